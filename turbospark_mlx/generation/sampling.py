"""From the logits of one row to one token id.

The stages are mlx-lm's, in its order: logit bias and penalties on the logits, log-softmax, top-p over the full
distribution, min-p, top-k, and the temperature only in the final draw. Every filter keeps a prefix of the tokens ranked
by probability, so at least one token survives; between equal probabilities the lower id ranks first.

All arithmetic is float64 on the host. A draw is a function of (seed, position) alone: it does not depend on how often
the sampler was called, on the chunks of the prompt, or on a reused prefix.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real

import numpy as np

from turbospark_mlx.errors import GenerationError, OptionError

SEED_LIMIT = 2**64
FIRST_RANKED = 256  # top-p ranks this many tokens first, and more only while their mass does not reach the threshold


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen. The defaults choose the most probable one.

    ``temperature``: at least 0; 0 is greedy. ``top_k``: at least 0; 0 switches it off. ``top_p``: in (0, 1]; 1 switches
    it off. ``min_p``: in [0, 1]; 0 switches it off. ``repetition_penalty``: above 0; 1 switches it off (Keskar et al.
    2019, arXiv:1909.05858). ``presence_penalty`` and ``frequency_penalty``: finite, subtracted from the logit of a
    token that occurred, once or for each time. Each penalty looks at the last ``..._context_size`` tokens of prompt and
    answer. ``logit_bias``: token id -> what is added to its logit; ``-inf`` bans the token. ``seed``: in [0, 2**64);
    None draws one, and the responses report it.

    Raises OptionError for a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self):
        _check_real("temperature", self.temperature, "a finite number of at least 0", lambda v: v >= 0)
        _check_integer("top_k", self.top_k, "a whole number of at least 0 (0 switches it off)", lambda v: v >= 0)
        _check_real("top_p", self.top_p, "in (0, 1] (1 switches it off)", lambda v: 0 < v <= 1)
        _check_real("min_p", self.min_p, "in [0, 1] (0 switches it off)", lambda v: 0 <= v <= 1)
        _check_real("repetition_penalty", self.repetition_penalty, "above 0 (1 switches it off)", lambda v: v > 0)
        _check_real("presence_penalty", self.presence_penalty, "a finite number (0 switches it off)")
        _check_real("frequency_penalty", self.frequency_penalty, "a finite number (0 switches it off)")
        for name in ("repetition_context_size", "presence_context_size", "frequency_context_size"):
            _check_integer(name, getattr(self, name), "a whole number of at least 1", lambda v: v >= 1)
        if self.seed is not None:
            _check_integer("seed", self.seed, "a whole number in [0, 2**64), or None", lambda v: 0 <= v < SEED_LIMIT)
        if not isinstance(self.logit_bias, Mapping):
            raise OptionError(f"logit_bias is {self.logit_bias!r}; give a mapping of token ids to numbers.")
        for token, value in self.logit_bias.items():
            _check_integer("logit_bias", token, "keyed by token ids (whole numbers of at least 0)", lambda v: v >= 0)
            if isinstance(value, bool) or not isinstance(value, Real) or not value < math.inf:
                raise OptionError(
                    f"logit_bias[{token}] is {value!r}; it must be a finite number, or -inf to ban the token."
                )

    @property
    def draws(self) -> bool:
        """Whether choosing a token takes a random draw."""
        return self.temperature > 0

    @property
    def takes_the_likeliest(self) -> bool:
        """Whether the token is the one that the model found most probable."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return not (self.draws or penalties or self.logit_bias)


SAMPLING_NAMES = frozenset(f.name for f in fields(SamplingOptions))


def _check_real(name, value, must_be, holds=lambda value: True):
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or not holds(value):
        raise OptionError(f"{name} is {value!r}; it must be {must_be}.")


def _check_integer(name, value, must_be, holds):
    if isinstance(value, bool) or not isinstance(value, Integral) or not holds(value):
        raise OptionError(f"{name} is {value!r}; it must be {must_be}.")


