"""Every error this package raises on purpose.

A message names the file, the tensor or the option; says what was declared and what was found; and ends with the next
step. This module imports nothing of ours, so that every layer can raise the same classes.
"""

from pathlib import PurePath


class TurbosparkError(Exception):
    """Base of all errors of this package. The command line prints it as one line and exits with code 1."""


class InstallError(TurbosparkError):
    """A ``.gturbo`` install is damaged, hostile, incomplete, or of a kind that this version cannot run."""


class ConvertError(TurbosparkError):
    """A checkpoint cannot be converted, or a conversion cannot be resumed."""


class StoreError(TurbosparkError):
    """A model alias, repository or download cannot be resolved."""


class OptionError(TurbosparkError, ValueError):
    """An option or argument has a value that cannot work."""


class ContextError(TurbosparkError, ValueError):
    """A prompt and the tokens to generate do not fit the context, or a position is out of order."""


class GenerationError(TurbosparkError):
    """Generation cannot go on, for example because the logits are not finite."""


class BackendError(TurbosparkError):
    """A kernel back end is missing, or cannot serve what was asked of it."""


class KernelFault(BackendError):
    """A Metal kernel breaks a rule: of the language, of its memory, or between its threads.

    ``kind`` is a word for the rule: see docs/kernels.md.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def counted(number: int, noun: str) -> str:
    """``number`` of what ``noun`` names, for a message.

    >>> counted(1, "token"), counted(2, "token")
    ('1 token', '2 tokens')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def explain_import_error(error: ImportError) -> BackendError | None:
    """What to install where MLX itself does not load; None for any other failed import."""
    # A compiled module that does not load is named by its last part only, so its path has to say whose it is.
    if error.name not in ("mlx", "mlx.core") and PurePath(error.path or "").parent.name != "mlx":
        return None
    return BackendError(
        f"MLX does not load ({error}). On Linux it needs a part of its own for the machine:"
        ' pip install "mlx[cpu]" without a GPU, pip install "mlx[cuda13]" with one from NVIDIA.'
    )
