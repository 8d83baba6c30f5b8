// Runs compiled Metal bodies: threads are fibers of one core, every access to device, constant and threadgroup memory is
// checked, and the first fault ends the process. Here: what compilers call by name, and what worker.py calls.
#include "threads.hpp"

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

// The first read of memory that nobody had written, or null.
extern "C" const char* emu_suspect(uint32_t* site, char* thread, uint64_t size) {
  *site = suspect_site;
  print_thread(thread, size, suspect_thread);
  return suspect_name;
}

// The first time that a lane took the value of one that was not there, or false.
extern "C" bool emu_absence(uint32_t* lane, uint32_t* site, char* thread, uint64_t size) {
  *lane = absent_lane;
  *site = absent_site;
  print_thread(thread, size, absent_thread);
  return absent_thread != 0;
}
