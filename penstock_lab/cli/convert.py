"""`penstock convert`: writes a checkpoint in another form, packed or plain."""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.cli.options import UNSET, add_engine_options, engine_options, parse_size
from penstock.cli.terminal import handle_signals, note
from penstock.client.prompts import progress
from penstock.config import EngineConfig
from penstock.errors import check_choice, check_int, check_str, invalid
from penstock.interface.plugins import import_files
from penstock.weights.sources import FORMS

PACKED = "packed"
DEFAULT_SHARD_SIZE = 5 * 10**9
WEIGHT_OPTIONS = (
    "dtype", "quantization", "quantization_group_size", "load_format", "threads", "tensor_parallel_size",
    "attention_parallel_size", "mlp_parallel_size", "expert_parallel_size",
)  # fmt: skip
DESCRIPTION = """Write a model in another form.

  packed        packed, and quantised if asked: it is mapped, not loaded
  transformers  safetensors with the names and layouts of Transformers
  merged        one tensor per parameter, pieces joined: qkv_proj, gate_up_proj
  separate      one tensor per piece and expert: q_proj, k_proj, v_proj

All forms but packed keep every bit, so converting back restores the checkpoint. A tied LM head is written if SRC
holds it too; tensors that no model uses are left out and listed. Of a quantised checkpoint, packed keeps the codes as
they are, and the other forms write the values that they stand for, in the model's dtype.
"""
EXAMPLES = """examples:
  penstock convert /models/llama /models/llama-int8 --quantization int8
  penstock convert demo /tmp/demo-packed && penstock generate /tmp/demo-packed -p "Once upon a time"
  penstock convert /models/falcon /models/falcon-qkv --to separate
  penstock convert /models/falcon-qkv /models/falcon-again --to transformers --max-shard-size 10GB
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", help="a Hugging Face directory, a hub name, or demo")
    help_text = "a directory that does not exist or is empty (leftovers of an interrupted run are replaced)"
    parser.add_argument("dst", metavar="DST", help=help_text)
    choices = "{" + ",".join([PACKED, *FORMS]) + "}"
    parser.add_argument("--to", default=PACKED, metavar=choices, help="the form to write (default: packed)")
    help_text = "largest file of a form that is not packed, like 5GB (default: 5GB)"
    parser.add_argument("--max-shard-size", type=parse_size, default=UNSET, metavar="N", help=help_text)
    add_engine_options(parser, WEIGHT_OPTIONS, "weights, in the packed form")


def run(args: argparse.Namespace) -> int:
    check_str("src", args.src)
    check_str("dst", args.dst)
    check_choice("to", args.to, (PACKED, *FORMS))
    config = EngineConfig.from_options(model=args.src, **engine_options(args))
    _check_options(args)
    import_files(config.imports)
    started = time.perf_counter()
    size = _write(args, config)
    note(f"penstock: {args.dst}: {size / 2**20:,.1f} MiB of weights, written in {time.perf_counter() - started:.1f} s")
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Raise InvalidRequestError for an option that the chosen form does not use."""
    unused = ["max_shard_size"] if args.to == PACKED else list(engine_options(args))
    name = next((name for name in unused if hasattr(args, name)), None)
    if name is not None:
        why = "has one file" if args.to == PACKED else "keeps every bit as it is"
        raise invalid(name, f"not allowed with --to {args.to}, which {why}")
    check_int("max_shard_size", getattr(args, "max_shard_size", DEFAULT_SHARD_SIZE), 1, 2**50)


def _write(args: argparse.Namespace, config: EngineConfig) -> int:
    """Write the checkpoint in the chosen form and return the number of bytes of its weights."""
    from penstock.kernels.cpu.host import free_memory_bytes
    from penstock_lab.convert.pack import convert_model
    from penstock_lab.convert.rewrite import rewrite_model

    handle_signals(terminate=True)
    target = Path(os.path.expanduser(args.dst))
    if args.to == PACKED:
        with _percent("layers") as show:
            return convert_model(config, target, show, free_memory=free_memory_bytes)
    with _percent("tensors") as show:
        limit = getattr(args, "max_shard_size", DEFAULT_SHARD_SIZE)
        written = rewrite_model(args.src, target, args.to, limit, show)
    if written.ignored:
        note(f"penstock: left out, as no model uses them: {', '.join(written.ignored)}")
    return written.num_bytes


@contextmanager
def _percent(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar; yield a function of (done, total)."""
    with progress(what, 100) as advance:
        shown = 0

        def show(done: int, total: int) -> None:
            nonlocal shown
            percent = 100 * done // total
            advance(percent - shown)
            shown = percent

        yield show
