"""``python -m turbospark_mlx`` is the ``turbospark-mlx`` command."""

import sys

from turbospark_mlx.cli import main

sys.exit(main())
