"""`penstock rm`: deletes models from Hugging Face's cache."""

import argparse

from penstock.cli.terminal import size_text

DESCRIPTION = "Delete models from Hugging Face's cache, which other programs share."
EXAMPLES = """examples:
  penstock rm Qwen/Qwen3-0.6B
  penstock rm owner/model-GGUF:Q4_K_M       only this file; without the colon, all files of the repository
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a name from `penstock list`, or a short name")


def run(args: argparse.Namespace) -> int:
    from penstock.weights.cached import remove_model

    for model in args.models:
        name, freed = remove_model(model)
        print(f"deleted {name}: {size_text(freed)} are free again")
    return 0
