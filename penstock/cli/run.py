"""`penstock run`: from a name to a conversation. Fetches the model if need be, and chooses what fits this machine."""

import argparse
import sys
from typing import Any

from penstock.cli.answers import LocalModel
from penstock.cli.chat import add_conversation_options, begin
from penstock.cli.conversation import show
from penstock.cli.options import add_generation_options, engine_options, load_llm, sampling_options
from penstock.cli.terminal import handle_signals, note, saying, show_choices, size_text
from penstock.client.prompts import STDIN, check_text, read_text
from penstock.errors import ModelLoadError
from penstock.weights.hub import find_local

DESCRIPTION = "Talk to a model, which is fetched if it is not here yet, as it fits this machine; or answer one prompt."
EXAMPLES = """examples:
  penstock run                                     the bundled demo model
  penstock run qwen3:0.6b                          a short name: penstock/short_names.toml lists them
  penstock run Qwen/Qwen3-0.6B "Why is the sky blue?"
  penstock run owner/model-GGUF:Q8_0
  git diff | penstock run qwen3:4b --system "Summarise this change in one sentence."

Of safetensors, the first of bfloat16, int8 and int4 is taken that fits into the free memory, with a context of up to
32768 tokens; of several GGUF files, Q4_K_M or the largest that fits. --quantization, --max-model-len and --memory
decide otherwise. A model that is complete in Hugging Face's cache is not looked up on the network; `penstock pull`
updates it.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_generation_options(parser, max_tokens=None)
    help_text = "answer this, and leave (default: standard input, if it is not a terminal)"
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help=help_text)
    add_conversation_options(parser)


def run(args: argparse.Namespace) -> int:
    options = sampling_options(args)
    engine_options(args, seed=False)
    find_local(args.model)  # a mistyped name is refused before anything is read
    prompt = args.prompt
    if prompt is None and not sys.stdin.isatty():
        prompt = read_text(STDIN).rstrip("\r\n")
    if prompt is not None:
        check_text(prompt)
    args.model = fetched(args.model)
    with load_llm(args, **_chosen(args)) as llm:
        handle_signals()
        if args.verbose:
            show_choices(llm.engine.model_info)
        model = LocalModel(llm, args.model)
        model.params(options)
        if prompt is None:
            begin(model, args)
        elif model.can_chat:
            system = [{"role": "system", "content": args.system}] if args.system else []
            show(model.answer([*system, {"role": "user", "content": prompt}], options))
        else:
            note("penstock: the model has no chat template, so it continues the text")
            show(model.complete(prompt, options))
    return 0


def fetched(model: str) -> str:
    """Return the full name of a model whose files are here, after downloading what is missing.

    Raises:
        ModelLoadError: there is no such model, or the download fails.
    """
    from penstock.cli.pull import pull
    from penstock.weights.downloads import is_offline
    from penstock.weights.hub import full_name, resolve_model
    from penstock.weights.safetensors import find_files

    if find_local(model) is not None:
        return model
    try:
        place = resolve_model(model, is_local=True)
        find_files(place)  # all parts of the weights are here
    except ModelLoadError:
        if is_offline():
            raise
        handle_signals(terminate=True)
        return pull(model)[0]
    return full_name(model) if place.is_dir() else str(place)


def _chosen(args: argparse.Namespace) -> dict[str, Any]:
    """Choose the engine options that the user left open, and say what was chosen."""
    from penstock.assembly import fit_here

    with saying(f"penstock: reading {args.model} ..."):
        found = fit_here(engine_options(args, seed=False))
    note(f"penstock: {args.model} as {found.precision}: {size_text(found.num_bytes)} of memory")
    return found.options
