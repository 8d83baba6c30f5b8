// Runs the threadgroups of compiled kernels on all cores, over the memory of Python arrays.
//
// One pool of threads a process. A job is a function and a number of threadgroups; threads take the next one from a
// shared counter until none is left, so a core that is busy elsewhere holds nobody up. Which thread runs a threadgroup
// does not change its result.
#include <pthread.h>
#include <signal.h>
#include <sched.h>
#include <stdint.h>
#include <unistd.h>

// The part of Python's stable interface (3.11 and newer) that is used, so that its headers need not be installed.
extern "C" {
struct Buffer {
  void* memory;
  void* object;
  intptr_t bytes, item_bytes;
  int read_only, dimensions;
  char* format;
  intptr_t *shape, *strides, *suboffsets;
  void* internal;
};
int PyObject_GetBuffer(void* object, Buffer* view, int flags);
void PyBuffer_Release(Buffer* view);
intptr_t PyTuple_Size(void* tuple);
void* PyTuple_GetItem(void* tuple, intptr_t index);
void* PyEval_SaveThread(void);
void PyEval_RestoreThread(void* state);
}

typedef void (*Kernel)(const void* const* buffers, const uint32_t* groups, uint32_t begin, uint32_t end);

namespace {

constexpr int MAX_ARRAYS = 16, MAX_BUFFERS = 3 * MAX_ARRAYS, MAX_DIMENSIONS = 8, MAX_THREADS = 256, SPINS = 20000, YIELD_AFTER = 1000;
constexpr uint32_t NO_GENERATION = 0;
constexpr int WRITABLE = 0x0001, STRIDED = 0x0018;           // PyBUF_WRITABLE, PyBUF_STRIDES

struct Job {
  uint32_t generation;
  Kernel kernel;
  const void* const* buffers;
  const uint32_t* groups;
  uint32_t count;
};

// Two slots, so that a thread that comes late to a finished job never reads one that is being written.
Job jobs[2];
uint64_t next_group;      // generation in the high half, the next threadgroup in the low half
uint32_t unfinished;
int sleeping;
int workers;
int owner;                // the process that the workers live in: threads do not survive a fork
pthread_mutex_t entry = PTHREAD_MUTEX_INITIALIZER, sleep_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t wake = PTHREAD_COND_INITIALIZER;

inline void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Take threadgroups of the current job until there are none.
void work() {
  for (;;) {
    const uint64_t taken = __atomic_fetch_add(&next_group, 1, __ATOMIC_ACQ_REL);
    const uint32_t generation = uint32_t(taken >> 32), index = uint32_t(taken);
    const Job& slot = jobs[generation & 1];
    // A slot of another generation belongs to a later job; then ours is finished and index is past its end.
    if (__atomic_load_n(&slot.generation, __ATOMIC_ACQUIRE) != generation) return;
    const uint32_t count = __atomic_load_n(&slot.count, __ATOMIC_ACQUIRE);
    if (__atomic_load_n(&slot.generation, __ATOMIC_ACQUIRE) != generation || index >= count) return;
    slot.kernel(slot.buffers, slot.groups, index, index + 1);
    __atomic_fetch_sub(&unfinished, 1, __ATOMIC_ACQ_REL);
  }
}

uint32_t current_generation() {
  return uint32_t(__atomic_load_n(&next_group, __ATOMIC_SEQ_CST) >> 32);
}

void* worker(void* first) {
  uint32_t seen = uint32_t(uintptr_t(first));
  for (;;) {
    for (int i = 0; i < SPINS && current_generation() == seen; ++i) pause_core();
    if (current_generation() == seen) {
      pthread_mutex_lock(&sleep_lock);
      __atomic_fetch_add(&sleeping, 1, __ATOMIC_SEQ_CST);
      while (current_generation() == seen) pthread_cond_wait(&wake, &sleep_lock);
      __atomic_fetch_sub(&sleeping, 1, __ATOMIC_SEQ_CST);
      pthread_mutex_unlock(&sleep_lock);
    }
    seen = current_generation();
    work();
  }
}

void start_workers(int wanted) {
  if (owner == getpid()) return;
  owner = getpid();
  workers = 0;
  sleeping = 0;
  pthread_mutex_init(&sleep_lock, nullptr);
  pthread_cond_init(&wake, nullptr);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&attributes, 8 << 20);
  // Signals belong to Python's main thread: one that a worker took would not wake it from waiting for a line.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (int i = 1; i < wanted && i < MAX_THREADS; ++i) {
    pthread_t id;
    if (pthread_create(&id, &attributes, worker, (void*)uintptr_t(current_generation())) == 0) ++workers;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
}

void run(Kernel kernel, const void* const* buffers, const uint32_t* groups, int threads) {
  const uint32_t count = groups[0] * groups[1];
  pthread_mutex_lock(&entry);
  start_workers(threads);
  if (workers == 0 || count == 1) {
    kernel(buffers, groups, 0, count);
    pthread_mutex_unlock(&entry);
    return;
  }
  uint32_t generation = current_generation() + 1;
  if (generation == NO_GENERATION) generation += 2;
  Job& slot = jobs[generation & 1];
  __atomic_store_n(&slot.generation, NO_GENERATION, __ATOMIC_RELEASE);
  slot.kernel = kernel;
  slot.buffers = buffers;
  slot.groups = groups;
  __atomic_store_n(&slot.count, count, __ATOMIC_RELEASE);
  __atomic_store_n(&unfinished, count, __ATOMIC_RELEASE);
  __atomic_store_n(&slot.generation, generation, __ATOMIC_RELEASE);
  __atomic_store_n(&next_group, uint64_t(generation) << 32, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&sleeping, __ATOMIC_SEQ_CST)) {
    pthread_mutex_lock(&sleep_lock);
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&sleep_lock);
  }
  work();
  // The thread that is waited for may need this core.
  for (int i = 0; __atomic_load_n(&unfinished, __ATOMIC_ACQUIRE); ++i) i < YIELD_AFTER ? pause_core() : (void)sched_yield();
  pthread_mutex_unlock(&entry);
}

