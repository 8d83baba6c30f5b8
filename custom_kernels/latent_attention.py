"""Decode attention over latents (DeepSeek-V2, arXiv:2405.04434, 2.1) in its absorbed form: queries are brought to the
latents, read them as keys and values at once, and what each head reads is brought to its values.

Shapes: B sequences, L tokens, H heads; a head has n dimensions without a position, r that turn, v values; R is the
width of a latent, and a cached row is a latent and r turned dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from turbospark_mlx.custom_kernels import decode_attention, sdpa
from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.host import thread_count
from turbospark_mlx.custom_kernels.backends.kernel import SIMD_WIDTH, Kernel, Launch, float_bits
from turbospark_mlx.custom_kernels.backends.op import Op
from turbospark_mlx.custom_kernels.gemv import PRODUCTS_PER_GROUP
from turbospark_mlx.custom_kernels.norm import rms_norm_reference
from turbospark_mlx.custom_kernels.rotation import rotate_reference
from turbospark_mlx.errors import OptionError

ABSORB = Kernel(
    "mla_absorb_q",
    inputs=("q", "latent", "norm_weight", "rotation", "w", "scales", "biases", "cache", "start"),
    outputs=("queries",),
    headers=("eight", "affine", "affine_block", "fp4", "expert_rows", "reduce", "rotary"),
    writes=("cache",),
)
COMBINE = Kernel(
    "mla_v_combine",
    inputs=("w", "scales", "biases", "x"),
    outputs=("y",),
    headers=("eight", "affine", "affine_block", "fp4", "expert_rows"),
)
LATENT_ATTENTION = Op(
    "latent_attention",
    (ABSORB, *decode_attention.ATTENTION.kernels, COMBINE),
    rows=decode_attention.ROWS,
    only="of packed matrices",
    instead=decode_attention.ATTENTION.name,
)
SIMDGROUPS = 4


@dataclass(frozen=True, eq=False)
class HeadRows:
    """Rows of an affine-quantized matrix ``[H * stride, K]``: head h has ``count`` from ``h * stride + first`` on."""

    weight: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group_size: int
    first: int
    count: int
    stride: int

    @property
    def columns(self) -> int:
        return self.weight.shape[1] * 32 // self.bits

    def dequantized(self) -> mx.array:
        """``[H, count, K]`` in float32."""
        companions = (part.astype(mx.float32) for part in (self.scales, self.biases))
        whole = mx.dequantize(self.weight, *companions, group_size=self.group_size, bits=self.bits)
        return whole.reshape(-1, self.stride, whole.shape[1])[:, self.first : self.first + self.count]

    @property
    def form(self) -> tuple:
        """What decides about a kernel's text."""
        return self.bits, self.group_size, self.first, self.count, self.stride, self.columns, self.scales.dtype


def latent_attention_reference(
    q, latent, norm_weight, rotation, cache, start, keys, values, *, scale, transposed, interleaved, eps, mask=None
):
    """Definition of `latent_attention`: the result, and the cache that has the rows."""
    (batch, length, width), rank = latent.shape, norm_weight.shape[0]
    turned, nope = width - rank, keys.columns if transposed else keys.count
    heads = q.astype(mx.float32).reshape(batch, length, -1, nope + turned).swapaxes(1, 2)

    def turn(x):
        return rotate_reference(x.astype(mx.float32), rotation, interleaved=interleaved)

    normed = rms_norm_reference(latent[..., :rank].astype(mx.float32), norm_weight, eps=eps)
    rows = mx.concatenate([normed[:, None], turn(latent[:, None, :, rank:])], axis=-1)
    cache = mx.array(cache)
    cache[0, :, :, (start + mx.arange(length)) % cache.shape[3]] = rows.astype(cache.dtype)
    weight = keys.dequantized()
    absorbed = heads[..., :nope] @ (weight.swapaxes(-1, -2) if transposed else weight)
    queries = mx.concatenate([absorbed, turn(heads[..., nope:])], axis=-1)
    seen = cache[0, :, :, : start.item() + length].astype(mx.float32)
    read = sdpa.attention_reference(queries, seen, seen[..., :rank], scale=scale, mask=mask)
    y = (read @ values.dequantized().swapaxes(-1, -2)).swapaxes(1, 2).reshape(batch, length, -1)
    return y.astype(q.dtype), cache


def latent_attends(q: mx.array, rotation: mx.array, backend: Backend) -> bool:
    """Whether `latent_attention` takes these rows: few, and in a dtype that the back end computes in."""
    return rotation.size >= 8 and LATENT_ATTENTION.serves(backend, q.dtype, rows=q.shape[1])


