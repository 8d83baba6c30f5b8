"""Mixture-of-Experts blocks (Shazeer et al. 2017, arXiv:1701.06538; Fedus et al. 2021, arXiv:2101.03961).

A block routes each token to ``top_k`` experts and adds their answers, weighted, in the router's order. Where the
experts live is not the block's to know (``protocols.Experts``); ``StackedExperts`` are those that live in parameters.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from turbospark_mlx.families.layers import Builder, Module, gelu_tanh
from turbospark_mlx.protocols import Experts, ExpertSpec


def route(logits: mx.array, top_k: int, *, normalize: bool) -> tuple[mx.array, mx.array]:
    """The ``top_k`` largest of ``logits [rows, experts]``: indices and weights ``[rows, top_k]``, float32, best first.

    Of equal logits the lower index comes first. Weights are the softmax over all experts; with ``normalize`` they are
    divided by their sum, which is the softmax over the chosen ones.
    """
    logits = logits.astype(mx.float32)
    indices = mx.stop_gradient(mx.argsort(-logits, axis=-1)[:, :top_k])
    if normalize:
        return indices, mx.softmax(mx.take_along_axis(logits, indices, axis=-1), axis=-1)
    return indices, mx.take_along_axis(mx.softmax(logits, axis=-1), indices, axis=-1)


def activate(spec: ExpertSpec, gate: mx.array, up: mx.array) -> mx.array:
    """How an expert joins its two halves; see ``protocols.Activation``."""
    if spec.activation == "gelu_tanh":
        return gelu_tanh(gate) * up
    if spec.activation == "silu":
        return gate * mx.sigmoid(gate) * up
    gate, up = mx.minimum(gate, spec.limit), mx.clip(up, -spec.limit, spec.limit)
    return gate * mx.sigmoid(spec.alpha * gate) * (up + 1)


class StackedExperts(Module):
    """Routed experts as stacks in parameters, all of them in memory. Chosen ones are gathered on the device."""

    def __init__(self, path: str, spec: ExpertSpec, build: Builder):
        super().__init__()
        self._spec = spec
        for name in ("gate", "up", "down"):
            rows, columns = spec.tensors[name]
            self[f"{name}_proj"] = build.stacked(f"{path}.{name}_proj", spec.num_experts, columns, rows, spec.biases)

    def begin(self, indices: mx.array) -> mx.array:
        return indices

    def finish(
        self, pending: mx.array, x: mx.array, weights: mx.array, *, meanwhile: tuple[mx.array, ...] = ()
    ) -> mx.array:
        """See ``protocols.Experts``. Nothing is waited for here."""
        each = x[:, None, None]
        hidden = activate(self._spec, self.gate_proj(each, pending), self.up_proj(each, pending))
        y = self.down_proj(hidden, pending).squeeze(-2).astype(mx.float32)
        return (y * weights[..., None]).sum(axis=-2).astype(x.dtype)


def routed_experts(path: str, position: int, spec: ExpertSpec, build: Builder) -> Experts:
    """The experts of a layer, of which ``position`` counts those that have any: from the builder's factory, or as
    parameters below ``path``."""
    return StackedExperts(path, spec, build) if build.experts is None else build.experts(position, spec)


class SparseMoe(Module):
    """A feed-forward block of routed experts alone, as Mixtral and Qwen3-MoE have it (arXiv:2401.04088, 2505.09388)."""

    def __init__(self, path: str, position: int, spec: ExpertSpec, *, normalize: bool, build: Builder):
        """``normalize`` is ``route``'s; ``position`` counts the layers that have experts."""
        super().__init__()
        self._top_k, self._normalize = spec.top_k, normalize
        self.gate = build.linear(f"{path}.gate", spec.hidden, spec.num_experts)
        self.switch_mlp = routed_experts(f"{path}.switch_mlp", position, spec, build)

    def __call__(self, x: mx.array, *, norm: nn.Module | None = None, residual: mx.array | None = None) -> mx.array:
        """``norm`` is applied to ``x`` before, ``residual`` is added after."""
        rows = (x if norm is None else norm(x)).reshape(-1, x.shape[-1])
        indices, weights = route(self.gate(rows.astype(mx.float32)), self._top_k, normalize=self._normalize)
        pending = self.switch_mlp.begin(indices)
        y = self.switch_mlp.finish(pending, rows, weights).reshape(x.shape)
        return y if residual is None else residual + y
