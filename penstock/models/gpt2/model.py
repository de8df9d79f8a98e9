"""GPT-2 decoder (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019).

x = wte[id] + wpe[position]
block:  x = x + attn(ln_1(x));  x = x + mlp(ln_2(x))      LayerNorm, as many key/value heads as query heads, a plain MLP
varies by ModelConfig only: the scale of scores, optionally per layer; tied head
not here: [in, out] weights and the names in checkpoints (table.yaml), arithmetic and rounding (kernels/ops.py)
"""

from penstock.layers.decoder import MLP, Attention, DecoderLM
from penstock.layers.factory import LayerFactory
from penstock.layers.module import ForwardContext, Module, Tensor
from penstock.spec.model_config import ModelConfig


class GPT2LMHeadModel(DecoderLM):
    """The decoder and its head."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        super().__init__(cfg, make, GPT2Model, "transformer")


class GPT2Model(Module):
    """Embeddings of tokens and positions, blocks, final norm."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        self.wte = make.embedding("wte")
        self.wpe = make.embedding("wpe")
        self.h = [GPT2Block(cfg, make.at(f"h.{index}"), index) for index in range(cfg.num_hidden_layers)]
        self.ln_f = make.layer_norm("ln_f", cfg.norm_eps)

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Map ids [T] int64 to hidden states [T, hidden] dtype."""
        x, h = self.wte(input_ids), self.wpe(ctx.positions)  # the first norm adds them
        for block in self.h:
            x, h = block(x, h, ctx)
        return self.ln_f.add(x, h)[1]


class GPT2Block(Module):
    """Attention and feed-forward, each after its norm; the next norm adds the last branch."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory, index: int) -> None:
        self.ln_1 = make.layer_norm("ln_1", cfg.norm_eps)
        self.attn = Attention(cfg, make.at("attn"), index, scale=score_scale(cfg, index))
        self.ln_2 = make.layer_norm("ln_2", cfg.norm_eps)
        self.mlp = MLP(make.at("mlp"), cfg.hidden_act)

    def forward(self, x: Tensor, h: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Map the residual stream x and the branch h not yet added, [T, hidden] float32 each, to the next x and h."""
        x, y = self.ln_1.add(x, h)  # x + h, and its norm
        x, y = self.ln_2.add(x, self.attn(y, ctx))
        return x, self.mlp(y)


def score_scale(cfg: ModelConfig, index: int) -> float:
    """Compute the factor of a layer's scores: 1 / sqrt(D) or 1, divided by the layer's number if the config says so."""
    scale = cfg.attention_scale or cfg.head_dim**-0.5
    return scale / (index + 1) if cfg.extra["scale_by_layer"] else scale
