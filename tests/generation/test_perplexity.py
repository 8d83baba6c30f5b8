"""Perplexity against a float64 computation over whole windows, on a model of one matrix."""

import math
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from turbospark_mlx import perplexity as module
from turbospark_mlx.errors import ContextError, GenerationError, OptionError
from turbospark_mlx.perplexity import Window, perplexity, windows

VOCAB, WIDTH = 50, 16


class SumModel:
    """Predicts from the sum of the embeddings of all tokens so far, so that every token of a window matters."""

    def __init__(self, max_position_embeddings=64):
        rng = np.random.default_rng(0)
        self.args = SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=max_position_embeddings)
        self.table = rng.standard_normal((VOCAB, WIDTH))
        self.out = rng.standard_normal((WIDTH, VOCAB)) / 4
        self.headed = []

    def make_cache(self):
        return [SimpleNamespace(state=mx.zeros(WIDTH))]

    def hidden(self, tokens, cache):
        assert tokens.shape[1] <= module.CHUNK
        hidden = cache[0].state + mx.cumsum(mx.array(self.table.astype(np.float32))[tokens[0]], axis=0)
        cache[0].state = hidden[-1]
        return hidden[None]

    def head(self, hidden):
        self.headed.append(hidden.shape[1])
        return hidden @ mx.array(self.out.astype(np.float32))

    def log_probability(self, before, token):
        logits = self.table[before].sum(0) @ self.out
        return logits[token] - logits.max() - math.log(np.exp(logits - logits.max()).sum())


def expected(model, ids, context, stride, bos):
    """By the definition: one token at a time, behind what its window holds."""
    prefix = [] if bos is None else [bos]
    longest = context + 1 - len(prefix)
    total, positions = 0.0, range(1 - len(prefix), len(ids))
    for position in positions:
        later_windows = max(0, math.ceil((position + 1 - longest) / stride))
        end = min(longest + later_windows * stride, len(ids))
        before = prefix + ids[max(0, end - longest) : position]
        assert 1 <= len(before) <= context
        total -= model.log_probability(before, ids[position])
    return total / len(positions), len(positions)


@pytest.mark.parametrize("bos", [None, 3])
@pytest.mark.parametrize(
    ("length", "context", "stride"), [(60, 64, 64), (60, 20, 20), (61, 20, 7), (9, 4, 1), (2, 1, 1)]
)
def test_perplexity_is_the_definition(monkeypatch, length, context, stride, bos):
    monkeypatch.setattr(module, "CHUNK", 6)
    monkeypatch.setattr(module, "LOGITS_BYTES", 4 * VOCAB * 4)
    model = SumModel()
    ids = np.random.default_rng(length).integers(0, VOCAB, length).tolist()
    calls = []
    result = perplexity(
        model, ids, bos=bos, context=context, stride=stride, progress=lambda done, total: calls.append((done, total))
    )
    nll, count = expected(model, ids, context, stride, bos)
    assert result.tokens == count == length - (bos is None)
    assert result.nll == pytest.approx(nll, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(nll), rel=1e-4)
    assert result.windows == 1 + max(0, -(-(count - context) // stride))
    assert result.tokens_per_second > 0
    assert calls[-1] == (count, count)
    assert max(model.headed) <= 4
    assert sum(model.headed) == count  # no row is headed that predicts nothing new


def test_windows_by_hand():
    assert list(windows(10, context=4, stride=4, has_bos=False)) == [Window(0, 1, 5), Window(4, 5, 9), Window(5, 9, 10)]
    assert list(windows(10, context=4, stride=4, has_bos=True)) == [Window(0, 0, 4), Window(4, 4, 8), Window(6, 8, 10)]
    assert list(windows(6, context=4, stride=2, has_bos=False)) == [Window(0, 1, 5), Window(1, 5, 6)]


def test_the_default_context_is_the_trained_one_up_to_a_limit():
    ids = [1] * 100
    assert perplexity(SumModel(16), ids).windows == 7
    assert perplexity(SumModel(1 << 20), ids * 25).windows == 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"context": 0}, OptionError, "context is 0"),
        ({"context": 65}, OptionError, "1 to 64, the model's trained context"),
        ({"context": 8, "stride": 9}, OptionError, "stride is 9; it must be 1 to 8"),
        ({"stride": 0}, OptionError, "stride is 0"),
    ],
)
def test_options_that_cannot_work_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        perplexity(SumModel(), [1] * 10, **options)


def test_texts_that_cannot_work_are_refused():
    with pytest.raises(ContextError, match="0 tokens; it takes at least 2"):
        perplexity(SumModel(), [])
    with pytest.raises(ContextError, match="1 token; it takes at least 2"):
        perplexity(SumModel(), [1])
    with pytest.raises(ContextError, match="0 tokens; it takes at least 1"):
        perplexity(SumModel(), [], bos=1)
    assert perplexity(SumModel(), [1], bos=1).tokens == 1
    for bad in (-1, VOCAB):
        with pytest.raises(ContextError, match="0 to 49"):
            perplexity(SumModel(), [1, bad, 2])


def test_a_loss_that_is_not_finite_is_an_error_naming_the_token():
    model = SumModel()
    model.table[7] = np.nan
    ids = [1] * 30
    ids[20] = 7  # the first token behind it is the 21st predicted one
    with pytest.raises(GenerationError, match="token 21 of 29"):
        perplexity(model, ids, context=8)
