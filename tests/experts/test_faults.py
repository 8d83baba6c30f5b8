"""What goes wrong while experts are read: a clear error, and then either right answers or the same error again."""

import errno
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.experts import layers
from turbospark_mlx.custom_kernels.backends import select
from turbospark_mlx.errors import InstallError, OptionError
from turbospark_mlx.experts import open_experts, reader
from turbospark_mlx.gturbo import files

SPEC = layers.SPEC
LAYER = "packed_experts/layer_00.bin"
LAYOUT = "packed_experts/layout.json"


@pytest.fixture
def written(tmp_path):
    return layers.write(tmp_path / "i.gturbo", layers=1)


@pytest.fixture
def backend():
    return select("auto")


def step(seed, rows=1):
    rng = np.random.default_rng(seed)
    return layers.route(rng, SPEC, rows), *layers.inputs(rng, SPEC, rows)


def mixed(layer, work):
    indices, x, weights = work
    return np.array(layer.finish(layer.begin(indices), x, weights))


def expected(written, backend, work):
    with written.open() as install, open_experts(install, backend=backend, residency="resident") as store:
        return mixed(store(0, SPEC), work)


class Disk:
    """Stands in for preadv: fails, ends early or dawdles where it is told to."""

    def __init__(self, monkeypatch):
        self.fail_at, self.short, self.reads = None, None, 0
        self._lock, self._preadv = threading.Lock(), os.preadv
        monkeypatch.setattr(files.os, "preadv", self)

    def __call__(self, fd, buffers, offset):
        with self._lock:
            self.reads += 1
            number = self.reads
        if number == self.fail_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.short:
            buffers = [buffers[0][: max(1, len(buffers[0]) // self.short)]]
        return self._preadv(fd, buffers, offset)


@pytest.mark.parametrize("failing", [1, 3, 9])
@pytest.mark.parametrize("rows", [1, 20])
def test_a_read_error_names_everything_and_is_over_when_the_disk_is_well(written, backend, monkeypatch, failing, rows):
    monkeypatch.setattr(reader, "PIECE_BYTES", 8192)
    first, second = step(1), step(2, rows)
    if rows == 1:
        second = (first[0] + SPEC.top_k) % SPEC.num_experts, *second[1:]
    with written.open() as install, open_experts(install, backend=backend, residency="streamed", slots=5) as store:
        layer = store(0, SPEC)
        mixed(layer, first)
        disk = Disk(monkeypatch)
        disk.fail_at = failing
        with pytest.raises(InstallError, match=rf"Expert \d+ of layer 0 could not be read\. .*{LAYER}: .*Input/output"):
            mixed(layer, second)
        monkeypatch.undo()
        assert np.array_equal(mixed(layer, second), expected(written, backend, second))
        assert np.array_equal(mixed(layer, first), expected(written, backend, first))


def test_short_reads_are_completed(written, backend, monkeypatch):
    work = step(1, 20)
    right = expected(written, backend, work)
    Disk(monkeypatch).short = 3
    with written.open() as install, open_experts(install, backend=backend, residency="streamed", slots=5) as store:
        assert np.array_equal(mixed(store(0, SPEC), work), right)


def test_a_file_that_is_cut_while_open(written, backend):
    with written.open() as install, open_experts(install, backend=backend, residency="streamed", slots=8) as store:
        layer, held = store(0, SPEC), step(1)
        right = mixed(layer, held)
        os.truncate(f"{written.path}/{LAYER}", 3 * 32768)
        # What is in slots is still what was read.
        assert np.array_equal(mixed(layer, held), right)
        with pytest.raises(InstallError, match=rf"{LAYER}: (ends at byte|was changed)"):
            mixed(layer, step(2, 20))


def test_a_file_that_is_written_to_while_open(written, backend):
    with written.open() as install, open_experts(install, backend=backend, residency="streamed", slots=5) as store:
        layer, held = store(0, SPEC), step(1)
        right = mixed(layer, held)
        with open(f"{written.path}/{LAYER}", "r+b") as file:
            file.seek(5)
            file.write(b"x")
        assert np.array_equal(mixed(layer, held), right)
        for _ in range(2):
            with pytest.raises(InstallError, match=rf"layer 0 could not be read\. .*{LAYER}: was changed while it was"):
                mixed(layer, step(2, 20))


def test_a_map_of_a_file_that_is_written_to(written, backend):
    with written.open() as install, open_experts(install, backend=backend, residency="mapped") as store:
        layer = store(0, SPEC)
        mixed(layer, step(1))
        os.truncate(f"{written.path}/{LAYER}", 3 * 32768)
        with pytest.raises(InstallError, match=f"{LAYER}: was changed while it was open"):
            mixed(layer, step(1))


@pytest.mark.parametrize("residency", ["streamed", "mapped"])
def test_a_renamed_and_a_replaced_file_keep_the_old_bytes(written, backend, residency):
    work = step(2, 20)
    right, path = expected(written, backend, work), f"{written.path}/{LAYER}"
    with (
        written.open() as install,
        open_experts(install, backend=backend, residency=residency, **layers.slots_for(residency, 5)) as store,
    ):
        layer = store(0, SPEC)
        mixed(layer, step(1))
        os.rename(path, f"{path}.old")
        with open(path, "wb") as file:
            file.write(bytes(16 * 32768))
        assert np.array_equal(mixed(layer, work), right)
        os.remove(f"{path}.old")
        assert np.array_equal(mixed(layer, step(3)), mixed(layer, step(3)))


def test_checksums_find_what_the_times_do_not_show(written, backend, monkeypatch):
    work = step(2, 20)
    right = expected(written, backend, work)
    options = {"backend": backend, "residency": "streamed", "slots": 5}
    with written.open() as install, open_experts(install, checksum=True, **options) as store:
        layer = store(0, SPEC)
        assert np.array_equal(mixed(layer, work), right)
        preadv = os.preadv

        def flipped(fd, buffers, offset):
            count = preadv(fd, buffers, offset)
            buffers[0][100] ^= 1
            return count

        with monkeypatch.context() as patch:
            patch.setattr(files.os, "preadv", flipped)
            with pytest.raises(InstallError, match=rf"Expert \d+ of layer 0 .*{LAYER}: gave bytes with CRC-32"):
                mixed(layer, work)
        assert np.array_equal(mixed(layer, work), right)
    with open(f"{written.path}/{LAYER}", "r+b") as file:
        file.seek(40_000)
        file.write(b"\xff\x00\xff")
    with written.open() as install, pytest.raises(InstallError, match=f"{LAYER}: has SHA-256"):
        open_experts(install, checksum=True, **options)


def test_after_the_install_is_closed_nothing_is_read(written, backend):
    with written.open() as install:
        store = open_experts(install, backend=backend, residency="streamed", slots=5)
        layer = store(0, SPEC)
    with pytest.raises(InstallError, match="read after the install was closed"):
        mixed(layer, step(1))
    store.close()
    store.close()


REFUSALS = {
    "too few slots": (
        {"residency": "streamed", "slots": 3},
        "expert_slots=3: every token uses 4 experts .* 1 layer x 4 slots take 131 KB",
    ),
    "no slots": ({"residency": "streamed", "slots": 0}, "expert_slots=0: a whole number"),
    "slots of what has none": ({"residency": "mapped", "slots": 8}, "no slots with residency='mapped'"),
    "no such residency": ({"residency": "swapped"}, "residency='swapped': possible are auto, resident"),
    "no such policy": ({"residency": "streamed", "policy": "fifo"}, "expert_policy='fifo'"),
    "no room for slots": ({"slots": 16, "room": 400_000}, "16 slots take 524 KB, and 400 KB of memory are free"),
    "no room at all": ({"room": 100_000}, r"At least 4 slots \(131 KB\) must fit"),
    "no room for all": ({"residency": "resident", "room": 400_000}, "1 layer x 16 experts take 524 KB"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_work_is_refused_at_open(written, backend, case):
    options, message = REFUSALS[case]
    with written.open() as install, pytest.raises(OptionError, match=message):
        open_experts(install, backend=backend, **options)(0, SPEC)


AUTO = {
    "everything fits": (2 << 30, {}, ("resident", 0)),
    "a quarter of the room": (300_000 * 4, {}, ("streamed", 16)),
    "the floor": (16 * 32768, {}, ("streamed", 16)),
    "less than the floor": (10 * 32768, {}, ("streamed", 8)),
    "hardly anything": (5 * 32768, {}, ("streamed", 4)),
    "slots asked for": (2 << 30, {"slots": 5}, ("streamed", 5)),
    "more slots than experts": (2 << 30, {"slots": 99}, ("streamed", 16)),
}


@pytest.mark.parametrize("case", AUTO)
def test_what_auto_chooses(written, backend, case):
    room, options, (residency, slots) = AUTO[case]
    with written.open() as install, open_experts(install, backend=backend, room=room, **options) as store:
        assert (store.resolved.residency, store.resolved.slots) == (residency, slots)
        assert store.resolved.nbytes == (slots or 16) * 32768
        assert residency in str(store.resolved)


def test_experts_in_another_order_on_disk(written, backend):
    """The slots of a map are the experts, wherever they lie."""
    work = step(2, 20)
    right = expected(written, backend, work)
    root = Path(written.path)
    data, layout = (root / LAYER).read_bytes(), json.loads((root / LAYOUT).read_text())
    for expert in layout["layers"][0]["experts"]:
        expert["offset"] = (15 - expert["expert"]) * 32768
    (root / LAYER).write_bytes(b"".join(data[e * 32768 : (e + 1) * 32768] for e in reversed(range(16))))
    (root / LAYOUT).write_text(json.dumps(layout, separators=(",", ":")))
    manifest = json.loads((root / "manifest.json").read_text())
    manifest["files"][LAYOUT]["size"] = (root / LAYOUT).stat().st_size
    (root / "manifest.json").write_text(json.dumps(manifest))
    for residency in ("resident", "streamed", "mapped"):
        with (
            written.open() as install,
            open_experts(install, backend=backend, residency=residency, **layers.slots_for(residency, 5)) as store,
        ):
            assert np.array_equal(mixed(store(0, SPEC), work), right), residency
