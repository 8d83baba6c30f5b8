"""turbospark-mlx: run and prototype local language models from ``.gturbo`` installs on MLX.

Everything here is imported on first use, so that ``import turbospark_mlx`` is quick and touches no device.

>>> from turbospark_mlx import load, generate
>>> model, tokenizer = load("smollm2-135m")  # doctest: +SKIP
>>> print(generate(model, tokenizer, "What is a comet?"))  # doctest: +SKIP
"""

from importlib import import_module

__version__ = "0.1.0"

_EXPORTS = {
    "load": "api",
    "generate": "api",
    "stream_generate": "api",
    "GenerationResponse": "api",
    "Runner": "runner",
    "Tokenizer": "tokenizer",
    "SamplingOptions": "generation",
    "TurbosparkError": "errors",
    "InstallError": "errors",
    "ConvertError": "errors",
    "StoreError": "errors",
    "OptionError": "errors",
    "ContextError": "errors",
    "GenerationError": "errors",
    "BackendError": "errors",
}
__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{_EXPORTS[name]}")
    except ImportError as error:
        from turbospark_mlx.errors import explain_import_error

        if explained := explain_import_error(error):
            raise explained from error
        raise
    return getattr(module, name)


def __dir__():
    return __all__
