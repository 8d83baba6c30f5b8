"""Modules that every family builds from: matrices as they are stored, norms, rotary embedding, and the builder.

Parameters are in mlx layout under the checkpoint's names. Modules are made with zeros in the stored dtype, for a loader
to read into.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from turbospark_mlx.cache import causal_mask
from turbospark_mlx.custom_kernels import (
    affine_embedding,
    affine_matmul,
    attention,
    dense_matmul,
    gated_affine_matmul,
    gated_product,
    rms_norm,
    rms_norm_add,
    rotation_table,
)
from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.gated import gated_product_reference
from turbospark_mlx.errors import OptionError
from turbospark_mlx.protocols import AffineFormat, ExpertFactory, LayerCache, Mxfp4Format, PackedFormat, RowTable

DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}

Format = PackedFormat | str
"""How a tensor is stored: packed, or plainly in a dtype of ``DTYPES``."""


def packed(rows: int, columns: int, stored: AffineFormat) -> dict[str, mx.array]:
    """Zeroed ``weight``, ``scales`` and ``biases`` of a packed matrix ``[rows, columns]``."""
    companions = (rows, columns // stored.group_size)
    return {
        "weight": mx.zeros((rows, columns * stored.bits // 32), mx.uint32),
        "scales": mx.zeros(companions, DTYPES[stored.companion_dtype]),
        "biases": mx.zeros(companions, DTYPES[stored.companion_dtype]),
    }


class Module(nn.Module):
    """An ``mlx.nn.Module`` that counts assignments to any of its kind, so that what was derived from them can be found
    out of date."""

    assignments = 0

    def __setattr__(self, name: str, value: object) -> None:
        Module.assignments += 1
        super().__setattr__(name, value)

    def __setitem__(self, name: str, value: object) -> None:
        Module.assignments += 1
        super().__setitem__(name, value)


class Linear(Module):
    """``x @ weight.T + bias`` with ``weight [N, K]`` in any float dtype."""

    def __init__(self, inputs: int, outputs: int, *, stored: str, bias: str | None, backend: Backend):
        super().__init__()
        self._backend = backend
        self.weight = mx.zeros((outputs, inputs), DTYPES[stored])
        if bias:
            self.bias = mx.zeros((outputs,), DTYPES[bias])

    def __call__(self, x: mx.array, *, residual: mx.array | None = None, dtype: mx.Dtype | None = None) -> mx.array:
        """``residual`` is added after; without it the result is in ``dtype``, by default that of ``x``."""
        around = {"bias": self.get("bias"), "residual": residual, "dtype": dtype}
        return dense_matmul(x, self["weight"], **around, backend=self._backend)


class AffineLinear(Module):
    """``x @ W.T + bias`` with an affine-quantized ``W [N, K]``; ``biases`` are its zero points, ``bias`` is added."""

    def __init__(self, inputs: int, outputs: int, *, stored: AffineFormat, bias: str | None, backend: Backend):
        super().__init__()
        self._backend = backend
        self.bits, self.group_size = stored.bits, stored.group_size
        for name, array in packed(outputs, inputs, stored).items():
            self[name] = array
        if bias:
            self.bias = mx.zeros((outputs,), DTYPES[bias])

    def __call__(
        self,
        x: mx.array,
        *,
        norm: RMSNorm | None = None,
        row_gate: mx.array | None = None,
        residual: mx.array | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
        dtype: mx.Dtype | None = None,
    ) -> mx.array:
        """``norm`` is applied to ``x`` before, ``residual`` is added after; see `affine_matmul` for the others, of
        which ``dtype`` is that of the norm unless it is given."""
        return affine_matmul(
            x,
            self["weight"],
            self["scales"],
            self["biases"],
            bits=self.bits,
            group_size=self.group_size,
            bias=self.get("bias"),
            norm_weight=None if norm is None else norm["weight"],
            eps=None if norm is None else norm.eps,
            centered=norm is not None and norm.centered,
            row_gate=row_gate,
            residual=residual,
            scale=scale,
            softcap=softcap,
            dtype=dtype or (None if norm is None else norm.dtype),
            backend=self._backend,
        )

    def gated(self, x: mx.array, *, norm: RMSNorm | None, activation: str = "silu") -> mx.array:
        """``activation(gate) * up``, where the first half of the rows is the gate's."""
        return gated_affine_matmul(
            x,
            self["weight"],
            self["scales"],
            self["biases"],
            bits=self.bits,
            group_size=self.group_size,
            activation=activation,
            bias=self.get("bias"),
            norm_weight=None if norm is None else norm["weight"],
            eps=None if norm is None else norm.eps,
            centered=norm is not None and norm.centered,
            dtype=None if norm is None else norm.dtype,
            backend=self._backend,
        )


