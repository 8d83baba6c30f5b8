// Metal's math, common, relational, integer and geometric functions, with the overloads of its specification and no others:
// min(float, int) is as ambiguous here as it is there, and erf or expm1 do not exist.
#pragma once
#include "metal_types.h"

#define __METAL_FAST_MATH__ 1
#define __METAL_PRECISE_MATH__ 0
#define __METAL_MAYBE_FAST_MATH__ 0

extern "C" {
float acosf(float);
float acoshf(float);
float asinf(float);
float asinhf(float);
float atanf(float);
float atan2f(float, float);
float atanhf(float);
float cosf(float);
float coshf(float);
float expf(float);
float exp2f(float);
float fmodf(float, float);
float frexpf(float, int*);
float ldexpf(float, int);
float logf(float);
float log10f(float);
float log2f(float);
float nextafterf(float, float);
float powf(float, float);
float sinf(float);
float sinhf(float);
float tanf(float);
float tanhf(float);
}

// The builtins behind Metal's library, which MLX's functions on bfloat call by name. The last argument chooses fast math.
#define EMU_BUILTIN_1(name, value) \
  METAL_FUNC float __metal_##name(float x, int) { return value; }
#define EMU_BUILTIN_2(name, value) \
  METAL_FUNC float __metal_##name(float x, float y, int) { return value; }
#define EMU_BUILTIN_3(name, value) \
  METAL_FUNC float __metal_##name(float x, float y, float z, int = 0) { return value; }
EMU_BUILTIN_1(acos, acosf(x))
EMU_BUILTIN_1(acosh, acoshf(x))
EMU_BUILTIN_1(asin, asinf(x))
EMU_BUILTIN_1(asinh, asinhf(x))
EMU_BUILTIN_1(atan, atanf(x))
EMU_BUILTIN_2(atan2, atan2f(x, y))
EMU_BUILTIN_1(atanh, atanhf(x))
EMU_BUILTIN_1(ceil, __builtin_ceilf(x))
EMU_BUILTIN_1(cos, cosf(x))
EMU_BUILTIN_1(cosh, coshf(x))
EMU_BUILTIN_1(cospi, cosf(M_PI_F* x))
EMU_BUILTIN_2(divide, x / y)
EMU_BUILTIN_1(exp, expf(x))
EMU_BUILTIN_1(exp10, powf(10.0f, x))
EMU_BUILTIN_1(exp2, exp2f(x))
EMU_BUILTIN_1(fabs, __builtin_fabsf(x))
EMU_BUILTIN_1(floor, __builtin_floorf(x))
EMU_BUILTIN_3(fma, __builtin_fmaf(x, y, z))
EMU_BUILTIN_2(fmax, __builtin_fmaxf(x, y))
EMU_BUILTIN_2(fmin, __builtin_fminf(x, y))
EMU_BUILTIN_3(fmax3, __builtin_fmaxf(x, __builtin_fmaxf(y, z)))
EMU_BUILTIN_3(fmin3, __builtin_fminf(x, __builtin_fminf(y, z)))
EMU_BUILTIN_3(
    fmedian3,
    __builtin_fmaxf(__builtin_fminf(x, y), __builtin_fminf(__builtin_fmaxf(x, y), z)))
EMU_BUILTIN_2(fmod, fmodf(x, y))
EMU_BUILTIN_1(fract, __builtin_fminf(x - __builtin_floorf(x), 0.99999994f))
EMU_BUILTIN_1(log, logf(x))
EMU_BUILTIN_1(log10, log10f(x))
EMU_BUILTIN_1(log2, log2f(x))
EMU_BUILTIN_2(pow, powf(x, y))
EMU_BUILTIN_2(powr, x < 0.0f ? NAN : powf(x, y))
EMU_BUILTIN_1(rint, __builtin_rintf(x))
EMU_BUILTIN_1(round, __builtin_roundf(x))
EMU_BUILTIN_1(rsqrt, 1.0f / __builtin_sqrtf(x))
EMU_BUILTIN_1(sin, sinf(x))
EMU_BUILTIN_1(sinh, sinhf(x))
EMU_BUILTIN_1(sinpi, sinf(M_PI_F* x))
EMU_BUILTIN_1(sqrt, __builtin_sqrtf(x))
EMU_BUILTIN_1(tan, tanf(x))
EMU_BUILTIN_1(tanh, tanhf(x))
EMU_BUILTIN_1(tanpi, tanf(M_PI_F* x))
EMU_BUILTIN_1(trunc, __builtin_truncf(x))
#undef EMU_BUILTIN_1
#undef EMU_BUILTIN_2
#undef EMU_BUILTIN_3
METAL_FUNC float __metal_frexp(float x, int* exponent) { return frexpf(x, exponent); }
METAL_FUNC float __metal_ldexp(float x, int k, int) { return ldexpf(x, k); }
METAL_FUNC float __metal_nextafter(float x, float y) { return nextafterf(x, y); }

