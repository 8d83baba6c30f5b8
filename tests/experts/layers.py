"""Small random installs that hold routed experts and little else, and what their experts compute in float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from tests.gturbo import handmade
from tests.kernels import oracle
from turbospark_mlx.gturbo import Install, InstallWriter, TensorSpec
from turbospark_mlx.protocols import AffineFormat, ExpertSpec, Mxfp4Format

INT4 = AffineFormat(4, 32, "bfloat16")
FORMATS = {
    "int4": (INT4, INT4, INT4),
    "mixed": (AffineFormat(8, 64, "float16"), AffineFormat(6, 32, "float32"), AffineFormat(3, 32, "bfloat16")),
    "plain": ("bfloat16", "float32", "float16"),
    "mxfp4": (Mxfp4Format(), Mxfp4Format(), Mxfp4Format()),
}
SPEC = ExpertSpec(num_experts=16, top_k=4, hidden=128, intermediate=96)


@dataclass
class Written:
    """An install's directory, and the float64 matrices of each expert by (layer, expert, name)."""

    path: str
    spec: ExpertSpec
    matrices: dict[tuple[int, int, str], np.ndarray] = field(default_factory=dict)

    def open(self) -> Install:
        return Install.open(self.path, verify="off")

    def expert(self, layer: int, expert: int, x: np.ndarray) -> np.ndarray:
        """What an expert makes of ``x [rows, hidden]``, from the equations."""

        def product(name: str, x: np.ndarray) -> np.ndarray:
            y = x @ self.matrices[layer, expert, name].T
            return y + self.matrices.get((layer, expert, f"{name}_bias"), 0)

        gate, up = product("gate", x), product("up", x)
        if self.spec.activation == "silu":
            inner = gate / (1 + np.exp(-gate)) * up
        elif self.spec.activation == "gelu_tanh":
            inner = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
        else:
            gate, up = np.minimum(gate, self.spec.limit), np.clip(up, -self.spec.limit, self.spec.limit)
            inner = gate / (1 + np.exp(-self.spec.alpha * gate)) * (up + 1)
        return product("down", inner)

    def mixture(self, layer: int, indices: np.ndarray, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
        rows = [
            sum(w * self.expert(layer, int(e), row[None])[0] for e, w in zip(chosen, factors, strict=True))
            for chosen, row, factors in zip(indices, x, weights, strict=True)
        ]
        return np.array(rows)


def write(directory, spec: ExpertSpec = SPEC, *, layers: int = 2, formats: str = "int4", seed: int = 0) -> Written:
    """Write random experts; a seed is one set of weights."""
    directory.mkdir(parents=True)
    rng, made = np.random.default_rng(seed), Written(str(directory), spec)
    stored = dict(zip(("gate", "up", "down"), FORMATS[formats], strict=True))
    tensors = [TensorSpec(name, shape, stored.get(name, "float32")) for name, shape in spec.tensors.items()]
    norm = [TensorSpec("norm.weight", (64,), "float32")]
    writer = InstallWriter(directory, norm, experts=[tensors] * layers, num_experts=spec.num_experts)
    writer.write("norm.weight", "data", np.ones(64, np.float32))
    for layer, expert in np.ndindex(layers, spec.num_experts):
        for tensor in tensors:
            parts, values = _random(rng, tensor)
            made.matrices[layer, expert, tensor.name] = values
            for part, array in parts.items():
                writer.write_expert(layer, expert, tensor.name, part, memoryview(array).cast("B"))
    arch = handmade.arch(
        hiddenSize=spec.hidden,
        moeIntermediateSize=spec.intermediate,
        numExperts=spec.num_experts,
        topKExperts=spec.top_k,
        numLayers=layers,
        fullAttentionLayerMask=[1] * layers,
        family="qwen3moe",
    )
    writer.finish(arch=arch, extension={}, elder_assumption={}, model_id="tiny/experts")
    return made


def _random(rng, tensor: TensorSpec) -> tuple[dict[str, mx.array], np.ndarray]:
    if isinstance(tensor.dtype, AffineFormat):
        dtype = getattr(mx, tensor.dtype.companion_dtype)
        parts = oracle.random_affine(rng, *tensor.shape, tensor.dtype.bits, tensor.dtype.group_size, dtype)
        values = oracle.unpack(*parts, tensor.dtype.bits, tensor.dtype.group_size)
        return dict(zip(("data", "scales", "biases"), parts, strict=True)), values
    if isinstance(tensor.dtype, Mxfp4Format):
        return _random_mxfp4(rng, *tensor.shape)
    spread = 2.0 if len(tensor.shape) == 1 else 0.3
    array = mx.array((spread * rng.normal(size=tensor.shape)).astype(np.float32)).astype(getattr(mx, tensor.dtype))
    mx.eval(array)
    return {"data": array}, oracle.float64(array)


def _random_mxfp4(rng, rows: int, columns: int) -> tuple[dict[str, mx.array], np.ndarray]:
    codes = rng.integers(0, 16, (rows, columns // 8, 8))
    exponents = rng.integers(120, 126, (rows, columns // 32))
    words = (codes << (4 * np.arange(8))).sum(axis=-1).astype(np.uint32)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes & 8, -1, 1)
    values = values.reshape(rows, columns) * 2.0 ** (exponents.repeat(32, axis=1) - 127)
    return {"data": mx.array(words), "scales": mx.array(exponents.astype(np.uint8))}, values


def route(rng, spec: ExpertSpec, rows: int, pool: int | None = None) -> mx.array:
    """Experts for ``rows`` rows, best first, from the first ``pool`` of them."""
    chosen = [rng.permutation(pool or spec.num_experts)[: spec.top_k] for _ in range(rows)]
    return mx.array(np.array(chosen, np.uint32).reshape(rows, spec.top_k))


def inputs(rng, spec: ExpertSpec, rows: int) -> tuple[mx.array, mx.array]:
    """``x`` and positive weights that sum to 1."""
    x = mx.array(rng.normal(size=(rows, spec.hidden)).astype(np.float32) / 8)
    weights = rng.random((rows, spec.top_k)).astype(np.float32) + 0.1
    return x, mx.array(weights / weights.sum(axis=1, keepdims=True))


def slots_for(residency: str, slots: int) -> dict[str, int]:
    """The option, where there are slots."""
    return {"slots": slots} if residency == "streamed" else {}
