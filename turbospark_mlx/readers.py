"""Threads that read files."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from turbospark_mlx.gturbo.files import OpenFile

_sizing = threading.Lock()
STACK_BYTES = 512 << 10
"""A limit on the data of a process counts stacks in full, and 8 MB each is what a system gives by default."""
_ADVISED = 1 << 20
"""Linux takes no more of an advice than a disk reads at once."""


def start_readers(count: int) -> ThreadPoolExecutor:
    """A pool of ``count`` threads, all of them running, with small stacks: they wait for the disk and call little."""
    pool, all_here = ThreadPoolExecutor(count, thread_name_prefix="turbospark-reader"), threading.Barrier(count)
    with _sizing:  # the size is that of all threads that anybody starts
        before = threading.stack_size(STACK_BYTES)
        try:
            for _ in range(count):
                # None is idle before all are there, so that each of these starts another.
                pool.submit(all_here.wait)
        except BaseException:
            all_here.abort()
            pool.shutdown()
            raise
        finally:
            threading.stack_size(before)
    return pool


def read_ahead(file: OpenFile) -> None:
    """Have the system bring ``file`` into its cache from now on, where it takes such advice (Linux): a disk that waits
    until each part is asked for is idle in between."""
    if not hasattr(os, "posix_fadvise"):
        return

    def advise(own: OpenFile) -> None:
        with own:
            for start in range(0, own.state.size, _ADVISED):
                os.posix_fadvise(own.fd, start, _ADVISED, os.POSIX_FADV_WILLNEED)

    if file.state.size <= _ADVISED:
        advise(file.duplicate())
    else:
        # The call lasts until the disk has taken the request.
        pool = start_readers(1)
        pool.submit(advise, file.duplicate())
        pool.shutdown(wait=False)
