// What every kernel may rely on beside Metal's own library. Each back end has its own version of this file.
#define SIMD_WIDTH 32
#define MAX_SIMDGROUPS 32
#define UNROLL _Pragma("clang loop unroll(full)")
