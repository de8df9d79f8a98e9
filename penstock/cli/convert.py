"""`penstock convert`: a checkpoint in another form, packed or plain. Flags -> EngineConfig, no more."""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.cli.options import UNSET, add_imports, add_weight_options, engine_options, parse_size
from penstock.cli.terminal import progress, take_interrupts, take_termination, tell
from penstock.config import EngineConfig
from penstock.errors import InvalidRequestError
from penstock.plugins.user_files import import_files
from penstock.validation import check_choice, check_int, check_str
from penstock.weights.matching import FORMS

PACKED = "packed"
DEFAULT_SHARD_SIZE = 5 * 10**9
DESCRIPTION = """Write a model once more, in another form.

  packed        packed, and quantised if asked: it is mapped, not loaded
  transformers  safetensors with the names and layouts of Transformers
  merged        one tensor a parameter, pieces joined: qkv_proj, gate_up_proj
  separate      one tensor a piece and an expert: q_proj, k_proj, v_proj

All but packed keep every bit, so a checkpoint comes back from merged or separate as it was. A tied head is written
where SRC holds it too; tensors that carry nothing are left out, and named.
"""
EXAMPLES = """examples:
  penstock convert /models/llama /models/llama-int8 --quantization int8
  penstock convert demo /tmp/demo-packed && penstock generate /tmp/demo-packed -p "Once upon a time"
  penstock convert /models/falcon /models/falcon-qkv --to separate
  penstock convert /models/falcon-qkv /models/falcon-again --to transformers --max-shard-size 10GB
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.add_argument("src", metavar="SRC", help="a Hugging Face directory, a hub name, or demo")
    parser.add_argument(
        "dst",
        metavar="DST",
        help="a directory to make; it must not exist, or be empty (leftovers of a killed run are replaced)",
    )
    choices = "{" + ",".join([PACKED, *FORMS]) + "}"
    parser.add_argument("--to", default=PACKED, metavar=choices, help="the form to write (default: packed)")
    help_text = "largest file of a form that is not packed, like 5GB (default: 5GB)"
    parser.add_argument("--max-shard-size", type=parse_size, default=UNSET, metavar="N", help=help_text)
    add_imports(parser)
    add_weight_options(parser.add_argument_group("weights, of the packed form"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_str("src", args.src)
    check_str("dst", args.dst)
    check_choice("to", args.to, (PACKED, *FORMS))
    config = EngineConfig.from_options(model=args.src, **engine_options(args))
    _check_options(args)
    import_files(config.imports)
    started = time.perf_counter()
    size = _pack(args, config) if args.to == PACKED else _rewrite(args)
    tell(f"penstock: {args.dst}: {size / 2**20:,.1f} MiB of weights, written in {time.perf_counter() - started:.1f} s")
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Options that the asked form would not use are refused."""
    unused = ["max_shard_size"] if args.to == PACKED else list(engine_options(args))
    name = next((name for name in unused if hasattr(args, name)), None)
    if name is not None:
        why = "has one file" if args.to == PACKED else "keeps every bit as it is"
        raise InvalidRequestError(f"{name}: not allowed with --to {args.to}, which {why}", param=name)
    check_int("max_shard_size", getattr(args, "max_shard_size", DEFAULT_SHARD_SIZE), 1, 2**50)


def _pack(args: argparse.Namespace, config: EngineConfig) -> int:
    from penstock.planner.memory import free_memory_bytes
    from penstock.weights.convert import convert_model

    _take_signals()
    with _percent("layers") as show:
        return convert_model(config, _destination(args), show, free_memory=free_memory_bytes)


def _rewrite(args: argparse.Namespace) -> int:
    from penstock.weights.rewrite import rewrite_model

    _take_signals()
    with _percent("tensors") as show:
        limit = getattr(args, "max_shard_size", DEFAULT_SHARD_SIZE)
        done = rewrite_model(args.src, _destination(args), args.to, limit, show)
    if done.ignored:
        tell(f"penstock: left out, because they carry nothing: {', '.join(done.ignored)}")
    return done.num_bytes


def _destination(args: argparse.Namespace) -> Path:
    return Path(os.path.expanduser(args.dst))


def _take_signals() -> None:
    """Once everything is imported: what is written so far is removed again."""
    take_interrupts()
    take_termination()


@contextmanager
def _percent(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar, as a function of what is done and all there is."""
    with progress(what, 100) as advance:
        shown = 0

        def show(done: int, total: int) -> None:
            nonlocal shown
            percent = 100 * done // total
            advance(percent - shown)
            shown = percent

        yield show
