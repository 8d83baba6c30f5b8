// What the parts of the emulator share, and how a fault ends it: with one line of JSON that says what happened where.
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "thread.h"

namespace {

constexpr uint32_t LANES = 32, MAX_THREADS = 1024, MAX_SIMDGROUPS = 32;
constexpr uint32_t MAX_BUFFERS = 64, MAX_ARRAYS = 64, MAX_SLOTS = MAX_BUFFERS + MAX_ARRAYS;
constexpr uint32_t MAX_THREADGROUP_BYTES = 32768;
constexpr uint64_t PAGE = 16384, STACK = 256 << 10;
enum Kind { READ_ONLY, WRITTEN, OUTPUT, THREADGROUP };
enum { MEM_DEVICE = 1, MEM_THREADGROUP = 2 };

// The last accesses to one granule of memory. Threads are numbered through the grid from 1 on.
struct Access {
  uint32_t thread, tick, site;
};
constexpr uint32_t ATOMIC = 0xffffffff;
struct Shadow {
  Access write, read, other_read;
};

struct Slot {
  uint64_t begin, end;
  const char* name;
  Kind kind;
  uint32_t granule;
  Shadow* shadow;
};

}  // namespace

// Where the running thread is, and what unwritten memory holds; compiled kernels use both by name.
extern "C" uint32_t emu_site;
extern "C" uint8_t emu_poison;
uint32_t emu_site;
uint8_t emu_poison;

namespace {

typedef void (*Body)(const emu_thread*);
enum State { READY, AT_SIMD, AT_SIMD_BARRIER, AT_BARRIER, DONE };

struct Fiber {
  void* stack_pointer;
  char* stack;
  emu_thread self;
  State state;
  uint32_t site, flags, number, exchanges;
};

struct Simdgroup {
  emu_exchange exchange[2];
  uint32_t tick[2];  // of its last simdgroup barrier: [0] for device memory, [1] for threadgroup memory
};

Slot slots[MAX_SLOTS];
uint32_t slot_count;
uint64_t base, slot_bytes;
int slot_shift;
uint32_t threadgroup_bytes;
Fiber fibers[MAX_THREADS];
Simdgroup simdgroups[MAX_SIMDGROUPS];
Fiber* running;
void* scheduler_stack_pointer;
Body body;
uint32_t tick, group_start, group_tick[2], threads_in_group;
uint64_t random_state;
bool shuffled;
const char* suspect_name;
uint32_t suspect_site, suspect_thread;
uint32_t absent_lane, absent_site, absent_thread;
uint32_t seconds_allowed;
uint32_t grid_size[3], nominal[3];

struct Where {
  uint32_t position[3], group[3];
  bool known;
};

Where where(uint32_t number) {
  Where at = {};
  if (number == 0 || number == ATOMIC) return at;
  const uint64_t nominal_threads = uint64_t(nominal[0]) * nominal[1] * nominal[2];
  uint64_t group = (number - 1) / nominal_threads, index = (number - 1) % nominal_threads;
  for (int i = 0; i < 3; ++i) {
    const uint64_t groups = (grid_size[i] + nominal[i] - 1) / nominal[i];
    at.group[i] = uint32_t(group % groups);
    group /= groups;
    const uint32_t rest = grid_size[i] - at.group[i] * nominal[i];
    const uint32_t size = rest < nominal[i] ? rest : nominal[i];
    at.position[i] = uint32_t(index % size);
    index /= size;
  }
  at.known = true;
  return at;
}

void write_all(const char* text, size_t size) {
  while (size) {
    const ssize_t done = write(1, text, size);
    if (done <= 0) _exit(4);
    text += done;
    size -= size_t(done);
  }
}

void print_thread(char* to, size_t size, uint32_t number) {
  const Where at = where(number);
  if (!at.known) {
    snprintf(to, size, "null");
    return;
  }
  snprintf(
      to, size, "[[%u,%u,%u],[%u,%u,%u]]", at.position[0], at.position[1], at.position[2], at.group[0], at.group[1],
      at.group[2]);
}

// End with {"fault": kind, "site", "thread", "details": ...}; ``details`` are further members.
[[noreturn]] void fault(const char* kind, uint32_t site, uint32_t thread, const char* details, ...) {
  char members[1024], at[128], line[1400];
  va_list arguments;
  va_start(arguments, details);
  vsnprintf(members, sizeof members, details, arguments);
  va_end(arguments);
  print_thread(at, sizeof at, thread);
  const int size = snprintf(
      line, sizeof line, "{\"fault\":\"%s\",\"site\":%u,\"thread\":%s%s%s}\n", kind, site, at, *members ? "," : "", members);
  write_all(line, size_t(size));
  _exit(3);
}

uint32_t self() { return running ? running->number : 0; }

uint32_t draw(uint32_t below) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return uint32_t((random_state >> 32) % below);
}

void permute(uint32_t* order, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) order[i] = i;
  if (!shuffled) return;
  for (uint32_t i = count; i > 1; --i) {
    const uint32_t j = draw(i), kept = order[i - 1];
    order[i - 1] = order[j];
    order[j] = kept;
  }
}
void on_signal(int number, siginfo_t* info, void*) {
  const uint64_t address = reinterpret_cast<uint64_t>(info->si_addr);
  if (number == SIGALRM) fault("timeout", emu_site, self(), "\"seconds\":%u", seconds_allowed);
  if (running && running->stack && address >= uint64_t(running->stack) - PAGE && address < uint64_t(running->stack)) {
    fault("stack", emu_site, self(), "\"bytes\":%llu", (unsigned long long)STACK);
  }
  fault("signal", emu_site, self(), "\"signal\":%d,\"address\":%llu", number, (unsigned long long)address);
}

void watch(uint32_t seconds) {
  static char handler_stack[64 << 10];
  stack_t stack = {};
  stack.ss_sp = handler_stack;
  stack.ss_size = sizeof handler_stack;
  sigaltstack(&stack, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  const int numbers[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGALRM, SIGTRAP};
  for (const int number : numbers) sigaction(number, &action, nullptr);
  seconds_allowed = seconds;
  alarm(seconds);
}
}  // namespace
