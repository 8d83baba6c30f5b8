"""Performance-critical operations: public functions, each beside its reference in plain mlx.

Every op takes the back end that `backends.select` returned. Results have the dtype of the activations; sums are taken
in float32. A reference is the op's definition and may be slow.
"""

from importlib import import_module

from turbospark_mlx.custom_kernels import (
    affine,
    backends,
    decode_attention,
    delta_net,
    dense,
    dilated,
    expert_groups,
    expert_phases,
    experts_cpu,
    gated,
    head,
    indexer,
    norm,
    rotary,
    rotation,
    router,
    sparse,
    streams,
)
from turbospark_mlx.custom_kernels.affine import affine_embedding, affine_matmul, gated_affine_matmul
from turbospark_mlx.custom_kernels.append_attention import APPEND_ATTENTION, append_attention
from turbospark_mlx.custom_kernels.delta_net import DeltaWeights, gated_delta, gated_delta_step, steps
from turbospark_mlx.custom_kernels.dense import dense_matmul
from turbospark_mlx.custom_kernels.dilated import convolves, dilated_convolution, dilated_convolution_step
from turbospark_mlx.custom_kernels.expert_arena import BlobMatrix, ExpertArena, ExpertBlob
from turbospark_mlx.custom_kernels.expert_groups import grouped_experts
from turbospark_mlx.custom_kernels.expert_phases import moe_phase1_gate_up_act, moe_phase2_down_reduce
from turbospark_mlx.custom_kernels.experts import Mixture, expert_mixture
from turbospark_mlx.custom_kernels.gated import gated_product
from turbospark_mlx.custom_kernels.head import greedy_head, largest
from turbospark_mlx.custom_kernels.indexer import index_append, index_appends, pool_blocks
from turbospark_mlx.custom_kernels.latent_attention import LATENT_ATTENTION, HeadRows, latent_attends, latent_attention
from turbospark_mlx.custom_kernels.norm import JoinedNorms, add_rms_norm, gated_rms_norm, rms_norm, rms_norm_add
from turbospark_mlx.custom_kernels.rotary import appends, qkv_append, qkv_epilogue, rotation_table
from turbospark_mlx.custom_kernels.rotation import rotate, rotations
from turbospark_mlx.custom_kernels.router import router_topk_select
from turbospark_mlx.custom_kernels.sdpa import attention, cache_attention
from turbospark_mlx.custom_kernels.sparse import (
    choose_positions,
    indexed_attention,
    score_blocks,
    sparse_mask,
)
from turbospark_mlx.custom_kernels.streams import ngram_gate, stream_inject, stream_mix

OPS = (
    affine.AFFINE_MATMUL,
    affine.GATED_AFFINE_MATMUL,
    gated.GATED_PRODUCT,
    affine.AFFINE_EMBEDDING,
    dense.DENSE_MATMUL,
    head.GREEDY_HEAD,
    head.LARGEST,
    norm.RMS_NORM,
    norm.GATED_RMS_NORM,
    norm.RMS_NORM_ADD,
    norm.ADD_RMS_NORM,
    rotary.QKV_EPILOGUE,
    rotary.QKV_APPEND,
    rotation.ROTATE,
    decode_attention.ATTENTION,
    delta_net.GATED_DELTA,
    delta_net.GATED_DELTA_STEP,
    APPEND_ATTENTION,
    LATENT_ATTENTION,
    router.ROUTER_TOPK_SELECT,
    expert_phases.MOE_PHASE1,
    expert_phases.MOE_PHASE2,
    expert_groups.GROUPED_EXPERTS,
    experts_cpu.EXPERT_MIXTURE,
    streams.STREAM_MIX,
    streams.STREAM_INJECT,
    streams.NGRAM_GATE,
    dilated.DILATED_CONVOLUTION,
    indexer.POOL_BLOCKS,
    indexer.INDEX_APPEND,
    sparse.SCORE_BLOCKS,
    sparse.CHOOSE_POSITIONS,
    sparse.INDEXED_ATTENTION,
)
"""Every op, as what `backends.Backend.counters` counts: its kernels, and when they are taken."""

__all__ = [
    "OPS",
    "BlobMatrix",
    "DeltaWeights",
    "ExpertArena",
    "ExpertBlob",
    "HeadRows",
    "JoinedNorms",
    "Mixture",
    "add_rms_norm",
    "affine_embedding",
    "affine_matmul",
    "append_attention",
    "appends",
    "attention",
    "backends",
    "cache_attention",
    "choose_positions",
    "convolves",
    "dense_matmul",
    "dilated_convolution",
    "dilated_convolution_step",
    "emulate",
    "expert_mixture",
    "gated_affine_matmul",
    "gated_delta",
    "gated_delta_step",
    "gated_product",
    "gated_rms_norm",
    "greedy_head",
    "grouped_experts",
    "index_append",
    "index_appends",
    "indexed_attention",
    "largest",
    "latent_attends",
    "latent_attention",
    "moe_phase1_gate_up_act",
    "moe_phase2_down_reduce",
    "ngram_gate",
    "pool_blocks",
    "qkv_append",
    "qkv_epilogue",
    "rms_norm",
    "rms_norm_add",
    "rotate",
    "rotation_table",
    "rotations",
    "router_topk_select",
    "score_blocks",
    "sparse_mask",
    "steps",
    "stream_inject",
    "stream_mix",
]


def __getattr__(name: str):
    # The emulator is for those who write kernels; nobody else waits for it.
    if name == "emulate":
        return import_module(f"{__name__}.emulator").emulate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
