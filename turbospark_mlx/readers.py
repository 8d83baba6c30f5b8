"""Threads that read files."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

_sizing = threading.Lock()
STACK_BYTES = 512 << 10
"""A limit on the data of a process counts stacks in full, and 8 MB each is what a system gives by default."""


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
