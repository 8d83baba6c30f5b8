"""The decode step: one token through all layers, as cheaply as the back end allows.

Every operation of a pass costs time in Python and MLX before it costs any on the device. The operations of a step are
the same for every token, so they are found once, by running the model, and then run together: on a CPU as one list of
kernels and buffers, on an NVIDIA GPU as one CUDA graph of them, and on other GPUs, or where there is more than kernels,
as one compiled graph (``mx.compile``). What differs between tokens is in arrays: the token, its position, the rotations
there, and what a model finds by it on the host. Keys and values are written in place, so that nothing else comes back,
but for the experts that were chosen where a GPU has only some of them.

A step notices parameters and modules that were replaced, and finds its operations again. It cannot notice a method that
was patched on a class, nor that a part of an array was assigned to: give the module the array once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from turbospark_mlx.custom_kernels import largest
from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.cuda import observed, zeros
from turbospark_mlx.custom_kernels.backends.cuda_graph import GraphRecording, Ticket, bring
from turbospark_mlx.custom_kernels.backends.replay import HostRecording, Known, NotRecordable
from turbospark_mlx.errors import BackendError
from turbospark_mlx.experts import Routed, SlotMaps
from turbospark_mlx.families.layers import Module, Positions, RoPE
from turbospark_mlx.protocols import LayerCache

Buffers = mx.array | tuple["Buffers", ...]
"""What one layer's kernels write a token into."""
Found = dict[str, np.ndarray]
"""``CausalModel.look_up``: what a pass is given beside its token."""

COMPILED = "one compiled graph"

_Result = tuple[mx.array, Routed | None]


class Begun(Protocol):
    """A step on its way. What is asked of it waits for it."""

    routed: Routed | None
    """What has to be right for its results to count."""

    def wait(self) -> None:
        """Return when nothing is written any more."""

    @property
    def fed(self) -> int:
        """The token that was run."""

    @property
    def logits(self) -> mx.array:
        """Float32 logits ``[vocab]`` behind it."""

    @property
    def likeliest(self) -> int:
        """The largest logit's token; without meaning unless ``peak``, that logit, is finite."""

    @property
    def peak(self) -> float: ...


class _Evaluating:
    """A step that MLX was asked for. What the next one needs is evaluated with it, because whoever waits for one result
    of an evaluation waits for all of them."""

    def __init__(self, token: mx.array, logits: mx.array, routed: Routed | None):
        self._token, self.logits, self.routed = token, logits, routed
        self.next_token, self._peak = mx.argmax(logits).astype(mx.int32).reshape(1, 1), mx.max(logits)
        mx.async_eval(logits, routed and routed.array, self.next_token, self._peak)

    def wait(self) -> None:
        mx.eval(self.logits)

    @property
    def fed(self) -> int:
        return self._token.item()

    @property
    def likeliest(self) -> int:
        return self.next_token.item()

    @property
    def peak(self) -> float:
        return self._peak.item()


class _Launched:
    """A step that is a CUDA graph under way."""

    def __init__(self, after: int | _Launched, ticket: Ticket):
        self._ticket, self.routed = ticket, None
        self._fed = after if isinstance(after, int) else after._ticket

    def wait(self) -> None:
        self._ticket.wait()

    def chosen(self) -> np.ndarray:
        """The ids that all layers chose, one layer after the other."""
        return np.concatenate([ids.reshape(-1) for ids in self._ticket.small[2:]])

    @property
    def fed(self) -> int:
        return self._fed if isinstance(self._fed, int) else self._fed.small[0].item()

    @property
    def logits(self) -> mx.array:
        return self._ticket.large

    @property
    def likeliest(self) -> int:
        return self._ticket.small[0].item()

    @property
    def peak(self) -> float:
        return self._ticket.small[1].item()


class _PlacedState:
    """The state of one layer inside a step: its token has its place already."""

    def __init__(self, buffers: Buffers):
        self._buffers = buffers

    def places(self, length: int) -> bool:
        return length == 1

    def place(self, length: int, shapes: Sequence, dtypes: object) -> Buffers:
        return self._buffers

    @property
    def parts(self) -> list[_PlacedState]:
        """Those of a ``JointState``."""
        return [_PlacedState(buffers) for buffers in self._buffers]

    def written(self, output: mx.array) -> None:
        """The logits, which depend on every output, are given to the cache instead."""

    def append(self, *_: object) -> None:
        raise NotRecordable("a layer does not write its state in place")

    update_and_fetch = __getitem__ = append


class _StepPositions(Positions):
    """The position of one token, known as arrays only."""

    def __init__(self, start: mx.array, tables: dict[RoPE, mx.array]):
        self._start, self._tables = start, tables

    @property
    def offset(self) -> int:
        raise NotRecordable("an operation takes the position as a number")


