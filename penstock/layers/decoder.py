"""The parts of a decoder that families share: the stack of blocks with its norms, and the LM head on top of it."""

from collections.abc import Callable

from torch import Tensor, nn

from penstock.layers.context import ForwardContext
from penstock.layers.factory import LayerFactory
from penstock.layers.rotary import Rotary
from penstock.spec.model_config import ModelConfig

# (config, factory, layer index, rotary) -> a module that maps (x, h, ctx) to (x, h): the residual stream and the branch
# that has not been added to it yet, [T, hidden] float32 each
MakeBlock = Callable[[ModelConfig, LayerFactory, int, Rotary | None], nn.Module]


class DecoderLM(nn.Module):
    """A CausalLM (context.py): a decoder under the name that the parameter table gives it, and the LM head."""

    def __init__(
        self,
        cfg: ModelConfig,
        make: LayerFactory,
        decoder: Callable[[ModelConfig, LayerFactory], nn.Module],
        name: str = "model",
    ) -> None:
        super().__init__()
        self.decoder_name = name
        self.add_module(name, decoder(cfg, make.at(name)))
        self.lm_head = make.lm_head("lm_head", softcap=cfg.final_logit_softcapping)

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Map ids [T] int64 to the hidden states [T, hidden] dtype after the final norm."""
        hidden: Tensor = self.get_submodule(self.decoder_name)(input_ids, ctx)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states [M, hidden] dtype, at the wanted positions only, to logits [M, V] float32."""
        logits: Tensor = self.lm_head(hidden)
        return logits


class RMSNormLM(DecoderLM):
    """A DecoderLM whose decoder is an RMSNormDecoder."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory, block: MakeBlock, *, unit_offset: bool = False) -> None:
        super().__init__(cfg, make, lambda cfg, make: RMSNormDecoder(cfg, make, block, unit_offset=unit_offset))


class RMSNormDecoder(nn.Module):
    """Embedding, blocks and a final RMSNorm, under the names that Llama's checkpoints have.

    A layer with a window uses the rotary tables of `local_rope`, where the config has one.
    """

    def __init__(self, cfg: ModelConfig, make: LayerFactory, block: MakeBlock, *, unit_offset: bool = False) -> None:
        super().__init__()
        self.embed_tokens = make.embedding("embed_tokens", scale=cfg.embedding_scale)
        rotary = None if cfg.rope is None else make.rotary(cfg.rope, cfg)
        local_rotary = rotary if cfg.local_rope is None else make.rotary(cfg.local_rope, cfg)
        self.layers = nn.ModuleList(
            block(cfg, make.at(f"layers.{index}"), index, rotary if window is None else local_rotary)
            for index, window in enumerate(cfg.layer_windows)
        )
        self.norm = make.rms_norm("norm", cfg.norm_eps, unit_offset=unit_offset)

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Map ids [T] int64 to hidden states [T, hidden] dtype."""
        x, h = self.embed_tokens(input_ids), None
        for block in self.layers:
            x, h = block(x, h, ctx)
        return self.norm.add(x, h)[1]
