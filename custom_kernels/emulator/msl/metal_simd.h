// Barriers, simdgroup and quadgroup functions. What they do stands in runtime.hpp: a lane hands over its value, waits for the
// others, and finds all of them in an Exchange.
#pragma once
#include "metal_math.h"
#include "thread.h"

extern "C" {
void emu_barrier(uint flags) __attribute__((convergent, nomerge));
void emu_simdgroup_barrier(uint flags) __attribute__((convergent, nomerge));
emu_exchange* emu_simd(const void* value, uint size) __attribute__((convergent, nomerge));
uint emu_lane(void) __attribute__((convergent));
void emu_absent(uint lane);
ulong emu_threadgroup(uint slot, ulong size, uint alignment, uint granule, const char* name);
}

namespace metal {

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
};
METAL_FUNC mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }

METAL_FUNC void threadgroup_barrier(mem_flags flags) { emu_barrier(uint(flags)); }
METAL_FUNC void simdgroup_barrier(mem_flags flags) { emu_simdgroup_barrier(uint(flags)); }

}  // namespace metal

namespace emu {

METAL_FUNC uint3 place(const unsigned* values) { return uint3(values[0], values[1], values[2]); }

// What simdgroup functions take: scalars and vectors of up to 32-bit elements.
template <typename T>
constexpr bool movable = traits<T>::arithmetic && sizeof(typename traits<T>::element) <= 4 &&
    !metal::is_same_v<typename traits<T>::element, bool> && !metal::is_same_v<typename traits<T>::element, bfloat>;
template <typename T>
constexpr bool whole = movable<T> && metal::is_integral_v<typename traits<T>::element>;

template <typename T>
METAL_FUNC T of_lane(emu_exchange* all, uint lane) {
  T value;
  // What an absent or finished lane would have given is undefined.
  const bool there = lane < 32 && (all->active >> lane & 1);
  if (!there) emu_absent(lane);
  __builtin_memcpy(&value, there ? all->value[lane] : all->undefined, sizeof(T));
  return value;
}

// The values of the active lanes, combined in pairs. The first lane that looks does it for all.
template <typename T, typename F>
METAL_FUNC T reduce(T value, F combine) {
  emu_exchange* all = emu_simd(&value, sizeof(T));
  if (!all->done) {
    T found[32];
    int count = 0;
    for (uint lane = 0; lane < 32; ++lane) {
      if (all->active >> lane & 1) found[count++] = of_lane<T>(all, lane);
    }
    for (; count > 1; count = (count + 1) / 2) {
      for (int i = 0; i < count / 2; ++i) found[i] = combine(found[2 * i], found[2 * i + 1]);
      if (count % 2) found[count / 2] = found[count - 1];
    }
    __builtin_memcpy(all->result, &found[0], sizeof(T));
    all->done = 1;
  }
  __builtin_memcpy(&value, all->result, sizeof(T));
  return value;
}

template <typename T, typename F>
METAL_FUNC T prefix(T value, T start, bool inclusive, F combine) {
  emu_exchange* all = emu_simd(&value, sizeof(T));
  const uint last = emu_lane() + (inclusive ? 1 : 0);
  for (uint lane = 0; lane < last; ++lane) {
    if (all->active >> lane & 1) start = combine(start, of_lane<T>(all, lane));
  }
  return start;
}

}  // namespace emu

#define EMU_IF(condition) template <typename T, metal::enable_if_t<condition, bool> = true>
// Without these, MLX's functions on bfloat would take every other type by conversion, where Metal finds a call ambiguous.
#define EMU_NOT(condition) template <typename T, metal::enable_if_t<!(condition) && !metal::is_same_v<T, bfloat>, bool> = true>

