// Runs compiled Metal bodies: threads are fibers of one core, every access to device, constant and threadgroup memory is
// checked, and the first fault ends the process with one line of JSON that says what happened where.
//
// Order between threads is what barriers make it. ``tick`` counts barriers; memory remembers the ticks of its last accesses,
// and two of them by different threads, one a write, with no barrier of their own between them are a race.
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
uint32_t slot_count, array_count;
uint64_t base, slot_bytes;
int slot_shift;
uint32_t threadgroup_bytes, threadgroup_sizes[MAX_ARRAYS];
Fiber fibers[MAX_THREADS];
Simdgroup simdgroups[MAX_SIMDGROUPS];
Fiber* running;
void* scheduler_stack_pointer;
Body body;
uint32_t tick, group_start, group_tick[2], threads_in_group;
uint64_t random_state;
bool shuffled, has_fibers;
const char* suspect_name;
uint32_t suspect_site, suspect_thread;
uint32_t seconds_allowed;
uint32_t grid_size[3], nominal[3];

// Switch stacks: the registers that a call preserves are kept on the old stack.
#if defined(__x86_64__)
__attribute__((naked)) void switch_to(void**, void*) {
  asm volatile(
      "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
}
constexpr int SAVED_WORDS = 6;
#elif defined(__aarch64__)
__attribute__((naked)) void switch_to(void**, void*) {
  asm volatile(
      "sub sp, sp, #160\n"
      "stp x19, x20, [sp, #0]\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n stp x25, x26, [sp, #48]\n"
      "stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n"
      "stp d12, d13, [sp, #128]\n stp d14, d15, [sp, #144]\n"
      "mov x9, sp\n str x9, [x0]\n mov sp, x1\n"
      "ldp x19, x20, [sp, #0]\n ldp x21, x22, [sp, #16]\n ldp x23, x24, [sp, #32]\n ldp x25, x26, [sp, #48]\n"
      "ldp x27, x28, [sp, #64]\n ldp x29, x30, [sp, #80]\n ldp d8, d9, [sp, #96]\n ldp d10, d11, [sp, #112]\n"
      "ldp d12, d13, [sp, #128]\n ldp d14, d15, [sp, #144]\n"
      "add sp, sp, #160\n ret\n");
}
#else
#error "the emulator switches stacks on x86-64 and arm64"
#endif

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

Slot* slot_of(uint64_t address, uint32_t size, uint32_t site, bool may_be_constant) {
  const uint64_t index = (address - base) >> slot_shift;
  if (index < MAX_SLOTS) {
    Slot* slot = &slots[index];
    if (address >= slot->begin && address + size <= slot->end) return slot;
    if (slot->name) {
      fault(
          "bounds", site, self(), "\"name\":\"%s\",\"offset\":%lld,\"size\":%u,\"bytes\":%llu,\"local\":%d", slot->name,
          (long long)(address - slot->begin), size, (unsigned long long)(slot->end - slot->begin),
          slot->kind == THREADGROUP);
    }
  }
  // Constants of the program lie in the kernel's library.
  if (!may_be_constant || address < 1 << 20) fault("stray", site, self(), "\"address\":%llu", (unsigned long long)address);
  return nullptr;
}

bool ordered(const Access& before, uint32_t now, Kind kind) {
  if (before.thread == now) return true;
  const int space = kind == THREADGROUP;
  const uint64_t threads = uint64_t(nominal[0]) * nominal[1] * nominal[2];
  if (before.thread == ATOMIC || (before.thread - 1) / threads != (now - 1) / threads) {
    return before.thread == ATOMIC && before.tick < group_tick[space] && before.tick >= group_start;
  }
  if (before.tick < group_tick[space]) return true;
  const uint32_t first = uint32_t((before.thread - 1) % threads), second = uint32_t((now - 1) % threads);
  return first / LANES == second / LANES && before.tick < simdgroups[second / LANES].tick[space];
}

[[noreturn]] void race(const Slot* slot, uint64_t address, const Access& before, bool was_write, uint32_t site, bool is_write) {
  char other[128];
  print_thread(other, sizeof other, before.thread);
  fault(
      "race", site, self(),
      "\"name\":\"%s\",\"offset\":%llu,\"other\":%s,\"other_site\":%u,\"was_write\":%d,\"is_write\":%d,\"local\":%d",
      slot->name, (unsigned long long)(address - slot->begin), other, before.site, was_write, is_write,
      slot->kind == THREADGROUP);
}

bool fresh(const Slot* slot, const Access& access) {
  return access.thread != 0 && (slot->kind != THREADGROUP || access.tick >= group_start);
}

void note(const Slot* slot, uint64_t address, uint32_t size, uint32_t site, bool is_write, bool atomic) {
  const uint32_t now = self();
  const uint64_t first = (address - slot->begin) / slot->granule, last = (address + size - 1 - slot->begin) / slot->granule;
  for (uint64_t i = first; i <= last; ++i) {
    Shadow& shadow = slot->shadow[i];
    const bool written = fresh(slot, shadow.write);
    if (written && !(atomic && shadow.write.thread == ATOMIC) && !ordered(shadow.write, now, slot->kind)) {
      race(slot, address, shadow.write, true, site, is_write);
    }
    if (is_write) {
      const Access* reads[] = {&shadow.read, &shadow.other_read};
      for (const Access* read : reads) {
        if (fresh(slot, *read) && !ordered(*read, now, slot->kind)) race(slot, address, *read, false, site, true);
      }
      shadow.write = {atomic ? ATOMIC : now, tick, site};
      shadow.read = shadow.other_read = {};
    } else {
      if (!written && slot->kind != WRITTEN && !suspect_name) {
        suspect_name = slot->name;
        suspect_site = site;
        suspect_thread = now;
      }
      if (shadow.read.thread != now) shadow.other_read = shadow.read;
      shadow.read = {now, tick, site};
    }
  }
}

void check_alignment(const Slot* slot, uint64_t address, uint32_t size, uint32_t alignment, uint32_t site) {
  if (address & (alignment - 1)) {
    fault(
        "alignment", site, self(), "\"name\":\"%s\",\"offset\":%llu,\"size\":%u,\"alignment\":%u", slot->name,
        (unsigned long long)(address - slot->begin), size, alignment);
  }
}

void resume(Fiber* fiber) {
  running = fiber;
  fiber->state = READY;
  switch_to(&scheduler_stack_pointer, fiber->stack_pointer);
  running = nullptr;
}

void wait_as(State state, uint32_t flags) {
  Fiber* fiber = running;
  fiber->state = state;
  fiber->site = emu_site;
  fiber->flags = flags;
  switch_to(&fiber->stack_pointer, scheduler_stack_pointer);
}

void enter() {
  body(&running->self);
  running->state = DONE;
  switch_to(&running->stack_pointer, scheduler_stack_pointer);
}

void prepare(Fiber* fiber) {
  if (!fiber->stack) {
    void* memory = mmap(nullptr, STACK + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fault("memory", 0, 0, "\"bytes\":%llu", (unsigned long long)STACK);
    mprotect(memory, PAGE, PROT_NONE);
    fiber->stack = static_cast<char*>(memory) + PAGE;
  }
  uint64_t* top = reinterpret_cast<uint64_t*>(fiber->stack + STACK);
#if defined(__x86_64__)
  top -= 2;
  top[0] = reinterpret_cast<uint64_t>(&enter);  // the address to return to; above it the stack is aligned as after a call
  fiber->stack_pointer = top - SAVED_WORDS;
#else
  top -= 20;
  top[11] = reinterpret_cast<uint64_t>(&enter);
  fiber->stack_pointer = top;
#endif
  fiber->state = READY;
  fiber->exchanges = 0;
}

const char* name_of(State state) {
  return state == AT_BARRIER ? "barrier" : state == AT_SIMD ? "simd" : state == AT_SIMD_BARRIER ? "simd_barrier" : "done";
}

[[noreturn]] void diverged(const Fiber* one, const Fiber* other) {
  char thread[128];
  print_thread(thread, sizeof thread, other->number);
  fault(
      "divergence", one->site, one->number, "\"at\":\"%s\",\"other\":%s,\"other_site\":%u,\"other_at\":\"%s\"",
      name_of(one->state), thread, other->state == DONE ? 0 : other->site, name_of(other->state));
}

// Run the lanes of a simdgroup until all of them have finished or wait at one threadgroup barrier.
void run_simdgroup(uint32_t index) {
  Fiber* lanes = fibers + index * LANES;
  const uint32_t count = threads_in_group - index * LANES < LANES ? threads_in_group - index * LANES : LANES;
  uint32_t order[LANES];
  for (;;) {
    permute(order, count);
    for (uint32_t i = 0; i < count; ++i) {
      if (lanes[order[i]].state == READY) resume(&lanes[order[i]]);
    }
    Fiber *first = nullptr, *finished = nullptr;
    for (uint32_t i = 0; i < count; ++i) {
      if (lanes[i].state == DONE) {
        finished = &lanes[i];
      } else if (!first) {
        first = &lanes[i];
      } else if (lanes[i].state != first->state || lanes[i].site != first->site) {
        // The lane that waits for the others is the one to name first.
        if (first->state == AT_BARRIER && lanes[i].state != AT_BARRIER) diverged(&lanes[i], first);
        diverged(first, &lanes[i]);
      }
    }
    if (!first) return;
    if (first->state == AT_BARRIER) {
      if (finished) diverged(first, finished);
      return;
    }
    Simdgroup& simdgroup = simdgroups[index];
    if (first->state == AT_SIMD_BARRIER) {
      ++tick;
      if (first->flags & MEM_DEVICE) simdgroup.tick[0] = tick;
      if (first->flags & MEM_THREADGROUP) simdgroup.tick[1] = tick;
    } else {
      // A lane cannot be two exchanges ahead of another, so the older of the two is free again.
      uint32_t active = 0;
      for (uint32_t i = 0; i < count; ++i) active |= lanes[i].state == DONE ? 0 : 1u << i;
      emu_exchange& exchange = simdgroup.exchange[(first->exchanges - 1) & 1];
      exchange.active = active;
      exchange.done = 0;
      memset(exchange.undefined, emu_poison, sizeof exchange.undefined);
    }
    for (uint32_t i = 0; i < count; ++i) {
      if (lanes[i].state != DONE) lanes[i].state = READY;
    }
  }
}

void run_fibers() {
  const uint32_t count = (threads_in_group + LANES - 1) / LANES;
  uint32_t order[MAX_SIMDGROUPS];
  for (uint32_t i = 0; i < threads_in_group; ++i) prepare(&fibers[i]);
  for (;;) {
    permute(order, count);
    for (uint32_t i = 0; i < count; ++i) run_simdgroup(order[i]);
    Fiber *first = nullptr, *finished = nullptr;
    for (uint32_t i = 0; i < threads_in_group; ++i) {
      if (fibers[i].state == DONE) {
        finished = &fibers[i];
      } else if (!first) {
        first = &fibers[i];
      } else if (fibers[i].site != first->site) {
        diverged(first, &fibers[i]);
      }
    }
    if (!first) return;
    if (finished) diverged(first, finished);
    ++tick;
    if (first->flags & MEM_DEVICE) group_tick[0] = tick;
    if (first->flags & MEM_THREADGROUP) group_tick[1] = tick;
    for (uint32_t i = 0; i < threads_in_group; ++i) fibers[i].state = READY;
  }
}

void run_plain() {
  uint32_t order[MAX_THREADS];
  permute(order, threads_in_group);
  for (uint32_t i = 0; i < threads_in_group; ++i) {
    running = &fibers[order[i]];
    body(&running->self);
  }
  running = nullptr;
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

uint64_t map_slot(uint32_t index, uint64_t size, uint64_t alignment) {
  const uint64_t bytes = (size + PAGE - 1) / PAGE * PAGE, start = base + index * slot_bytes + PAGE;
  if (bytes + 2 * PAGE > slot_bytes) fault("memory", emu_site, self(), "\"bytes\":%llu", (unsigned long long)size);
  if (bytes && mprotect(reinterpret_cast<void*>(start), bytes, PROT_READ | PROT_WRITE)) {
    fault("memory", emu_site, self(), "\"bytes\":%llu", (unsigned long long)size);
  }
  return (start + bytes - size) & ~(alignment - 1);
}

void add_shadow(Slot& slot, uint64_t size) {
  const uint64_t count = (size + slot.granule - 1) / slot.granule + 1;
  void* memory =
      mmap(nullptr, count * sizeof(Shadow), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fault("memory", emu_site, self(), "\"bytes\":%llu", (unsigned long long)size);
  slot.shadow = static_cast<Shadow*>(memory);
}

}  // namespace

// What the instrumented code calls before each access, and the shim in its functions.

static void read(uint64_t address, uint32_t size, uint32_t alignment, uint32_t site, bool may_be_constant) {
  emu_site = site;
  const Slot* slot = slot_of(address, size, site, may_be_constant);
  if (!slot) return;
  check_alignment(slot, address, size, alignment, site);
  if (slot->shadow && size) note(slot, address, size, site, false, false);
}

extern "C" void emu_read(uint64_t address, uint32_t size, uint32_t alignment, uint32_t site) {
  read(address, size, alignment, site, false);
}

extern "C" void emu_read_constant(uint64_t address, uint32_t size, uint32_t alignment, uint32_t site) {
  read(address, size, alignment, site, true);
}

extern "C" void emu_write(uint64_t address, uint32_t size, uint32_t alignment, uint32_t site) {
  emu_site = site;
  const Slot* slot = slot_of(address, size, site, false);
  check_alignment(slot, address, size, alignment, site);
  if (slot->kind == READ_ONLY) {
    fault("input", site, self(), "\"name\":\"%s\",\"offset\":%llu", slot->name, (unsigned long long)(address - slot->begin));
  }
  if (size) note(slot, address, size, site, true, false);
}

extern "C" void emu_atomic(uint64_t address, uint32_t size) {
  const Slot* slot = slot_of(address, size, emu_site, false);
  check_alignment(slot, address, size, size, emu_site);
  if (slot->kind == READ_ONLY) {
    fault("input", emu_site, self(), "\"name\":\"%s\",\"offset\":%llu", slot->name, (unsigned long long)(address - slot->begin));
  }
  note(slot, address, size, emu_site, true, true);
}

extern "C" void emu_barrier(uint32_t flags) { wait_as(AT_BARRIER, flags); }

extern "C" void emu_simdgroup_barrier(uint32_t flags) { wait_as(AT_SIMD_BARRIER, flags); }

extern "C" uint32_t emu_lane() { return running->self.thread_index_in_simdgroup; }

extern "C" emu_exchange* emu_simd(const void* value, uint32_t size) {
  Fiber* fiber = running;
  emu_exchange& exchange = simdgroups[fiber->self.simdgroup_index_in_threadgroup].exchange[fiber->exchanges++ & 1];
  memcpy(exchange.value[fiber->self.thread_index_in_simdgroup], value, size);
  wait_as(AT_SIMD, 0);
  return &exchange;
}

// The memory of a threadgroup variable; the first thread that comes to it makes it.
extern "C" uint64_t emu_threadgroup(uint32_t index, uint64_t size, uint32_t alignment, uint32_t granule, const char* name) {
  Slot& slot = slots[MAX_BUFFERS + index];
  if (!slot.name) {
    threadgroup_bytes = (threadgroup_bytes + alignment - 1) / alignment * alignment + uint32_t(size);
    if (size > MAX_THREADGROUP_BYTES || threadgroup_bytes > MAX_THREADGROUP_BYTES) {
      const unsigned long long total = size > MAX_THREADGROUP_BYTES ? size : threadgroup_bytes;
      fault("threadgroup_memory", emu_site, self(), "\"name\":\"%s\",\"bytes\":%llu", name, total);
    }
    slot.begin = map_slot(MAX_BUFFERS + index, size, alignment < 16 ? 16 : alignment);
    slot.end = slot.begin + size;
    slot.kind = THREADGROUP;
    slot.granule = granule;
    add_shadow(slot, size);
    slot.name = name;
    memset(reinterpret_cast<void*>(slot.begin), emu_poison, size);
  }
  return slot.begin;
}

// Conversions of half types that the processor may not have. Compilers call them by these names.

static uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
static float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
template <typename To>
static To half_of(uint16_t bits) {
  To x;
  memcpy(&x, &bits, 2);
  return x;
}

extern "C" __bf16 __truncsfbf2(float x) {
  const uint32_t bits = bits_of(x);
  if (x != x) return half_of<__bf16>(uint16_t(bits >> 16 | 0x40));
  return half_of<__bf16>(uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16));
}

extern "C" _Float16 __truncsfhf2(float x) {
  const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return half_of<_Float16>(uint16_t(sign | 0x7e00));
  if (magnitude >= 0x47800000) return half_of<_Float16>(uint16_t(sign | 0x7c00));
  if (magnitude < 0x38800000) {
    // Adding a half's smallest unit times 2^23 leaves the rounded multiple of that unit in the low bits.
    return half_of<_Float16>(uint16_t(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f))));
  }
  const uint32_t rebased = magnitude - 0x38000000;
  return half_of<_Float16>(uint16_t(sign | ((rebased + 0xfff + (rebased >> 13 & 1)) >> 13)));
}

