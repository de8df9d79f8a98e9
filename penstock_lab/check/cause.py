"""Guess the cause of the first difference from weights, positions and rotary tables."""

import torch
from torch import Tensor

from penstock.kernels.ops import TensorRows
from penstock.layers.decoder import Attention
from penstock.layers.module import get_submodule
from penstock.layers.weights import LayerNorm, RMSNorm
from penstock.weights.rows import tensor_rows
from penstock_lab.check.pairs import both_values
from penstock_lab.check.parity import ACTIVATION, ATTENTION, LAYER_TOLERANCE, STREAM, Comparison, Place

EPSILONS = ("variance_epsilon", "eps", "epsilon")  # names of this attribute in Transformers' modules


def find_cause(found: Comparison) -> str | None:
    """Return a line about the first row that failed, or None if no row failed."""
    index = found.first_failed
    if index is None:
        return None
    if index == len(found.places):
        changed = _changed_weights(found, "lm_head")
        return f"the final norm agrees: {changed or 'the product of the head, or a soft cap'}"
    place = found.places[index]
    if place.what == STREAM:
        return "both branches agree: how they are added to the stream, or scaled, differs"
    module = get_submodule(found.ours.model, place.layer)
    if place.what == ATTENTION and isinstance(module, Attention):
        return _attention(found, place, module)
    changed = _changed_weights(found, place.layer)
    if changed is not None:
        return changed
    if place.what == ACTIVATION:
        return "the weights agree: the activation function differs"
    if isinstance(module, RMSNorm | LayerNorm):
        return _norm(found, place, module.eps)
    return "the weights agree: the computation differs"


def _changed_weights(found: Comparison, layer: str) -> str | None:
    """Name the first tensor of a layer of ours with different values in their model, and count the differences."""
    for parameter, ours, theirs in both_values(layer, found.source, found.twin.model.state_dict()):
        if ours.shape != theirs.shape:
            continue
        difference = (ours - theirs).abs()
        if bool((difference > LAYER_TOLERANCE * theirs.abs().max()).any()):
            count = f"{int((difference > 0).sum()):,} of {difference.numel():,} differ, by up to {difference.max():.3g}"
            parts = tensor_rows(parameter.layouts[0], TensorRows(difference))
            source = next(name for name, rows in parts.items() if bool(rows.read(0, rows.shape[0]).any()))
            return f"{source} has different values there ({count})"
    return None


def _norm(found: Comparison, place: Place, ours: float) -> str:
    module = found.twin.model.get_submodule(place.their_module)
    theirs = next((value for name in EPSILONS if isinstance(value := getattr(module, name, None), float)), None)
    if theirs is not None and theirs != ours:
        return f"the input and the weight agree: the norm's epsilon is {ours:g} here and {theirs:g} there"
    return "the input and the weight agree: the kind of norm, or an offset of its weight, differs"


def _attention(found: Comparison, place: Place, attention: Attention) -> str:
    """Tell wrong values from wrong angles: the first token sees only itself, so no angle, mask or scale affects it."""
    errors = (place.ours - place.theirs).square().mean(dim=1).sqrt()
    wrong = (errors > LAYER_TOLERANCE * place.theirs.square().mean().sqrt()).nonzero()
    position = int(wrong[0]) if len(wrong) else 0
    if position == 0:
        return "the products for q, k and v agree, and attention differs from the first token on: values or heads"
    where = f"the products for q, k and v agree, and attention differs from position {position} on"
    tables = _same_angles(found, attention)
    if tables is False:
        return f"{where}: the rotary tables differ (base or scaling)"
    return f"{where}: {'the rotary tables agree, so ' if tables else 'rotary, '}mask, window or scale"


def _same_angles(found: Comparison, attention: Attention) -> bool | None:
    """Return whether one of their rotary tables equals ours, or None if there are no tables to compare."""
    modules = found.twin.model.named_modules()
    names = {name for name, module in modules if type(module).__name__.endswith("RotaryEmbedding")}
    theirs = [call.outputs for call in found.their_trace if call.name in names and len(call.outputs) == 2]
    if attention.rotary is None or not theirs:
        return None
    ours = attention.rotary.cos_sin.cpu().chunk(2, dim=1)
    return any(all(map(_same_table, ours, pair)) for pair in theirs)


def _same_table(ours: Tensor, theirs: Tensor) -> bool:
    """Compare our [positions, D / 2] with their [.., T, D], which has the same values twice."""
    theirs = theirs.reshape(-1, theirs.shape[-1])[:, : ours.shape[1]]
    return theirs.shape[1] == ours.shape[1] and torch.allclose(ours[: len(theirs)], theirs, atol=1e-4)
