// Metal Shading Language for a C++ compiler, with simdgroups of one lane and threadgroups of one simdgroup.
//
// A barrier has nobody to wait for and threadgroup memory belongs to one thread, so both cost nothing; what is left are
// straight loops. Half precision types are structs, because compilers differ in what they offer for them.
#include <stdint.h>
#include <string.h>

#define SIMD_WIDTH 1
#define MAX_SIMDGROUPS 1
// GPUs keep small arrays in registers only where loops over them are unrolled; a CPU's compiler decides better by itself.
#define UNROLL
#define METAL_FUNC static inline __attribute__((always_inline))
#define device
#define constant
#define threadgroup
#define thread

typedef unsigned int uint;
typedef unsigned short ushort;
struct uint3 {
  uint x, y, z;
};

// Eight values that one core handles together.
typedef float Float8 __attribute__((vector_size(32)));
typedef int32_t Int8 __attribute__((vector_size(32)));
typedef uint32_t Uint8 __attribute__((vector_size(32)));

template <typename To, typename From>
METAL_FUNC To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// The compiler's own half, where the CPU converts it: what includes <immintrin.h> compiles four times as long.
#if defined(__FLT16_MAX__) && (defined(__F16C__) || defined(__aarch64__))
#define CONVERTS_HALF 1
typedef _Float16 Half8 __attribute__((vector_size(16)));

METAL_FUNC Float8 widen_eight(const void* from) {
  Half8 halves;
  memcpy(&halves, from, sizeof halves);
  return __builtin_convertvector(halves, Float8);
}
#endif

struct half {
  uint16_t bits;
  operator float() const {
#if CONVERTS_HALF
    return as_type<_Float16>(bits);
#else
    const uint magnitude = uint(bits & 0x7fff) << 13, sign = uint(bits & 0x8000) << 16;
    // Scaling by 2^112 moves the exponent's bias and normalizes small numbers; infinities and NaN need theirs set.
    const uint scaled = as_type<uint>(as_type<float>(magnitude) * 0x1p112f);
    return as_type<float>(sign | (magnitude < 0x0f800000u ? scaled : magnitude | 0x7f800000u));
#endif
  }
};

struct bfloat16_t {
  uint16_t bits;
  operator float() const { return as_type<float>(uint(bits) << 16); }
};

typedef half float16_t;

#define INFINITY __builtin_inff()

namespace mem_flags {
enum { mem_none, mem_device, mem_threadgroup };
}

METAL_FUNC void threadgroup_barrier(int) {}

METAL_FUNC float simd_sum(float value) {
  return value;
}

METAL_FUNC float simd_max(float value) {
  return value;
}

template <typename T>
METAL_FUNC T min(T a, T b) {
  return b < a ? b : a;
}

template <typename T>
METAL_FUNC T max(T a, T b) {
  return a < b ? b : a;
}

METAL_FUNC float rsqrt(float x) {
  return 1.0f / __builtin_sqrtf(x);
}

// exp without a branch, so that a loop over it becomes vector code: exp(x) = 2^n exp(r) with |r| <= ln(2) / 2, and a
// polynomial for exp(r) that is good to two units in the last place. 2^n is added to the exponent as an integer, because
// sums and products may be reordered, here into powers that overflow. Results below the normal numbers are 0.
METAL_FUNC float exp(float x) {
  const float lowest = -87.3365f, highest = 88.7228f;
  const float bounded = x < lowest ? lowest : x > highest ? highest : x;
  const float n = __builtin_rintf(bounded * 1.44269504f);
  const float r = __builtin_fmaf(n, -1.42860677e-6f, __builtin_fmaf(n, -0.693145752f, bounded));
  float p = 1.38888889e-3f;
  p = __builtin_fmaf(p, r, 8.33333377e-3f);
  p = __builtin_fmaf(p, r, 4.16666679e-2f);
  p = __builtin_fmaf(p, r, 1.66666672e-1f);
  p = __builtin_fmaf(p, r, 0.5f);
  p = __builtin_fmaf(p, r, 1.0f);
  p = __builtin_fmaf(p, r, 1.0f);
  const float power = as_type<float>(as_type<uint>(p) + (uint(int(n)) << 23));
  return x != x ? x : x < lowest ? 0.0f : x > highest ? INFINITY : power;
}

// A polynomial near 0, where the other form would lose digits (Cephes).
METAL_FUNC float tanh(float x) {
  const float z = x * x;
  float p = -5.70498872745e-3f;
  p = __builtin_fmaf(p, z, 2.06390887954e-2f);
  p = __builtin_fmaf(p, z, -5.37397155531e-2f);
  p = __builtin_fmaf(p, z, 1.33314422036e-1f);
  p = __builtin_fmaf(p, z, -3.33332819422e-1f);
  const float near = __builtin_fmaf(p * z, x, x), far = 1.0f - 2.0f / (exp(2.0f * x) + 1.0f);
  return z < 0.39f ? near : far;
}