#define EMU_REDUCTION(name, condition, expression)                       \
  EMU_NOT(condition)                                                     \
  T simd_##name(T data) = delete;                                        \
  EMU_IF(condition)                                                      \
  METAL_FUNC T simd_##name(T data) {                                     \
    return emu::reduce(data, [](T a, T b) -> T { return expression; });  \
  }                                                                      \
  EMU_IF(condition)                                                      \
  METAL_FUNC T quad_##name(T data) {                                     \
    emu_exchange* all = emu_simd(&data, sizeof(T));                      \
    const uint first = emu_lane() / 4 * 4;                               \
    bool found = false;                                                  \
    T b = T();                                                           \
    for (uint lane = first; lane < first + 4; ++lane) {                  \
      if (!(all->active >> lane & 1)) continue;                          \
      T a = emu::of_lane<T>(all, lane);                                  \
      b = found ? T(expression) : a;                                     \
      found = true;                                                      \
    }                                                                    \
    return b;                                                            \
  }

// From which lane a value comes. Lanes that ``from`` names outside the simdgroup keep their own value or take ``filling``.
#define EMU_MOVE(name, from)                                      \
  EMU_NOT(emu::movable<T>)                                        \
  T simd_##name(T data, ushort by) = delete;                      \
  EMU_IF(emu::movable<T>)                                         \
  METAL_FUNC T simd_##name(T data, ushort by) {                   \
    emu_exchange* all = emu_simd(&data, sizeof(T));               \
    const uint lane = emu_lane();                                 \
    return emu::of_lane<T>(all, from);                            \
  }

namespace metal {

EMU_REDUCTION(sum, emu::movable<T>, a + b)
EMU_REDUCTION(product, emu::movable<T>, a* b)
EMU_REDUCTION(max, emu::movable<T>, max(a, b))
EMU_REDUCTION(min, emu::movable<T>, min(a, b))
EMU_REDUCTION(and, emu::whole<T>, a& b)
EMU_REDUCTION(or, emu::whole<T>, a | b)
EMU_REDUCTION(xor, emu::whole<T>, a ^ b)

EMU_MOVE(broadcast, by)
EMU_MOVE(shuffle, by)
EMU_MOVE(shuffle_xor, lane ^ by)
EMU_MOVE(shuffle_up, lane >= by ? lane - by : lane)
EMU_MOVE(shuffle_down, lane + by < 32 ? lane + by : lane)
EMU_MOVE(shuffle_rotate_up, (lane + 32 - by % 32) % 32)
EMU_MOVE(shuffle_rotate_down, (lane + by) % 32)

#define EMU_QUAD_MOVE(name, from)                                  \
  EMU_IF(emu::movable<T>)                                          \
  METAL_FUNC T quad_##name(T data, ushort by) {                    \
    emu_exchange* all = emu_simd(&data, sizeof(T));                \
    const uint lane = emu_lane() % 4, first = emu_lane() - lane;   \
    return emu::of_lane<T>(all, first + (from));                   \
  }
EMU_QUAD_MOVE(broadcast, by % 4)
EMU_QUAD_MOVE(shuffle, by % 4)
EMU_QUAD_MOVE(shuffle_xor, (lane ^ by) % 4)
EMU_QUAD_MOVE(shuffle_up, lane >= by ? lane - by : lane)
EMU_QUAD_MOVE(shuffle_down, lane + by < 4 ? lane + by : lane)
#undef EMU_QUAD_MOVE

EMU_IF(emu::movable<T>)
METAL_FUNC T simd_shuffle_and_fill_up(T data, T filling, ushort by, ushort modulo = 32) {
  emu_exchange* given = emu_simd(&data, sizeof(T));
  const uint lane = emu_lane(), place = lane % modulo;
  const T moved = place >= by ? emu::of_lane<T>(given, lane - by) : filling;
  emu_exchange* fill = emu_simd(&filling, sizeof(T));
  return place >= by ? moved : emu::of_lane<T>(fill, lane - place + (place + modulo - by) % modulo);
}
EMU_IF(emu::movable<T>)
METAL_FUNC T simd_shuffle_and_fill_down(T data, T filling, ushort by, ushort modulo = 32) {
  emu_exchange* given = emu_simd(&data, sizeof(T));
  const uint lane = emu_lane(), place = lane % modulo;
  const T moved = place + by < modulo ? emu::of_lane<T>(given, lane + by) : filling;
  emu_exchange* fill = emu_simd(&filling, sizeof(T));
  return place + by < modulo ? moved : emu::of_lane<T>(fill, lane - place + (place + by) % modulo);
}

