"""Transformers' side of a comparison: its own class for an architecture, its weights, and one recorded pass.

A `Trace` has the inputs and outputs of a model's modules during one pass, of theirs or of ours.

Transformers is an optional dependency and is imported nowhere else, except to train the demo model.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock import ModelLoadError
from penstock.errors import missing
from penstock.layers.module import named_modules, replaced
from penstock.models.config_json import load_model_config
from penstock.models.registry import find_architecture
from penstock.weights.sources import read_parameters

Tensors = tuple[Tensor, ...]
# Plain torch comes first. If the two differ, the one that agrees with our model counts, and the report names it.
ATTENTIONS = ("eager", "sdpa")


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of a module: its name, and copies of the float tensors in its arguments and results, in order."""

    name: str
    inputs: Tensors
    outputs: Tensors


class Trace(list[Call]):
    """The calls of one pass, in the order in which they ended.

    Args:
        follow: a trace of a model with the same modules. After a call is recorded, its result is replaced by that in
            the other trace, so each module computes from the other model's values and inherits no difference.
    """

    def __init__(self, follow: "Trace | None" = None) -> None:
        super().__init__()
        self._follow = follow

    def last(self, name: str) -> Call | None:
        return next((call for call in reversed(self) if call.name == name), None)

    def record(self, name: str, inputs: Tensors, result: Any) -> Any:
        """Record one call. Return the result (a tensor or a tuple) with which the model continues."""
        self.append(Call(name, inputs, float_tensors(result)))
        call = None if self._follow is None else self._follow.last(name)
        if call is None or not call.outputs:
            return result
        others = iter(call.outputs)
        several = result if isinstance(result, tuple) else (result,)
        values = tuple(next(others).to(own.dtype, copy=True) if isinstance(own, Tensor) else own for own in several)
        return values if isinstance(result, tuple) else values[0]


@contextmanager
def watching(model: object, follow: Trace | None = None) -> Iterator[Trace]:
    """Record every call of every module of the model. follow: as in Trace."""
    trace = Trace(follow)

    def call(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inputs = float_tensors((args, tuple(kwargs.values())))  # copied now, because a layer may write into them
        return trace.record(name, inputs, forward(*args, **kwargs))

    with ExitStack() as stack:
        for name, module in list(named_modules(model)):
            stack.enter_context(replaced(module, "forward", partial(call, name, module.forward)))
        yield trace


def float_tensors(value: Any) -> Tensors:
    """Copy the float tensors in a value, including nested tuples and lists, as float32."""
    if isinstance(value, Tensor):
        return (value.detach().float().clone(),) if value.is_floating_point() else ()
    if isinstance(value, tuple | list):
        return tuple(tensor for item in value for tensor in float_tensors(item))
    return ()


class Headless(nn.Module):
    """A model without a language-model head: its base, under the name that the parameter table gives it, and a
    classifier's head, if it is one."""

    def __init__(self, model: Any, name: str, *, classifies: bool) -> None:
        super().__init__()
        base = getattr(model, model.base_model_prefix, model)
        heads = model.named_children() if classifies else ()
        for part, module in ((name, base), *((part, head) for part, head in heads if head is not base)):
            self.add_module(part, module)
        self._whole = (model if classifies else base,)  # not a module of its own

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [1, T] to hidden states [1, T, hidden], or to a classifier's logits of the text or of each token."""
        found = self._whole[0](ids)
        states: Tensor = found.last_hidden_state if hasattr(found, "last_hidden_state") else found.logits
        return states


@dataclass(frozen=True, slots=True, eq=False)
class Twin:
    """A Transformers model in float32, and which of ATTENTIONS computes it."""

    model: nn.Module
    attention: str

    @classmethod
    def load(cls, directory: Path, attention: str = ATTENTIONS[0], adapter: str | None = None) -> "Twin":
        """Load the checkpoint of a directory. adapter: directory of a LoRA adapter, which PEFT merges into it.

        Raises:
            ModelLoadError: Transformers is missing, has no such class, or cannot read the checkpoint.
        """
        config = load_model_config(directory)
        model_class = find_class(config.architecture)
        options = {"local_files_only": True, "use_safetensors": True}
        with load_errors(f"{directory}: Transformers cannot load it"):
            model = model_class.from_pretrained(
                directory, dtype=torch.float32, attn_implementation=attention, **options
            )
        if adapter is not None:
            with load_errors(f"{adapter}: PEFT cannot load it"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what Transformers has renamed, and PEFT still reads
                model = peft().PeftModel.from_pretrained(model, adapter).merge_and_unload()
        if not find_architecture(config.architecture).has_lm_head:
            model = Headless(model, next(iter(read_parameters(config))).split(".")[0], classifies=bool(config.labels))
        return cls(model.eval(), attention)

    @torch.inference_mode()
    def run(self, ids: list[int]) -> tuple[Trace, Tensor]:
        """Run one pass over a prompt. Return its trace and the logits after each token, [T, V] float32; without a
        language-model head, the hidden states, or a classifier's logits."""
        # Some models round constants (alibi's slopes) to bfloat16 even in float32.
        with replaced(Tensor, "bfloat16", Tensor.float), watching(self.model) as trace:
            if isinstance(self.model, Headless):
                logits = self.model(torch.tensor([ids]))[0]
            else:
                logits = self.model(torch.tensor([ids]), use_cache=False).logits[0]
        return trace, logits.float()

    @torch.inference_mode()
    def logits(self, ids: list[int], module: str, noise: float) -> Tensor:
        """Compute the logits with random noise on the result of a module. noise: its RMS over that of the result."""
        hook = self.model.get_submodule(module).register_forward_hook(partial(_noise, noise))
        try:
            with replaced(Tensor, "bfloat16", Tensor.float):
                logits: Tensor = self.model(torch.tensor([ids]), use_cache=False).logits[0]
        finally:
            hook.remove()
        return logits.float()


def _noise(size: float, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Add noise to the result of a module; its RMS is `size` times that of the result."""
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    return output + size * output.square().mean().sqrt() * noise


def transformers() -> Any:
    """Import the package `transformers`.

    Raises:
        ModelLoadError: it is not installed; the message says how to install it.
    """
    try:
        import transformers
    except ImportError:
        raise ModelLoadError(f"check: {missing('the comparison', 'transformers')}") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def peft() -> Any:
    """Import the package `peft`. Raise ModelLoadError if it is not installed."""
    try:
        import peft
    except ImportError:
        raise ModelLoadError("check: the comparison with an adapter needs peft: pip install peft") from None
    return peft


def find_class(architecture: str) -> Any:
    """Find Transformers' class for an architecture.

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
