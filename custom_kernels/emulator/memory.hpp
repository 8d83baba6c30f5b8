// Memory: where it lies, which accesses are in bounds, and who touched it last.
//
// Order between threads is what barriers make it. ``tick`` counts barriers; memory remembers the ticks of its last accesses,
// and two of them by different threads, one a write, with no barrier of their own between them are a race.
#include "state.hpp"

namespace {

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

// What an access does, as bits.
enum { READS = 1, WRITES = 2, ATOMICALLY = 4 };

void note(const Slot* slot, uint64_t address, uint32_t size, uint32_t site, uint32_t how) {
  const bool is_write = how & WRITES, atomic = how & ATOMICALLY;
  const uint32_t now = self();
  const uint64_t first = (address - slot->begin) / slot->granule, last = (address + size - 1 - slot->begin) / slot->granule;
  for (uint64_t i = first; i <= last; ++i) {
    Shadow& shadow = slot->shadow[i];
    const bool written = fresh(slot, shadow.write);
    if (written && !(atomic && shadow.write.thread == ATOMIC) && !ordered(shadow.write, now, slot->kind)) {
      race(slot, address, shadow.write, true, site, is_write);
    }
    if (how & READS && !written && slot->kind != WRITTEN && !suspect_name) {
      suspect_name = slot->name;
      suspect_site = site;
      suspect_thread = now;
    }
    if (is_write) {
      const Access* reads[] = {&shadow.read, &shadow.other_read};
      for (const Access* read : reads) {
        if (fresh(slot, *read) && !ordered(*read, now, slot->kind)) race(slot, address, *read, false, site, true);
      }
      shadow.write = {atomic ? ATOMIC : now, tick, site};
      shadow.read = shadow.other_read = {};
    } else {
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
// ``size`` bytes that begin ``residue`` bytes behind a multiple of ``alignment``, and end before a page that nobody may touch.
uint64_t map_slot(uint32_t index, uint64_t size, uint64_t alignment, uint64_t residue) {
  const uint64_t bytes = (size + alignment + PAGE - 1) / PAGE * PAGE, start = base + index * slot_bytes + PAGE;
  if (bytes + 2 * PAGE > slot_bytes) fault("memory", emu_site, self(), "\"bytes\":%llu", (unsigned long long)size);
  if (bytes && mprotect(reinterpret_cast<void*>(start), bytes, PROT_READ | PROT_WRITE)) {
    fault("memory", emu_site, self(), "\"bytes\":%llu", (unsigned long long)size);
  }
  return ((start + bytes - size - residue) & ~(alignment - 1)) + residue;
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
  if (slot->shadow && size) note(slot, address, size, site, READS);
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
  if (size) note(slot, address, size, site, WRITES);
}

extern "C" void emu_atomic(uint64_t address, uint32_t size, bool reads) {
  const Slot* slot = slot_of(address, size, emu_site, false);
  check_alignment(slot, address, size, size, emu_site);
  if (slot->kind == READ_ONLY) {
    fault("input", emu_site, self(), "\"name\":\"%s\",\"offset\":%llu", slot->name, (unsigned long long)(address - slot->begin));
  }
  note(slot, address, size, emu_site, WRITES | ATOMICALLY | (reads ? READS : 0));
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
    slot.begin = map_slot(MAX_BUFFERS + index, size, alignment < 16 ? 16 : alignment, 0);
    slot.end = slot.begin + size;
    slot.kind = THREADGROUP;
    slot.granule = granule;
    add_shadow(slot, size);
    slot.name = name;
    memset(reinterpret_cast<void*>(slot.begin), emu_poison, size);
  }
  return slot.begin;
}

// The memory of one buffer of ``size`` bytes, full of poison, ``residue`` bytes behind a multiple of 16.
extern "C" uint64_t emu_buffer(uint32_t kind, uint64_t size, uint32_t residue, uint32_t granule, const char* name) {
  Slot& slot = slots[slot_count];
  slot.begin = map_slot(slot_count, size, 16, residue);
  slot.end = slot.begin + size;
  slot.kind = Kind(kind);
  slot.granule = granule;
  if (kind != READ_ONLY) add_shadow(slot, size);
  slot.name = name;
  memset(reinterpret_cast<void*>(slot.begin), emu_poison, size);
  ++slot_count;
  return slot.begin;
}

// How many granules of buffer ``index`` were never written, and the byte at which the first of them begins.
extern "C" uint64_t emu_unwritten(uint32_t index, uint64_t* first) {
  const Slot& slot = slots[index];
  const uint64_t count = (slot.end - slot.begin + slot.granule - 1) / slot.granule;
  uint64_t missing = 0;
  for (uint64_t i = 0; i < count; ++i) {
    if (slot.shadow[i].write.thread == 0 && missing++ == 0) *first = i * slot.granule;
  }
  return missing;
}
