"""The process that reads hostile files for prove/hostile_files.py.

It reads lines with a kind and a path, and answers each with one line. It limits its time and memory for
each file, and reads files as a server does. So a crash, a hang or growing memory ends this process and is noticed.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np

from penstock import PenstockError
from penstock.client.text import choose_tokenizer, limited
from penstock.kernels.backends import load_ops
from penstock.models.config_json import load_model_config
from penstock.ranks.sharding_map import ShardingMap
from penstock.spec.param_table import ParamTable
from penstock.weights.adapters import digest_of
from penstock.weights.kv_scales import read_kv_scales
from penstock.weights.loader import load_model, open_reader
from penstock.weights.safetensors import CODES, fingerprint, verify_checksums
from penstock.weights.sources import STACKED_DIMENSIONS, DummySource, open_checkpoint, open_source, read_parameters

CPU_S, MEMORY = 10.0, 2**30  # limits for one file; each file is smaller than a megabyte
SAMPLE = [{"role": "user", "content": "What is 3 + 4?"}]


def read_config(file: Path) -> None:
    load_model_config(file.parent)


def read_tokenizer(file: Path) -> None:
    _use_tokenizer(file.parent)


def _use_tokenizer(place: Path) -> None:
    tokenizer = choose_tokenizer(None, str(place))
    if tokenizer is not None:
        ids = tokenizer.encode("Once upon a time, \u00e9\U0001f642")
        tokenizer.decode(ids)
        tokenizer.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False)
        for token_id in ids[:8]:
            tokenizer.token_to_text(token_id)
        if tokenizer.chat_template is not None:
            tokenizer.chat_template.render(SAMPLE)


def read_checkpoint(file: Path) -> None:
    config = load_model_config(file.parent)
    checkpoint = open_checkpoint(file.parent, config.quantization)
    for name, entry in checkpoint.entries.items():
        if entry.dtype not in CODES and entry.shape:
            first_expert = 0 if len(entry.shape) == STACKED_DIMENSIONS and entry.shape[0] else None
            rows = checkpoint.rows(name, first_expert)
            rows.read(0, rows.shape[0])
    open_source(checkpoint, config, "auto")
    fingerprint(file.parent)
    verify_checksums(file.parent)


def read_gguf(file: Path) -> None:
    """Read a GGUF file as a server does: configuration, tensors, tokenizer, fingerprint."""
    config = load_model_config(file)
    checkpoint = open_checkpoint(file, None)
    for name in checkpoint.entries:
        rows = checkpoint.rows(name)
        rows.read(0, rows.shape[0])
    open_source(checkpoint, config, "auto")
    _use_tokenizer(file)
    fingerprint(file)
    verify_checksums(file)


def read_packed(file: Path) -> None:
    config = load_model_config(file.parent)
    load_model(file.parent, config, load_ops("cpu", np.dtype("float32")))
    fingerprint(file.parent)
    verify_checksums(file.parent)


def read_table(file: Path) -> None:
    ParamTable.from_file(file).parameters(load_model_config(file.parent))


def read_sharding(file: Path) -> None:
    ShardingMap.from_file(file).resolve(read_parameters(load_model_config(file.parent)))


def read_scales(file: Path) -> None:
    config = load_model_config(file.parent)
    read_kv_scales(file, [(config.num_key_value_heads, config.head_dim)] * config.num_hidden_layers)


def read_adapter(file: Path) -> None:
    digest_of(file.parent)
    open_reader(load_model_config(file.parent), DummySource()).read(file.parent)


READERS: dict[str, Callable[[Path], None]] = {
    "config": read_config,
    "tokenizer": read_tokenizer,
    "checkpoint": read_checkpoint,
    "gguf": read_gguf,
    "packed": read_packed,
    "table": read_table,
    "sharding": read_sharding,
    "scales": read_scales,
    "adapter": read_adapter,
}


def outcome(kind: str, file: Path) -> str:
    """Load a file; the outcome is "loaded", "refused", or "wrong: " with the error that must not occur."""
    try:
        with limited(CPU_S, MEMORY):
            READERS[kind](file)
    except PenstockError as error:
        text = str(error)
        if not text.strip() or "\n" in text or len(text) > 2000:
            return f"wrong: an error that is not one line: {text[:300]!r}"
        return "refused"
    except BaseException:
        return f"wrong: {' | '.join(traceback.format_exc(limit=-2).split(chr(10)))[-600:]}"
    return "loaded"


def main() -> None:
    """Answer lines until the end of standard input."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # the tokenizers library prints its panics
    for line in sys.stdin:
        kind, file = json.loads(line)
        print(outcome(kind, Path(file)), flush=True)


if __name__ == "__main__":
    main()
