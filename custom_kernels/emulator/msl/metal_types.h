// Metal's types, address spaces and type traits for clang. The address spaces are real: a pointer in the wrong one is an error.
#pragma once

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define kernel
#define METAL_FUNC inline __attribute__((always_inline))
#define __METAL__ 1
#define __METAL_VERSION__ 310

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef long ptrdiff_t;
typedef _Float16 half;
typedef __bf16 bfloat;

#define EMU_VECTORS(T)                                \
  typedef T T##2 __attribute__((ext_vector_type(2))); \
  typedef T T##3 __attribute__((ext_vector_type(3))); \
  typedef T T##4 __attribute__((ext_vector_type(4)));
EMU_VECTORS(char)
EMU_VECTORS(uchar)
EMU_VECTORS(short)
EMU_VECTORS(ushort)
EMU_VECTORS(int)
EMU_VECTORS(uint)
EMU_VECTORS(long)
EMU_VECTORS(ulong)
EMU_VECTORS(half)
EMU_VECTORS(bfloat)
EMU_VECTORS(float)
EMU_VECTORS(bool)
#undef EMU_VECTORS

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define HALF_MAX half(65504.0f)
#define INT_MAX 0x7fffffff
#define INT_MIN (-0x7fffffff - 1)
#define UINT_MAX 0xffffffffu
#define M_PI_F 3.14159274101257f
#define M_E_F 2.71828174591064f
#define M_LN2_F 0.69314718246460f
#define M_LOG2E_F 1.44269502162933f
#define M_SQRT2_F 1.41421353816986f

namespace metal {

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

template <typename T, T V>
struct integral_constant {
  static constexpr T value = V;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return V; }
};
template <bool V>
using bool_constant = integral_constant<bool, V>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;

template <typename A, typename B>
struct is_same : false_type {};
template <typename A>
struct is_same<A, A> : true_type {};
template <typename A, typename B>
constexpr bool is_same_v = is_same<A, B>::value;

template <bool C, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool C, typename T = void>
using enable_if_t = typename enable_if<C, T>::type;

template <bool C, typename A, typename B>
struct conditional {
  typedef A type;
};
template <typename A, typename B>
struct conditional<false, A, B> {
  typedef B type;
};
template <bool C, typename A, typename B>
using conditional_t = typename conditional<C, A, B>::type;

template <typename T>
struct remove_cv {
  typedef __remove_cv(T) type;
};
template <typename T>
using remove_cv_t = typename remove_cv<T>::type;
template <typename T>
struct remove_reference {
  typedef __remove_reference_t(T) type;
};
template <typename T>
using remove_reference_t = typename remove_reference<T>::type;

template <typename From, typename To>
struct is_convertible : bool_constant<__is_convertible(From, To)> {};
template <typename From, typename To>
constexpr bool is_convertible_v = is_convertible<From, To>::value;

#define EMU_ONE_OF(name, ...)                                                \
  template <typename T, typename... Others>                                  \
  constexpr bool name##_of = (is_same_v<remove_cv_t<T>, Others> || ...);     \
  template <typename T>                                                      \
  struct name : bool_constant<name##_of<T, __VA_ARGS__>> {};                 \
  template <typename T>                                                      \
  constexpr bool name##_v = name<T>::value;
EMU_ONE_OF(is_integral, bool, char, int8_t, uchar, short, ushort, int, uint, long, ulong)
EMU_ONE_OF(is_floating_point, half, bfloat, float)
EMU_ONE_OF(is_unsigned, bool, uchar, ushort, uint, ulong)
#undef EMU_ONE_OF
template <typename T>
struct is_signed : bool_constant<(is_integral_v<T> || is_floating_point_v<T>) && !is_unsigned_v<T>> {};
template <typename T>
constexpr bool is_signed_v = is_signed<T>::value;
template <typename T>
struct is_arithmetic : bool_constant<is_integral_v<T> || is_floating_point_v<T>> {};
template <typename T>
constexpr bool is_arithmetic_v = is_arithmetic<T>::value;

template <typename T>
struct numeric_limits {
  static constexpr T max() { return is_unsigned_v<T> ? T(~T(0)) : T(((T(1) << (sizeof(T) * 8 - 2)) - 1) * 2 + 1); }
  static constexpr T min() { return is_unsigned_v<T> ? T(0) : T(-max() - 1); }
  static constexpr T lowest() { return min(); }
};
#define EMU_LIMITS(T, largest, smallest, step)                  \
  template <>                                                   \
  struct numeric_limits<T> {                                    \
    static constexpr T max() { return T(largest); }             \
    static constexpr T min() { return T(smallest); }            \
    static constexpr T lowest() { return T(-(largest)); }       \
    static constexpr T epsilon() { return T(step); }            \
    static constexpr T infinity() { return T(INFINITY); }       \
    static constexpr T quiet_NaN() { return T(NAN); }           \
  };
