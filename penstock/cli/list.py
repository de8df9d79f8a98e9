"""`penstock list`: the models in Hugging Face's cache, with their size, format and whether they fit this machine."""

import argparse
import json
from typing import Any

from penstock.cli.terminal import size_text
from penstock.errors import InvalidRequestError, ModelLoadError

DESCRIPTION = "List the models that are in Hugging Face's cache, and how each fits this machine's free memory."
EXAMPLES = """examples:
  penstock list
  penstock list --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON array, and nothing else")


def run(args: argparse.Namespace) -> int:
    from penstock.weights.cached import cached_models

    rows: list[dict[str, Any]] = [
        {"name": model.name, "size": model.num_bytes, "format": model.format, **_fit(str(model.place))}
        for model in cached_models()
    ]
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    if not rows:
        print("no models yet: `penstock pull OWNER/MODEL` fetches one, and `demo` comes with Penstock")
        return 0
    table = [("NAME", "SIZE", "FORMAT", "FITS THIS MACHINE")]
    table += [(row["name"], size_text(row["size"]), row["format"], _words(row)) for row in rows]
    widths = [max(len(line[column]) for line in table) for column in range(3)]
    for line in table:
        print("  ".join([*(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=False)), line[3]]))
    return 0


def _fit(place: str) -> dict[str, Any]:
    """Plan a model; say at which precision it fits and with which context, or why not."""
    from penstock.assembly import fit_here

    try:
        found = fit_here({"model": place})
    except (InvalidRequestError, ModelLoadError) as error:
        return {"fits": False, "reason": str(error).removeprefix(f"{place}: ").removeprefix("model: ")}
    return {
        "fits": True,
        "precision": found.precision,
        "max_model_len": found.max_model_len,
        "memory_bytes": found.num_bytes,
    }


def _words(row: dict[str, Any]) -> str:
    if not row["fits"]:
        return f"no: {row['reason']}"
    return f"as {row['precision']}, {row['max_model_len']} tokens, {size_text(row['memory_bytes'])}"
