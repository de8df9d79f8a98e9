"""What a model's weights and results will take, counted on its layers before any weight is read."""

from penstock.kernels.ops import Ops
from penstock.layers.factory import LayerFactory
from penstock.layers.lm_head import HeadLayout, LMHead
from penstock.layers.mlp import MoE
from penstock.layers.module import named_modules
from penstock.layers.weights import Linear
from penstock.planner.ledger import ModelSizes
from penstock.quant.scheme import Scheme
from penstock.spec.model_config import ModelConfig
from penstock.weights.loader import empty_model, weight_bytes
from penstock.weights.sources import read_parameters


def model_sizes(model_config: ModelConfig, ops: Ops, scheme: Scheme | None, head: HeadLayout) -> ModelSizes:
    """Return the sizes of a model whose layers are all of this package: a layer of torch's own would be allocated."""
    parameters = read_parameters(model_config)
    make = LayerFactory.single_device(ops, parameters, scheme=scheme, max_positions=1, head=head)
    model = empty_model(model_config, make)
    modules = [module for _, module in named_modules(model)]
    heads = [module for module in modules if isinstance(module, LMHead)]
    experts = [expert for module in modules if isinstance(module, MoE) for expert in module.experts]
    # One call computes all experts of a layer, so that they leave no results of their own.
    unused = {layer.out for expert in experts for layer in (expert.gate_up_proj, expert.down_proj)}
    return ModelSizes(
        weights=weight_bytes(model, make),
        row_bytes=sum(slot.row_bytes for slot in make.arena.slots - unused - {head.out for head in heads}),
        vocab_columns=max(head.width for head in heads),
        deepest=max(module.spec.shape[1] for module in modules if isinstance(module, Linear)),
    )
