"""Experts on disk, of which a few are kept in slots.

Rules that everything else rests on:

- A slot's bytes and its record change together: a plan empties the slots it takes, and only experts that were read in
  full are published.
- A slot that work still to be evaluated will read is not overwritten: that work is evaluated first.
- Products are summed in the router's order, so that no answer depends on what was a hit.
- A decode step on a GPU that is laid out before it runs (`on_device`) reads slots without asking. It counts only if all
  that it chose was there, and it too is evaluated before a slot is overwritten.
- A chunk that wants more experts than there are slots is cut on experts, not on tokens: first those that are here, then
  the others in batches, so that each is read once. While one batch is computed the next is read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from turbospark_mlx.custom_kernels import ExpertArena, Mixture, expert_mixture
from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.errors import BackendError, InstallError, OptionError
from turbospark_mlx.experts.chunks import mix_in_parts, most_rows
from turbospark_mlx.experts.counters import ExpertCounters
from turbospark_mlx.experts.reader import ExpertReader, Reads
from turbospark_mlx.experts.slots import EMPTY, Plan, SlotTable

_UNEVALUATED = 4
"""Results that may be waiting to be evaluated; an older one is evaluated when another comes."""


@dataclass
class _Batch:
    """Experts with their slots, some of them still being read."""

    plan: Plan
    reads: Reads | None


class _Chunk:
    """The experts that some rows want, ``chosen [rows, top_k]``: the ``first`` to be placed, and those ``left``."""

    def __init__(self, chosen: np.ndarray, table: SlotTable):
        self.chosen = chosen
        wanted = list(dict.fromkeys(chosen.ravel().tolist()))
        self.in_one = len(wanted) <= len(table)
        self._half = max(1, len(table) // 2)
        here = wanted if self.in_one else [expert for expert in wanted if expert in table]
        self.left = [] if self.in_one else [expert for expert in wanted if expert not in table]
        self.first = here or self.take(len(table))

    def take(self, room: int) -> list[int]:
        """The next experts to read, at most ``room`` and half of all slots."""
        count = min(room, self._half)
        taken, self.left = self.left[:count], self.left[count:]
        return taken


@dataclass
class _Pending:
    indices: mx.array
    slot_of: mx.array | None = None
    chosen: np.ndarray | None = None
    chunk: _Chunk | None = None
    batch: _Batch | None = None


class Streamed:
    """The experts of one layer over an arena of slots."""

    idle = False
    """See ``ExpertStore.idle``."""

    def __init__(
        self,
        arena: ExpertArena,
        table: SlotTable,
        *,
        position: int,
        read_bytes: int,
        reader: ExpertReader,
        backend: Backend,
    ):
        """``position`` counts the layers that have experts, ``read_bytes`` is what is read of each blob."""
        self.table, self.counters = table, ExpertCounters()
        self.arena, self._position, self._reader, self._backend = arena, position, reader, backend
        self._buffers = [blob[:read_bytes] for blob in arena.blobs]
        self._in_flight: Reads | None = None
        self._user: threading.Thread | None = None
        self._unevaluated: list[tuple[frozenset[int], list[mx.array]]] = []
        self.steps: list[Callable[[], object]] = []
        """Each returns once a step that was laid out reads no slot any more."""
        self._mapped: tuple[int, mx.array] | None = None
        self._given_map: mx.array | None = None
        self._chosen: mx.array | None = None

    def begin(self, indices: mx.array) -> _Pending:
        """On a CPU the experts that are missing begin to be read here. On a GPU the router is set going; nobody waits
        for it where a step is laid out, nor once every expert is here to stay."""
        pending = _Pending(indices)
        if self.idle and self._given_map is None:
            return pending
        self._enter()
        if self._given_map is not None:
            self._chosen, pending.slot_of = indices, self._given_map
        elif self._backend.device == "cpu":
            pending.chosen = self._host(indices)
            if pending.chosen.size:
                rows = most_rows(indices.shape[1], self.arena.blob.gate.columns)
                pending.chunk, pending.batch = self._open(pending.chosen[:rows])
        elif self.table.holds_all:
            pending.slot_of = self.slot_map
        else:
            mx.async_eval(indices)
        return pending

    def _enter(self) -> None:
        user = self._user
        if user is not None and user is not threading.current_thread() and user.is_alive():
            raise BackendError(
                f"Streamed experts serve one thread at a time, and thread {user.name!r} is in the middle of a layer."
                " Open the model once for each thread."
            )
        self._user = threading.current_thread()

    def lay_out(self, slot_map: mx.array) -> None:
        """Until `laid_out`, mix what lies where ``slot_map`` says. Nothing is read, counted or waited for."""
        self._enter()
        self._given_map = slot_map

    def laid_out(self) -> mx.array | None:
        """The indices that were asked for since `lay_out`."""
        if self._given_map is not None:
            self._user = None
        chosen, self._given_map, self._chosen = self._chosen, None, None
        return chosen

    def finish(
        self,
        pending: _Pending,
        x: mx.array,
        weights: mx.array,
        *,
        meanwhile: tuple[mx.array, ...] = (),
        residual: mx.array | None = None,
    ) -> mx.array:
        if self._given_map is None:
            self._user = None
        if x.shape[0] == 0 or (self.idle and pending.slot_of is None):
            return mx.zeros(x.shape, x.dtype)
        if pending.slot_of is not None:
            mixed = partial(self._mix_slots, slot_of=pending.slot_of)
            return mix_in_parts(mixed, pending.indices, x, weights, residual)
        if pending.chosen is None:
            mx.async_eval(*meanwhile, x, weights)
            pending.chosen = self._host(pending.indices)
        started = iter([(pending.chunk, pending.batch)] if pending.chunk else ())

        def mix(chosen: np.ndarray, x: mx.array, weights: mx.array, residual: mx.array | None) -> mx.array:
            chunk, batch = next(started, (None, None))
            if chunk is None:
                chunk, batch = self._open(chosen)
            return self._mix(chunk, batch, x, weights, residual)

        return mix_in_parts(mix, pending.chosen, x, weights, residual)

    def settle(self) -> None:
        """After an error between ``begin`` and ``finish``: return when nothing is written into slots any more."""
        self._user = None
        self._settle()

    def _settle(self) -> None:
        if self._in_flight is not None:
            self._in_flight.abandon()
            self._in_flight = None

    def load(self, experts: Sequence[int]) -> None:
        """Read experts, at most as many as there are slots, before any is wanted. They count as misses."""
        self._complete(self._start(list(experts)))

    def count_hits(self, experts: list[int]) -> None:
        """Count experts, all of them in slots, as `begin` and `finish` do for one chunk."""
        if not self.table.holds_all:
            self._start(experts)

    @property
    def slot_map(self) -> mx.array:
        """The slot of each expert, int32 ``[experts]``, and any for one that has none: the same array until one comes
        in."""
        if self._mapped is None or self._mapped[0] != self.table.arrivals:
            held = np.array(self.table.expert_of)
            slot_of = np.zeros(len(self.table.use_count), np.int32)
            slot_of[held[held != EMPTY]] = np.flatnonzero(held != EMPTY)
            self._mapped = self.table.arrivals, mx.array(slot_of)
        return self._mapped[1]

    def _mix_slots(
        self,
        slots: mx.array,
        x: mx.array,
        weights: mx.array,
        residual: mx.array | None,
        slot_of: mx.array | None = None,
    ) -> mx.array:
        options = {"residual": residual, "slot_of": slot_of, "backend": self._backend}
        return expert_mixture(self.arena, slots, x, weights, **options)

    def _host(self, indices: mx.array) -> np.ndarray:
        chosen, count = np.array(indices), len(self.table.use_count)
        if chosen.size and (chosen.min() < 0 or chosen.max() >= count):
            raise OptionError(f"experts {chosen.min()} to {chosen.max()} were asked for; a layer has 0 to {count - 1}")
        return chosen

    def _mix(self, chunk: _Chunk, batch: _Batch, x: mx.array, weights: mx.array, residual: mx.array | None) -> mx.array:
        chosen = chunk.chosen
        slot_of = np.zeros(len(self.table.use_count), np.int32)
        if chunk.in_one and self._backend.device == "gpu":
            # One operation for all of them, as where everything is resident.
            self._complete(batch)
            slot_of[list(batch.plan.experts)] = batch.plan.slots
            y = self._mix_slots(mx.array(slot_of[chosen]), x, weights, residual)
            self._will_read(batch.plan.slots, [y])
            return y
        mixture, flat = (
            Mixture(x, weights, residual=residual, blob=self.arena.blob, backend=self._backend),
            chosen.ravel(),
        )

        def add(experts: Sequence[int]) -> None:
            pairs = np.flatnonzero(np.isin(flat, experts))
            self._will_read(slot_of[list(experts)], mixture.add(self.arena, pairs, slot_of[flat[pairs]]))

        while batch is not None:
            plan, following = batch.plan, None
            slot_of[list(plan.experts)] = plan.slots
            read = [plan.experts[miss] for miss in plan.misses]
            if here := [expert for expert in plan.experts if expert not in read]:
                # While the others are being read.
                add(here)
            self._complete(batch)
            # What is read now may not go where the experts of this batch are about to be used.
            if more := chunk.take(len(self.table) - len(plan.slots)):
                following = self._start(more, protected=plan.slots)
            if read:
                add(read)
            if following is None and (more := chunk.take(len(self.table))):
                following = self._start(more)
            batch = following
        return mixture.result()

    def _open(self, chosen: np.ndarray) -> tuple[_Chunk, _Batch]:
        chunk = _Chunk(chosen, self.table)
        if chunk.left:
            self._reader.advise(self._position, chunk.left)
        return chunk, self._start(chunk.first)

    def _start(self, wanted: list[int], protected: Collection[int] = ()) -> _Batch:
        """Place experts, and begin to read those that are missing."""
        self._settle()
        plan = self.table.plan(wanted, protected)
        assert plan is not None, f"{len(wanted)} experts beside {len(protected)} in {len(self.table)} slots"
        self.counters.hits += plan.hits
        self.counters.misses += len(plan.misses)
        if not plan.misses:
            return _Batch(plan, None)
        slots = [plan.slots[miss] for miss in plan.misses]
        self._evaluate_readers(slots)
        experts = [plan.experts[miss] for miss in plan.misses]
        self._in_flight = self._reader.reads(self._position, experts, [self._buffers[slot] for slot in slots])
        self._in_flight.start()
        return _Batch(plan, self._in_flight)

    def _complete(self, batch: _Batch) -> None:
        """Wait for a batch's experts and publish them."""
        if batch.reads is None:
            return
        started = time.perf_counter()
        try:
            batch.reads.wait()
        except InstallError:
            self._in_flight = None
            raise
        self._in_flight = None
        self.counters.wait_seconds += time.perf_counter() - started
        self.counters.reads += 1
        self.counters.bytes_read += batch.reads.nbytes
        self.counters.read_seconds += batch.reads.seconds
        self.table.commit(batch.plan)

    def _will_read(self, slots: Collection[int], arrays: list[mx.array]) -> None:
        """Remember that ``arrays`` read ``slots`` when they are evaluated. On a CPU they have been."""
        if self._backend.device == "cpu":
            return
        mx.async_eval(arrays)
        self._unevaluated.append((frozenset(map(int, slots)), arrays))
        if len(self._unevaluated) > _UNEVALUATED:
            mx.eval(self._unevaluated.pop(0)[1])

    def _evaluate_readers(self, slots: Collection[int]) -> None:
        while self.steps:
            self.steps.pop(0)()
        kept = []
        for read, arrays in self._unevaluated:
            if read.isdisjoint(slots):
                kept.append((read, arrays))
            else:
                mx.eval(arrays)
        self._unevaluated = kept
