// Atomic functions on device and threadgroup memory, in relaxed order, as Metal has them.
#pragma once
#include "metal_simd.h"

extern "C" void emu_atomic(ulong address, uint size, bool reads);

namespace metal {

enum memory_order { memory_order_relaxed };

template <typename T>
struct atomic {
  static_assert(
      is_same_v<T, int> || is_same_v<T, uint> || is_same_v<T, bool> || is_same_v<T, float>,
      "Metal has atomic<T> for int, uint, bool and float");
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;

}  // namespace metal

namespace emu {

template <typename T, typename P>
METAL_FUNC T& unchecked(P object, bool reads = true) {
  emu_atomic(ulong(object), sizeof(T), reads);
  return *(T*)ulong(object);
}

}  // namespace emu

#define EMU_FETCH(name, space, condition, expression)                                               \
  template <typename T, metal::enable_if_t<condition, bool> = true>                                 \
  METAL_FUNC T atomic_fetch_##name##_explicit(volatile space atomic<T>* object, T b, memory_order) { \
    T& at = emu::unchecked<T>(object);                                                              \
    const T a = at;                                                                                 \
    at = expression;                                                                                \
    return a;                                                                                       \
  }

#define EMU_ATOMICS(space, floats)                                                                                       \
  template <typename T>                                                                                               \
  METAL_FUNC T atomic_load_explicit(const volatile space atomic<T>* object, memory_order) {                           \
    return emu::unchecked<T>(object);                                                                                 \
  }                                                                                                                   \
  template <typename T>                                                                                               \
  METAL_FUNC void atomic_store_explicit(volatile space atomic<T>* object, T desired, memory_order) {                  \
    emu::unchecked<T>(object, false) = desired;                                                                       \
  }                                                                                                                   \
  template <typename T>                                                                                               \
  METAL_FUNC T atomic_exchange_explicit(volatile space atomic<T>* object, T desired, memory_order) {                  \
    T& at = emu::unchecked<T>(object);                                                                                \
    const T was = at;                                                                                                 \
    at = desired;                                                                                                     \
    return was;                                                                                                       \
  }                                                                                                                   \
  template <typename T>                                                                                               \
  METAL_FUNC bool atomic_compare_exchange_weak_explicit(                                                              \
      volatile space atomic<T>* object, thread T* expected, T desired, memory_order, memory_order) {                  \
    T& at = emu::unchecked<T>(object);                                                                                \
    if (as_type<uint>(at) == as_type<uint>(*expected)) {                                                              \
      at = desired;                                                                                                   \
      return true;                                                                                                    \
    }                                                                                                                 \
    *expected = at;                                                                                                   \
    return false;                                                                                                     \
  }                                                                                                                   \
  EMU_FETCH(add, space, (!is_same_v<T, bool> && (floats || !is_same_v<T, float>)), a + b)                                                                 \
  EMU_FETCH(sub, space, (!is_same_v<T, bool> && (floats || !is_same_v<T, float>)), a - b)                                                                 \
  EMU_FETCH(min, space, (is_same_v<T, int> || is_same_v<T, uint>), a < b ? a : b)                                     \
  EMU_FETCH(max, space, (is_same_v<T, int> || is_same_v<T, uint>), a > b ? a : b)                                     \
  EMU_FETCH(and, space, (is_same_v<T, int> || is_same_v<T, uint>), a& b)                                              \
  EMU_FETCH(or, space, (is_same_v<T, int> || is_same_v<T, uint>), a | b)                                              \
  EMU_FETCH(xor, space, (is_same_v<T, int> || is_same_v<T, uint>), a ^ b)

namespace metal {
EMU_ATOMICS(device, true)
EMU_ATOMICS(threadgroup, false)
}  // namespace metal

#undef EMU_FETCH
#undef EMU_ATOMICS
