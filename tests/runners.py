"""What tests of runners share: a walk beside an oracle, and Ctrl-C at a line."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import mlx.core as mx
import numpy as np

from tests.families.oracles import assert_exact
from turbospark_mlx.runner import Runner

TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, 320, 60)]


def walk(runner: Runner, oracle: Runner, rng: np.random.Generator, steps: int, chances: Mapping[str, float]) -> None:
    """Take ``steps`` steps with both, which have to stay the same to the bit; ``chances`` are those of each action."""
    marks, logits = [], None
    for _ in range(steps):
        action = rng.choice(list(chances), p=list(chances.values()))
        room = runner.max_context - runner.position
        if action in ("likeliest", "other") and room and runner.position:
            token = int(mx.argmax(logits)) if action == "likeliest" else int(rng.integers(320))
            logits = runner.decode(token, ahead=bool(rng.integers(4)))
            assert_exact(logits, oracle.decode(token))
            assert runner.likeliest() in (None, int(mx.argmax(logits)))
        elif action == "mark" and runner.position:
            marks.append((runner.mark(), oracle.mark(), logits))
        elif action == "rollback" and marks:
            mark, other, logits = marks.pop()
            runner.rollback(mark)
            oracle.rollback(other)
        elif action == "reuse" and runner.position > 1:
            ids = runner.history[:-1]
            assert runner.reuse(ids) == oracle.reuse(ids)
            marks, ids = [], ids[runner.position :]
            logits = runner.prefill(ids)
            assert_exact(logits, oracle.prefill(ids))
        elif action == "reset":
            marks = []
            runner.reset()
            oracle.reset()
        elif room > 3:
            ids = TOKENS[: int(rng.integers(1, 4))]
            logits = runner.prefill(ids)
            assert_exact(logits, oracle.prefill(ids))
        assert runner.history == oracle.history


@contextmanager
def interrupted(line: int, *names: str) -> Iterator[list[int]]:
    """Ctrl-C at line number ``line`` of those that run in this package's functions of these ``names``, which are noted:
    nothing was interrupted where there are no more than ``line``."""
    lines = []

    def trace(frame, event, _):
        if frame.f_code.co_name in names and frame.f_globals.get("__name__", "").startswith("turbospark_mlx."):
            lines.append(frame.f_lineno)
            if len(lines) == line + 1:
                raise KeyboardInterrupt
            return trace
        return None

    sys.settrace(trace)
    try:
        yield lines
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
