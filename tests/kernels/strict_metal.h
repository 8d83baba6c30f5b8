// Enough of Metal Shading Language for clang to check a kernel's text: the address spaces are real, so that a pointer or
// an array in the wrong one is an error as it would be for Metal's own compiler. Nothing here is ever run.
#pragma once
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned long ulong;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef _Float16 half;
typedef __bf16 bfloat;
typedef half float16_t;
typedef bfloat bfloat16_t;
typedef half half2 __attribute__((ext_vector_type(2)));
typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef uint uint4 __attribute__((ext_vector_type(4)));
typedef float float4 __attribute__((ext_vector_type(4)));

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define METAL_FUNC inline __attribute__((always_inline))
#define INFINITY __builtin_inff()

template <typename To, typename From>
To as_type(From from) {
  return __builtin_bit_cast(To, from);
}

namespace mem_flags {
enum { mem_none, mem_device, mem_threadgroup };
}
void threadgroup_barrier(int);
float simd_sum(float);
float simd_max(float);
float simd_shuffle_xor(float, ushort);
float fabs(float);
half2 fma(half2, half2, half2);
float rsqrt(float);
float exp(float);
float tanh(float);
template <typename T>
T min(T, T);
template <typename T>
T max(T, T);
