"""The routed experts of an open install: the factory that a model is given, and what it made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import mlx.core as mx

from turbospark_mlx.custom_kernels import ExpertArena, expert_mixture
from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.experts_cpu import WARM_UP_ROWS
from turbospark_mlx.errors import OptionError
from turbospark_mlx.experts.blob import describe, used_bytes
from turbospark_mlx.experts.chunks import most_rows
from turbospark_mlx.experts.counters import ExpertCounters
from turbospark_mlx.experts.in_place import InPlace
from turbospark_mlx.experts.mapped import map_experts
from turbospark_mlx.experts.on_device import SlotMaps
from turbospark_mlx.experts.reader import THREADS, ExpertReader
from turbospark_mlx.experts.resolve import Resolved, resolve
from turbospark_mlx.experts.slots import Policy, SlotTable
from turbospark_mlx.experts.streamed import Streamed
from turbospark_mlx.gturbo import Install
from turbospark_mlx.memory import available_bytes
from turbospark_mlx.protocols import Experts, ExpertSpec

GPU_WARM_UP_ROWS = (2, 1)
"""Rows that take each way there is on a GPU."""


class ExpertStore:
    """Calling it makes the experts of one layer (``protocols.ExpertFactory``). A context manager.

    ``resolved`` says where experts live and why. Layers may be made once each; it belongs to the runner's thread.
    """

    def __init__(self, install: Install, resolved: Resolved, *, backend: Backend, policy: Policy, reader: ExpertReader):
        self.resolved = resolved
        self._install, self._backend, self._policy = install, backend, policy
        self._layers: dict[int, Experts] = {}
        self._reader = reader
        self._most_rows: int | None = None

    def __call__(self, position: int, spec: ExpertSpec) -> Experts:
        """The experts of the ``position``-th layer that has any. Raises InstallError where nothing computes with them,
        or where reading them fails; OptionError for fewer slots than a token needs."""
        place, file = self._install.experts.layers[position], self._install.expert_file(position)
        blob, used = describe(place, spec, file.label), used_bytes(place)
        rows = most_rows(spec.top_k, spec.hidden)
        self._most_rows = min(rows, self._most_rows or rows)
        match self.resolved.residency:
            case "mapped":
                made = map_experts(file, place, blob, self._backend)
            case "resident":
                arena = ExpertArena.allocate(blob, spec.num_experts, place.stride)
                reads = self._reader.reads(position, range(spec.num_experts), [b[:used] for b in arena.blobs])
                reads.start()
                reads.wait()
                made = InPlace(arena, self._backend)
            case _:
                if self.resolved.slots < min(spec.top_k, spec.num_experts):
                    raise OptionError(
                        f"expert_slots={self.resolved.slots}: layer {place.layer} uses {spec.top_k} experts at once."
                    )
                take = ExpertArena.reserve if self._backend.device == "cpu" else ExpertArena.allocate
                made = Streamed(
                    take(blob, self.resolved.slots, place.stride),
                    SlotTable(self.resolved.slots, spec.num_experts, self._policy),
                    position=position,
                    read_bytes=used,
                    reader=self._reader,
                    backend=self._backend,
                )
        self._layers[position] = made
        return made

    @property
    def most_rows(self) -> int | None:
        """The longest chunk of a prompt within which every expert is read at most once; None without layers."""
        return self._most_rows

    @property
    def reads_files(self) -> bool:
        """Whether the install's files are needed as long as the model is."""
        return self.resolved.residency != "resident"

    @property
    def on_host(self) -> bool:
        """Whether the router's choice may come to the host in the middle of a step."""
        return not all(isinstance(layer, InPlace) and layer.fixed for layer in self._layers.values())

    @cached_property
    def slot_maps(self) -> SlotMaps | None:
        """What lays a step out over slots all the same: for a GPU, once all layers were made. None without slots, and
        on a CPU, which waits for nothing."""
        layers = self._streamed()
        return SlotMaps(layers) if layers and self._backend.device == "gpu" else None

    @property
    def arrays(self) -> list[mx.array]:
        """Where experts lie: what steps read that are laid out before they run."""
        arrays = [layer.arena.array for layer in self._layers.values()]
        return [array for array in arrays if array is not None]

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Inside, mixtures are zeros, and nothing is read or counted: for what is run to compile its kernels."""
        for layer in self._layers.values():
            layer.idle = True
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.idle = False

    def settle(self) -> None:
        """After an error in the middle of a pass: stop what it began."""
        for layer in self._streamed():
            layer.settle()

    def compile_kernels(self, dtype: mx.Dtype) -> None:
        """Mix zeros in ``dtype``, for many rows an expert and for few, so that no kernel is compiled in the middle of
        an answer. On a GPU a pass that warms up has run all of them but those that a streamed layer's `idle` leaves."""
        if self._backend.launch is None:
            return
        on_cpu = self._backend.device == "cpu"
        counts = WARM_UP_ROWS if on_cpu else GPU_WARM_UP_ROWS
        layers = [layer for _, layer in sorted(self._layers.items())] if on_cpu else self._streamed()
        arenas = {layer.arena.blob: layer.arena for layer in reversed(layers)}
        for blob, arena in arenas.items():
            for count in counts:
                slots = mx.zeros((count, 1), mx.int32)
                x = mx.zeros((count, blob.gate.columns), dtype)
                for residual in (None, x):
                    weights = mx.zeros((count, 1))
                    mx.eval(expert_mixture(arena, slots, x, weights, residual=residual, backend=self._backend))

    @property
    def counters(self) -> list[ExpertCounters]:
        """What was read so far, a layer at a time; zeros where nothing is streamed."""
        return [getattr(layer, "counters", ExpertCounters()) for _, layer in sorted(self._layers.items())]

    def routing(self) -> list[list[int]]:
        """How often each expert of each layer was wanted, once a chunk; what ``warm`` takes. Empty where nothing is
        streamed."""
        return [layer.table.use_count.copy() for layer in self._streamed()]

    def warm(self, routing: Sequence[Sequence[float]]) -> None:
        """Fill the slots with the experts that ``routing`` (see there) has most often, before the first token. Does
        nothing where nothing is streamed. Raises OptionError for a histogram of another model."""
        layers = self._streamed()
        if not layers:
            return
        shape = [len(layer.table.use_count) for layer in layers]
        if [len(counts) for counts in routing] != shape:
            raise OptionError(
                f"routing has {[len(counts) for counts in routing][:3]}... experts in {len(routing)} layers; this model"
                f" has {shape[0]} in {len(shape)}."
            )
        for layer, counts in zip(layers, routing, strict=True):
            ranked = sorted(range(len(counts)), key=lambda expert: -counts[expert])
            layer.load(ranked[: len(layer.table)])

    def _streamed(self) -> list[Streamed]:
        return [layer for _, layer in sorted(self._layers.items()) if isinstance(layer, Streamed)]

    def __enter__(self) -> ExpertStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the reading threads; a second call does nothing. What streams cannot be used any more."""
        self._reader.close()


def open_experts(
    install: Install,
    *,
    backend: Backend,
    residency: str = "auto",
    slots: int | str = "auto",
    policy: Policy = "lfu",
    threads: int = THREADS,
    read_ahead: bool = False,
    checksum: bool = False,
    room: int | None = None,
) -> ExpertStore:
    """The routed experts of an install, to be given to its model and closed before the install.

    ``residency`` is ``"resident"`` (all in memory), ``"streamed"`` (``slots`` of them a layer, the others on disk),
    ``"mapped"`` (in the page cache) or ``"auto"``: resident where everything fits, else streamed. ``slots`` is a number
    or ``"auto"``. ``policy`` says which expert gives way: ``"lfu"`` or ``"lru"``; ``threads`` read.
    ``read_ahead`` tells the system early what a long prompt will read. ``checksum`` checks each expert that is read
    against a sum taken now, which reads all of them once. ``room`` is the memory free for experts in bytes; by
    default what is available now, less the resident tensors. Raises OptionError and InstallError.
    """
    if room is None:
        weights = sum(entry.nbytes for entry in install.tensors.values())
        room = max(0, available_bytes(backend.device) - weights)
    top_k = install.arch.get("topKExperts", 0)
    resolved = resolve(install.experts, top_k, residency=residency, slots=slots, room=room)
    reader = ExpertReader(install, threads=threads, read_ahead=read_ahead, checksum=checksum)
    return ExpertStore(install, resolved, backend=backend, policy=policy, reader=reader)
