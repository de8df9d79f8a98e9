"""`penstock pull`: downloads a model from the Hugging Face hub, into Hugging Face's cache."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.cli.terminal import handle_signals, note, size_text
from penstock.errors import ModelLoadError

DESCRIPTION = "Download a model from the Hugging Face hub. An interrupted download goes on where it stopped."
EXAMPLES = """examples:
  penstock pull Qwen/Qwen3-0.6B
  penstock pull qwen3:0.6b                              the same; penstock/short_names.toml lists such names
  penstock pull owner/model-GGUF                        Q4_K_M, or the largest file that fits this machine
  penstock pull owner/model-GGUF:Q8_0                   this one
  HF_TOKEN=hf_... penstock pull meta-llama/Llama-3.2-1B-Instruct

The files go to Hugging Face's cache, which other programs share. HF_HOME or HF_HUB_CACHE names another place,
HF_ENDPOINT a mirror of the hub, HF_TOKEN your account; with HF_HUB_OFFLINE=1 nothing is fetched.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="OWNER/MODEL, OWNER/MODEL:FILE for one GGUF file, or short name")


def run(args: argparse.Namespace) -> int:
    from penstock.weights.cached import cached_models
    from penstock.weights.downloads import is_offline

    if is_offline():
        raise ModelLoadError(
            "model: HF_HUB_OFFLINE is set, which forbids downloads; `penstock list` shows what is here"
        )
    handle_signals(terminate=True)
    name, place = pull(args.model)
    found = next((model for model in cached_models() if model.name == name), None)
    size = "" if found is None else f", {size_text(found.num_bytes)}"
    print(f"{name}: {place}{size}")
    note(f"penstock: talk to it with `penstock run {name}`, serve it with `penstock serve {name}`")
    return 0


def pull(model: str) -> tuple[str, str]:
    """Download a model, with a progress bar on a terminal; return its full name and its place.

    Raises:
        ModelLoadError: there is no such model, or the download fails.
    """
    from huggingface_hub.utils import disable_progress_bars

    from penstock.kernels.cpu.host import usable_memory_bytes
    from penstock.weights.hub import full_name, pull_model

    disable_progress_bars()  # one for all files is shown instead
    if full_name(model) != model:
        note(f"penstock: {model} is {full_name(model)}")
    try:
        name, place = pull_model(model, usable_memory_bytes(), _progress)
    except KeyboardInterrupt:
        note(f"\npenstock: interrupted; `penstock pull {model}` goes on where it stopped")
        raise
    return name, str(place)


@contextmanager
def _progress(total: int, here: int) -> Iterator[Callable[[int], None]]:
    """Show how much of a download has arrived: a bar on a terminal, a line elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    if not sys.stderr.isatty():
        note(f"penstock: fetching {size_text(total - here)}")
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=total, completed=here)
        yield lambda num_bytes: bar.advance(task, num_bytes)