class Sampler:
    """Chooses token ids under one set of options for a model of ``vocab_size`` logits.

    ``seed`` is the seed in use: the option's, a fresh one where the option is None, or None where nothing is drawn.
    Raises OptionError for a ``logit_bias`` id that the vocabulary does not have.
    """

    def __init__(self, options: SamplingOptions, vocab_size: int):
        self.options = options
        self.vocab_size = vocab_size
        self.seed = None
        if options.draws:
            self.seed = int(options.seed) if options.seed is not None else secrets.randbits(64)
        for token in options.logit_bias:
            if token >= vocab_size:
                raise OptionError(f"logit_bias names token {token}; this model's ids are 0 to {vocab_size - 1}.")
        self._biased = np.array(list(options.logit_bias), dtype=np.int64)
        self._bias = np.array(list(options.logit_bias.values()), dtype=np.float64)

    def process(self, logits: np.ndarray, history: Sequence[int] = ()) -> np.ndarray:
        """Bias and penalties: the float64 logits ``[vocab]`` that the token is chosen from.

        ``history`` are the ids of prompt and answer so far. Raises GenerationError for logits that are NaN, +inf or all
        -inf, and for a history id that the vocabulary does not have.
        """
        if logits.shape != (self.vocab_size,):
            raise GenerationError(f"the logits have shape {logits.shape}; this model's are ({self.vocab_size},).")
        _check_finite(logits, "the model computed them: check the install with `turbospark-mlx verify`")
        processed = logits.astype(np.float64)
        options = self.options
        if self._biased.size:
            processed[self._biased] += self._bias
        if options.repetition_penalty != 1:
            recent = self._recent(history, options.repetition_context_size)
            scores = processed[recent]
            penalty = options.repetition_penalty
            processed[recent] = np.where(scores < 0, scores * penalty, scores / penalty)
        if options.presence_penalty:
            recent = self._recent(history, options.presence_context_size)
            processed[recent] -= options.presence_penalty  # once, however often the token occurs
        if options.frequency_penalty:
            recent = self._recent(history, options.frequency_context_size)
            np.subtract.at(processed, recent, options.frequency_penalty)
        _check_finite(processed, "logit_bias and the penalties made them so")
        return processed

    def distribution(self, processed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``(ids, probabilities)`` of the tokens that survive, in ascending id order: what ``choose`` draws from.

        ``processed`` is the result of ``process``. Greedy options give one id with probability 1.
        """
        options = self.options
        if not options.draws:
            return np.array([np.argmax(processed)]), np.ones(1)
        below = processed - processed.max()
        # Each filter keeps a prefix of one ranking, so the cheap ones may come first; top-p still counts all mass.
        kept = np.flatnonzero(below >= math.log(options.min_p) if options.min_p > 0 else below > -np.inf)
        if 0 < options.top_k < kept.size:
            kept = kept[np.sort(_top(below[kept], options.top_k))]
        if options.top_p < 1:
            kept = kept[np.sort(_nucleus(below[kept], options.top_p * np.exp(below).sum()))]
        with np.errstate(over="ignore"):  # a tiny temperature sends everything but the maximum to -inf
            weights = np.exp(below[kept] / options.temperature)
        return kept, weights / weights.sum()

    def choose(self, processed: np.ndarray, position: int) -> int:
        """The token id at ``position`` (how many tokens come before it). ``processed`` is the result of ``process``."""
        ids, probabilities = self.distribution(processed)
        if ids.size == 1:
            return int(ids[0])
        cumulative = np.cumsum(probabilities)
        drawn = np.searchsorted(cumulative, uniform(self.seed, position) * cumulative[-1], side="right")
        return int(ids[drawn])

    def _recent(self, history, size):
        recent = np.array(history[-size:], dtype=np.int64)
        if recent.size and (recent.min() < 0 or recent.max() >= self.vocab_size):
            raise GenerationError(f"a token of the history is outside this model's ids, 0 to {self.vocab_size - 1}.")
        return recent


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on ``(seed, position)`` alone.

    It is the Philox generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), keyed by the seed
    and counting positions.
    """
    return int(np.random.Philox(key=seed, counter=position).random_raw() >> 11) * 2.0**-53


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """``logits - log(sum(exp(logits)))`` of one float64 row, stable for any finite maximum."""
    shifted = logits - logits.max()
    return shifted - math.log(np.exp(shifted).sum())


def _check_finite(logits, cause):
    # A comparison with NaN is false, so the first condition refuses NaN as well as +inf.
    if not logits.max() < np.inf:
        bad = int(np.flatnonzero(~(logits < np.inf))[0])
        raise GenerationError(f"logit {bad} is {logits[bad]}; {cause}.")
    if logits.max() == -np.inf:
        raise GenerationError(f"all logits are -inf, so that no token is left to choose; {cause}.")


def _top(values, count):
    """Positions of the ``count`` largest values, largest first; between equal values the lower position."""
    if count < values.size:
        threshold = np.partition(values, values.size - count)[values.size - count]
        above = np.flatnonzero(values > threshold)
        equal = np.flatnonzero(values == threshold)[: count - above.size]
        positions = np.concatenate([above, equal])
    else:
        positions = np.arange(values.size)
    return positions[np.argsort(-values[positions], kind="stable")]


def _nucleus(logits, enough):
    """Positions of the fewest largest logits whose exponentials sum to ``enough``, or all.

    This is top-p of Holtzman et al. 2019 (arXiv:1904.09751): the one that crosses the threshold is kept.
    """
    size = FIRST_RANKED
    while True:
        ranked = _top(logits, size)
        mass = np.cumsum(np.exp(logits[ranked]))
        if mass[-1] >= enough or ranked.size == logits.size:
            return ranked[: np.searchsorted(mass, enough, side="left") + 1]
        size *= 8
