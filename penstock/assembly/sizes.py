"""The memory that a model's weights and results will take, counted on its layers before any weight is read.

The engine counts when it starts; `penstock plan` counts without an engine. Both can count a whole model or a rank's
part of it.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from penstock.assembly.memory import ModelSizes, Products
from penstock.kernels.ops import Ops, Packing
from penstock.layers.decoder import MoE, expert_products, slots_of
from penstock.layers.module import named_modules
from penstock.layers.weights import Embedding, HeadLayout, Linear, LMHead, WeightLayer
from penstock.spec.model_config import ModelConfig
from penstock.weights.loader import (
    ANYWHERE,
    Place,
    Stored,
    adapter_bytes,
    empty_model,
    kept_layers,
    make_factory,
    plain_bytes,
)


def model_sizes(
    model_config: ModelConfig, ops: Ops, head: HeadLayout, stored: Stored, place: Place = ANYWHERE, **options: Any
) -> ModelSizes:
    """Count a model's bytes and operations. It must have no torch modules, because making them would allocate their
    memory.

    stored: how its checkpoint codes weights.
    place: the part that is counted.
    options: `scheme`, `slices` and `lora`, as in load_model.
    """
    make = make_factory(stored, model_config, ops, place, max_positions=1, head=head, **options)
    model = empty_model(model_config, make)
    whole = [module for _, module in named_modules(model)]
    experts = [expert for module in whole if isinstance(module, MoE) for expert in module.experts]
    # One call computes all experts of a layer, so the single experts need no result buffers. Logits are counted apart.
    unused = {layer.out for expert in experts for layer in (expert.gate_up_proj, expert.down_proj)}
    unused |= {slot for module in whole if isinstance(module, LMHead) for slot in slots_of(module)}
    place.trim(model, make)
    modules = [module for _, module in named_modules(model)]
    plain, kept = "float32" if int(ops.dtype.itemsize) == 4 else "bfloat16", kept_layers(model, make)
    weights = sum(layer.num_bytes for layer in kept) + plain_bytes(model, make)
    return ModelSizes(
        weights=weights,
        adapters=adapter_bytes(model),
        fixed_rows=ops.fixed_rows,
        row_bytes=sum(slot.row_bytes for slot in make.arena.slots - unused),
        vocab_columns=sum(slot.columns[0] for head in modules if isinstance(head, LMHead) for slot in slots_of(head)),
        deepest=max(module.spec.shape[1] for module in modules if isinstance(module, Linear)),
        kinds=_kinds(kept, plain, weights),
        products=_products(modules, plain),
    )


def _products(modules: Iterable[object], plain: str) -> dict[str, Products]:
    """Sum the bytes and operations of products by how often a step uses them."""
    experts = {id(layer) for layer in expert_products(modules)}
    products = {name: Products() for name in ("layers", "head", "experts")}
    for layer in modules:
        if isinstance(layer, Linear):
            use = "head" if isinstance(layer, LMHead) else "experts" if id(layer) in experts else "layers"
            for begin, end, packing in layer.pieces:
                kind, passes = _kind(packing, plain), max(1, packing.activation_slices)
                num_bytes = layer.ops.packed_bytes((end - begin, layer.spec.shape[1]), packing, bias=layer.has_bias)
                products[use].num_bytes[kind] += num_bytes
                products[use].operations[kind] += 2 * (end - begin) * layer.spec.shape[1] * passes
    return products


def _kinds(layers: Iterable[WeightLayer], plain: str, total: int) -> dict[str, int]:
    """Sum the bytes of weights by type, with scales, biases and padding listed separately."""
    kinds: Counter[str] = Counter()
    for layer in layers:
        if isinstance(layer, Linear):
            kinds.update(_bytes_of(layer, plain))
        else:
            coding = layer.packing.coding if isinstance(layer, Embedding) and layer.packing is not None else None
            name = coding.name if coding is not None else plain if isinstance(layer, Embedding) else "float32"
            kinds[name] += int(layer.num_bytes)
    kinds[plain] += total - kinds.total()  # parameters of torch modules
    return {kind: size for kind, size in kinds.items() if size}


def _kind(packing: Packing, plain: str) -> str:
    """Return the type in which products with a weight are computed."""
    if packing.coding is not None:
        return "int8" if packing.coding.is_integer else plain
    return plain if packing.scheme is None else packing.scheme.name.partition("-x")[0]


def _bytes_of(layer: Linear, plain: str) -> Counter[str]:
    """Split the bytes of a packed weight into values, scales, bias and padding. Codes count with all that they have."""
    parts: Counter[str] = Counter()
    for begin, end, packing in layer.pieces:
        (n, k), scheme = (end - begin, layer.spec.shape[1]), packing.scheme
        num_bytes = int(layer.ops.packed_bytes((n, k), packing, bias=layer.has_bias))
        if packing.coding is not None:
            parts[packing.coding.name] += num_bytes
            continue
        bits = scheme.weight_bits if scheme else 32 if plain == "float32" else 16
        own = Counter({_kind(packing, plain): n * k * bits // 8})
        if scheme is not None:
            own["scales"] = 4 * n if scheme.group_size is None else 2 * n * -(-k // scheme.group_size)
        if layer.spec.bias:
            own["bias"] = 4 * n
        own["padding"] = num_bytes - own.total()
        parts.update(own)
    return parts