@lru_cache(maxsize=4096)
def absorb_plan(
    backend: str,
    tokens: tuple[int, int],
    heads: int,
    nope: int,
    turned: int,
    rank: int,
    form: tuple,
    transposed: bool,
    interleaved: bool,
    eps: float,
    dtype: mx.Dtype,
    norm_dtype: mx.Dtype,
) -> Launch:
    """The launch for ``tokens (B, L)``; ``form`` is that of the keys' `HeadRows`."""
    bits, group_size, first, _, stride, _, companion = form
    batch, length = tokens
    blocks, host = rank // 32, backend == "host"
    # GPUs cut a head's latent so that the partial sums of all threads fit into threadgroup memory.
    span = blocks if host else next(n for n in (4, 2, 1) if blocks % n == 0)
    return Launch(
        ABSORB,
        template=(
            ("T", dtype),
            ("S", companion),
            ("H", heads),
            ("NOPE", nope),
            ("TURNED", turned),
            ("LATENT", rank),
            ("BITS", bits),
            ("GROUP", group_size),
            ("FIRST", first),
            ("STRIDE", stride),
            ("TRANSPOSED", transposed),
            ("INTERLEAVED", interleaved),
            ("SPLITS", blocks // span),
            ("PARTS", 1 if host else SIMDGROUPS * SIMD_WIDTH // span),
            ("EPSILON_BITS", float_bits(eps)),
        ),
        groups=(batch * length * (heads * (blocks // span) + 1), 1),
        simdgroups=1 if host else SIMDGROUPS,
        input_dtypes=(dtype, dtype, norm_dtype, mx.float32, mx.uint32, companion, companion, dtype, mx.int32),
        output_shapes=((batch, heads, length, rank + turned),),
        output_dtypes=(dtype,),
    )


@lru_cache(maxsize=4096)
def combine_plan(backend: str, tokens: tuple[int, int], heads: int, form: tuple, dtype: mx.Dtype) -> Launch:
    """The launch for ``tokens (B, L)``; ``form`` is that of the values' `HeadRows`."""
    bits, group_size, first, count, stride, rank, companion = form
    at_once = next(n for n in (4, 2, 1) if count % n == 0)
    rows, host = tokens[0] * tokens[1], backend == "host"
    groups = -(-heads * count // (at_once * (1 if host else SIMDGROUPS)))
    if host:
        wanted = min(4 * thread_count(), rows * heads * count * rank // PRODUCTS_PER_GROUP)
        groups = max(1, min(groups, -(-wanted // rows)))
    return Launch(
        COMBINE,
        template=(
            ("T", dtype),
            ("S", companion),
            ("H", heads),
            ("V", count),
            ("K", rank),
            ("BITS", bits),
            ("GROUP", group_size),
            ("FIRST", first),
            ("STRIDE", stride),
            ("ROWS", at_once),
        ),
        groups=(groups, rows),
        simdgroups=1 if host else SIMDGROUPS,
        input_dtypes=(mx.uint32, companion, companion, dtype),
        output_shapes=((*tokens, heads * count),),
        output_dtypes=(dtype,),
    )


def _check(q, latent, norm_weight, rotation, cache, keys: HeadRows, values: HeadRows, transposed: bool) -> int:
    """Check that the parts belong together; returns the number of heads. Raises OptionError."""
    (batch, length, width), rank = latent.shape, norm_weight.size
    turned, nope = width - rank, keys.columns if transposed else keys.count
    heads = q.shape[2] // (nope + turned)
    fits = (
        q.shape == (batch, length, heads * (nope + turned))
        and turned > 0
        and rotation.shape == (length, turned // 2, 2)
        and cache.ndim == 5
        and cache.shape == (1, batch, 1, cache.shape[3], width)
        and length <= cache.shape[3]
        and cache.dtype == latent.dtype == q.dtype
    )
    ranks = keys.count if transposed else keys.columns, values.columns
    wholes = [(part.stride, part.weight.shape[0]) for part in (keys, values)]
    if not fits or ranks != (rank, rank) or rank % 32 or any(heads * stride != rows for stride, rows in wholes):
        raise OptionError(
            f"latent_attention: q {list(q.shape)}, latent {list(latent.shape)} of {rank} and the rest, rotation "
            f"{list(rotation.shape)}, cache {cache.dtype} {list(cache.shape)}, and matrices of {wholes[0][1]} and "
            f"{wholes[1][1]} rows do not fit [B, L, H * (n + r)], [B, L, R + r], [L, r / 2, 2] and [1, B, 1, capacity, "
            "R + r], with R a multiple of 32"
        )
    return heads


def latent_attention(
    q: mx.array,
    latent: mx.array,
    norm_weight: mx.array,
    rotation: mx.array,
    cache: mx.array,
    start: mx.array,
    keys: HeadRows,
    values: HeadRows,
    *,
    scale: float,
    transposed: bool,
    interleaved: bool,
    eps: float,
    mask: str | None = None,
    backend: Backend,
) -> mx.array:
    """Attention of ``q [B, L, H * (n + r)]`` over latents, for what `latent_attends` accepts -> ``[B, L, H * v]``.

    The rows of ``latent [B, L, R + r]``, normalized by ``norm_weight [R]`` and turned by ``rotation [L, r / 2, 2]`` in
    pairs of neighbours where ``interleaved`` and of halves otherwise, are first written into ``cache [1, B, 1,
    capacity, R + r]`` as `rotary.qkv_append` does it, from ``start``, an int32 array ``[1]``, on. ``keys`` are n rows
    of R columns a head, or with ``transposed`` R rows of n; ``values`` are v rows of R. The first two arrays may be any
    views whose last axis is dense. ``mask`` is None or ``"causal"``. Raises OptionError for shapes that do not fit.
    """
    heads = _check(q, latent, norm_weight, rotation, cache, keys, values, transposed)
    backend.count(LATENT_ATTENTION.name, "kernel")
    (batch, length, width), rank = latent.shape, norm_weight.size
    sizes = (heads, q.shape[2] // heads - (width - rank), width - rank, rank)
    variant = (transposed, interleaved, eps, q.dtype, norm_weight.dtype)
    absorb = absorb_plan(backend.name, (batch, length), *sizes, keys.form, *variant)
    parts = (keys.weight, keys.scales, keys.biases)
    (queries,) = backend.launch(absorb, (q, latent, norm_weight, rotation, *parts, cache, start))
    options = {"scale": scale, "causal": mask is not None, "window": None, "sinks": None, "shared_dim": rank}
    read = decode_attention.decode_attention(queries, cache, None, start, **options, backend=backend)
    combine = combine_plan(backend.name, (batch, length), heads, values.form, q.dtype)
    return backend.launch(combine, (values.weight, values.scales, values.biases, read))[0]
