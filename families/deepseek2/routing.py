"""How tokens choose their experts: DeepSeek-V2 (arXiv:2405.04434, 2.2) and V3 (arXiv:2412.19437, 2.1.2)."""

from __future__ import annotations

import mlx.core as mx

from turbospark_mlx.families.deepseek2.config import BIASED, Deepseek2Config


def route(logits: mx.array, bias: mx.array | None, config: Deepseek2Config) -> tuple[mx.array, mx.array]:
    """The experts of each row of ``logits [rows, experts]``: indices and weights ``[rows, top_k]``, float32, best
    first.

    ``bias [experts]`` is added to scores for the choice alone, never to weights. Of equal scores the lower index comes
    first. With groups, only experts of the best ``topk_group`` groups can be chosen, however low their scores are; a
    group's score is its best expert's, or with a bias the sum of its two best.
    """
    logits, biased = logits.astype(mx.float32), config.topk_method == BIASED
    scores = mx.sigmoid(logits) if biased else mx.softmax(logits, axis=-1)
    ranked = scores + bias.astype(mx.float32) if biased else scores
    if config.n_group > 1:
        ranked = _within_the_best_groups(ranked, config.n_group, config.topk_group, best=2 if biased else 1)
    indices = mx.stop_gradient(mx.argsort(-ranked, axis=-1)[:, : config.num_experts_per_tok])
    weights = mx.take_along_axis(scores, indices, axis=-1)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return indices, weights * config.routed_scaling_factor


def _within_the_best_groups(scores: mx.array, groups: int, kept: int, *, best: int) -> mx.array:
    """``scores [rows, experts]`` with those outside of the ``kept`` best groups at minus infinity."""
    grouped = scores.reshape(scores.shape[0], groups, -1)
    totals = mx.sort(grouped, axis=-1)[..., -best:].sum(axis=-1)
    rank = mx.argsort(mx.argsort(-totals, axis=-1), axis=-1)
    return mx.where((rank < kept)[..., None], grouped, -mx.inf).reshape(scores.shape)
