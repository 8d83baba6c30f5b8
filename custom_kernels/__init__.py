"""Performance-critical operations: public functions, each beside its reference in plain mlx.

Every op takes the back end that `backends.select` returned. Results have the dtype of the activations; sums are taken
in float32. A reference is the op's definition and may be slow.
"""

from turbospark_mlx.custom_kernels import backends
from turbospark_mlx.custom_kernels.affine import affine_embedding, affine_matmul, gated_affine_matmul
from turbospark_mlx.custom_kernels.append_attention import append_attention
from turbospark_mlx.custom_kernels.dense import dense_matmul
from turbospark_mlx.custom_kernels.emulator import emulate
from turbospark_mlx.custom_kernels.head import greedy_head
from turbospark_mlx.custom_kernels.norm import add_rms_norm, gated_rms_norm, rms_norm, rms_norm_add
from turbospark_mlx.custom_kernels.rotary import appends, qkv_append, qkv_epilogue, rotation_table
from turbospark_mlx.custom_kernels.sdpa import attention, cache_attention

__all__ = [
    "add_rms_norm",
    "affine_embedding",
    "affine_matmul",
    "append_attention",
    "appends",
    "attention",
    "backends",
    "cache_attention",
    "dense_matmul",
    "emulate",
    "gated_affine_matmul",
    "gated_rms_norm",
    "greedy_head",
    "qkv_append",
    "qkv_epilogue",
    "rms_norm",
    "rms_norm_add",
    "rotation_table",
]
