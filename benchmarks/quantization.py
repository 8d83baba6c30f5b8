"""Perplexity and size of the default model for every width, group and companion dtype: the table of docs/conversion.md.

python benchmarks/quantization.py               # SmolLM2-135M over tests/golden/alice.txt
python benchmarks/quantization.py --source ./Qwen3-0.6B --text passage.txt
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import product
from pathlib import Path

from turbospark_mlx import Runner
from turbospark_mlx.convert import convert
from turbospark_mlx.perplexity import perplexity

PASSAGE = Path(__file__).parents[1] / "tests" / "golden" / "alice.txt"


def _row(source: str, text: str, options: dict) -> tuple[float, int]:
    """(perplexity, bytes of the resident weights) of the source converted with these options."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gturbo"
        convert(source, path, progress=False, **options)
        size = (path / "model_weights.bin").stat().st_size
        with Runner.open(path) as runner:
            result = perplexity(runner.model, runner.tokenizer.encode(text))
    return result.perplexity, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="a checkpoint directory, GGUF file or install")
    parser.add_argument("--text", type=Path, default=PASSAGE)
    args = parser.parse_args()
    text = args.text.read_text()
    print("| bits | group | companions | perplexity | against the source | MB |\n| --- | --- | --- | --- | --- | --- |")
    stored, size = _row(args.source, text, {})
    print(f"| as the source | | | {stored:.3f} | | {size / 1e6:.1f} |", flush=True)
    for bits, group_size, companions in product((8, 4), (32, 64, 128), ("float16", "bfloat16")):
        options = {"bits": bits, "group_size": group_size, "companion_dtype": companions}
        value, size = _row(args.source, text, options)
        print(
            f"| {bits} | {group_size} | {companions} | {value:.3f} | {value / stored - 1:+.2%} | {size / 1e6:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