class StackedLinear(Module):
    """One of several matrices for each row: ``weight [E, N, K]`` and, where there is one, ``bias [E, N]``."""

    def __init__(self, count: int, inputs: int, outputs: int, *, stored: str, bias: str | None):
        super().__init__()
        self.weight = mx.zeros((count, outputs, inputs), DTYPES[stored])
        if bias:
            self.bias = mx.zeros((count, outputs), DTYPES[bias])

    def _product(self, x: mx.array, indices: mx.array) -> mx.array:
        return mx.gather_mm(x, self["weight"].swapaxes(-1, -2), rhs_indices=indices)

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """``x [R, 1 or M, 1, K]`` with matrices ``indices [R, M]`` -> ``[R, M, 1, N]`` in the dtype of ``x``."""
        y = self._product(x, indices)
        return (y + self["bias"][indices][..., None, :] if "bias" in self else y).astype(x.dtype)


class AffineStackedLinear(StackedLinear):
    """``StackedLinear`` with affine-quantized matrices."""

    def __init__(self, count: int, inputs: int, outputs: int, *, stored: AffineFormat, bias: str | None):
        Module.__init__(self)
        self.bits, self.group_size = stored.bits, stored.group_size
        for name, array in packed(count * outputs, inputs, stored).items():
            self[name] = array.reshape(count, outputs, -1)
        if bias:
            self.bias = mx.zeros((count, outputs), DTYPES[bias])

    def _product(self, x: mx.array, indices: mx.array) -> mx.array:
        return mx.gather_qmm(
            x,
            self["weight"],
            self["scales"],
            self["biases"],
            rhs_indices=indices,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
        )