extern "C" float __extendhfsf2(_Float16 x) {
  uint16_t bits;
  memcpy(&bits, &x, 2);
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
  if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude >= 0x400) return float_of(sign | ((magnitude << 13) + 0x38000000));
  return float_of(sign | bits_of(float(magnitude) * 5.9604644775390625e-8f));
}

#define EMU_OVERFLOW(name)                                                                                              \
  extern "C" void __ubsan_handle_##name##_overflow_abort(void*, uint64_t, uint64_t) { fault("overflow", emu_site, self(), ""); }
EMU_OVERFLOW(add)
EMU_OVERFLOW(sub)
EMU_OVERFLOW(mul)
extern "C" void __ubsan_handle_negate_overflow_abort(void*, uint64_t) { fault("overflow", emu_site, self(), ""); }
extern "C" void __ubsan_handle_divrem_overflow_abort(void*, uint64_t, uint64_t) { fault("division", emu_site, self(), ""); }
extern "C" void __ubsan_handle_shift_out_of_bounds_abort(void*, uint64_t, uint64_t by) {
  fault("shift", emu_site, self(), "\"by\":%lld", (long long)by);
}
extern "C" void __ubsan_handle_out_of_bounds_abort(void* data, uint64_t index) {
  struct Type {
    uint16_t kind, info;
    char name[1];
  };
  struct Data {
    const char* file;
    uint32_t line, column;
    const Type* array;
  };
  fault(
      "index", emu_site, self(), "\"array\":\"%s\",\"index\":%lld", static_cast<Data*>(data)->array->name, (long long)index);
}
extern "C" void __ubsan_handle_float_cast_overflow_abort(void*, uint64_t) { fault("conversion", emu_site, self(), ""); }
extern "C" void __ubsan_handle_missing_return_abort(void*) { fault("missing_return", emu_site, self(), ""); }
extern "C" void __ubsan_handle_builtin_unreachable_abort(void*) { fault("missing_return", emu_site, self(), ""); }

