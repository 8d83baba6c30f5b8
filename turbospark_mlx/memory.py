"""The memory of this process: what is free, and giving back what is not in use."""

from __future__ import annotations

import ctypes
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx

_M_MMAP_THRESHOLD = -3
"""From glibc's malloc.h."""
_LARGE = 1 << 20


def available_bytes(device: str) -> int:
    """Bytes that arrays may still take on ``device`` (``"cpu"`` or ``"gpu"``).

    MLX's limit less what it holds; on a CPU under Linux also what the kernel calls available, what the control group
    allows and what the limits of the process leave: MLX ends a process that gets no memory.
    """
    bounds = [mx.get_memory_limit() - mx.get_active_memory()]
    if device == "cpu":
        if found := re.search(r"MemAvailable:\s+(\d+) kB", _read("/proc/meminfo")):
            bounds.append(int(found[1]) * 1024)
        if (limit := _read("/sys/fs/cgroup/memory.max").strip()).isdigit():
            bounds.append(int(limit) - mx.get_active_memory())
        status = _read("/proc/self/status")
        for limited, held in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
            soft, _ = resource.getrlimit(limited)
            if soft != resource.RLIM_INFINITY and (found := re.search(rf"{held}:\s+(\d+) kB", status)):
                bounds.append(soft - int(found[1]) * 1024)
    return max(0, min(bounds))


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def give_back() -> None:
    """Return to the system what nobody uses: what MLX keeps for arrays to come, and what glibc keeps of what MLX and
    numpy freed."""
    mx.clear_cache()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


@contextmanager
def uncached() -> Iterator[None]:
    """Inside, MLX keeps nothing for arrays to come."""
    before = mx.set_cache_limit(0)
    try:
        yield
    finally:
        mx.set_cache_limit(before)


def map_large_blocks() -> None:
    """From now on, have glibc map each large block by itself, so that it goes back to the system when it is freed. By
    default it learns from the first that is freed to cut those to come from its heap, which they leave in pieces."""
    if option := getattr(ctypes.CDLL(None), "mallopt", None):
        option(_M_MMAP_THRESHOLD, _LARGE)
