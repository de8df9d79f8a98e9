"""`penstock show`: what a model is, and how it fits this machine, from its config.json or the header of its file."""

import argparse
from typing import TYPE_CHECKING, Any

from penstock.cli.options import add_model
from penstock.cli.terminal import size_text
from penstock.errors import invalid

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.assembly import Fitting

DESCRIPTION = "Show what a model is and at which precisions it fits this machine, without loading it."
EXAMPLES = """examples:
  penstock show qwen3:0.6b                  fetches only the small files
  penstock show /models/llama-Q4_K_M.gguf
`penstock plan` predicts its speed, and plans for other machines.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser)


def run(args: argparse.Namespace) -> int:
    from penstock.assembly import fittings
    from penstock.kernels.cpu.host import usable_memory_bytes
    from penstock.models.config_json import load_model_config
    from penstock.weights.hub import full_name, resolve_model

    place = resolve_model(args.model, weights=False)
    config = load_model_config(place)
    fits = [_row(item) for item in fittings({"model": str(place)})]
    layers, heads = f"{config.num_hidden_layers} layers", f"{config.num_attention_heads} heads"
    experts = f", {config.num_experts_per_tok} of {config.num_experts} experts" if config.num_experts else ""
    facts: dict[str, Any] = {
        "model": full_name(args.model),
        "place": place,
        "architecture": config.architecture,
        "shape": f"{layers}, hidden size {config.hidden_size}, {heads}{experts}, {config.vocab_size} tokens",
        "stored as": config.dtype,
        "context": f"{config.context} tokens",
        "sampling": ", ".join(f"{name} {value}" for name, value in config.default_sampling.items()) or "no defaults",
        "chat": _chat(place),
    }
    for name, value in facts.items():
        print(f"{name:<13} {value}")
    print(f"free memory   {size_text(usable_memory_bytes())}, of which a model may have")
    if not fits:
        raise invalid("model", f"{args.model} does not fit this machine at any precision")
    for row in fits:
        print(row)
    return 0


def _chat(place: "Path") -> str:
    """Say whether the model has a tokenizer and a chat template."""
    from penstock.tokenizer.hf import has_tokenizer, load_tokenizer

    if not has_tokenizer(place):
        return "no tokenizer: prompts are token ids"
    return (
        "has a chat template" if load_tokenizer(place).chat_template is not None else "no chat template: a base model"
    )


def _row(item: "Fitting") -> str:
    """Describe one precision."""
    sizes = f"weights {size_text(item.weight_bytes)}, with the cache {size_text(item.num_bytes)}"
    return f"  {item.precision:<11} {sizes}, a context of {item.max_model_len} tokens"