// What worker.py calls, in this order.

extern "C" void emu_begin(uint64_t largest, uint32_t poison_byte, uint32_t seconds) {
  emu_poison = uint8_t(poison_byte);
  // Far apart, so that a wrong index in one buffer does not come out in another; closer where a limit forbids that.
  void* memory = MAP_FAILED;
  for (slot_shift = 33; memory == MAP_FAILED && (1ull << slot_shift) >= largest + 4 * PAGE; --slot_shift) {
    slot_bytes = 1ull << slot_shift;
    memory = mmap(nullptr, (MAX_SLOTS + 1) * slot_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  }
  ++slot_shift;
  if (memory == MAP_FAILED) fault("memory", 0, 0, "\"bytes\":%llu", (unsigned long long)(MAX_SLOTS * slot_bytes));
  base = (uint64_t(memory) + slot_bytes - 1) / slot_bytes * slot_bytes;
  watch(seconds);
}

// The memory of one buffer of ``size`` bytes, full of poison.
extern "C" uint64_t emu_buffer(uint32_t kind, uint64_t size, uint32_t alignment, uint32_t granule, const char* name) {
  Slot& slot = slots[slot_count];
  slot.begin = map_slot(slot_count, size, alignment);
  slot.end = slot.begin + size;
  slot.kind = Kind(kind);
  slot.granule = granule;
  if (kind != READ_ONLY) add_shadow(slot, size);
  slot.name = name;
  memset(reinterpret_cast<void*>(slot.begin), emu_poison, size);
  ++slot_count;
  return slot.begin;
}

extern "C" void emu_run(void* kernel, const uint32_t* grid, const uint32_t* threadgroup, uint64_t seed, uint32_t uses_fibers) {
  body = reinterpret_cast<Body>(kernel);
  shuffled = seed != 0;
  random_state = seed * 0x9e3779b97f4a7c15ull + 1;
  uint32_t groups[3], total = 1;
  for (int i = 0; i < 3; ++i) {
    grid_size[i] = grid[i];
    nominal[i] = threadgroup[i];
    groups[i] = (grid[i] + threadgroup[i] - 1) / threadgroup[i];
    total *= groups[i];
  }
  const uint32_t nominal_threads = nominal[0] * nominal[1] * nominal[2];
  uint32_t* order = static_cast<uint32_t*>(malloc(total * sizeof(uint32_t)));
  permute(order, total);
  for (uint32_t n = 0; n < total; ++n) {
    const uint32_t group = order[n], at[3] = {group % groups[0], group / groups[0] % groups[1], group / groups[0] / groups[1]};
    uint32_t size[3];
    threads_in_group = 1;
    for (int i = 0; i < 3; ++i) {
      const uint32_t rest = grid_size[i] - at[i] * nominal[i];
      size[i] = rest < nominal[i] ? rest : nominal[i];
      threads_in_group *= size[i];
    }
    group_start = group_tick[0] = group_tick[1] = ++tick;
    for (Simdgroup& simdgroup : simdgroups) simdgroup.tick[0] = simdgroup.tick[1] = tick;
    for (uint32_t i = MAX_BUFFERS; i < MAX_SLOTS && slots[i].name; ++i) {
      memset(reinterpret_cast<void*>(slots[i].begin), emu_poison, slots[i].end - slots[i].begin);
    }
    for (uint32_t t = 0; t < threads_in_group; ++t) {
      Fiber& fiber = fibers[t];
      emu_thread& me = fiber.self;
      const uint32_t place[3] = {t % size[0], t / size[0] % size[1], t / size[0] / size[1]};
      for (int i = 0; i < 3; ++i) {
        me.thread_position_in_grid[i] = at[i] * nominal[i] + place[i];
        me.thread_position_in_threadgroup[i] = place[i];
        me.threadgroup_position_in_grid[i] = at[i];
        me.threads_per_grid[i] = grid_size[i];
        me.threadgroups_per_grid[i] = groups[i];
        me.threads_per_threadgroup[i] = size[i];
        me.dispatch_threads_per_threadgroup[i] = nominal[i];
        me.grid_origin[i] = 0;
      }
      me.thread_index_in_threadgroup = t;
      me.simdgroup_index_in_threadgroup = t / LANES;
      me.thread_index_in_simdgroup = t % LANES;
      me.simdgroups_per_threadgroup = (threads_in_group + LANES - 1) / LANES;
      me.dispatch_simdgroups_per_threadgroup = (nominal_threads + LANES - 1) / LANES;
      for (uint32_t i = 0; i < slot_count; ++i) me.buffers[i] = slots[i].begin;
      fiber.number = group * nominal_threads + t + 1;
    }
    uses_fibers ? run_fibers() : run_plain();
  }
  free(order);
}

// Where the written bytes of buffer ``index`` are: one byte for each granule. Returns how many are not written.
extern "C" uint64_t emu_unwritten(uint32_t index, uint64_t* first) {
  const Slot& slot = slots[index];
  const uint64_t count = (slot.end - slot.begin + slot.granule - 1) / slot.granule;
  uint64_t missing = 0;
  for (uint64_t i = 0; i < count; ++i) {
    if (slot.shadow[i].write.thread == 0 && missing++ == 0) *first = i * slot.granule;
  }
  return missing;
}

// The first read of memory that nobody had written, or null.
extern "C" const char* emu_suspect(uint32_t* site, char* thread, uint64_t size) {
  *site = suspect_site;
  print_thread(thread, size, suspect_thread);
  return suspect_name;
}
