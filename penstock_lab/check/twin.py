"""Transformers' side of a comparison: its own class for an architecture, its weights, and one recorded pass.

Transformers is an optional dependency and is imported nowhere else, except to train the demo model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock import ModelLoadError, NotSupportedError
from penstock.layers.module import replaced
from penstock.models.config_json import load_model_config
from penstock.models.registry import find_architecture
from penstock_lab.check.trace import Trace, watching

INSTALL = "check: the comparison needs Transformers, which is not installed; pip install 'penstock[check]'"

# Plain torch comes first. If the two differ, the one that agrees with our model counts, and the report names it.
ATTENTIONS = ("eager", "sdpa")


@dataclass(frozen=True, slots=True, eq=False)
class Twin:
    """A Transformers model in float32, and which of ATTENTIONS computes it."""

    model: nn.Module
    attention: str

    @classmethod
    def load(cls, directory: Path, attention: str = ATTENTIONS[0]) -> "Twin":
        """Load the checkpoint of a directory.

        Raises:
            ModelLoadError: Transformers is missing, has no such class, or cannot read the checkpoint.
            NotSupportedError: the model has no language-model head.
        """
        architecture = load_model_config(directory).architecture
        if not find_architecture(architecture).has_lm_head:
            message = f"check: {architecture} has no language-model head, and the check compares logits"
            raise NotSupportedError(message, param="model")
        model_class = find_class(architecture)
        options = {"local_files_only": True, "use_safetensors": True}
        with load_errors(f"{directory}: Transformers cannot load it"):
            model = model_class.from_pretrained(
                directory, dtype=torch.float32, attn_implementation=attention, **options
            )
        return cls(model.eval(), attention)

    @torch.inference_mode()
    def run(self, ids: list[int]) -> tuple[Trace, Tensor]:
        """Run one pass over a prompt. Return its trace and the logits after each token, [T, V] float32."""
        # Some models round constants (alibi's slopes) to bfloat16 even in float32.
        with replaced(Tensor, "bfloat16", Tensor.float), watching(self.model) as trace:
            logits = self.model(torch.tensor([ids]), use_cache=False).logits[0]
        return trace, logits.float()


def transformers() -> Any:
    """Return the package `transformers`.

    Raises:
        ModelLoadError: it is not installed; the message says how to install it.
    """
    try:
        import transformers
    except ImportError:
        raise ModelLoadError(INSTALL) from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def find_class(architecture: str) -> Any:
    """Return Transformers' class for an architecture.

    Raises:
        ModelLoadError: there is no such class, so there is nothing to compare with.
    """
    found = getattr(transformers(), architecture, None)
    if found is None:
        raise ModelLoadError(
            f"check: Transformers {transformers().__version__} has no {architecture} to compare with; "
            f"--verify compares the kernels without it"
        )
    return found


@contextmanager
def load_errors(message: str) -> Iterator[None]:
    """Turn the errors that Transformers raises into a ModelLoadError with a one-line message."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise ModelLoadError(f"{message}: {' '.join(str(error).split())}") from error
