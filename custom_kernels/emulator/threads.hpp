// Threads: fibers that switch stacks where a thread waits for others, and the loops over threadgroups, simdgroups and lanes.
#include "memory.hpp"

namespace {

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
}  // namespace

extern "C" void emu_barrier(uint32_t flags) { wait_as(AT_BARRIER, flags); }

extern "C" void emu_simdgroup_barrier(uint32_t flags) { wait_as(AT_SIMD_BARRIER, flags); }

extern "C" uint32_t emu_lane() { return running->self.thread_index_in_simdgroup; }

// A lane takes the value of one that is not there.
extern "C" void emu_absent(uint32_t lane) {
  if (absent_thread) return;
  absent_lane = lane;
  absent_site = running->site;
  absent_thread = running->number;
}

extern "C" emu_exchange* emu_simd(const void* value, uint32_t size) {
  Fiber* fiber = running;
  emu_exchange& exchange = simdgroups[fiber->self.simdgroup_index_in_threadgroup].exchange[fiber->exchanges++ & 1];
  memcpy(exchange.value[fiber->self.thread_index_in_simdgroup], value, size);
  wait_as(AT_SIMD, 0);
  return &exchange;
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
  if (!order) fault("memory", 0, 0, "\"bytes\":%llu", (unsigned long long)(total * sizeof(uint32_t)));
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
