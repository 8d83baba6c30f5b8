"""How long a context may be. The tiny model takes 512 bytes a token in its full layer, and 4096 bytes in its window."""

import resource
from dataclasses import replace

import pytest

from tests.families.models import config_of
from turbospark_mlx import memory
from turbospark_mlx.admission import ContextLimit, resolve_context
from turbospark_mlx.errors import OptionError
from turbospark_mlx.gturbo.files import spell_bytes


@pytest.fixture(scope="module")
def config():
    return config_of("llama", "mistral-mixed")


def test_the_trained_length_the_default_or_what_memory_allows(config):
    long = replace(config, max_position_embeddings=32768)
    plenty = 10**9
    assert resolve_context(config, None, 4, plenty).tokens == 512
    assert resolve_context(config, None, 4, plenty).reason == "the trained length"
    assert resolve_context(long, None, 4, plenty).tokens == 4096
    assert resolve_context(long, None, 4, plenty).reason == "the default"
    # Half of the room for 768 full rows and the window, and one byte less.
    room = 2 * (768 * 512 + 4096)
    assert resolve_context(long, None, 4, room).tokens == 768
    assert resolve_context(long, None, 4, room).reason == "as memory allows"
    assert resolve_context(long, None, 4, room - 2).tokens == 512
    with pytest.raises(OptionError, match="caches of 256 tokens take"):
        resolve_context(long, None, 4, 2 * 256 * 512)


def test_what_is_asked_for_may_take_all_the_room(config):
    room = 1000 * 512 + 4096
    assert resolve_context(config, 1000, 4, room) == ContextLimit(1000, "as asked, beyond the trained length")
    assert resolve_context(config, 512, 4, room).reason == "as asked"
    with pytest.raises(OptionError, match="Up to 768 tokens fit"):
        resolve_context(config, 1001, 4, room - 1)


def test_memory_is_found():
    assert 10**6 < memory.available_bytes("cpu") < 10**15


@pytest.mark.parametrize("kind", [resource.RLIMIT_DATA, resource.RLIMIT_AS])
def test_limits_of_the_process_count(monkeypatch, kind):
    held = {"/proc/self/status": "VmSize:\t    3000 kB\nVmData:\t    2000 kB\n"}
    monkeypatch.setattr(memory, "_read", lambda path: held.get(path, ""))
    limits = {kind: 5000 * 1024}
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (limits.get(asked, resource.RLIM_INFINITY), 0))
    left = {resource.RLIMIT_DATA: 3000, resource.RLIMIT_AS: 2000}[kind]
    assert memory.available_bytes("cpu") == left * 1024
    limits[kind] = 1000 * 1024
    assert memory.available_bytes("cpu") == 0


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 KB"), (270 * 10**6, "270 MB"), (1.44e9, "1.4 GB")],
)
def test_sizes_for_people(nbytes, text):
    assert spell_bytes(int(nbytes)) == text
