"""The memory that a model's weights and results will take, counted on its layers before any weight is read.

The engine counts when it starts; `penstock plan` counts without an engine. Both can count a whole model or a rank's
part of it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from penstock.assembly.memory import ModelSizes, Products
from penstock.kernels.ops import Ops
from penstock.kernels.scheme import Scheme
from penstock.layers.decoder import MoE
from penstock.layers.factory import LayerFactory
from penstock.layers.module import named_modules
from penstock.layers.weights import Embedding, HeadLayout, Linear, LMHead, WeightLayer
from penstock.spec.model_config import ModelConfig
from penstock.weights.loader import ANYWHERE, Place, empty_model, kept_layers, plain_bytes
from penstock.weights.sources import read_parameters


def model_sizes(
    model_config: ModelConfig, ops: Ops, scheme: Scheme | None, head: HeadLayout, place: Place = ANYWHERE
) -> ModelSizes:
    """Count a model's bytes and operations. It must have no torch modules, because making them would allocate their
    memory.

    place: the part that is counted.
    """
    parameters = read_parameters(model_config)
    make = place.factory(LayerFactory.single_device(ops, parameters, scheme=scheme, max_positions=1, head=head))
    model = empty_model(model_config, make)
    modules = [module for _, module in named_modules(model)]
    heads = [module for module in modules if isinstance(module, LMHead)]
    experts = [expert for module in modules if isinstance(module, MoE) for expert in module.experts]
    # One call computes all experts of a layer, so the single experts need no result buffers.
    unused = {layer.out for expert in experts for layer in (expert.gate_up_proj, expert.down_proj)}
    plain, kept = "float32" if int(ops.dtype.itemsize) == 4 else "bfloat16", kept_layers(model, make)
    weights = sum(layer.num_bytes for layer in kept) + plain_bytes(model, make)
    return ModelSizes(
        weights=weights,
        row_bytes=sum(slot.row_bytes for slot in make.arena.slots - unused - {head.out for head in heads}),
        vocab_columns=max(head.width for head in heads),
        deepest=max(module.spec.shape[1] for module in modules if isinstance(module, Linear)),
        kinds=_kinds(kept, plain, weights),
        products=_products(modules, plain),
    )


def _products(modules: Iterable[object], plain: str) -> dict[str, Products]:
    """Sum the bytes and operations of products by how often a step uses them."""
    experts = {id(layer) for layer in _expert_products(modules)}
    products = {name: Products() for name in ("layers", "head", "experts")}
    for layer in modules:
        if isinstance(layer, Linear):
            use = "head" if isinstance(layer, LMHead) else "experts" if id(layer) in experts else "layers"
            (n, k), scheme, kind = layer.spec.shape, layer.spec.packing.scheme, _kind(layer, plain)
            products[use].num_bytes[kind] += int(layer.num_bytes)
            products[use].operations[kind] += 2 * n * k * max(1, scheme.slices if scheme else 1)
    return products


def _kinds(layers: Iterable[WeightLayer], plain: str, total: int) -> dict[str, int]:
    """Sum the bytes of weights by type, with scales, biases and padding listed separately."""
    kinds: Counter[str] = Counter()
    for layer in layers:
        if isinstance(layer, Linear):
            kinds.update(_bytes_of(layer, plain))
        else:
            kinds[plain if isinstance(layer, Embedding) else "float32"] += int(layer.num_bytes)
    kinds[plain] += total - kinds.total()  # parameters of torch modules
    return {kind: size for kind, size in kinds.items() if size}


def _expert_products(modules: Iterable[object]) -> Iterator[Linear]:
    for module in modules:
        if isinstance(module, MoE):
            for expert in module.experts:
                yield from (expert.gate_up_proj, expert.down_proj)


def _kind(layer: Linear, plain: str) -> str:
    scheme = layer.spec.packing.scheme
    return plain if scheme is None else scheme.name.partition("-x")[0]


def _bytes_of(layer: Linear, plain: str) -> Counter[str]:
    """Split the bytes of a packed weight into values, scales, bias and padding."""
    (n, k), scheme = layer.spec.shape, layer.spec.packing.scheme
    bits = scheme.weight_bits if scheme else 32 if plain == "float32" else 16
    parts = Counter({_kind(layer, plain): n * k * bits // 8})
    if scheme is not None:
        parts["scales"] = 4 * n if scheme.group_size is None else 2 * n * -(-k // scheme.group_size)
    if layer.spec.bias:
        parts["bias"] = 4 * n
    parts["padding"] = int(layer.num_bytes) - parts.total()
    return parts
