"""``turbospark-mlx kernel check``: run a Metal kernel on any machine, with every check there is."""

from __future__ import annotations

import argparse
import math
import shlex
from pathlib import Path

HELP = "check a Metal kernel on this machine, whatever it is"
CHECK_HELP = "compile and run the body of a Metal kernel, with every check there is"

LARGEST = 2**31 - 1
"""MLX counts sizes in 32 bits with a sign."""

EPILOG = """\
examples:
  turbospark-mlx kernel check scale.metal --input x=float32:1000 --output y=float32:1000 --grid 1000 --threadgroup 256
  turbospark-mlx kernel check scale.metal

The second form is for a file that says the rest itself. See: turbospark-mlx kernel check --help
"""

CHECK_EPILOG = """\
FILE holds the body of a kernel, as mx.fast.metal_kernel takes it. Lines of it that begin with "// check:" hold options,
so that a file can say how it is run; the command line changes what it names.

an input is NAME=TYPE:SHAPE[:CONTENT], NAME=NUMBER (passed as a 0-d array) or NAME=FILE.npy
  TYPE     float32, float16, bfloat16, int32, uint32, int8, uint8, ... as in MLX
  SHAPE    sizes with an x between: 4x64
  CONTENT  normal (floats by default), bits (integers by default: any), arange, or a number

The text that MLX generates runs with its threads in order and in shuffled orders, and every access is checked. Exit
code 0: nothing found, and the outputs are printed. Exit code 1: what is wrong, with line and thread.

examples:
  turbospark-mlx kernel check scale.metal --input x=float32:1000 --output y=float32:1000 --grid 1000 --threadgroup 256
  turbospark-mlx kernel check gemv.metal --header dot.h --input w=uint32:64x128 --input x=bfloat16:1024 \\
      --output y=bfloat16:64 --template T=bfloat16 --template K=1024 --grid 2048 --threadgroup 256 --orders 8
  turbospark-mlx kernel check sum.metal --input x=x.npy --output y=float32:1 --grid 32 --threadgroup 32 --expect y=y.npy
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser(
        "check",
        help=CHECK_HELP,
        description=CHECK_HELP,
        epilog=CHECK_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_check_arguments(check)


def _sizes(text: str) -> tuple[int, int, int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not 1 <= len(found) <= 3 or min(found) < 1 or max(found) > LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not one to three sizes such as 256 or 256,4")
    return tuple([*found, 1, 1][:3])


def _count(least: int):
    def number(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= LARGEST:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
        return int(text)

    return number


def _named(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier() or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _add_check_arguments(parser: argparse.ArgumentParser) -> None:
    repeated = {"action": "append", "type": _named}
    parser.add_argument("file", metavar="FILE", type=Path, help="the body of the kernel")
    parser.add_argument("--header", type=Path, help="a file whose text stands before the kernel function")
    parser.add_argument("--input", metavar="NAME=SPEC", **repeated, help="an input, in order; may be repeated")
    parser.add_argument("--output", metavar="NAME=TYPE:SHAPE", **repeated, help="an output, in order; may be repeated")
    parser.add_argument(
        "--template", metavar="NAME=VALUE", **repeated, help="a type, an int, true or false; repeatable"
    )
    parser.add_argument("--grid", metavar="X[,Y[,Z]]", type=_sizes, help="threads of the grid, not threadgroups")
    parser.add_argument("--threadgroup", metavar="X[,Y[,Z]]", type=_sizes, help="threads of a threadgroup")
    parser.add_argument("--strided", action="store_true", default=None, help="as ensure_row_contiguous=False")
    parser.add_argument("--atomic-outputs", action="store_true", default=None, help="as atomic_outputs=True")
    parser.add_argument("--init-value", metavar="V", type=float, help="what MLX fills the outputs with first")
    parser.add_argument("--written", metavar="NAME", action="append", help="an input that the kernel may write to")
    parser.add_argument("--optional", metavar="NAME", action="append", help="an output that may stay unwritten")
    parser.add_argument("--orders", metavar="N", type=_count(0), help="shuffled orders to try (3)")
    parser.add_argument("--seconds", metavar="S", type=_count(1), help="time that one run may take (60)")
    parser.add_argument("--seed", metavar="N", type=_count(0), help="of random inputs (0)")
    parser.add_argument(
        "--expect", metavar="NAME=FILE.npy", **repeated, help="what an output has to be; may be repeated"
    )
    parser.add_argument(
        "--tolerance", metavar="T", type=float, help="error that --expect allows, of the largest value (1e-3)"
    )
    parser.add_argument(
        "--save", metavar="FILE.npz", type=Path, help="write the outputs, in float32 where numpy lacks a type"
    )


def _options(args: argparse.Namespace, source: str) -> argparse.Namespace:
    """``args``, and for the rest what the file itself says."""
    lines = [line.strip() for line in source.splitlines()]
    words = [word for line in lines if line.startswith("// check:") for word in shlex.split(line[len("// check:") :])]
    parser = argparse.ArgumentParser(prog=f"{args.file}: // check:", add_help=False)
    _add_check_arguments(parser)
    for name, value in vars(parser.parse_args([str(args.file), *words])).items():
        given = getattr(args, name)
        if given is None:
            setattr(args, name, value)
        elif name in ("input", "output", "template", "expect"):
            setattr(args, name, list((dict(value or ()) | dict(given)).items()))
    return args


def run(args: argparse.Namespace) -> int:
    import mlx.core as mx
    import numpy as np

    from turbospark_mlx.custom_kernels import emulate
    from turbospark_mlx.errors import OptionError

    source = _text(args.file)
    args = _options(args, source)
    for name in ("output", "grid", "threadgroup"):
        if not getattr(args, name):
            raise OptionError(f"{args.file}: says nothing about --{name}; see: turbospark-mlx kernel check --help")
    mx.set_default_device(mx.cpu)
    rng = np.random.default_rng(args.seed or 0)
    header = _text(args.header) if args.header else ""
    inputs = {name: _input(name, spec, rng) for name, spec in args.input or ()}
    outputs = {name: _type_and_shape("output", name, spec.split(":")) for name, spec in args.output}
    if both := inputs.keys() & outputs.keys():
        raise OptionError(f"{args.file}: {min(both)} is an input and an output; an input written to takes --written")
    kernel = mx.fast.metal_kernel(
        name=args.file.stem if args.file.stem.isidentifier() else "kernel",
        input_names=list(inputs),
        output_names=list(outputs),
        source=source,
        header=header,
        ensure_row_contiguous=not args.strided,
        atomic_outputs=bool(args.atomic_outputs),
    )
    found = emulate(
        kernel,
        list(inputs.values()),
        name=args.file.stem,
        source=source,
        header=header,
        written=tuple(args.written or ()),
        optional_outputs=tuple(args.optional or ()),
        init_value=args.init_value,
        orders=3 if args.orders is None else args.orders,
        seconds=args.seconds or 60,
        grid=args.grid,
        threadgroup=args.threadgroup,
        template=[(name, _template(name, value)) for name, value in args.template or ()],
        output_shapes=[shape for _, shape in outputs.values()],
        output_dtypes=[dtype for dtype, _ in outputs.values()],
    )
    plain = {name: _plain(array) for name, array in zip(outputs, found, strict=True)}
    if args.save:
        np.savez(args.save, **plain)
    wrong = 0
    for name, file in args.expect or ():
        if name not in plain:
            raise OptionError(f"--expect {name}: the outputs are {', '.join(plain)}")
        wrong += _differs(
            name, plain[name], _array_of(f"expect {name}", file), 1e-3 if args.tolerance is None else args.tolerance
        )
    for name, array in plain.items():
        with np.printoptions(threshold=8, precision=5):
            print(f"{name} {list(array.shape)}: {str(array).replace(chr(10), '')}")
    if not wrong:
        print(f"{args.file}: nothing found")
    return int(bool(wrong))


def _text(file: Path) -> str:
    from turbospark_mlx.errors import OptionError

    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(f"{file}: byte {error.start} is not UTF-8; a kernel is text in UTF-8") from None


def _array_of(option: str, file: str):
    import numpy as np

    from turbospark_mlx.errors import OptionError

    try:
        return np.load(file)
    except (EOFError, ValueError):
        raise OptionError(f"--{option}: {file} is not an array of numbers that numpy.save wrote") from None


def _differs(name: str, found, expected, tolerance: float) -> bool:
    import numpy as np

    if found.shape != expected.shape:
        print(f"{name} is {list(found.shape)}, expected is {list(expected.shape)}")
        return True
    wide, goal = found.astype(np.float64), expected.astype(np.float64)
    errors = np.abs(wide - goal) / max(np.abs(goal).max(), np.finfo(np.float32).tiny)
    if (errors <= tolerance).all():
        return False
    at = np.unravel_index(np.argmax(np.where(np.isnan(errors), np.inf, errors)), errors.shape)
    place = ", ".join(str(i) for i in at)
    print(f"{name}[{place}] is {found[at]}, expected {expected[at]}; {(~(errors <= tolerance)).sum()} elements differ")
    return True


def _plain(array):
    import mlx.core as mx
    import numpy as np

    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


def _dtype(name: str):
    import mlx.core as mx

    from turbospark_mlx.errors import OptionError

    found = getattr(mx, "bool_" if name == "bool" else name, None)
    if not isinstance(found, mx.Dtype):
        raise OptionError(f"{name!r} is not a type of MLX such as float32, bfloat16 or uint32")
    if found == mx.float64:
        raise OptionError("float64 is not a type of Metal: take float32")
    return found


def _type_and_shape(kind: str, name: str, parts: list[str]):
    from turbospark_mlx.errors import OptionError

    try:
        shape = tuple(int(size) for size in parts[1].split("x"))
    except (IndexError, ValueError):
        raise OptionError(f"--{kind} {name}={':'.join(parts)}: expected TYPE:SHAPE such as float32:4x64") from None
    dtype = _dtype(parts[0])
    if min(shape) < 0 or math.prod(shape) * dtype.size > LARGEST:
        raise OptionError(f"--{kind} {name}={':'.join(parts)}: arrays of 0 to {LARGEST:,} bytes can be emulated")
    return dtype, shape


def _template(name: str, value: str):
    if value in ("true", "false"):
        return value == "true"
    try:
        number = int(value, 0)
    except ValueError:
        return _dtype(value)
    if abs(number) > LARGEST:
        from turbospark_mlx.errors import OptionError

        raise OptionError(f"--template {name}={value}: MLX takes template values of at most {LARGEST:,}")
    return number


def _input(name: str, spec: str, rng):
    import mlx.core as mx
    import numpy as np

    if spec.endswith(".npy"):
        return mx.array(_array_of(f"input {name}", spec))
    for number in (int, float):
        try:
            return number(spec)
        except ValueError:
            continue
    parts = spec.split(":")
    dtype, shape = _type_and_shape("input", name, parts)
    content = parts[2] if len(parts) > 2 else "normal" if mx.issubdtype(dtype, mx.floating) else "bits"
    count = int(np.prod(shape))
    if content == "normal":
        return mx.array(rng.normal(size=shape).astype(np.float32)).astype(dtype)
    if content == "bits" and dtype != mx.bool_:
        return mx.array(rng.integers(0, 256, count * dtype.size, dtype=np.uint8)).view(dtype).reshape(shape)
    if content == "bits":
        return mx.array(rng.integers(0, 2, shape)) != 0
    if content == "arange":
        return mx.arange(count).astype(dtype).reshape(shape)
    from turbospark_mlx.errors import OptionError

    try:
        number = int(content) if content.lstrip("+-").isdecimal() else float(content)
    except ValueError:
        raise OptionError(f"--input {name}={spec}: {content!r} is not normal, bits, arange or a number") from None
    if mx.issubdtype(dtype, mx.integer) and not mx.iinfo(dtype).min <= number <= mx.iinfo(dtype).max:
        raise OptionError(f"--input {name}={spec}: {parts[0]} cannot hold {content}")
    # Of a plain float, mx.full makes floats, whatever type is asked for.
    return mx.full(shape, mx.array(number, dtype))
