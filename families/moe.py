"""Mixture-of-Experts blocks (Shazeer et al. 2017, arXiv:1701.06538; Fedus et al. 2021, arXiv:2101.03961).

A block routes each token to ``top_k`` experts and adds their answers, weighted, in the router's order. Where the
experts live is not the block's to know (``protocols.Experts``); ``StackedExperts`` are those that live in parameters.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from turbospark_mlx.custom_kernels import router_topk_select
from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.families.feed_forward import FeedForward
from turbospark_mlx.families.layers import Builder, Linear, Module, gelu_tanh, product_in
from turbospark_mlx.protocols import Experts, ExpertSpec


def route(
    router: nn.Module, x: mx.array, top_k: int, *, normalize: bool, backend: Backend, **around: object
) -> tuple[mx.array, mx.array]:
    """The experts that ``router``, a matrix, chooses for ``x [rows, hidden]``, with logits in float32; see
    `router_topk_select` for what can stand ``around``, and for what it returns."""
    options = {"top_k": top_k, "normalize": normalize, "backend": backend, **around}
    if isinstance(router, Linear):
        return router_topk_select(x, router["weight"], bias=router.get("bias"), **options)
    return router_topk_select(product_in(mx.float32, router, x), **options)


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
        self,
        pending: mx.array,
        x: mx.array,
        weights: mx.array,
        *,
        meanwhile: tuple[mx.array, ...] = (),
        residual: mx.array | None = None,
    ) -> mx.array:
        """See ``protocols.Experts``. Nothing is waited for here."""
        each = x[:, None, None]
        hidden = activate(self._spec, self.gate_proj(each, pending), self.up_proj(each, pending))
        y = self.down_proj(hidden, pending).squeeze(-2).astype(mx.float32)
        total = (y * weights[..., None]).sum(axis=-2)
        return (total if residual is None else total + residual.astype(mx.float32)).astype(x.dtype)


def routed_experts(path: str, position: int, spec: ExpertSpec, build: Builder) -> Experts:
    """The experts of a layer, of which ``position`` counts those that have any: from the builder's factory, or as
    parameters below ``path``."""
    return StackedExperts(path, spec, build) if build.experts is None else build.experts(position, spec)


class SparseMoe(Module):
    """A feed-forward block of routed experts alone, as Mixtral and Qwen3-MoE have it (arXiv:2401.04088, 2505.09388)."""

    def __init__(self, path: str, position: int, spec: ExpertSpec, *, normalize: bool, build: Builder):
        """``normalize`` is ``route``'s; ``position`` counts the layers that have experts."""
        super().__init__()
        self._top_k, self._normalize, self._backend = spec.top_k, normalize, build.backend
        self.gate = build.linear(f"{path}.gate", spec.hidden, spec.num_experts)
        self.switch_mlp = routed_experts(f"{path}.switch_mlp", position, spec, build)

    def __call__(self, x: mx.array, *, norm: nn.Module | None = None, residual: mx.array | None = None) -> mx.array:
        """``norm`` is applied to ``x`` before, ``residual`` is added after."""
        rows = (x if norm is None else norm(x)).reshape(-1, x.shape[-1])
        added = None if residual is None else residual.reshape(rows.shape)
        indices, weights = route(self.gate, rows, self._top_k, normalize=self._normalize, backend=self._backend)
        pending = self.switch_mlp.begin(indices)
        return self.switch_mlp.finish(pending, rows, weights, residual=added).reshape(x.shape)


class SharedExpertMoe(Module):
    """Routed experts, whose weights add up to 1, and a shared one with a gate, as Qwen 3.5 has them."""

    def __init__(self, path: str, position: int, spec: ExpertSpec, shared_width: int, build: Builder):
        """``position`` counts the layers that have experts, ``shared_width`` is that of the shared one."""
        super().__init__()
        self._experts, self._top_k, self._backend = spec.num_experts, spec.top_k, build.backend
        (self.gate, self.shared_expert_gate), self._gates = build.projections(
            spec.hidden, {f"{path}.gate": spec.num_experts, f"{path}.shared_expert_gate": 1}
        )
        self.switch_mlp = routed_experts(f"{path}.switch_mlp", position, spec, build)
        self.shared_expert = FeedForward(f"{path}.shared_expert", spec.hidden, shared_width, build)

    def __call__(self, x: mx.array, *, norm: nn.Module | None = None, residual: mx.array | None = None) -> mx.array:
        """``norm`` is applied to ``x`` before, ``residual`` is added after."""
        rows = (x if norm is None else norm(x)).reshape(-1, x.shape[-1])
        added = None if residual is None else residual.reshape(rows.shape)
        joint = self._gates.joint(self.gate, self.shared_expert_gate)
        options = {"normalize": True, "backend": self._backend}
        if joint is None:
            indices, weights = route(self.gate, rows, self._top_k, **options)
            row_gate = self.shared_expert_gate(rows)
        else:
            logits, row_gate = mx.split(joint(rows, dtype=mx.float32), [self._experts], axis=-1)
            indices, weights = router_topk_select(logits, top_k=self._top_k, **options)
        pending = self.switch_mlp.begin(indices)
        shared = self.shared_expert(rows, row_gate=row_gate, residual=added)
        return self.switch_mlp.finish(pending, rows, weights, meanwhile=(shared,), residual=shared).reshape(x.shape)