def _logits(
    model: nn.Module, token: mx.array, states: Sequence[Any], positions: Positions, found: dict[str, mx.array]
) -> mx.array:
    return model.head(model.hidden(token, states, positions=positions, **found))[0, 0]


def _arrays(found: Found) -> dict[str, mx.array]:
    return {name: mx.array(array) for name, array in found.items()}


class _Contents:
    """The arrays and modules of a model at one time."""

    def __init__(self, model: nn.Module):
        self._assignments = Module.assignments
        self._entries = []
        self._add(model)

    def _add(self, container: Any) -> None:
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in items:
            if isinstance(value, (dict, list, mx.array)) and not isinstance(container, Module):
                self._entries.append((container, key, value))
            if isinstance(value, (dict, list)):
                self._add(value)

    def unchanged(self) -> bool:
        try:
            return self._assignments == Module.assignments and all(
                container[key] is value for container, key, value in self._entries
            )
        except (KeyError, IndexError):
            return False


class DecodeStep:
    """Runs one token at a time through ``model``; ``how`` says in a few words in which way."""

    def __init__(
        self,
        model: nn.Module,
        cache: Sequence[LayerCache],
        *,
        fixed: bool = True,
        arrays: Sequence[mx.array] = (),
        slots: SlotMaps | None = None,
    ):
        """``cache`` is like those of the steps to come. ``fixed`` says that the operations of a step do not depend on
        what it computes; with ``slots`` they may be run as if they did not. ``arrays`` are what they read beside the
        model's parameters."""
        self._model, self._arrays, self._slots = model, arrays, slots
        backend: Backend = model.backend
        self._ropes: list[RoPE] | None = None
        self._run: Callable[[int | Begun, int, Found, list[Buffers]], _Result | Begun] | None = None
        self.how = "one operation after the other"
        self._where = " while experts are in their slots" * (not fixed)
        if not fixed and (slots is None or backend.launch is None):
            self.how += ", because experts are chosen on the way"
        elif backend.launch is not None and not all(layer.places(1) for layer in cache):
            self.how += ", because a state is not written in place"
        elif backend.launch is not None:
            if backend.graphs:
                self._run, self.how = self._run_graph, "one CUDA graph"
            elif backend.device == "gpu":
                self._run, self.how = self._run_compiled, COMPILED
            else:
                self._run, self.how = self._run_recorded, "one list of kernels"
            self.how += self._where
        self._compiled: Callable[..., Sequence[mx.array]] | None = None
        self._recorded: _Recorded | _Graph | None = None
        self._known: Known | None = None
        self._contents: _Contents | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the operations of a step run together, as far as is known."""
        return self._run is not None

    @property
    def is_apart(self) -> bool:
        """Whether a step has its own way of running kernels, which passes of several tokens do not share."""
        return self._run == self._run_graph

    def __call__(self, token: int, cache: Sequence[LayerCache], *, by_layer: bool = False) -> _Result:
        """Float32 logits ``[vocab]`` behind ``token``; not yet evaluated where MLX computes them. With them comes what
        ``SlotMaps.settle`` has to find right before they count, or None.

        ``by_layer`` runs one operation after the other, with experts read on the way. ``cache`` moves on by one token.
        Whoever catches an error trims it.
        """
        result = self._advance(token, cache, by_layer)
        return result if isinstance(result, tuple) else (result.logits, result.routed)

    def begin(self, after: int | Begun, cache: Sequence[LayerCache]) -> Begun:
        """Run a token on a GPU without waiting: ``after`` is its id, or the step that was begun last, whose likeliest
        token it is."""
        result = self._advance(after, cache, by_layer=False)
        return _Evaluating(_token(after), *result) if isinstance(result, tuple) else result

    def wait(self) -> None:
        """Return when no step writes any more that MLX does not know of, even one whose beginning was interrupted."""
        if self._recorded is not None:
            self._recorded.wait()

    def _advance(self, after: int | Begun, cache: Sequence[LayerCache], by_layer: bool) -> _Result | Begun:
        offset = cache[0].offset
        found = self._model.look_up(after, cache) if self._model.looks_up else {}
        if self.is_whole and not by_layer and all(layer.arrays for layer in cache):
            buffers = [layer.place(1) for layer in cache]
            while self.is_whole:
                try:
                    known = self._contents is not None and self._contents.unchanged()
                    result = (self._run if known else self._first)(after, offset, found, buffers)
                except NotRecordable as reason:
                    self._give_up(reason)
                else:
                    if isinstance(result, tuple):
                        for layer in cache:
                            layer.written(result[0])
                    return result
            for layer in cache:
                layer.trim(1)
        logits = _logits(self._model, _token(after), cache, Positions(offset, 1), _arrays(found))
        return logits.astype(mx.float32), None

    def _give_up(self, reason: NotRecordable) -> None:
        """Go over to the way that asks for less."""
        if self.is_apart:
            self._run, self.how = self._run_compiled, f"{COMPILED}{self._where}, because {reason}"
        else:
            self._run, self.how = None, f"one operation after the other, because {reason}"

    def _first(self, after: int | Begun, offset: int, found: Found, buffers: list[Buffers]) -> _Result | Begun:
        """Run the model as it is, to learn which rotations it asks for."""
        self.wait()
        positions = Positions(offset, 1)
        states = [_PlacedState(buffer) for buffer in buffers]
        maps = self._maps()
        with observed(zeros) if self.is_apart else nullcontext():
            outputs = self._outputs(_token(after), states, positions, _arrays(found), maps)
        self._ropes, self._contents = positions.ropes, _Contents(self._model)
        self._compiled = self._recorded = self._known = None
        if self.is_apart:
            return self._run_graph(after, offset, found, buffers)
        return self._result(self._joined(*outputs), maps)

    def _maps(self) -> list[mx.array]:
        return self._slots.arrays() if self._slots else []

    def _outputs(
        self,
        token: mx.array,
        states: list[_PlacedState],
        positions: Positions,
        found: dict[str, mx.array],
        maps: list[mx.array],
    ) -> tuple[mx.array, list[mx.array]]:
        """Logits and, where experts are in slots, what each layer chose."""
        compute = partial(_logits, self._model, token, states, positions, found)
        return self._slots.laid_out(maps, compute) if self._slots else (compute(), [])

    def _joined(self, logits: mx.array, chosen: list[mx.array]) -> tuple[mx.array, ...]:
        """The same in as few arrays as there can be, which MLX evaluates."""
        joined = [mx.concatenate([ids.reshape(-1).astype(mx.int32) for ids in chosen])] if chosen else []
        return logits.astype(mx.float32), *joined

    def _result(self, joined: Sequence[mx.array], maps: list[mx.array]) -> _Result:
        logits, *joined = joined
        if not joined:
            return logits, None
        routed = Routed(partial(np.array, *joined), maps, *joined)
        return logits, self._slots.launched(routed, partial(mx.eval, logits))

    def _tables(self, offset: int) -> list[np.ndarray]:
        return [rope.table(offset, 1) for rope in self._ropes]

    def _run_compiled(self, after: int | Begun, offset: int, found: Found, buffers: list[Buffers]) -> _Result:
        if self._compiled is None:

            def step(token, start, tables, found, buffers, maps):
                positions = _StepPositions(start, dict(zip(self._ropes, tables, strict=True)))
                states = [_PlacedState(buffer) for buffer in buffers]
                return self._joined(*self._outputs(token, states, positions, found, maps))

            self._compiled = mx.compile(step)
        tables, maps = [mx.array(table) for table in self._tables(offset)], self._maps()
        try:
            given = _token(after), mx.array([offset], mx.int32), tables, _arrays(found), buffers, maps
            joined = self._compiled(*given)
        except (ValueError, RuntimeError) as error:
            raise NotRecordable(f"it cannot be traced: {error}") from error
        return self._result(joined, maps)

    def _run_recorded(self, token: int, offset: int, found: Found, buffers: list[Buffers]) -> _Result:
        new = (token, offset, self._tables(offset), found)
        if self._recorded is None or not self._recorded.moved_to(buffers):
            self._recorded = _Recorded(self._model, self._arrays, self._ropes, new, buffers)
            return self._recorded.logits, None
        return self._recorded(*new), None

    def _run_graph(self, after: int | Begun, offset: int, found: Found, buffers: list[Buffers]) -> Begun:
        maps, tables = self._maps(), self._tables(offset)
        try:
            if self._recorded is None or not self._recorded.moved_to(buffers):
                if self._known is None:
                    self._known = Known([*self._arrays, *_flat(self._model.parameters())])
                    bring(self._known)
                learnt = self._model.backend, self._known, self._ropes, self._outputs
                self._recorded = _Graph(*learnt, (tables, found, maps), buffers, self._recorded)
            step = self._recorded(after, offset, tables, found, maps)
        except BackendError as error:
            raise NotRecordable(str(error)) from error
        if self._slots is not None:
            step.routed = self._slots.launched(Routed(step.chosen, maps), step.wait)
        return step


def _token(after: int | Begun) -> mx.array:
    """The token of a step, int32 ``[1, 1]``."""
    if isinstance(after, _Evaluating):
        return after.next_token
    return mx.array([[after if isinstance(after, int) else after.likeliest]], mx.int32)


class _OverBuffers:
    """The kernels of one step over certain buffers; ``_recording`` has them."""

    def __init__(self, buffers: list[Buffers]):
        mx.eval(buffers)
        self._lent = _flat(buffers)

    def wait(self) -> None:
        """Return when nothing is written into the buffers any more."""

    def moved_to(self, buffers: list[Buffers]) -> bool:
        """Go over to ``buffers``, not yet evaluated; False where they are not like those that were recorded."""
        pairs = list(zip(self._lent, new := _flat(buffers), strict=True))
        if all(mine is theirs for mine, theirs in pairs):
            return True
        # Where they are made of the others, those have to be complete.
        self.wait()
        if any(mine.shape != theirs.shape or mine.dtype != theirs.dtype for mine, theirs in pairs):
            return False
        mx.eval(buffers)
        self._recording.move(self._lent, new)
        self._lent = new
        return True


def _flat(arrays: Any) -> list[mx.array]:
    return [array for _, array in tree_flatten(arrays)]


class _Recorded(_OverBuffers):
    """A list of kernels, and the memory through which they are told what is new."""

    def __init__(
        self,
        model: nn.Module,
        arrays: Sequence[mx.array],
        ropes: list[RoPE],
        first: tuple[int, int, list[np.ndarray], Found],
        buffers: list[Buffers],
    ):
        super().__init__(buffers)
        ids, start, rotations = mx.zeros((1, 1), mx.int32), mx.zeros((1,), mx.int32), list(map(mx.array, first[2]))
        found = _arrays(first[3])
        inputs = [ids, start, *rotations, *found.values()]
        mx.eval(inputs)
        self._memory = [np.array(array, copy=False) for array in inputs]
        self._tell(*first)
        positions = _StepPositions(start, dict(zip(ropes, rotations, strict=True)))
        states = [_PlacedState(buffer) for buffer in buffers]
        with HostRecording([*inputs, *arrays, *_flat(model.parameters())], self._lent) as self._recording:
            self._recording.finish(_logits(model, ids, states, positions, found))

    @property
    def logits(self) -> mx.array:
        """What the last run gave."""
        return mx.array(self._recording.result)

    def _tell(self, token: int, offset: int, tables: list[np.ndarray], found: Found) -> None:
        ids, start, *others = self._memory
        ids[0, 0], start[0] = token, offset
        for memory, new in zip(others, [*tables, *found.values()], strict=True):
            memory[...] = new

    def __call__(self, token: int, offset: int, tables: list[np.ndarray], found: Found) -> mx.array:
        self._tell(token, offset, tables, found)
        self._recording.replay()
        return self.logits


class _Graph(_OverBuffers):
    """A CUDA graph of kernels, told what is new in front of each launch."""

    def __init__(
        self,
        backend: Backend,
        known: Known,
        ropes: list[RoPE],
        outputs: Callable[..., tuple[mx.array, list[mx.array]]],
        told: tuple[list[np.ndarray], Found, list[mx.array]],
        buffers: list[Buffers],
        instead: _Graph | None,
    ):
        """``outputs`` is given the token, states, positions, and, as ``told`` has them after the rotations, what was
        found, and maps; see `DecodeStep`. ``instead`` is what was recorded over other buffers, if anything was."""
        super().__init__(buffers)
        tables, found, maps = told
        self._maps: list[mx.array] = []
        self._last: _Launched | None = None
        self._recording = GraphRecording(known, self._lent, self._told(0, 0, *told))
        ids, start, *others = self._recording.inputs
        rotations, others = others[: len(tables)], others[len(tables) :]
        positions = _StepPositions(start, dict(zip(ropes, rotations, strict=True)))
        states = [_PlacedState(buffer) for buffer in buffers]
        with self._recording.noting():
            ends = np.cumsum([slot_map.size for slot_map in maps]).tolist()
            parts = [others[-1][first:end] for first, end in zip([0, *ends], ends, strict=False)]
            logits, chosen = outputs(ids, states, positions, dict(zip(found, others, strict=False)), parts)
            results = logits, [*largest(logits, backend=backend), *chosen]
            self._recording.finish(*results, instead=instead and instead._recording)

    def _told(
        self, token: int | None, offset: int, tables: list[np.ndarray], found: Found, maps: list[mx.array]
    ) -> list[np.ndarray | None]:
        if any(new is not old for new, old in zip_longest(maps, self._maps)):
            self._maps, self._flat_maps = maps, [np.concatenate([np.array(slot_map) for slot_map in maps])]
        ids = None if token is None else np.array([[token]], np.int32)
        return [ids, np.array([offset], np.int32), *tables, *found.values(), *(self._flat_maps if maps else ())]

    def __call__(
        self, after: int | Begun, offset: int, tables: list[np.ndarray], found: Found, maps: list[mx.array]
    ) -> _Launched:
        if not isinstance(after, int) and after is not self._last:
            after = after.likeliest
        token = after if isinstance(after, int) else None
        self._last = _Launched(after, self._recording.begin(self._told(token, offset, tables, found, maps)))
        return self._last

    def wait(self) -> None:
        self._recording.wait()
