"""Hyper-connections (Zhu et al. 2024, arXiv:2409.19606) in the low-rank form of Qwen4-Exp: sublayers around widened
residual streams.

Shapes: B sequences, L tokens, C streams, H their width.
"""

from __future__ import annotations

import mlx.core as mx

from turbospark_mlx.custom_kernels import rms_norm, stream_inject, stream_mix
from turbospark_mlx.families.layers import Builder, Module
from turbospark_mlx.families.qwen4.config import Qwen4Config


class StreamNorm(Module):
    """A root mean square for each stream, and a weight for each of their dimensions."""

    def __init__(self, config: Qwen4Config, path: str, build: Builder):
        super().__init__()
        self._shape, self._backend = (config.hc_count, config.hidden_size), build.backend
        self._eps, self._centered = config.rms_norm_eps, config.centered_norms
        self.weight = build.vector(f"{path}.weight", config.wide)

    def __call__(self, x: mx.array) -> mx.array:
        """``x [..., C * H]``."""
        weight, options = self["weight"].reshape(self._shape), {"eps": self._eps, "centered": self._centered}
        y = rms_norm(x.reshape(*x.shape[:-1], *self._shape), weight, **options, backend=self._backend)
        return y.reshape(x.shape)


class HyperConnection(Module):
    """What a sublayer reads of the streams, and what each of them is given of its answer."""

    def __init__(self, config: Qwen4Config, path: str, build: Builder, *, inject: bool = True):
        super().__init__()
        self._streams, self._backend, self._gated_product = config.hc_count, build.backend, build.gated_product
        self.hc_norm = StreamNorm(config, f"{path}.hc_norm", build)
        self.input_mix_weight_down = build.linear(f"{path}.input_mix_weight_down", config.wide, config.hc_lowrank)
        self.input_mix_weight_up = build.linear(f"{path}.input_mix_weight_up", config.hc_lowrank, config.wide)
        if inject:
            self.block_inject_weight = build.linear(f"{path}.block_inject_weight", config.wide, config.hc_count)

    def mix(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """``x [B, L, C * H]`` -> what is read ``[B, L, H]``, and the streams as they were normalised for it."""
        normed = self.hc_norm(x)
        low = self.input_mix_weight_down(normed)
        # SiLU is a value times its own sigmoid.
        low = self._gated_product(low, low, activation="sigmoid", scale=1 / self._streams)
        gate = self.input_mix_weight_up(low)
        return stream_mix(gate, normed, streams=self._streams, backend=self._backend), normed

    def inject(self, x: mx.array, y: mx.array, normed: mx.array) -> mx.array:
        """The streams ``x`` with an answer ``y [B, L, H]``; ``normed`` comes from `mix`."""
        return stream_inject(x, y, self.block_inject_weight(normed), backend=self._backend)