EMU_IF(emu::movable<T>)
METAL_FUNC T simd_broadcast_first(T data) {
  emu_exchange* all = emu_simd(&data, sizeof(T));
  return emu::of_lane<T>(all, uint(__builtin_ctz(all->active)));
}

EMU_IF(emu::movable<T>)
METAL_FUNC T simd_prefix_inclusive_sum(T data) { return emu::prefix(data, T(0), true, [](T a, T b) -> T { return a + b; }); }
EMU_IF(emu::movable<T>)
METAL_FUNC T simd_prefix_exclusive_sum(T data) { return emu::prefix(data, T(0), false, [](T a, T b) -> T { return a + b; }); }
EMU_IF(emu::movable<T>)
METAL_FUNC T simd_prefix_inclusive_product(T data) { return emu::prefix(data, T(1), true, [](T a, T b) -> T { return a * b; }); }
EMU_IF(emu::movable<T>)
METAL_FUNC T simd_prefix_exclusive_product(T data) { return emu::prefix(data, T(1), false, [](T a, T b) -> T { return a * b; }); }

class simd_vote {
 public:
  typedef ulong vote_t;
  explicit constexpr simd_vote(vote_t v = 0) : bits(v) {}
  explicit constexpr operator vote_t() const { return bits; }
  bool all() const { return bits == 0xffffffff; }
  bool any() const { return bits != 0; }

 private:
  vote_t bits;
};

METAL_FUNC simd_vote simd_ballot(bool value) {
  const uint bit = value ? 1u << emu_lane() : 0u;
  return simd_vote(emu::reduce(bit, [](uint a, uint b) { return a | b; }));
}
METAL_FUNC simd_vote simd_active_threads_mask() { return simd_ballot(true); }
METAL_FUNC bool simd_any(bool value) { return emu::reduce(uint(value), [](uint a, uint b) { return a | b; }) != 0; }
METAL_FUNC bool simd_all(bool value) { return emu::reduce(uint(value), [](uint a, uint b) { return a & b; }) != 0; }
METAL_FUNC bool simd_is_first() {
  const uint lane = emu_lane();
  return emu::reduce(lane, [](uint a, uint b) { return a < b ? a : b; }) == lane;
}

}  // namespace metal

#undef EMU_REDUCTION
#undef EMU_MOVE

// The builtins that MLX's functions on bfloat call by name.
#define EMU_NAMED_1(name) \
  template <typename T>   \
  METAL_FUNC T __metal_simd_##name(T data) { return metal::simd_##name(data); }
#define EMU_NAMED_2(name) \
  template <typename T>   \
  METAL_FUNC T __metal_simd_##name(T data, ushort by) { return metal::simd_##name(data, by); }
EMU_NAMED_1(sum)
EMU_NAMED_1(product)
EMU_NAMED_1(max)
EMU_NAMED_1(min)
EMU_NAMED_1(prefix_inclusive_sum)
EMU_NAMED_1(prefix_exclusive_sum)
EMU_NAMED_1(prefix_inclusive_product)
EMU_NAMED_1(prefix_exclusive_product)
EMU_NAMED_2(broadcast)
EMU_NAMED_2(shuffle)
EMU_NAMED_2(shuffle_xor)
EMU_NAMED_2(shuffle_up)
EMU_NAMED_2(shuffle_down)
EMU_NAMED_2(shuffle_rotate_up)
EMU_NAMED_2(shuffle_rotate_down)
#undef EMU_NAMED_1
#undef EMU_NAMED_2
template <typename T>
T __metal_simd_xor(T data);
METAL_FUNC ushort __metal_get_simdgroup_size(ushort) { return 32; }
template <typename T>
METAL_FUNC T __metal_simd_shuffle_and_fill_up(T data, T filling, ushort by, ushort modulo) {
  return metal::simd_shuffle_and_fill_up(data, filling, by, modulo);
}
template <typename T>
METAL_FUNC T __metal_simd_shuffle_and_fill_down(T data, T filling, ushort by, ushort modulo) {
  return metal::simd_shuffle_and_fill_down(data, filling, by, modulo);
}
