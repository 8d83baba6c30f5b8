"""The command line over a scripted runner; as a process of its own, ``python -m tests.fake_command generate ...``.

Every answer is the alphabet, again and again. FAKE_DELAY is what running any tokens takes, in seconds.
"""

import os
import sys
import time
from contextlib import contextmanager
from unittest import mock

from tests.generation.fakes import ScriptedRunner
from turbospark_mlx import cli, runner, store

CONTEXT = 4096
BACKEND = "host"
TRAINED = 1 << 20
DELAY = float(os.environ.get("FAKE_DELAY", "0"))


class SlowRunner(ScriptedRunner):
    def _feed(self, ids):
        time.sleep(DELAY)
        super()._feed(ids)


def open_runner(path, *, max_context, **options):
    print(f"opened {path} with {options}", file=sys.stderr)
    context = max_context or CONTEXT
    runner = SlowRunner([n % 26 for n in range(context + 1)], max_context=context)
    runner.backend, runner.model.args.max_position_embeddings = BACKEND, TRAINED
    return runner


@contextmanager
def replaced():
    """Any name is a model, and every model is the scripted one."""
    with mock.patch.object(store, "resolve", str), mock.patch.object(runner.Runner, "open", open_runner):
        yield


if __name__ == "__main__":
    with replaced():
        sys.exit(cli.main())
