"""Write a Metal kernel without a Mac: from a first draft with faults to one that can be trusted, in under a minute.

python examples/write_a_kernel.py

The kernel sums the rows of a matrix: one threadgroup a row, a simdgroup function for 32 lanes at a time, and
threadgroup memory for what the simdgroups found. Each draft mends what the checks said about the one before it.
"""

from __future__ import annotations

import time

import mlx.core as mx
import numpy as np

from turbospark_mlx.custom_kernels import emulate
from turbospark_mlx.errors import KernelFault

HELPER = """
// What one thread adds up: every threads-th value of a row.
float partial_sum(const float* row, uint first, uint threads) {
  float sum = 0.0f;
  for (uint k = first; k <= K; k += threads) {
    sum += float(row[k]);
  }
  return sum;
}
"""

BODY = """
// x [rows, K] -> y [rows]
threadgroup float parts[32];
const uint row = threadgroup_position_in_grid.x;
const uint self = thread_index_in_threadgroup;
float sum = partial_sum<T, K>(x + row * K, self, threads_per_threadgroup.x);
sum = simd_sum(sum);
if (thread_index_in_simdgroup == 0) {
  parts[simdgroup_index_in_threadgroup] = sum;
}
sum = 0.0f;
for (uint i = 0; i < 8; ++i) {
  sum += parts[i];
}
if (self == 0) {
  y[row] = T(sum);
}
"""

DRAFTS = (
    ("A first draft: the helper takes float*, as in C++.", "", ""),
    (
        "Metal wants to know where a pointer points to.",
        "float partial_sum(const float* row",
        "template <typename T, int K>\nfloat partial_sum(const device T* row",
    ),
    (
        "What simdgroups write for each other needs a barrier before it is read.",
        "}\nsum = 0.0f;",
        "}\nthreadgroup_barrier(mem_flags::mem_threadgroup);\nsum = 0.0f;",
    ),
    ("A row ends before K, not at it.", "k <= K", "k < K"),
    ("There are as many parts as simdgroups, and that is not always 8.", "i < 8", "i < simdgroups_per_threadgroup"),
)


def run(header: str, body: str, x: mx.array, threads: int) -> mx.array:
    """One row of ``x`` for each threadgroup of ``threads``, emulated. On a Mac, call ``kernel`` itself the same way."""
    kernel = mx.fast.metal_kernel(
        name="row_sum", input_names=["x"], output_names=["y"], header=header, source=body, ensure_row_contiguous=True
    )
    rows, columns = x.shape
    (y,) = emulate(
        kernel,
        [x],
        name="row_sum",
        header=header,
        source=body,
        template=[("T", x.dtype), ("K", columns)],
        grid=(rows * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows,)],
        output_dtypes=[x.dtype],
    )
    return y


def main() -> None:
    started = time.perf_counter()
    mx.set_default_device(mx.cpu)
    rng = np.random.default_rng(0)
    x = mx.array(rng.normal(size=(6, 1000)).astype(np.float32)).astype(mx.float16)
    exact = np.array(x).astype(np.float64).sum(-1)
    header, body = HELPER, BODY
    for number, (reason, old, new) in enumerate(DRAFTS, 1):
        header, body = (header.replace(old, new), body.replace(old, new)) if old else (header, body)
        print(f"{number}. {reason}")
        try:
            for threads in (256, 96):
                error = np.abs(np.array(run(header, body, x, threads)) - exact).max() / np.abs(exact).max()
                print(f"   {threads} threads a row: off by {error:.1e} of the largest sum")
        except KernelFault as found:
            print(f"   {found.kind}: {found}")
    print(f"\nThe kernel as it is now:\n{header}{body}\n{time.perf_counter() - started:.0f} seconds")


if __name__ == "__main__":
    main()
