"""``turbospark-mlx list``: the models that are here, and those that can be had."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

HELP = "list the installed models and the catalog"

EPILOG = """\
Models lie in $TURBOSPARK_HOME/models (~/.turbospark/models). Your own catalog entries go to
$TURBOSPARK_HOME/catalog.json; docs/models.md has the schema.

examples:
  turbospark-mlx list
  turbospark-mlx list --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    from turbospark_mlx import catalog, store
    from turbospark_mlx.gturbo.files import spell_bytes

    models, unfinished = store.installed(), store.unfinished()
    entries = catalog.load(store.home())
    if args.json:
        document = {
            "home": str(store.home()),
            "installed": [
                {
                    "alias": model.alias,
                    "path": str(model.path),
                    "family": model.family,
                    "bytes": model.nbytes,
                    "quantization": model.quantization,
                    "source": model.source,
                    "fetched": model.fetched,
                    "fault": model.fault,
                }
                for model in models
            ],
            "unfinished": [{"alias": left.alias, "bytes": left.nbytes, "running": left.running} for left in unfinished],
            "catalog": [
                {
                    "alias": entry.alias,
                    "description": entry.description,
                    "license": entry.license,
                    "source": str(entry.source),
                    "downloadBytes": entry.download_bytes,
                }
                for entry in entries.values()
            ],
        }
        print(json.dumps(document, indent=2))
        return 0
    if models:
        rows = [
            (
                model.alias,
                model.family or "?",
                "?" if model.nbytes is None else spell_bytes(model.nbytes),
                model.quantization or "?",
                model.source or "?",
            )
            for model in models
        ]
        _print_table(("installed", "family", "size", "quantization", "source"), rows)
        for model in models:
            if model.fault:
                print(f"{model.alias} cannot be opened: {model.fault}")
    else:
        print(f"No models in {store.models_directory()}.")
    for left in unfinished:
        what = "is being pulled" if left.running else "was not finished"
        then = "" if left.running else f": pull it again, or turbospark-mlx rm {left.alias}"
        print(f"{left.alias} {what} ({spell_bytes(left.nbytes)}){then}")
    print()
    here = {model.alias for model in models}
    _print_table(
        ("to pull", "license", "description"),
        [(entry.alias, entry.license, entry.description) for entry in entries.values() if entry.alias not in here],
    )
    return 0


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
