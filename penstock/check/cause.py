"""What the first difference points to: a guess, from the weights, the positions and the rotary tables of both models."""

import torch
from torch import Tensor, nn

from penstock.check.pairs import Piece, ungroup
from penstock.check.parity import ACTIVATION, ATTENTION, LAYER_TOLERANCE, STREAM, Comparison, Place
from penstock.layers.attention import Attention
from penstock.layers.norm import LayerNorm, RMSNorm
from penstock.weights.loader import open_source, read_parameters

EPSILONS = ("variance_epsilon", "eps", "epsilon")  # what modules of Transformers call it


def find_cause(found: Comparison) -> str | None:
    """A line about the first row that failed; None if none did, or nothing is known."""
    index = next((index for index, row in enumerate(found.rows) if not row.passed), None)
    if index is None:
        return None
    if index == len(found.places):
        return _head(found)
    place = found.places[index]
    if place.what == STREAM:
        return "both branches agree: they are added to the stream, or scaled, in another way"
    changed = _changed_weights(found, place.pieces)
    if changed is not None:
        return changed
    module = found.ours.model.get_submodule(place.layer)
    if place.what == ATTENTION and isinstance(module, Attention):
        return _attention(found, place, module)
    if place.what == ACTIVATION:
        return "the weights agree: another activation"
    if isinstance(module, RMSNorm | LayerNorm):
        return _norm(found, place, module.eps)
    return "the weights agree: a bias, a scale or the layout" if place.pieces else None


def _changed_weights(found: Comparison, pieces: tuple[Piece, ...]) -> str | None:
    """The first parameter of theirs that is not what our loader reads."""
    for piece in pieces:
        module = found.twin.model.get_submodule(piece.theirs)
        for name, theirs in module.named_parameters(recurse=False):
            ours = _our_values(found, piece, name)
            if ours is None or ours.shape != (theirs := _in_our_order(piece, theirs)).shape:
                continue
            difference = (ours - theirs).abs()
            if bool((difference > LAYER_TOLERANCE * theirs.abs().max()).any()):
                return (
                    f"the inputs agree, and {piece.theirs}.{name} has other values "
                    f"({int((difference > 0).sum()):,} of {ours.numel():,} differ, by up to {difference.max():.3g})"
                )
    return None


def _our_values(found: Comparison, piece: Piece, name: str) -> Tensor | None:
    """The rows of our weight or bias that correspond to the piece, as our loader reads them, in float32."""
    ours = found.ours
    parameter = read_parameters(ours.config).get(f"{piece.ours}.{name}")
    if parameter is None:
        return None
    rows = open_source(ours.directory, ours.config, "auto").rows(parameter)
    bounds = piece.rows if piece.is_part else slice(0, rows.shape[0])
    return rows.read(bounds.start, bounds.stop).float()


def _in_our_order(piece: Piece, values: Tensor) -> Tensor:
    """A weight or bias of theirs as our table has it."""
    values = values.detach().float()
    if values.ndim == 1:
        return ungroup(values, piece.layout)
    return ungroup(values if piece.layout.transposed else values.T, piece.layout).T


def _norm(found: Comparison, place: Place, ours: float) -> str:
    module = found.twin.model.get_submodule(place.their_module)
    theirs = next((value for name in EPSILONS if isinstance(value := getattr(module, name, None), float)), None)
    if theirs is not None and theirs != ours:
        return f"the input and the weight agree: the norm's epsilon is {ours:g} here and {theirs:g} there"
    return "the input and the weight agree: another kind of norm, or an offset of its weight"


def _attention(found: Comparison, place: Place, attention: Attention) -> str:
    """The first token sees only itself: no angle, mask or scale reaches it."""
    wrong = (place.ours - place.theirs).square().mean(dim=1).sqrt() > LAYER_TOLERANCE * place.theirs.square().mean().sqrt()
    position = int(wrong.nonzero()[0]) if bool(wrong.any()) else 0
    if position == 0:
        return "the products for q, k and v agree, and attention differs from the first token on: values or heads"
    where = f"the products for q, k and v agree, and attention differs from position {position} on"
    tables = _same_angles(found, attention)
    if tables is False:
        return f"{where}: the rotary tables differ (base or scaling)"
    return f"{where}: {'the rotary tables agree, so ' if tables else 'rotary, '}mask, window or scale"


def _same_angles(found: Comparison, attention: Attention) -> bool | None:
    """Whether some rotary table of theirs is ours; None where there is none to compare."""
    modules = found.twin.model.named_modules()
    names = {name for name, module in modules if type(module).__name__.endswith("RotaryEmbedding")}
    theirs = [call.outputs for call in found.their_trace.calls if call.name in names and len(call.outputs) == 2]
    if attention.rotary is None or not theirs:
        return None
    ours = attention.rotary.cos_sin.cpu().chunk(2, dim=1)
    return any(all(_same_table(own, other) for own, other in zip(ours, pair, strict=True)) for pair in theirs)


def _same_table(ours: Tensor, theirs: Tensor) -> bool:
    """[positions, D / 2] of ours beside [.., T, D] of theirs, which repeats it."""
    theirs = theirs.reshape(-1, theirs.shape[-1])[:, : ours.shape[1]]
    return theirs.shape[1] == ours.shape[1] and torch.allclose(ours[: len(theirs)], theirs, atol=1e-4)


def _head(found: Comparison) -> str:
    head = found.twin.model.get_output_embeddings()
    name = "lm_head.weight"
    parameter = read_parameters(found.ours.config).get(name)
    if isinstance(head, nn.Module) and parameter is not None:
        ours = open_source(found.ours.directory, found.ours.config, "auto").rows(parameter)
        theirs = head.weight.detach().float()
        if ours.shape == theirs.shape and not torch.equal(ours.read(0, ours.shape[0]).float(), theirs):
            return f"the final norm agrees: {name} has other values"
    return "the final norm agrees: the head's product, its bias or a soft cap"
