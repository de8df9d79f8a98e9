"""`penstock table`: prints a model's parameter table, or a template for a new table, without reading weights."""

import argparse
import os
import sys
from pathlib import Path

from penstock.cli.options import add_imports
from penstock.errors import check_str
from penstock.interface.plugins import import_files

DESCRIPTION = """Print every parameter of a model as a parameter table: name, shape, sharded axis, type.

A known architecture needs only its config.json. For an unknown one the checkpoint's headers make a template, in which
`shard: '?'` has to be filled in. No weights are read.
"""
EXAMPLES = """examples:
  penstock table demo
  penstock table /models/llama/config.json
  penstock table /models/new-one > my_model.yaml
  penstock table /models/llama --sharding           one axis per name, as in JetStream's sharding files
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a directory, a GGUF file, a config.json, a hub name, or demo")
    parser.add_argument("--sharding", action="store_true", help="print a sharding file: NAME : AXIS #  TYPE SHAPE")
    add_imports(parser)


def run(args: argparse.Namespace) -> int:
    check_str("model", args.model)
    import_files(getattr(args, "import", ()))
    from penstock.weights.hub import resolve_model
    from penstock_lab.planner.table_template import table_text

    file = Path(os.path.expanduser(args.model))
    source = file if file.suffix == ".json" and file.is_file() else resolve_model(args.model, weights=False)
    sys.stdout.write(table_text(source, sharding=args.sharding))
    return 0
