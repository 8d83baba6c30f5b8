"""Reading threads: there at once, with stacks that a limit on the process's data does not feel."""

import re
import sys
import threading
from pathlib import Path

import pytest

from turbospark_mlx.readers import STACK_BYTES, start_readers


def data_bytes():
    return int(re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_stacks_are_small():
    before, threads, stack = data_bytes(), threading.active_count(), threading.stack_size()
    with start_readers(8) as pool:
        assert threading.active_count() == threads + 8
        assert pool.submit(sum, [1, 2]).result() == 3
        assert data_bytes() - before < 8 * 2 * STACK_BYTES
        assert threading.stack_size() == stack
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
