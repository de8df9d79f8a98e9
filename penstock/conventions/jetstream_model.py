"""A model written to JetStream's calling convention as one of the engine's, and how it is made."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.conventions.jetstream import Environment, LayerCache
from penstock.errors import EngineError, ModelLoadError, NotSupportedError
from penstock.layers.context import ForwardContext
from penstock.layers.factory import LayerFactory
from penstock.layers.swap import swap_linears
from penstock.spec.model_config import ModelConfig


class JetStreamModel(nn.Module):
    """Packed tokens in, packed logits out; between them, rows of the convention.

    Logits are the "hidden" that a CausalLM returns, because the model has its head inside. So a step computes them for
    all of its tokens.
    """

    def __init__(self, model: nn.Module, env: Environment) -> None:
        super().__init__()
        self.model = model
        self.env = env

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """[T] int64 -> logits [T, V] float32.

        Raises:
            EngineError: the model returned something of another shape.
        """
        caches = self._caches(ctx)
        first = caches[0]
        tokens = first.unpack(input_ids[:, None, None])[:, 0, :, 0]
        logits = self.model(tokens, first.positions.clamp(min=0), caches, first.additive_mask)
        expected = (*tokens.shape, self.env.config.vocab_size)
        if tuple(logits.shape) != expected:
            raise EngineError(f"{type(self.model).__name__} returned {list(logits.shape)}, not {list(expected)}")
        return first.pack(logits[:, None]).float().contiguous()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """They are that already."""
        return hidden

    def _caches(self, ctx: ForwardContext) -> list[LayerCache]:
        """One a layer. They see the same tokens, so what the first has worked out serves all."""
        first = LayerCache(self.env.ops, *ctx.layer(0), layer=0)
        return [first, *(first.of_layer(index, ctx.kv_caches[index]) for index in range(1, len(ctx.kv_caches)))]


def build(model_class: type[nn.Module], config: ModelConfig, make: LayerFactory) -> nn.Module:
    """The model without weights. Its nn.Linear are the engine's products, so they quantise as the table allows.

    Raises:
        NotSupportedError: layers have different windows, for which the convention's one mask is not enough; or the head
            is asked for in pieces, or padded.
        ModelLoadError: a layer has another shape than the table says.
    """
    if len(set(config.layer_windows)) > 1:
        raise NotSupportedError(
            f"{config.architecture}: layers with different windows need more than the one mask of JetStream's calling "
            f"convention"
        )
    if not make.head.is_plain:
        text = "lm_head_pieces, pad_vocab_multiple: a model of JetStream's calling convention has its own head"
        raise NotSupportedError(text, param="lm_head_pieces")
    with make.ops.device, _EmptyOnMeta():
        model = model_class(config, Environment(config, make.ops, make))
    _check_linears(model, {name: item.shape for name, item in make.parameters.items()})
    swap_linears(model, make)
    return model


class _EmptyOnMeta(TorchFunctionMode):
    """Parameters of torch's layers, which those make empty, take no memory before their weights arrive."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        of_a_layer = func is torch.empty and sys._getframe(1).f_globals.get("__name__", "").startswith("torch.nn.")
        changed = {"device": "meta"} if of_a_layer else {}
        return func(*args, **{**(kwargs or {}), **changed})


def _check_linears(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        for part, value in module.named_parameters(recurse=False):
            full = f"{name}.{part}"
            if shapes.get(full, value.shape) != tuple(value.shape):
                raise ModelLoadError(
                    f"{full} has the shape {list(value.shape)} in the model; its parameter table makes it "
                    f"{list(shapes[full])}"
                )
