"""DecoderLM: a decoder and its head, which is the same for every family; what a family brings is the decoder."""

from collections.abc import Callable

from torch import Tensor, nn

from penstock.layers.context import ForwardContext
from penstock.layers.factory import LayerFactory
from penstock.model_config import ModelConfig


class DecoderLM(nn.Module):
    """A CausalLM (causal_lm.py) of a decoder: embedding, blocks and final norm under one name, and the LM head."""

    def __init__(
        self,
        cfg: ModelConfig,
        make: LayerFactory,
        decoder: Callable[[ModelConfig, LayerFactory], nn.Module],
        name: str = "model",
    ) -> None:
        """name: what the decoder is called in the parameter table."""
        super().__init__()
        self.decoder_name = name
        self.add_module(name, decoder(cfg, make.at(name)))
        self.lm_head = make.lm_head("lm_head", softcap=cfg.final_logit_softcapping)

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """[T] int64 -> [T, hidden] dtype, after the final norm."""
        hidden: Tensor = self.get_submodule(self.decoder_name)(input_ids, ctx)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[M, hidden] dtype -> [M, V] float32, at the positions that the caller wants."""
        logits: Tensor = self.lm_head(hidden)
        return logits
