"""Reading threads: there at once, with stacks that a limit on the process's data does not feel."""

import os
import re
import sys
import threading
import time
from pathlib import Path

import pytest

from turbospark_mlx import readers
from turbospark_mlx.gturbo.files import Directory
from turbospark_mlx.readers import STACK_BYTES, start_readers


def data_bytes():
    return int(re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_stacks_are_small():
    before, threads = data_bytes(), threading.active_count()
    with start_readers(8) as pool:
        assert threading.active_count() == threads + 8
        assert pool.submit(sum, [1, 2]).result() == 3
        assert data_bytes() - before < 8 * 2 * STACK_BYTES
        assert threading.stack_size(0) == 0  # which is the system's own
    assert threading.active_count() == threads


def test_a_system_without_threads_is_not_waited_for(monkeypatch):
    start, left = threading.Thread.start, [2]

    def fail(self):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", fail)
    threads = threading.active_count()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        start_readers(8)
    assert threading.active_count() == threads


def test_pools_that_are_started_together_leave_the_size_as_it_was():
    def work():
        for _ in range(50):
            start_readers(1).shutdown()

    together = [threading.Thread(target=work) for _ in range(4)]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join()
    assert threading.stack_size(0) == 0


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice")
@pytest.mark.parametrize("size", [0, 5, readers._ADVISED, 3 * readers._ADVISED + 7])
def test_reading_ahead_covers_the_file_and_keeps_no_descriptor(tmp_path, monkeypatch, size):
    (tmp_path / "data").write_bytes(b"x" * size)
    asked, used, advise = set(), set(), os.posix_fadvise

    def note(fd, start, length, advice):
        assert advice == os.POSIX_FADV_WILLNEED
        used.add(fd)
        asked.update(range(start, min(size, start + length), 1 << 10))
        advise(fd, start, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", note)
    threads = threading.active_count()
    with Directory(tmp_path) as root, root.open("data") as file:
        readers.read_ahead(file)
        own = file.fd
    deadline = time.monotonic() + 20
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == threads
    assert asked == set(range(0, size, 1 << 10))
    for fd in used - {own}:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