EMU_LIMITS(float, FLT_MAX, FLT_MIN, FLT_EPSILON)
EMU_LIMITS(half, 65504.0f, 6.103515625e-05f, 9.765625e-04f)
EMU_LIMITS(bfloat, 3.3895313892515355e38f, FLT_MIN, 7.8125e-03f)
#undef EMU_LIMITS

template <typename T, size_t N>
struct array {
  T elements[N];
  T& operator[](size_t i) { return elements[i]; }
  const T& operator[](size_t i) const { return elements[i]; }
  static constexpr size_t size() { return N; }
};

}  // namespace metal

template <typename To, typename From>
METAL_FUNC To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  return __builtin_bit_cast(To, from);
}

namespace emu {

// Elements of a vector, or of a scalar, which is one.
template <typename V>
struct traits {
  typedef V element;
  static constexpr int count = 1;
  static constexpr bool arithmetic = metal::is_arithmetic_v<V>;
};
template <typename T, int N>
struct traits<T __attribute__((ext_vector_type(N)))> {
  typedef T element;
  static constexpr int count = N;
  static constexpr bool arithmetic = true;
};

// The bytes of memory that belong to one value: what two threads may write side by side.
template <typename T>
constexpr uint granule() {
  if constexpr (traits<T>::arithmetic) return sizeof(typename traits<T>::element);
  return alignof(T) < 4 ? alignof(T) : 4;
}
template <typename T>
struct innermost {
  typedef T type;
};
template <typename T, size_t N>
struct innermost<T[N]> : innermost<T> {};

template <typename V>
METAL_FUNC void append(V& to, int& at) {}
template <typename V, typename P, typename... Rest>
METAL_FUNC void append(V& to, int& at, P part, Rest... rest) {
  typedef typename traits<V>::element element;
  if constexpr (traits<P>::count == 1) {
    to[at++] = element(part);
  } else {
    for (int i = 0; i < traits<P>::count; ++i) to[at++] = element(part[i]);
  }
  append(to, at, rest...);
}

// What float4(...) means in Metal: one scalar for all elements, or parts that fill them exactly.
template <typename V, typename... P>
METAL_FUNC V make(P... parts) {
  constexpr int given = (0 + ... + traits<P>::count), count = traits<V>::count;
  static_assert(given == count || (sizeof...(P) <= 1 && given <= 1), "the parts do not make up the vector");
  V to;
  if constexpr (given == count) {
    int at = 0;
    append(to, at, parts...);
  } else {
    for (int i = 0; i < count; ++i) to[i] = typename traits<V>::element((0 + ... + parts));
  }
  return to;
}

}  // namespace emu

#define float2(...) emu::make<float2>(__VA_ARGS__)
#define float3(...) emu::make<float3>(__VA_ARGS__)
#define float4(...) emu::make<float4>(__VA_ARGS__)
#define half2(...) emu::make<half2>(__VA_ARGS__)
#define half3(...) emu::make<half3>(__VA_ARGS__)
#define half4(...) emu::make<half4>(__VA_ARGS__)
#define bfloat2(...) emu::make<bfloat2>(__VA_ARGS__)
#define bfloat3(...) emu::make<bfloat3>(__VA_ARGS__)
#define bfloat4(...) emu::make<bfloat4>(__VA_ARGS__)
#define char2(...) emu::make<char2>(__VA_ARGS__)
#define char3(...) emu::make<char3>(__VA_ARGS__)
#define char4(...) emu::make<char4>(__VA_ARGS__)
#define uchar2(...) emu::make<uchar2>(__VA_ARGS__)
#define uchar3(...) emu::make<uchar3>(__VA_ARGS__)
#define uchar4(...) emu::make<uchar4>(__VA_ARGS__)
#define short2(...) emu::make<short2>(__VA_ARGS__)
#define short3(...) emu::make<short3>(__VA_ARGS__)
#define short4(...) emu::make<short4>(__VA_ARGS__)
#define ushort2(...) emu::make<ushort2>(__VA_ARGS__)
#define ushort3(...) emu::make<ushort3>(__VA_ARGS__)
#define ushort4(...) emu::make<ushort4>(__VA_ARGS__)
#define int2(...) emu::make<int2>(__VA_ARGS__)
#define int3(...) emu::make<int3>(__VA_ARGS__)
#define int4(...) emu::make<int4>(__VA_ARGS__)
#define uint2(...) emu::make<uint2>(__VA_ARGS__)
#define uint3(...) emu::make<uint3>(__VA_ARGS__)
#define uint4(...) emu::make<uint4>(__VA_ARGS__)
