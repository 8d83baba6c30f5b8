"""The state of one layer of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, 2.1)."""

from __future__ import annotations

import mlx.core as mx

from turbospark_mlx.cache.kv import LinearKV


class LatentKV(LinearKV):
    """One row a token that stands for its keys and values: a latent, or both side by side, of any widths.

    The buffer, and what `append` takes, is ``[1, B, KV, capacity, D]``. Otherwise as `LinearKV`.
    """

    _planes = 1

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """`append` with ``keys [B, KV, L, D]`` and ``values [B, KV, L, E]`` apart; those of all tokens come back."""
        buffer, rows = self.append(mx.concatenate([keys, values], axis=-1)[None])
        width = keys.shape[-1]
        return buffer[0, :, :, :rows, :width], buffer[0, :, :, :rows, width:]
