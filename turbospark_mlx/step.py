"""The decode step: one token through all layers, as cheaply as the back end allows.

Every operation of a pass costs time in Python and MLX before it costs any on the device. The operations of a step are
the same for every token, so they are found once, by running the model, and then run together: on a GPU as one compiled
graph (``mx.compile``), on a CPU as one list of kernels and buffers. What differs between tokens is in arrays: the
token, its position, the rotations there, and what a model finds by it on the host. Keys and values are written in
place, so that nothing else comes back, but for the experts that were chosen where a GPU has only some of them.

A step notices parameters and modules that were replaced, and finds its operations again. It cannot notice a method that
was patched on a class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.replay import HostRecording, NotRecordable
from turbospark_mlx.experts import Routed, SlotMaps
from turbospark_mlx.families.layers import Module, Positions, RoPE
from turbospark_mlx.protocols import LayerCache

Buffers = mx.array | tuple["Buffers", ...]
"""What one layer's kernels write a token into."""
Found = dict[str, np.ndarray]
"""``CausalModel.look_up``: what a pass is given beside its token."""

_Result = tuple[mx.array, Routed | None]


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
    return model.head(model.hidden(token, states, positions=positions, **found))[0, 0].astype(mx.float32)


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
        self._run: Callable[[mx.array | int, int, Found, list[Buffers]], _Result] | None = None
        self.how = "one operation after the other"
        if not fixed and (slots is None or backend.launch is None):
            self.how += ", because experts are chosen on the way"
        elif backend.launch is not None and not all(layer.places(1) for layer in cache):
            self.how += ", because a state is not written in place"
        elif backend.launch is not None:
            self._run, self.how = (
                (self._run_compiled, "one compiled graph")
                if backend.device == "gpu"
                else (self._run_recorded, "one list of kernels")
            )
            self.how += " while experts are in their slots" * (not fixed)
        self._compiled: Callable[..., Sequence[mx.array]] | None = None
        self._recorded: _Recorded | None = None
        self._contents: _Contents | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the operations of a step run together, as far as is known."""
        return self._run is not None

    def __call__(self, token: int | mx.array, cache: Sequence[LayerCache], *, by_layer: bool = False) -> _Result:
        """Float32 logits ``[vocab]`` behind ``token``, an id or an int32 array ``[1, 1]``; not yet evaluated on a GPU.
        With them comes what ``SlotMaps.settle`` has to find right before they count, or None.

        ``by_layer`` runs one operation after the other, with experts read on the way. ``cache`` moves on by one token.
        Whoever catches an error trims it.
        """
        offset = cache[0].offset
        found = self._model.look_up(token, cache)
        if self.is_whole and not by_layer and all(layer.arrays for layer in cache):
            buffers = [layer.place(1) for layer in cache]
            try:
                known = self._contents is not None and self._contents.unchanged()
                result = (self._run if known else self._first)(token, offset, found, buffers)
                for layer in cache:
                    layer.written(result[0])
                return result
            except NotRecordable as reason:
                self._run, self.how = None, f"one operation after the other, because {reason}"
                for layer in cache:
                    layer.trim(1)
        return _logits(self._model, _ids(token), cache, Positions(offset, 1), _arrays(found)), None

    def _first(self, token: int | mx.array, offset: int, found: Found, buffers: list[Buffers]) -> _Result:
        """Run the model as it is, to learn which rotations it asks for."""
        positions = Positions(offset, 1)
        states = [_PlacedState(buffer) for buffer in buffers]
        maps = self._maps()
        outputs = self._outputs(_ids(token), states, positions, _arrays(found), maps)
        self._ropes, self._contents = positions.ropes, _Contents(self._model)
        self._compiled = self._recorded = None
        return self._result(outputs, maps)

    def _maps(self) -> list[mx.array]:
        return self._slots.arrays() if self._slots else []

    def _outputs(
        self,
        token: mx.array,
        states: list[_PlacedState],
        positions: Positions,
        found: dict[str, mx.array],
        maps: list[mx.array],
    ) -> tuple[mx.array, ...]:
        """Logits and, where experts are in slots, what was chosen."""
        compute = partial(_logits, self._model, token, states, positions, found)
        return self._slots.laid_out(maps, compute) if self._slots else (compute(),)

    def _result(self, outputs: Sequence[mx.array], maps: list[mx.array]) -> _Result:
        return outputs[0], self._slots.launched(*outputs, maps) if self._slots else None

    def _tables(self, offset: int) -> list[np.ndarray]:
        return [rope.table(offset, 1) for rope in self._ropes]

    def _run_compiled(self, token: int | mx.array, offset: int, found: Found, buffers: list[Buffers]) -> _Result:
        if self._compiled is None:

            def step(token, start, tables, found, buffers, maps):
                positions = _StepPositions(start, dict(zip(self._ropes, tables, strict=True)))
                return self._outputs(token, [_PlacedState(buffer) for buffer in buffers], positions, found, maps)

            self._compiled = mx.compile(step)
        tables, maps = [mx.array(table) for table in self._tables(offset)], self._maps()
        try:
            given = _ids(token), mx.array([offset], mx.int32), tables, _arrays(found), buffers, maps
            outputs = self._compiled(*given)
        except (ValueError, RuntimeError) as error:
            raise NotRecordable(f"it cannot be traced: {error}") from error
        return self._result(outputs, maps)

    def _run_recorded(self, token: int, offset: int, found: Found, buffers: list[Buffers]) -> _Result:
        new = (token, offset, self._tables(offset), found)
        if self._recorded is None or not self._recorded.moved_to(buffers):
            self._recorded = _Recorded(self._model, self._arrays, self._ropes, new, buffers)
            return self._recorded.logits, None
        return self._recorded(*new), None


def _ids(token: int | mx.array) -> mx.array:
    return token if isinstance(token, mx.array) else mx.array([[token]], mx.int32)


class _Recorded:
    """The kernels of one step over certain buffers, and the memory through which they are told what is new."""

    def __init__(
        self,
        model: nn.Module,
        arrays: Sequence[mx.array],
        ropes: list[RoPE],
        first: tuple[int, int, list[np.ndarray], Found],
        buffers: list[Buffers],
    ):
        self._buffers = buffers
        ids, start, rotations = mx.zeros((1, 1), mx.int32), mx.zeros((1,), mx.int32), list(map(mx.array, first[2]))
        found = _arrays(first[3])
        inputs = [ids, start, *rotations, *found.values()]
        mx.eval(inputs, buffers)
        lent = [array for _, array in tree_flatten(buffers)]
        self._memory = [np.array(array, copy=False) for array in inputs]
        self._tell(*first)
        positions = _StepPositions(start, dict(zip(ropes, rotations, strict=True)))
        states = [_PlacedState(buffer) for buffer in buffers]
        known = [*inputs, *arrays, *(array for _, array in tree_flatten(model.parameters()))]
        with HostRecording(known, lent) as self._recording:
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

    def moved_to(self, buffers: list[Buffers]) -> bool:
        """Go over to ``buffers``; False where they are not like those that were recorded."""
        old, new = ([array for _, array in tree_flatten(each)] for each in (self._buffers, buffers))
        pairs = list(zip(old, new, strict=True))
        if all(mine is theirs for mine, theirs in pairs):
            return True
        if any(mine.shape != theirs.shape or mine.dtype != theirs.dtype for mine, theirs in pairs):
            return False
        mx.eval(buffers)
        self._recording.move(old, new)
        self._buffers = buffers
        return True

    def __call__(self, token: int, offset: int, tables: list[np.ndarray], found: Found) -> mx.array:
        self._tell(token, offset, tables, found)
        self._recording.replay()
        return self.logits
