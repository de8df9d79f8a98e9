"""The decoder of Falcon (Almazrouei et al., "The Falcon Series of Open Language Models", 2023): 7B, 40B, 180B, 11B and
RW; and of BLOOM (BigScience Workshop, "BLOOM: A 176B-Parameter Open-Access Multilingual Language Model", 2022).

block:  x = x + attn(ln(x)) + mlp(ln(x))                  7B, 11B: one norm for both branches
        x = x + attn(ln_attn(x)) + mlp(ln_mlp(x))         40B, 180B: one each
        x = x + attn(ln(x));  x = x + mlp(ln'(x))         RW, BLOOM: one branch after the other
        LayerNorm, a plain MLP; rotary embedding, or ALiBi (RW, BLOOM)
varies by ModelConfig only: num_parallel_norms, key/value heads (one, groups, all), alibi, biases, tied head, a norm of
    the embedding (BLOOM)
not here: the layout of the fused query_key_value (table.yaml), arithmetic and rounding (kernels/ops.py)
"""

from penstock.layers.decoder import MLP, Attention, DecoderLM
from penstock.layers.factory import LayerFactory
from penstock.layers.module import ForwardContext, Module, Tensor
from penstock.layers.rotary import Rotary
from penstock.spec.model_config import ModelConfig


class FalconForCausalLM(DecoderLM):
    """The decoder and its head."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        super().__init__(cfg, make, FalconModel, "transformer")


class FalconModel(Module):
    """Embedding, which may be normed, blocks, final norm."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        self.word_embeddings = make.embedding("word_embeddings")
        self.word_embeddings_layernorm = None
        if cfg.embedding_norm:
            self.word_embeddings_layernorm = make.layer_norm("word_embeddings_layernorm", cfg.norm_eps, dtype="float32")
        rotary = None if cfg.rope is None else make.rotary(cfg.rope, cfg)
        block = ParallelBlock if cfg.num_parallel_norms else SequentialBlock
        self.h = [block(cfg, make.at(f"h.{index}"), index, rotary) for index in range(cfg.num_hidden_layers)]
        self.ln_f = make.layer_norm("ln_f", cfg.norm_eps)

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Map ids [T] int64 to hidden states [T, hidden] dtype."""
        x, h = self.word_embeddings(input_ids), None
        if self.word_embeddings_layernorm is not None:
            x = self.word_embeddings_layernorm(x)
        for block in self.h:
            x, h = block(x, h, ctx)
        return self.ln_f.add(x, h)[1]


class FalconBlock(Module):
    """Base of the blocks: attention and feed-forward. The next norm adds the last branch.

    forward maps the residual stream x and the branch h not yet added, [T, hidden] float32 each, to the next x and h.
    """

    def __init__(self, cfg: ModelConfig, make: LayerFactory, index: int, rotary: Rotary | None) -> None:
        self.ops = make.ops
        self.self_attention = Attention(cfg, make.at("self_attention"), index, rotary)
        self.mlp = MLP(make.at("mlp"), cfg.hidden_act)


class SequentialBlock(FalconBlock):
    """The feed-forward branch reads the residual stream after attention."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory, index: int, rotary: Rotary | None) -> None:
        super().__init__(cfg, make, index, rotary)
        self.input_layernorm = make.layer_norm("input_layernorm", cfg.norm_eps)
        self.post_attention_layernorm = make.layer_norm("post_attention_layernorm", cfg.norm_eps)

    def forward(self, x: Tensor, h: Tensor | None, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        x, y = self.input_layernorm.add(x, h)  # x + h, and its norm
        x, y = self.post_attention_layernorm.add(x, self.self_attention(y, ctx))
        return x, self.mlp(y)


class ParallelBlock(FalconBlock):
    """Both branches read the same residual stream, through a shared norm or through a norm each."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory, index: int, rotary: Rotary | None) -> None:
        super().__init__(cfg, make, index, rotary)
        self.shares_norm = cfg.num_parallel_norms == 1
        if self.shares_norm:
            self.input_layernorm = make.layer_norm("input_layernorm", cfg.norm_eps)
        else:
            self.ln_attn = make.layer_norm("ln_attn", cfg.norm_eps)
            self.ln_mlp = make.layer_norm("ln_mlp", cfg.norm_eps)

    def forward(self, x: Tensor, h: Tensor | None, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        x, y = (self.input_layernorm if self.shares_norm else self.ln_attn).add(x, h)
        z = y if self.shares_norm else self.ln_mlp(x)  # before attention is added
        return self.ops.add(x, self.self_attention(y, ctx)), self.mlp(z)
