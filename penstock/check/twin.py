"""Transformers' side of a comparison: its own class for an architecture, its weights, and one watched pass.

Transformers is an optional dependency and is imported nowhere else (but for the training of the demo model).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.check.trace import Trace, watching
from penstock.errors import ModelLoadError
from penstock.models.config_json import load_model_config

INSTALL = "check: Transformers is not installed, and it is what a model is compared with; pip install 'penstock[check]'"

# Plain torch first. For some models the two disagree; then the one counts that agrees with us, and the report names it.
ATTENTIONS = ("eager", "sdpa")


@dataclass(frozen=True, slots=True, eq=False)
class Twin:
    """A model of Transformers, in float32.

    Attributes:
        attention: which of its implementations computes it, one of ATTENTIONS.
    """

    model: nn.Module
    attention: str

    @classmethod
    def load(cls, directory: Path, attention: str = ATTENTIONS[0]) -> "Twin":
        """The checkpoint of a directory.

        Raises:
            ModelLoadError: Transformers is missing, has no such class, or cannot read it.
        """
        model_class = find_class(load_model_config(directory).architecture)
        try:
            model = model_class.from_pretrained(
                directory,
                dtype=torch.float32,
                attn_implementation=attention,
                local_files_only=True,
                use_safetensors=True,
            )
        except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
            raise ModelLoadError(f"{directory}: Transformers cannot load it: {one_line(error)}") from error
        return cls(model.eval(), attention)

    @torch.inference_mode()
    def run(self, ids: list[int]) -> tuple[Trace, Tensor]:
        """One pass over a prompt -> what its modules said, and the logits after each token, [T, V] float32."""
        with _nothing_rounded(), watching(self.model) as trace:
            logits = self.model(torch.tensor([ids]), use_cache=False).logits[0]
        return trace, logits.float()


@contextmanager
def _nothing_rounded() -> Iterator[None]:
    """Some models round constants to bfloat16 whatever their own type is, the slopes of alibi for instance. The twin is
    the mathematics in float32, so here such a rounding does nothing."""
    rounding = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = torch.Tensor.float  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.bfloat16 = rounding  # type: ignore[method-assign]


def transformers() -> Any:
    """The package.

    Raises:
        ModelLoadError: it is not installed; the message says how to.
    """
    try:
        import transformers
    except ImportError:
        raise ModelLoadError(INSTALL) from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def find_class(architecture: str) -> Any:
    """Transformers' class of that name.

    Raises:
        ModelLoadError: it has none, so there is nothing to compare with.
    """
    found = getattr(transformers(), architecture, None)
    if found is None:
        raise ModelLoadError(
            f"check: Transformers {transformers().__version__} has no {architecture}, so there is no twin; "
            f"--verify compares the kernels without one"
        )
    return found


def read_config(directory: Path) -> Any:
    """Transformers' reading of a config.json.

    Raises:
        ModelLoadError: it cannot read it.
    """
    config_class = find_class(load_model_config(directory).architecture).config_class
    try:
        return config_class.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{directory}: Transformers cannot read config.json: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """What an error of another package says."""
    return " ".join(str(error).split())