#define EMU_EACH(V, value)                                    \
  {                                                           \
    V to;                                                     \
    for (int i = 0; i < emu::traits<V>::count; ++i) to[i] = value; \
    return to;                                                \
  }
#define EMU_UNARY_VECTORS(name, T)                            \
  METAL_FUNC T##2 name(T##2 x) EMU_EACH(T##2, name(x[i]))     \
  METAL_FUNC T##3 name(T##3 x) EMU_EACH(T##3, name(x[i]))     \
  METAL_FUNC T##4 name(T##4 x) EMU_EACH(T##4, name(x[i]))
#define EMU_BINARY_VECTORS(name, T)                                       \
  METAL_FUNC T##2 name(T##2 x, T##2 y) EMU_EACH(T##2, name(x[i], y[i]))   \
  METAL_FUNC T##3 name(T##3 x, T##3 y) EMU_EACH(T##3, name(x[i], y[i]))   \
  METAL_FUNC T##4 name(T##4 x, T##4 y) EMU_EACH(T##4, name(x[i], y[i]))
#define EMU_TERNARY_VECTORS(name, T)                                                       \
  METAL_FUNC T##2 name(T##2 x, T##2 y, T##2 z) EMU_EACH(T##2, name(x[i], y[i], z[i]))      \
  METAL_FUNC T##3 name(T##3 x, T##3 y, T##3 z) EMU_EACH(T##3, name(x[i], y[i], z[i]))      \
  METAL_FUNC T##4 name(T##4 x, T##4 y, T##4 z) EMU_EACH(T##4, name(x[i], y[i], z[i]))