bool contiguous(const Buffer& view) {
  intptr_t expected = view.item_bytes;
  for (int i = view.dimensions - 1; i >= 0; --i) {
    if (view.shape[i] != 1 && view.strides[i] != expected) return false;
    expected *= view.shape[i];
  }
  return true;
}

}  // namespace

enum { SHAPE = 1, STRIDES = 2 };

// A kernel and its arguments: the memory of each array, followed by what it reads of its shape and strides.
struct Call {
  Kernel kernel;
  uint32_t groups[2];
  int used;
  uint8_t is_memory[MAX_BUFFERS];
  const void* buffers[MAX_BUFFERS];
  int32_t shapes[MAX_ARRAYS][MAX_DIMENSIONS];
  int64_t strides[MAX_ARRAYS][MAX_DIMENSIONS];
};

namespace {

// Fill ``call`` from tuples of objects with the buffer protocol. ``uses[i]`` says whether the kernel reads the shape (int32) or the
// strides (int64, in elements) of input i, whose last axis must then be contiguous; the others must be so as a whole. Returns 0;
// 1 + i where input i is not; -1 with a Python exception set. ``views`` keep the memory, and have to be let go.
int gather(Call& call, void* inputs, const uint8_t* uses, void* outputs, Buffer* views, int& held) {
  const int in = int(PyTuple_Size(inputs)), arrays = in + int(PyTuple_Size(outputs));
  int status = 0;
  call.used = 0;
  for (held = 0; held < arrays && status == 0; ++held) {
    const bool is_input = held < in;
    void* object = is_input ? PyTuple_GetItem(inputs, held) : PyTuple_GetItem(outputs, held - in);
    Buffer& view = views[held];
    if (PyObject_GetBuffer(object, &view, is_input ? STRIDED : STRIDED | WRITABLE) != 0) return -1;
    const uint8_t use = is_input ? uses[held] : 0;
    call.is_memory[call.used] = 1;
    call.buffers[call.used++] = view.memory;
    if (use & SHAPE) {
      for (int i = 0; i < view.dimensions; ++i) call.shapes[held][i] = int32_t(view.shape[i]);
      call.is_memory[call.used] = 0;
      call.buffers[call.used++] = call.shapes[held];
    }
    if (use & STRIDES) {
      for (int i = 0; i < view.dimensions; ++i) call.strides[held][i] = view.strides[i] / view.item_bytes;
      call.is_memory[call.used] = 0;
      call.buffers[call.used++] = call.strides[held];
      const int last = view.dimensions - 1;
      if (last >= 0 && view.shape[last] > 1 && view.strides[last] != view.item_bytes) status = held + 1;
    } else if (!contiguous(view)) {
      status = held + 1;
    }
  }
  return status;
}

}  // namespace

// Run ``kernel`` over ``groups_x * groups_y`` threadgroups; see ``gather`` for the rest.
extern "C" int launch(
    Kernel kernel, void* inputs, const uint8_t* uses, void* outputs, uint32_t groups_x, uint32_t groups_y, int threads) {
  Call call;
  Buffer views[MAX_ARRAYS];
  int held;
  call.groups[0] = groups_x;
  call.groups[1] = groups_y;
  const int status = gather(call, inputs, uses, outputs, views, held);
  if (status == 0) {
    void* python = PyEval_SaveThread();
    run(kernel, call.buffers, call.groups, threads);
    PyEval_RestoreThread(python);
  }
  while (held > 0) PyBuffer_Release(&views[--held]);
  return status;
}

extern "C" uint32_t call_bytes() {
  return sizeof(Call);
}

// Note in ``call`` what `launch` would run. Whoever replays it keeps the arrays.
extern "C" int record(
    Call* call, Kernel kernel, void* inputs, const uint8_t* uses, void* outputs, uint32_t groups_x, uint32_t groups_y) {
  Buffer views[MAX_ARRAYS];
  int held;
  call->kernel = kernel;
  call->groups[0] = groups_x;
  call->groups[1] = groups_y;
  const int status = gather(*call, inputs, uses, outputs, views, held);
  while (held > 0) PyBuffer_Release(&views[--held]);
  return status;
}

// The memory arguments of a recorded call, to be read and replaced.
extern "C" int memory_arguments(Call* call, const void*** to) {
  int count = 0;
  for (int i = 0; i < call->used; ++i) {
    if (call->is_memory[i]) to[count++] = &call->buffers[i];
  }
  return count;
}

// Run recorded calls one after the other. The interpreter's lock has to be free.
extern "C" void replay(Call** calls, uint32_t count, int threads) {
  for (uint32_t i = 0; i < count; ++i) run(calls[i]->kernel, calls[i]->buffers, calls[i]->groups, threads);
}
