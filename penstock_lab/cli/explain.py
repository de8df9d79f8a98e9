"""`penstock explain`: shows how far a model sees, with its masks, tiles and pipeline as pictures."""

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from penstock.cli.options import parse_size
from penstock.errors import check_int, check_str

DESCRIPTION = """Print the receptive field of a model by layer and window, and draw its masks, the tiles that attention
computes, the waste of padded prompts, and the timeline of a pipeline. Only config.json is read.
"""
EXAMPLES = """examples:
  penstock explain demo
  penstock explain /models/mistral-7b --pipeline-parallel-size 4 --micro-batches 8
  penstock explain demo --window 3 --num-layers 4          another configuration
"""
MOST = 64  # of what is drawn


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a directory, a GGUF file, a config.json, a hub name, or demo")
    model = parser.add_argument_group("another configuration")
    model.add_argument("--window", type=parse_size, metavar="N", help="window of every layer; 0: none")
    model.add_argument("--num-layers", type=parse_size, metavar="N", help="number of layers")
    drawn = parser.add_argument_group("what is drawn")
    help_text = "tokens of the prompts that are packed (default: 3 4 5)"
    drawn.add_argument("--prompt-len", type=parse_size, nargs="+", action="extend", metavar="N", help=help_text)
    drawn.add_argument("--chunk", type=parse_size, metavar="N", help="tokens of a chunk (default: as the drawn window)")
    drawn.add_argument("--pipeline-parallel-size", type=parse_size, metavar="P", help="stages (default: 4)")
    drawn.add_argument("--micro-batches", type=parse_size, metavar="M", help="micro-batches (default: one a stage)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, and nothing else")


def run(args: argparse.Namespace) -> int:
    check_str("model", args.model)
    for name in ("chunk", "pipeline_parallel_size", "micro_batches"):
        check_int(name, getattr(args, name), 1, MOST, optional=True)
    for length in args.prompt_len or ():
        check_int("prompt_len", length, 1, MOST)
    check_int("window", args.window, 0, 2**31 - 1, optional=True)
    check_int("num_layers", args.num_layers, 1, 2**10, optional=True)
    from penstock.models.config_json import load_model_config, parse_model_config
    from penstock.spec.config_reader import read_json
    from penstock.weights.hub import resolve_model
    from penstock_lab.planner.explain import PROMPT_LENS, Example, as_text, explain

    file = Path(os.path.expanduser(args.model))
    is_json = file.suffix == ".json" and file.is_file()
    model = (
        parse_model_config(read_json(file)) if is_json else load_model_config(resolve_model(args.model, weights=False))
    )
    count, windows = args.num_layers or model.num_hidden_layers, model.layer_windows
    if args.window is not None:
        windows = (args.window or None,)
    windows = tuple(windows[index % len(windows)] for index in range(count))
    model = replace(model, num_hidden_layers=count, layer_windows=windows)
    lens = tuple(args.prompt_len or PROMPT_LENS)
    found = explain(model, Example(lens, args.chunk, args.pipeline_parallel_size, args.micro_batches))
    sys.stdout.write(json.dumps(found, indent=2) + "\n" if args.json else as_text(args.model, found))
    return 0
