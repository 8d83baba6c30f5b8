"""What tests of decode steps as CUDA graphs share, on a stand-in for the driver and on a GPU: ways through a text."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import mlx.core as mx

from tests.families.oracles import PROMPT, assert_exact
from tests.runners import TOKENS
from turbospark_mlx.custom_kernels import backends
from turbospark_mlx.runner import Runner

GRAPH = "one CUDA graph"
WHILE = " while experts are in their slots"


class Both:
    """A runner whose steps are graphs beside one whose steps are not; every pass has to give the same bits."""

    def __init__(self, runner: Runner, oracle: Runner):
        self.runner, self.oracle = runner, oracle
        self.logits: mx.array | None = None

    def prefill(self, ids) -> None:
        self.logits = self.runner.prefill(ids)
        assert_exact(self.logits, self.oracle.prefill(ids))

    def decode(self, token: int, *, ahead: bool) -> None:
        self.logits = self.runner.decode(token, ahead=ahead)
        assert_exact(self.logits, self.oracle.decode(token))
        if ahead and self.runner.likeliest() is not None:
            assert self.runner.likeliest() == int(mx.argmax(self.logits))
        assert self.runner.history == self.oracle.history

    def greedily(self, count: int, *, ahead: bool = True) -> None:
        for _ in range(count):
            self.decode(int(mx.argmax(self.logits)), ahead=ahead)

    def in_vain(self, count: int) -> None:
        """Each token is another than the one that was begun with."""
        for _ in range(count):
            self.decode((int(mx.argmax(self.logits)) + 1) % self.runner.vocab_size, ahead=True)

    def reset(self) -> None:
        for each in (self.runner, self.oracle):
            each.reset()

    def reuse(self, ids: list[int]) -> None:
        """A step that was begun in vain may have overwritten what the way back needs; then both begin anew."""
        held = self.runner.reuse(ids)
        if held != self.oracle.reuse(ids):
            self.reset()
            held = 0
        self.prefill(ids[held:])

    def follow(self) -> None:
        """Greedy steps over a growth of the caches, steps in vain, one by one, and every way back; then short texts,
        for which new caches are like the old ones, and a long one."""
        self.prefill(PROMPT[:5])
        self.greedily(14)
        self.in_vain(3)
        self.greedily(3, ahead=False)
        self.greedily(2)
        marks, logits = (self.runner.mark(), self.oracle.mark()), self.logits
        for following in (lambda: self.greedily(4), lambda: self.in_vain(3)):
            following()
            for each, mark in zip((self.runner, self.oracle), marks, strict=True):
                each.rollback(mark)
            self.logits = logits
        self.greedily(2)
        self.reuse([*self.runner.history[:-1], 7])
        self.greedily(4)
        self.prefill(TOKENS[:3])
        self.greedily(3)
        for length in (4, 3, 9):
            self.reset()
            self.prefill(PROMPT[:length])
            self.greedily(5)
        self.prefill(PROMPT[9:20])
        self.greedily(20)
        self.in_vain(2)


@contextmanager
def compiled_graphs() -> Iterator[None]:
    """Inside, "auto" selects a back end whose steps are compiled graphs, not CUDA graphs."""
    select = backends.select
    backends.select = lambda kernels="auto": replace(select(kernels), graphs=False)
    try:
        yield
    finally:
        backends.select = select


@contextmanager
def both(path, *, slots: int | None = None, alike: bool = False, **options) -> Iterator[Both]:
    """``options`` are those of `Runner.open`; experts are in ``slots``, and the oracle's, too, where they are
    ``alike``."""
    streamed = {"residency": "streamed", "expert_slots": slots} if slots is not None else {}
    with Runner.open(path, **options, **streamed) as runner:
        with compiled_graphs():
            oracle = Runner.open(path, **options, **(streamed if alike else {}))
        with oracle:
            assert "compiled graph" in oracle.report().decode_step
            yield Both(runner, oracle)
