"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464) as a layer: attention replaced by a state of fixed size.

What happens between its projections, and the shapes, are `custom_kernels.delta_net`'s.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from turbospark_mlx.cache import RecurrentState
from turbospark_mlx.custom_kernels import DeltaWeights, gated_delta, gated_delta_step, steps
from turbospark_mlx.custom_kernels.norm import Activation
from turbospark_mlx.families.layers import Builder, Module, Positions, project


class GatedDeltaNet(Module):
    """A recurrent layer: projections, a short convolution, the gated delta rule, a gated norm of each head."""

    def __init__(
        self,
        config: Any,
        path: str,
        build: Builder,
        *,
        convolution: tuple[int, ...],
        gate: Activation = "silu",
    ):
        """``config`` has the sizes under the names of ``QwenConfig``. ``convolution`` is the shape of the convolution's
        weights, ``gate`` the activation that the norm of each head is multiplied by."""
        super().__init__()
        hidden, heads, value_dim = config.hidden_size, config.linear_num_value_heads, config.linear_value_head_dim
        self._tail = config.linear_conv_kernel_dim - 1, config.convolved_width
        self._state = heads, value_dim, config.linear_key_head_dim
        self._eps, self._gate, self._backend = config.rms_norm_eps, gate, build.backend
        # In the order in which `gated_delta` takes them.
        rows = {
            "in_proj_qkv": config.convolved_width,
            "in_proj_z": config.value_width,
            "in_proj_b": heads,
            "in_proj_a": heads,
        }
        parts, self._inputs = build.projections(hidden, {f"{path}.{name}": n for name, n in rows.items()})
        for name, part in zip(rows, parts, strict=True):
            self[name] = part
        self._names = tuple(rows)
        self.conv1d = Module()
        self.conv1d.weight = build.vector(f"{path}.conv1d.weight", *convolution)
        self.A_log = build.vector(f"{path}.A_log", heads)
        self.dt_bias = build.vector(f"{path}.dt_bias", heads)
        self.norm = build.norm(f"{path}.norm", value_dim, config.rms_norm_eps)
        self.out_proj = build.linear(f"{path}.out_proj", config.value_width, hidden)

    def __call__(
        self,
        x: mx.array,
        positions: Positions,
        cache: RecurrentState | None = None,
        *,
        norm: nn.Module | None = None,
        residual: mx.array | None = None,
    ) -> mx.array:
        """``norm`` is applied to ``x [B, L, hidden]`` before, ``residual`` is added after."""
        batch, length, _ = x.shape
        projected = self._inputs.side_by_side(x, *(self[name] for name in self._names), norm=norm)
        weights = DeltaWeights(
            self.conv1d["weight"], self["A_log"], self["dt_bias"], self.norm["weight"], self._eps, self._gate
        )
        shapes, dtypes = ((batch, *self._tail), (batch, *self._state)), (projected.dtype, mx.float32)
        if cache is not None and cache.places(length) and steps(projected, self._backend):
            buffers = cache.place(length, shapes, dtypes)
            y = gated_delta_step(projected, *buffers, positions.start, weights, backend=self._backend)
            cache.written(y)
        else:
            tail, state = (None, None) if cache is None else (cache[0], cache[1])
            if tail is None:
                tail, state = map(mx.zeros, shapes, dtypes)
            y, before, after = gated_delta(projected, tail, state, weights, backend=self._backend)
            if cache is not None:
                self._keep(
                    cache,
                    mx.concatenate([tail, projected[:, -self._tail[0] - 1 :, : self._tail[1]]], axis=1),
                    length,
                    before,
                    after,
                )
        return project(self.out_proj, y.astype(x.dtype), residual=residual)

    def _keep(
        self, cache: RecurrentState, rows: mx.array, length: int, before: mx.array | None, after: mx.array
    ) -> None:
        """Leave the states of ``length`` tokens, of which ``rows`` are the last, in ``cache``: that before the last
        token by itself, so that its step can be taken back."""
        taps = self._tail[0] + 1
        if before is not None:
            cache[0], cache[1] = rows[:, -taps:-1], before
            cache.advance(length - 1)
        cache[0], cache[1] = rows[:, 1 - taps :], after
        cache.advance(1)