class Mxfp4StackedLinear(StackedLinear):
    """``StackedLinear`` with MXFP4 matrices; ``scales`` are the exponents."""

    def __init__(self, count: int, inputs: int, outputs: int, *, stored: Mxfp4Format, bias: str | None):
        Module.__init__(self)
        self.bits, self.group_size = stored.bits, stored.group_size
        self.weight = mx.zeros((count, outputs, inputs * self.bits // 32), mx.uint32)
        self.scales = mx.zeros((count, outputs, inputs // self.group_size), mx.uint8)
        if bias:
            self.bias = mx.zeros((count, outputs), DTYPES[bias])

    def _product(self, x: mx.array, indices: mx.array) -> mx.array:
        options = {"transpose": True, "group_size": self.group_size, "bits": self.bits, "mode": "mxfp4"}
        return mx.gather_qmm(x, self["weight"], self["scales"], rhs_indices=indices, **options)


class Embedding(Module):
    """Rows of a table, and products with it where the output head is tied."""

    def __init__(self, rows: int, width: int, *, stored: str, dtype: mx.Dtype, backend: Backend):
        super().__init__()
        self._backend, self._dtype = backend, dtype
        self.weight = mx.zeros((rows, width), DTYPES[stored])

    def __call__(self, ids: mx.array) -> mx.array:
        """Integer ids ``[...]`` -> ``[..., width]``. MLX does not check ids: on a CPU they are checked here and
        OptionError is raised; on a GPU the check would wait for the device, so the caller checks what comes from
        outside.
        """
        rows = self["weight"].shape[0]
        if self._backend.device == "cpu" and ids.size:
            known = np.array(ids, copy=False)
            if known.min() < 0 or known.max() >= rows:
                raise OptionError(f"token ids run from {known.min()} to {known.max()}; the embedding has {rows} rows.")
        return self["weight"][ids].astype(self._dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        return dense_matmul(x, self["weight"], backend=self._backend)


def product_in(dtype: mx.Dtype, matrix: nn.Module, x: mx.array) -> mx.array:
    """``matrix(x)`` multiplied, and given, in ``dtype``. A packed matrix reads ``x`` as it is, without a copy."""
    return matrix(x, dtype=dtype) if isinstance(matrix, AffineLinear) else matrix(x.astype(dtype))


class AffineEmbedding(Module):
    """``Embedding`` with an affine-quantized table."""

    def __init__(self, rows: int, width: int, *, stored: AffineFormat, dtype: mx.Dtype, backend: Backend):
        super().__init__()
        self._backend, self._dtype = backend, dtype
        self.bits, self.group_size = stored.bits, stored.group_size
        for name, array in packed(rows, width, stored).items():
            self[name] = array

    def _parts(self) -> tuple[mx.array, mx.array, mx.array]:
        return self["weight"], self["scales"], self["biases"]

    def __call__(self, ids: mx.array, *, scale: float = 1.0, copies: int = 1) -> mx.array:
        """Integer ids ``[...]`` -> ``scale`` times their rows, ``copies`` of each: ``[..., copies * width]``."""
        return affine_embedding(
            ids,
            *self._parts(),
            bits=self.bits,
            group_size=self.group_size,
            dtype=self._dtype,
            scale=scale,
            copies=copies,
            backend=self._backend,
        )

    def as_linear(self, x: mx.array, *, scale: float = 1.0, softcap: float | None = None) -> mx.array:
        """``x @ W.T``; see `affine_matmul` for what follows."""
        options = {"scale": scale, "softcap": softcap, "backend": self._backend}
        return affine_matmul(x, *self._parts(), bits=self.bits, group_size=self.group_size, **options)


class RMSNorm(Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, in ``dtype``, or in that of ``x`` where it is None."""

    centered = False

    def __init__(self, width: int, *, eps: float, stored: str, dtype: mx.Dtype | None, backend: Backend):
        super().__init__()
        self._backend = backend
        self.eps, self.dtype = eps, dtype
        self.weight = mx.ones((width,), DTYPES[stored])

    def __call__(self, x: mx.array) -> mx.array:
        options = {"eps": self.eps, "centered": self.centered, "dtype": self.dtype, "backend": self._backend}
        return rms_norm(x, self["weight"], **options)

    def add(self, residual: mx.array, x: mx.array, *, scale: mx.array | float | None = None) -> mx.array:
        """``(residual + self(x)) * scale``, where ``scale`` is ``[1]`` or a number."""
        options = {"eps": self.eps, "centered": self.centered, "scale": scale, "backend": self._backend}
        return rms_norm_add(x, self["weight"], residual, **options)


class CenteredRMSNorm(RMSNorm):
    """``RMSNorm`` whose weight is stored less 1."""

    centered = True


class PlainRMSNorm(nn.RMSNorm):
    """What ``nn.RMSNorm`` lacks of ``RMSNorm`` and ``CenteredRMSNorm``, with a gradient."""

    def __init__(self, width: int, eps: float, dtype: mx.Dtype | None, centered: bool):
        super().__init__(width, eps)
        self._dtype, self._centered = dtype, centered

    def __call__(self, x: mx.array) -> mx.array:
        # In half precision, 1 would swallow most of a weight.
        weight = 1 + self["weight"].astype(mx.float32) if self._centered else self["weight"]
        return mx.fast.rms_norm(x, weight, self.eps).astype(self._dtype or x.dtype)


def gelu_tanh(x: mx.array) -> mx.array:
    """The tanh approximation of GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415), computed in float32."""
    wide = x.astype(mx.float32)
    return (0.5 * wide * (1 + mx.tanh(0.7978845608028654 * wide * (1 + 0.044715 * wide * wide)))).astype(x.dtype)


def gelu_erf(x: mx.array) -> mx.array:
    """The Gaussian error linear unit itself (arXiv:1606.08415), computed in float32."""
    wide = x.astype(mx.float32)
    return (0.5 * wide * (1 + mx.erf(wide * 0.7071067811865476))).astype(x.dtype)


def plain_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: str | None = None,
    window: int | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """``custom_kernels.attention`` as one built-in of MLX, which has a gradient."""
    if window is not None and k.shape[2] > window:
        mask = causal_mask(q.shape[2], k.shape[2], window)
    sinks = None if sinks is None else sinks.astype(q.dtype)
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)


def project(
    linear: nn.Module,
    x: mx.array,
    *,
    norm: nn.Module | None = None,
    row_gate: mx.array | None = None,
    residual: mx.array | None = None,
):
    """``linear(norm(x)) * sigmoid(row_gate) + residual``, as one operation where this package's modules allow it."""
    if norm is not None and not (isinstance(linear, AffineLinear) and isinstance(norm, RMSNorm)):
        x, norm = norm(x), None
    if isinstance(linear, AffineLinear):
        return linear(x, norm=norm, row_gate=row_gate, residual=residual)
    if isinstance(linear, Linear) and row_gate is None:
        return linear(x, residual=residual)
    y = linear(x)
    y = y if row_gate is None else y * mx.sigmoid(row_gate).astype(y.dtype)
    return y if residual is None else residual + y


def scaled_rows(table: nn.Module, ids: mx.array, scale: float) -> mx.array:
    """``table(ids) * scale``, as one operation where this package's modules allow it."""
    return table(ids, scale=scale) if isinstance(table, AffineEmbedding) else table(ids) * scale


def repeated_rows(table: nn.Module, ids: mx.array, copies: int) -> mx.array:
    """``copies`` of ``table(ids)`` side by side, as one operation where this package's modules allow it."""
    return table(ids, copies=copies) if isinstance(table, AffineEmbedding) else mx.tile(table(ids), (1, 1, copies))


def add_normed(residual: mx.array, norm: nn.Module, x: mx.array, *, scale: mx.array | float | None = None) -> mx.array:
    """``(residual + norm(x)) * scale``, ``[1]`` or a number, as one operation where this package's modules allow it."""
    if isinstance(norm, RMSNorm):
        return norm.add(residual, x, scale=scale)
    y = residual + norm(x)
    return y if scale is None else y * (scale.astype(y.dtype) if isinstance(scale, mx.array) else scale)


class RoPE:
    """Rotation of ``x [B, H, L, D]`` at positions ``offset .. offset + L - 1``; see ``rope.py`` for the frequencies."""

    def __init__(self, frequencies: np.ndarray):
        """``frequencies [P]``: radians a position of pairs ``(i, i + P)``; dimensions from ``2 P`` on do not turn."""
        self._frequencies = frequencies
        with np.errstate(divide="ignore"):
            # A pair that does not turn has an infinite period, which MLX takes for angle 0.
            self._periods = mx.array((1.0 / frequencies).astype(np.float32))

    def table(self, offset: int, length: int) -> np.ndarray:
        """`custom_kernels.rotation_table` of ``length`` positions from ``offset`` on."""
        return rotation_table(self._frequencies, offset, length)

    def __call__(self, x: mx.array, offset: int | mx.array) -> mx.array:
        width = 2 * len(self._frequencies)
        return mx.fast.rope(x, width, traditional=False, base=None, scale=1.0, offset=offset, freqs=self._periods)


class Positions:
    """Where the tokens of one pass stand, as every layer needs it.

    Made once a pass. What it gives to kernels are arrays, so that a recorded pass runs again at another position.
    """

    def __init__(self, offset: int, length: int):
        """``length`` tokens from position ``offset`` on."""
        self._offset, self._length = offset, length
        self._tables: dict[RoPE, mx.array] = {}
        self._start: mx.array | None = None

    @classmethod
    def after(cls, cache: LayerCache | None, length: int) -> Positions:
        """``length`` tokens after what ``cache`` holds, or from position 0 on."""
        return cls(0 if cache is None else cache.offset, length)

    @property
    def offset(self) -> int:
        """The position of the first token, for operations that take a number."""
        return self._offset

    @property
    def start(self) -> mx.array:
        """``offset`` as an int32 array ``[1]``."""
        if self._start is None:
            self._start = mx.array([self._offset], mx.int32)
        return self._start

    @property
    def ropes(self) -> list[RoPE]:
        """What was asked for its rotation so far."""
        return list(self._tables)

    def rotation(self, rope: RoPE) -> mx.array:
        """`RoPE.table` of these positions, float32 ``[L, P, 2]``."""
        if rope not in self._tables:
            self._tables[rope] = mx.array(rope.table(self._offset, self._length))
        return self._tables[rope]


class Projections:
    """Products of one input with several matrices that lie in one array, done as one product.

    The parts keep their names: their parameters are leading slices of those of ``joint``. Where a part was replaced or
    given other parameters since, or where there is no ``joint``, each part is applied by itself.
    """

    def __init__(self, parts: Sequence[nn.Module], joint: nn.Module | None):
        self._joint = joint
        if joint is None:
            return
        ends = np.cumsum([part["weight"].shape[0] for part in parts]).tolist()
        self._borders = ends[:-1]
        for part, start, end in zip(parts, [0, *ends], ends, strict=False):
            for name, array in joint.items():
                part[name] = array[start:end]
        self._views = [dict(part) for part in parts]

    def _joined(self, parts: Sequence[nn.Module]) -> bool:
        return self._joint is not None and all(
            len(part) == len(views) and all(part.get(name) is view for name, view in views.items())
            for part, views in zip(parts, self._views, strict=True)
        )

    def joint(self, *parts: nn.Module) -> AffineLinear | None:
        """The module that applies all ``parts`` at once and can fuse what stands around it, where there is one."""
        return self._joint if isinstance(self._joint, AffineLinear) and self._joined(parts) else None

    def __call__(self, x: mx.array, *parts: nn.Module, norm: nn.Module | None = None) -> Sequence[mx.array]:
        """``x [..., K]`` -> one ``[..., N]`` a part; ``parts`` are the modules that their owner has at this moment.
        ``norm`` is applied to ``x`` before."""
        if self._joined(parts):
            return mx.split(project(self._joint, x, norm=norm), self._borders, axis=-1)
        x = x if norm is None else norm(x)
        return [part(x) for part in parts]

    def side_by_side(self, x: mx.array, *parts: nn.Module, norm: nn.Module | None = None) -> mx.array:
        """The products of a call as one array."""
        if self._joined(parts):
            return project(self._joint, x, norm=norm)
        return mx.concatenate(self(x, *parts, norm=norm), axis=-1)


@dataclass(frozen=True)
class Builder:
    """Makes modules for tensors as they are stored.

    ``formats`` maps tensor names, in the checkpoint's spelling, to formats; a name that is absent is float32. ``dtype``
    is that of activations, and of the residual stream unless that is in ``residual``; norms then bring it to ``dtype``.
    ``fused`` chooses this package's modules, with joint projections; without it, plain
    ``mlx.nn`` modules are made, which have gradients. ``experts`` makes routed experts that live elsewhere than in
    parameters, ``table`` is one of which rows are read as they are needed.
    """

    backend: Backend
    dtype: mx.Dtype
    formats: Mapping[str, Format] = field(default_factory=dict)
    fused: bool = True
    experts: ExpertFactory | None = None
    residual: mx.Dtype | None = None
    table: RowTable | None = None

    @property
    def gated_product(self) -> Callable[..., mx.array]:
        """``gated_product(gate, up, activation=, scale=)``; see ``custom_kernels.gated_product``."""
        return partial(gated_product, backend=self.backend) if self.fused else gated_product_reference

    @property
    def attention(self) -> Callable[..., mx.array]:
        """``attention(q, k, v, scale=, mask=, window=, sinks=)``; see ``custom_kernels.attention``."""
        return partial(attention, backend=self.backend) if self.fused else plain_attention

    def _stored(self, name: str) -> Format:
        return self.formats.get(name, "float32")

    def linear(self, path: str, inputs: int, outputs: int, *, bias: bool = False) -> nn.Module:
        """The matrix ``path.weight [outputs, inputs]``, with ``path.bias [outputs]`` where ``bias``."""
        return self._linear(
            inputs, outputs, self._stored(f"{path}.weight"), self._stored(f"{path}.bias") if bias else None
        )

    def _linear(self, inputs: int, outputs: int, stored: Format, bias: Format | None) -> nn.Module:
        if self.fused:
            kind = AffineLinear if isinstance(stored, AffineFormat) else Linear
            return kind(inputs, outputs, stored=stored, bias=bias, backend=self.backend)
        if isinstance(stored, AffineFormat):
            plain = nn.QuantizedLinear(inputs, outputs, False, stored.group_size, stored.bits)
            plain.update(packed(outputs, inputs, stored))
        else:
            plain = nn.Linear(inputs, outputs, bias=False)
            plain.weight = mx.zeros((outputs, inputs), DTYPES[stored])
        if bias:
            plain.bias = mx.zeros((outputs,), DTYPES[bias])
        return plain

    def stacked(self, path: str, count: int, inputs: int, outputs: int, bias: bool) -> StackedLinear:
        """The matrices ``path.weight [count, outputs, inputs]``, with ``path.bias [count, outputs]`` where ``bias``."""
        stored = self._stored(f"{path}.weight")
        kinds = {AffineFormat: AffineStackedLinear, Mxfp4Format: Mxfp4StackedLinear}
        kind = kinds.get(type(stored), StackedLinear)
        return kind(count, inputs, outputs, stored=stored, bias=self._stored(f"{path}.bias") if bias else None)

    def projections(
        self, inputs: int, outputs: Mapping[str, int], *, bias: bool = False
    ) -> tuple[list[nn.Module], Projections]:
        """``linear`` for each path of ``outputs``, and their joint application where they are stored alike."""
        parts = [self.linear(path, inputs, rows, bias=bias) for path, rows in outputs.items()]
        kinds = {(self._stored(f"{path}.weight"), self._stored(f"{path}.bias") if bias else None) for path in outputs}
        if not self.fused or len(kinds) > 1:
            return parts, Projections(parts, None)
        return parts, Projections(parts, self._linear(inputs, sum(outputs.values()), *kinds.pop()))

    def embedding(self, path: str, rows: int, width: int) -> nn.Module:
        """The table ``path.weight [rows, width]``."""
        stored = self._stored(f"{path}.weight")
        if self.fused:
            kind = AffineEmbedding if isinstance(stored, AffineFormat) else Embedding
            return kind(rows, width, stored=stored, dtype=self.residual or self.dtype, backend=self.backend)
        if isinstance(stored, AffineFormat):
            plain = nn.QuantizedEmbedding(rows, width, stored.group_size, stored.bits)
            plain.update(packed(rows, width, stored))
            return plain
        plain = nn.Embedding(rows, width)
        plain.weight = mx.zeros((rows, width), DTYPES[stored])
        return plain

    def vector(self, path: str, *shape: int) -> mx.array:
        """The parameter ``path [*shape]``."""
        return mx.ones(shape, DTYPES[self._stored(path)])

    def norm(self, path: str, width: int, eps: float, *, centered: bool = False) -> nn.Module:
        """The norm with ``path.weight [width]``, which is stored less 1 where ``centered``."""
        stored, dtype = self._stored(f"{path}.weight"), None if self.residual is None else self.dtype
        if self.fused:
            kind = CenteredRMSNorm if centered else RMSNorm
            return kind(width, eps=eps, stored=stored, dtype=dtype, backend=self.backend)
        plain = PlainRMSNorm(width, eps, dtype, centered) if centered or dtype else nn.RMSNorm(width, eps)
        plain.weight = mx.ones((width,), DTYPES[stored])
        return plain