#define EMU_UNARY_AS(name, builtin, T, fast)                            \
  METAL_FUNC T name(T x) { return T(__metal_##builtin(float(x), fast)); } \
  EMU_UNARY_VECTORS(name, T)
#define EMU_BINARY_AS(name, builtin, T, fast)                                              \
  METAL_FUNC T name(T x, T y) { return T(__metal_##builtin(float(x), float(y), fast)); }   \
  EMU_BINARY_VECTORS(name, T)
#define EMU_TERNARY_AS(name, builtin, T, fast)                                                              \
  METAL_FUNC T name(T x, T y, T z) { return T(__metal_##builtin(float(x), float(y), float(z), fast)); }     \
  EMU_TERNARY_VECTORS(name, T)

// X(metal name, builtin): every function of one, two and three floats.
#define EMU_UNARY_NAMES(X, T, fast)                                                                       \
  X(acos, acos, T, fast) X(acosh, acosh, T, fast) X(asin, asin, T, fast) X(asinh, asinh, T, fast)         \
  X(atan, atan, T, fast) X(atanh, atanh, T, fast) X(ceil, ceil, T, fast) X(cos, cos, T, fast)             \
  X(cosh, cosh, T, fast) X(cospi, cospi, T, fast) X(exp, exp, T, fast) X(exp10, exp10, T, fast)           \
  X(exp2, exp2, T, fast) X(fabs, fabs, T, fast) X(abs, fabs, T, fast) X(floor, floor, T, fast)            \
  X(fract, fract, T, fast) X(log, log, T, fast) X(log10, log10, T, fast) X(log2, log2, T, fast)           \
  X(rint, rint, T, fast) X(round, round, T, fast) X(rsqrt, rsqrt, T, fast) X(sin, sin, T, fast)           \
  X(sinh, sinh, T, fast) X(sinpi, sinpi, T, fast) X(sqrt, sqrt, T, fast) X(tan, tan, T, fast)             \
  X(tanh, tanh, T, fast) X(tanpi, tanpi, T, fast) X(trunc, trunc, T, fast)
#define EMU_BINARY_NAMES(X, T, fast)                                                                      \
  X(atan2, atan2, T, fast) X(divide, divide, T, fast) X(fmax, fmax, T, fast) X(max, fmax, T, fast)        \
  X(fmin, fmin, T, fast) X(min, fmin, T, fast) X(fmod, fmod, T, fast) X(pow, pow, T, fast)                \
  X(powr, powr, T, fast)
#define EMU_TERNARY_NAMES(X, T, fast)                                                                     \
  X(fma, fma, T, fast) X(fmax3, fmax3, T, fast) X(max3, fmax3, T, fast) X(fmin3, fmin3, T, fast)          \
  X(min3, fmin3, T, fast) X(fmedian3, fmedian3, T, fast) X(median3, fmedian3, T, fast)

namespace metal {

EMU_UNARY_NAMES(EMU_UNARY_AS, float, 0)
EMU_UNARY_NAMES(EMU_UNARY_AS, half, 0)
EMU_BINARY_NAMES(EMU_BINARY_AS, float, 0)
EMU_BINARY_NAMES(EMU_BINARY_AS, half, 0)
EMU_TERNARY_NAMES(EMU_TERNARY_AS, float, 0)
EMU_TERNARY_NAMES(EMU_TERNARY_AS, half, 0)

namespace fast {
EMU_UNARY_NAMES(EMU_UNARY_AS, float, 1)
EMU_BINARY_NAMES(EMU_BINARY_AS, float, 1)
EMU_TERNARY_NAMES(EMU_TERNARY_AS, float, 1)
}  // namespace fast

namespace precise {
EMU_UNARY_NAMES(EMU_UNARY_AS, float, 0)
EMU_BINARY_NAMES(EMU_BINARY_AS, float, 0)
EMU_TERNARY_NAMES(EMU_TERNARY_AS, float, 0)
}  // namespace precise

#define EMU_FLOATS(T)                                                                                        \
  METAL_FUNC T copysign(T x, T y) { return T(__builtin_copysignf(float(x), float(y))); }                      \
  METAL_FUNC T fdim(T x, T y) { return x > y ? T(x - y) : T(0.0f); }                                         \
  METAL_FUNC T nextafter(T x, T y) {                                                                         \
    if (x != x || y != y || x == y) return x != x ? x : y;                                                   \
    typedef conditional_t<sizeof(T) == 2, ushort, uint> bits;                                                \
    if (x == T(0.0f)) return copysign(as_type<T>(bits(1)), y);                                               \
    return as_type<T>(bits(as_type<bits>(x) + ((x < y) == (x > T(0.0f)) ? 1 : -1)));                         \
  }                                                                                                          \
  METAL_FUNC T frexp(T x, thread int& exponent) { return T(frexpf(float(x), &exponent)); }                   \
  METAL_FUNC T ldexp(T x, int k) { return T(ldexpf(float(x), k)); }                                          \
  METAL_FUNC int ilogb(T x) {                                                                                \
    int exponent;                                                                                            \
    frexpf(float(x), &exponent);                                                                             \
    return exponent - 1;                                                                                     \
  }                                                                                                          \
  METAL_FUNC T modf(T x, thread T& whole) {                                                                  \
    whole = trunc(x);                                                                                        \
    return copysign(T(x - whole), x);                                                                        \
  }                                                                                                          \
  METAL_FUNC T sincos(T x, thread T& cosine) {                                                               \
    cosine = cos(x);                                                                                         \
    return sin(x);                                                                                           \
  }                                                                                                          \
  METAL_FUNC T clamp(T x, T low, T high) { return fmin(fmax(x, low), high); }                                \
  METAL_FUNC T mix(T x, T y, T a) { return T(x + (y - x) * a); }                                             \
  METAL_FUNC T saturate(T x) { return clamp(x, T(0.0f), T(1.0f)); }                                          \
  METAL_FUNC T sign(T x) { return x > T(0.0f) ? T(1.0f) : x < T(0.0f) ? T(-1.0f) : x == x ? x : T(0.0f); }   \
  METAL_FUNC T step(T edge, T x) { return x < edge ? T(0.0f) : T(1.0f); }                                    \
  METAL_FUNC T smoothstep(T low, T high, T x) {                                                              \
    const T t = saturate(T((x - low) / (high - low)));                                                       \
    return T(t * t * (T(3.0f) - T(2.0f) * t));                                                               \
  }                                                                                                          \
  METAL_FUNC bool isnan(T x) { return x != x; }                                                              \
  METAL_FUNC bool isinf(T x) { return fabs(float(x)) == INFINITY; }                                          \
  METAL_FUNC bool isfinite(T x) { return fabs(float(x)) < INFINITY; }                                        \
  METAL_FUNC bool isnormal(T x) {                                                                            \
    return isfinite(x) && fabs(float(x)) >= float(numeric_limits<T>::min());                                 \
  }                                                                                                          \
  METAL_FUNC bool isordered(T x, T y) { return x == x && y == y; }                                           \
  METAL_FUNC bool isunordered(T x, T y) { return x != x || y != y; }                                         \
  METAL_FUNC bool signbit(T x) { return __builtin_copysignf(1.0f, float(x)) < 0.0f; }                        \
  METAL_FUNC T select(T x, T y, bool second) { return second ? y : x; }
EMU_FLOATS(float)
EMU_FLOATS(half)
// MLX's own functions on bfloat cover the rest; these two are Metal's.
METAL_FUNC bool isnan(bfloat x) { return x != x; }
METAL_FUNC bool isinf(bfloat x) { return fabs(float(x)) == INFINITY; }
METAL_FUNC bool isfinite(bfloat x) { return fabs(float(x)) < INFINITY; }
METAL_FUNC bfloat select(bfloat x, bfloat y, bool second) { return second ? y : x; }
METAL_FUNC bfloat clamp(bfloat x, bfloat low, bfloat high) {
  return bfloat(fmin(fmax(float(x), float(low)), float(high)));
}
#undef EMU_FLOATS

#define EMU_FLOAT_VECTORS(T)             \
  EMU_TERNARY_VECTORS(clamp, T)          \
  EMU_TERNARY_VECTORS(mix, T)            \
  EMU_TERNARY_VECTORS(smoothstep, T)     \
  EMU_BINARY_VECTORS(step, T)            \
  EMU_BINARY_VECTORS(copysign, T)        \
  EMU_UNARY_VECTORS(saturate, T)         \
  EMU_UNARY_VECTORS(sign, T)             \
  EMU_GEOMETRY(T, T##2)                  \
  EMU_GEOMETRY(T, T##3)                  \
  EMU_GEOMETRY(T, T##4)
#define EMU_GEOMETRY(T, V)                                                         \
  METAL_FUNC T dot(V x, V y) {                                                     \
    T sum = T(0.0f);                                                               \
    for (int i = 0; i < emu::traits<V>::count; ++i) sum = T(sum + x[i] * y[i]);    \
    return sum;                                                                    \
  }                                                                                \
  METAL_FUNC T length_squared(V x) { return dot(x, x); }                           \
  METAL_FUNC T length(V x) { return sqrt(dot(x, x)); }                             \
  METAL_FUNC T distance_squared(V x, V y) { return length_squared(x - y); }        \
  METAL_FUNC T distance(V x, V y) { return length(x - y); }                        \
  METAL_FUNC V normalize(V x) { return x * rsqrt(dot(x, x)); }
EMU_FLOAT_VECTORS(float)
EMU_FLOAT_VECTORS(half)
#undef EMU_FLOAT_VECTORS
#undef EMU_GEOMETRY
METAL_FUNC float3 cross(float3 x, float3 y) { return x.yzx * y.zxy - x.zxy * y.yzx; }

#define EMU_INTEGERS(T, U, W)                                                                             \
  METAL_FUNC T abs(T x) { return x < T(0) ? T(-x) : x; }                                                  \
  METAL_FUNC U absdiff(T x, T y) { return x > y ? U(x) - U(y) : U(y) - U(x); }                            \
  METAL_FUNC T min(T x, T y) { return x < y ? x : y; }                                                    \
  METAL_FUNC T max(T x, T y) { return x > y ? x : y; }                                                    \
  METAL_FUNC T min3(T x, T y, T z) { return min(x, min(y, z)); }                                          \
  METAL_FUNC T max3(T x, T y, T z) { return max(x, max(y, z)); }                                          \
  METAL_FUNC T median3(T x, T y, T z) { return max(min(x, y), min(max(x, y), z)); }                       \
  METAL_FUNC T clamp(T x, T low, T high) { return min(max(x, low), high); }                               \
  METAL_FUNC T popcount(T x) { return T(__builtin_popcountl(ulong(U(x)))); }                              \
  METAL_FUNC T clz(T x) {                                                                                 \
    return x == T(0) ? T(sizeof(T) * 8) : T(__builtin_clzl(ulong(U(x))) - int(64 - sizeof(T) * 8));       \
  }                                                                                                       \
  METAL_FUNC T ctz(T x) { return x == T(0) ? T(sizeof(T) * 8) : T(__builtin_ctzl(ulong(U(x)))); }         \
  METAL_FUNC T rotate(T x, T by) {                                                                        \
    const int bits = sizeof(T) * 8, left = int(U(by) % U(bits));                                          \
    return left == 0 ? x : T(U(U(x) << left) | U(U(x) >> (bits - left)));                                 \
  }                                                                                                       \
  METAL_FUNC T reverse_bits(T x) {                                                                        \
    U to = 0;                                                                                             \
    for (uint i = 0; i < sizeof(T) * 8; ++i) to = U(U(to << 1) | U((U(x) >> i) & U(1)));                  \
    return T(to);                                                                                         \
  }                                                                                                       \
  METAL_FUNC T extract_bits(T x, uint offset, uint bits) {                                                \
    const uint unused = uint(sizeof(T) * 8) - bits;                                                       \
    return bits == 0 ? T(0) : T(T(U(x) << (unused - offset)) >> unused);                                  \
  }                                                                                                       \
  METAL_FUNC T insert_bits(T x, T y, uint offset, uint bits) {                                            \
    const U ones = bits == sizeof(T) * 8 ? U(~U(0)) : U((U(1) << bits) - U(1));                           \
    const U mask = U(ones << offset);                                                                     \
    return T((U(x) & U(~mask)) | (U(U(y) << offset) & mask));                                             \
  }                                                                                                       \
  METAL_FUNC T select(T x, T y, bool second) { return second ? y : x; }                                   \
  METAL_FUNC T mulhi(T x, T y) { return T((W(x) * W(y)) >> (sizeof(T) * 8)); }                            \
  METAL_FUNC T hadd(T x, T y) { return T((W(x) + W(y)) >> 1); }                                           \
  METAL_FUNC T rhadd(T x, T y) { return T((W(x) + W(y) + 1) >> 1); }                                      \
  METAL_FUNC T addsat(T x, T y) {                                                                         \
    const W sum = W(x) + W(y);                                                                            \
    return sum > W(numeric_limits<T>::max())   ? numeric_limits<T>::max()                                 \
           : sum < W(numeric_limits<T>::min()) ? numeric_limits<T>::min()                                 \
                                               : T(sum);                                                  \
  }                                                                                                       \
  METAL_FUNC T subsat(T x, T y) {                                                                         \
    const W sum = W(x) - W(y);                                                                            \
    return sum > W(numeric_limits<T>::max())   ? numeric_limits<T>::max()                                 \
           : sum < W(numeric_limits<T>::min()) ? numeric_limits<T>::min()                                 \
                                               : T(sum);                                                  \
  }
EMU_INTEGERS(char, uchar, long)
EMU_INTEGERS(uchar, uchar, long)
EMU_INTEGERS(short, ushort, long)
EMU_INTEGERS(ushort, ushort, long)
EMU_INTEGERS(int, uint, long)
EMU_INTEGERS(uint, uint, long)
EMU_INTEGERS(long, ulong, __int128)
EMU_INTEGERS(ulong, ulong, __int128)
#undef EMU_INTEGERS

#define EMU_INTEGER_VECTORS(T)     \
  EMU_BINARY_VECTORS(min, T)       \
  EMU_BINARY_VECTORS(max, T)       \
  EMU_TERNARY_VECTORS(clamp, T)    \
  EMU_UNARY_VECTORS(abs, T)        \
  EMU_UNARY_VECTORS(popcount, T)
EMU_INTEGER_VECTORS(char)
EMU_INTEGER_VECTORS(uchar)
EMU_INTEGER_VECTORS(short)
EMU_INTEGER_VECTORS(ushort)
EMU_INTEGER_VECTORS(int)
EMU_INTEGER_VECTORS(uint)
#undef EMU_INTEGER_VECTORS

METAL_FUNC int mul24(int x, int y) { return x * y; }
METAL_FUNC uint mul24(uint x, uint y) { return x * y; }
METAL_FUNC int mad24(int x, int y, int z) { return x * y + z; }
METAL_FUNC uint mad24(uint x, uint y, uint z) { return x * y + z; }
METAL_FUNC int madhi(int x, int y, int z) { return mulhi(x, y) + z; }
METAL_FUNC uint madhi(uint x, uint y, uint z) { return mulhi(x, y) + z; }

// Comparisons of vectors give vectors of integers here, where Metal's are of bool.
template <typename T, int N>
METAL_FUNC bool any(vec<T, N> x) {
  bool found = false;
  for (int i = 0; i < N; ++i) found |= bool(x[i]);
  return found;
}
template <typename T, int N>
METAL_FUNC bool all(vec<T, N> x) {
  bool found = true;
  for (int i = 0; i < N; ++i) found &= bool(x[i]);
  return found;
}
METAL_FUNC bool any(bool x) { return x; }
METAL_FUNC bool all(bool x) { return x; }
template <typename T, typename C, int N>
METAL_FUNC vec<T, N> select(vec<T, N> x, vec<T, N> y, vec<C, N> second) {
  vec<T, N> to;
  for (int i = 0; i < N; ++i) to[i] = second[i] ? y[i] : x[i];
  return to;
}

}  // namespace metal
