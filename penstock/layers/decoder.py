"""The parts of a decoder that families share: the stack of blocks with its norms, and the LM head on top of it."""

from collections.abc import Callable
from typing import Any

from penstock.kernels.tensors import Tensor
from penstock.layers.factory import LayerFactory
from penstock.layers.module import ForwardContext, Module
from penstock.layers.rotary import Rotary
from penstock.spec.model_config import ModelConfig

# (config, factory, layer index, rotary) -> a module that maps (x, h, ctx) to (x, h). x is the residual stream, h the
# branch that has not been added to it yet, [T, hidden] float32 each.
MakeBlock = Callable[[ModelConfig, LayerFactory, int, Rotary | None], Any]


class DecoderLM(Module):
    """A CausalLM (layers/module.py): a decoder under the name that the parameter table gives it, and the LM head."""

    def __init__(
        self,
        cfg: ModelConfig,
        make: LayerFactory,
        decoder: Callable[[ModelConfig, LayerFactory], Any],
        name: str = "model",
    ) -> None:
        self._decoder = decoder(cfg, make.at(name))
        setattr(self, name, self._decoder)
        self.lm_head = make.lm_head("lm_head", softcap=cfg.final_logit_softcapping)

    @property
    def decoder(self) -> Any:
        """Return the module with the embedding, the blocks and the final norm."""
        return self._decoder

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Map ids [T] int64 to the hidden states [T, hidden] dtype after the final norm."""
        return self._decoder(input_ids, ctx)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states [M, hidden] dtype, at the wanted positions only, to logits [M, V] float32."""
        return self.lm_head(hidden)


class RMSNormLM(DecoderLM):
    """A DecoderLM whose decoder is an RMSNormDecoder."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory, block: MakeBlock, *, unit_offset: bool = False) -> None:
        super().__init__(cfg, make, lambda cfg, make: RMSNormDecoder(cfg, make, block, unit_offset=unit_offset))


class RMSNormDecoder(Module):
    """Embedding, blocks and a final RMSNorm, under the names of Llama's checkpoints.

    A layer with a window uses the rotary table of `local_rope`, if the config has one.
    """

    def __init__(self, cfg: ModelConfig, make: LayerFactory, block: MakeBlock, *, unit_offset: bool = False) -> None:
        self.embed_tokens = make.embedding("embed_tokens", scale=cfg.embedding_scale)
        rotary = None if cfg.rope is None else make.rotary(cfg.rope, cfg)
        local_rotary = rotary if cfg.local_rope is None else make.rotary(cfg.local_rope, cfg)
        self.layers = [
            block(cfg, make.at(f"layers.{index}"), index, rotary if window is None else local_rotary)
            for index, window in enumerate(cfg.layer_windows)
        ]
        self.norm = make.rms_norm("norm", cfg.norm_eps, unit_offset=unit_offset)

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Map ids [T] int64 to hidden states [T, hidden] dtype."""
        x, h = self.embed_tokens(input_ids), None
        for block in self.layers:
            x, h = block(x, h, ctx)
        return self.norm.add(x, h)[1]
