"""The gated feed-forward block of every family (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from typing import Literal

import mlx.core as mx
import mlx.nn as nn

from turbospark_mlx.families.layers import Builder, Module, RMSNorm, gelu_erf, gelu_tanh, project

_ACTIVATIONS = {"silu": lambda x: x * mx.sigmoid(x), "gelu_tanh": gelu_tanh, "gelu_erf": gelu_erf}


class FeedForward(Module):
    """``down(activation(gate(x)) * up(x))``: SwiGLU, or GeGLU with ``gelu_tanh`` or ``gelu_erf``."""

    def __init__(
        self,
        path: str,
        hidden: int,
        wide: int,
        build: Builder,
        *,
        bias: bool = False,
        activation: Literal["silu", "gelu_tanh", "gelu_erf"] = "silu",
    ):
        super().__init__()
        self._activation = activation
        (self.gate_proj, self.up_proj), self._gate_up = build.projections(
            hidden, {f"{path}.gate_proj": wide, f"{path}.up_proj": wide}, bias=bias
        )
        self.down_proj = build.linear(f"{path}.down_proj", wide, hidden, bias=bias)

    def __call__(self, x: mx.array, *, norm: nn.Module | None = None, residual: mx.array | None = None) -> mx.array:
        """``norm`` is applied to ``x`` before, ``residual`` is added after."""
        joint = self._gate_up.joint(self.gate_proj, self.up_proj)
        if joint is not None:
            if norm is not None and (not isinstance(norm, RMSNorm) or norm.centered):
                x, norm = norm(x), None
            opened = joint.gated(x, norm=norm, activation=self._activation)
        else:
            gate, up = self._gate_up(x, self.gate_proj, self.up_proj, norm=norm)
            opened = _ACTIVATIONS[self._activation](gate) * up
        return project(self.down_proj, opened, residual=residual)
