// Metal Shading Language for CUDA. What macros and functions cannot say is rewritten by cuda.py.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define SIMD_WIDTH 32
#define MAX_SIMDGROUPS 32
#define UNROLL _Pragma("unroll")
#define METAL_FUNC __device__ __forceinline__

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned long ulong;
typedef __half half;
typedef __half2 half2;
typedef __half float16_t;
typedef __nv_bfloat16 bfloat16_t;

// The run-time compiler brings no math.h.
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

namespace mem_flags {
enum { mem_none, mem_device, mem_threadgroup };
}

template <typename To, typename From>
METAL_FUNC To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

METAL_FUNC void threadgroup_barrier(int) {
  __syncthreads();
}

METAL_FUNC float simd_shuffle_xor(float value, ushort distance) {
  return __shfl_xor_sync(0xffffffffu, value, distance);
}

METAL_FUNC float simd_sum(float value) {
  UNROLL
  for (int distance = 16; distance > 0; distance >>= 1) {
    value += simd_shuffle_xor(value, distance);
  }
  return value;
}

METAL_FUNC float simd_max(float value) {
  UNROLL
  for (int distance = 16; distance > 0; distance >>= 1) {
    value = max(value, simd_shuffle_xor(value, distance));
  }
  return value;
}

METAL_FUNC half2 fma(half2 a, half2 b, half2 c) {
  return __hfma2(a, b, c);
}
