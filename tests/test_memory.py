"""What is given back to the system, and what is not taken before it is needed."""

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from turbospark_mlx import memory
from turbospark_mlx.custom_kernels import ExpertArena
from turbospark_mlx.runner import Runner
from turbospark_mlx.testing import make_tiny_install

BLOCK = 20 << 20

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def held(what):
    return int(re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def freed_below_another():
    """What stays of a block that was freed while a smaller one, taken after it, is held."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    libc.free(libc.malloc(BLOCK + (1 << 20)))  # from then on glibc cuts blocks up to this size from its heap
    before = held("VmData")
    block, after = libc.malloc(BLOCK), libc.malloc(100 << 10)
    libc.free(block)
    stays = held("VmData") - before
    libc.free(after)
    return stays


@linux
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_a_large_block_goes_back_whatever_lies_above_it():
    stays = []
    for first in ("pass", "memory.map_large_blocks()"):
        program = f"from tests.test_memory import *; {first}; print(freed_below_another())"
        command, root = [sys.executable, "-c", program], Path(__file__).parents[1]
        stays.append(int(subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout))
    by_default, mapped = stays
    assert by_default > BLOCK / 2 > 10 * mapped


def test_nothing_is_kept_inside_and_the_limit_is_what_it_was_after():
    def use():
        mx.eval(mx.zeros(1 << 20))
        assert mx.get_cache_memory() == 0
        raise ZeroDivisionError

    before = mx.set_cache_limit(BLOCK)
    try:
        with memory.uncached(), pytest.raises(ZeroDivisionError):
            use()
        with pytest.raises(ZeroDivisionError), memory.uncached():
            use()
        assert mx.set_cache_limit(before) == BLOCK
    finally:
        mx.set_cache_limit(before)


def test_who_streams_on_a_cpu_keeps_nothing_for_later(tmp_path):
    path = make_tiny_install("llama", tmp_path / "x.gturbo", variant="qwen3-moe")
    kept = {"streamed": [], "resident": []}
    for residency, seen in kept.items():
        with Runner.open(path, kernels="reference", residency=residency, prefill_chunk=16) as runner:
            mx.clear_cache()
            runner.prefill(list(range(64)), progress=lambda *_, seen=seen: seen.append(mx.get_cache_memory()))
    assert kept["streamed"] == [0] * 4
    assert all(kept["resident"])


@linux
def test_slots_take_memory_when_they_are_filled():
    before = held("VmRSS")
    arena = ExpertArena.reserve(None, 16, 4 << 20)
    assert held("VmRSS") - before < 4 << 20
    arena.blobs[3][:] = 1
    assert 4 << 20 <= held("VmRSS") - before < 8 << 20
    assert np.array_equal(arena.array[3, :2], [0x01010101] * 2)
