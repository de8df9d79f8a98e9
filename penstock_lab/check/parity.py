"""The table of errors: each of our layers compared with the Transformers module, or the kernel, that computes the same.

`compare` runs our model and Transformers' model in float32, each on its own values. The rows are in the order of our
computation, so the models diverge at the first row beyond its bound, and later rows inherit that difference.

`compare_kernels` runs the native kernels and the reference. Each reference layer reads what the same native layer has
read, so every row shows the error of that layer alone; in bfloat16, rounding could otherwise choose another expert. It
does not need Transformers. `find_cause` guesses the cause of the first difference from weights, positions and rotary
tables.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from penstock.kernels.ops import TensorRows
from penstock.layers.decoder import Attention
from penstock.layers.module import get_submodule, named_modules
from penstock.layers.weights import (
    ActivatedLinear,
    Embedding,
    HeadNorms,
    LayerNorm,
    Linear,
    LMHead,
    RMSNorm,
    WeightLayer,
)
from penstock.weights.rows import tensor_rows
from penstock.weights.sources import CheckpointSource, open_checkpoint_source
from penstock_lab.check.ours import OurModel
from penstock_lab.check.pairs import BLOCK, both_values, find_pairs, modules_of, split_columns, split_heads
from penstock_lab.check.report import Row
from penstock_lab.check.twin import Call, Headless, Trace, Twin

# Bounds of the relative error (RMS). Two orders of summation in float32 differ by about 1e-7 per product, and these
# rounding errors add up like a random walk over the blocks. A wrong weight, epsilon or angle causes far larger errors.
LAYER_TOLERANCE = 1e-5
KERNEL_TOLERANCE = {"float32": LAYER_TOLERANCE, "bfloat16": 5e-3}  # a bfloat16 rounding is at most 2^-9
ATTENTION, ACTIVATION, STREAM = "attention (rotary, mask, scale)", "activation", "residual stream"
LOGPROBS, TABLE, WEIGHTS = "log-probabilities", "(all rows)", "(weights of experts, and other single ones)"
LABELS, VECTORS = "logits of the labels", "pooled vectors (MEAN, CLS, LAST)"
EPSILONS = ("variance_epsilon", "eps", "epsilon")  # names of this attribute in Transformers' modules


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """An output of both computations.

    Attributes:
        layer: our layer.
        what: which of its outputs, or in brackets which piece of it; "" for its whole result.
        ours, theirs: [T, n] float32.
    """

    layer: str
    what: str
    their_module: str
    ours: Tensor
    theirs: Tensor

    @property
    def block(self) -> int | None:
        """The number of the decoder block that contains the layer, or that the layer is."""
        match = BLOCK.match(self.layer + ".")
        return None if match is None else int(match[1].rpartition(".")[2])


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Both models after one pass each.

    Attributes:
        source: our checkpoint.
        places: the compared outputs, in the order of computation.
        rows: one row per place, then one for the log-probabilities.
    """

    ours: OurModel
    source: CheckpointSource
    twin: Twin
    their_trace: Trace
    places: tuple[Place, ...]
    rows: tuple[Row, ...]

    @property
    def first_failed(self) -> int | None:
        """The index of the first row that failed."""
        return next((index for index, row in enumerate(self.rows) if not row.passed), None)

    @property
    def differs_in_attention(self) -> bool:
        """True if the first difference is the result of attention."""
        index = self.first_failed
        return index is not None and index < len(self.places) and self.places[index].what == ATTENTION


def compare(ours: OurModel, twin: Twin, ids: list[int]) -> Comparison:
    """Run both models over a prompt and compare every layer."""
    our_trace, our_logits = ours.run(ids)
    their_trace, their_logits = twin.run(ids)
    source = open_checkpoint_source(ours.directory, ours.config)
    places = tuple(_Walk(ours, source, twin.model, their_trace, len(ids)).places(our_trace))
    rows = tuple(rows_of(places, LAYER_TOLERANCE))
    if isinstance(twin.model, Headless):
        last = _last_of_headless(ours, our_logits.cpu(), their_logits, rows[-1])
    else:
        theirs = their_logits.log_softmax(dim=-1)
        found = errors(our_logits.cpu().log_softmax(dim=-1), theirs)
        last = Row(None, LOGPROBS, "logits", *found, logprob_tolerance(twin, ids, theirs, rows[-1]), absolute=True)
    return Comparison(ours, source, twin, their_trace, places, (*rows, last))


def _last_of_headless(ours: OurModel, found: Tensor, expected: Tensor, before: Row) -> Row:
    """Compare a classifier's logits or, of another model, the vectors that pooling makes of the states [T, hidden]."""
    if ours.config.labels:
        return Row(None, LABELS, "logits", *errors(found, expected), before.allowed)
    pooled = (torch.stack([states.mean(dim=0), states[0], states[-1]]) for states in (found, expected))
    return Row(None, VECTORS, "last_hidden_state", *errors(*pooled), before.allowed)


def logprob_tolerance(twin: Twin, ids: list[int], logprobs: Tensor, norm: Row) -> float:
    """Measure the largest difference of a log-probability that an error allowed in the final norm's result causes.

    How large it is depends on the weights: on the norm of the head's rows, and on how large its input is. So random
    noise with the bound of the row `norm` is added to that result, and Transformers' own head makes logits of it.
    """
    return errors(twin.logits(ids, norm.theirs, norm.allowed).log_softmax(dim=-1), logprobs)[0]


def compare_kernels(directory: Path, dtype: str, ids: list[int]) -> tuple[Row, ...]:
    """Run the native kernels and the reference over a prompt and compare every layer."""
    native, reference = (
        OurModel.load(directory, dtype=dtype, kernels=kernels, tokens=len(ids)) for kernels in ("cpu", "reference")
    )
    found, _ = native.run(ids)
    expected, _ = reference.run(ids, follow=found)
    return compare_traces(native, found, expected, dtype)


def compare_traces(model: OurModel, found: Trace, expected: Trace, dtype: str) -> tuple[Row, ...]:
    return tuple(rows_of(_kernel_places(model.model, found, expected), KERNEL_TOLERANCE[dtype]))


def rows_of(places: Iterable[Place], tolerance: float) -> Iterator[Row]:
    """Yield each place as a row. The bound grows with the number of blocks passed, because rounding errors add up."""
    blocks = 0
    for place in places:
        blocks = blocks if place.block is None else place.block + 1
        found = errors(place.ours, place.theirs)
        name = f"{place.layer} {place.what}".rstrip()
        yield Row(place.block, name, place.their_module, *found, tolerance * math.sqrt(1 + blocks))


def errors(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Compute the largest difference, and the RMS of the difference over the RMS of `theirs`; infinite for NaN."""
    if ours.shape != theirs.shape:
        return math.inf, math.inf
    if torch.equal(ours, theirs):  # false for NaN
        return 0.0, 0.0
    difference, scale = (ours - theirs).double(), theirs.double().square().mean().sqrt().item()
    largest, rms = difference.abs().max().item(), difference.square().mean().sqrt().item()
    if not math.isfinite(largest):
        return math.inf, math.inf
    return largest, rms / scale if scale else (math.inf if rms else 0.0)


def _kernel_places(model: object, found: Trace, expected: Trace) -> Iterator[Place]:
    before: Call | None = None
    for own, other in zip(found, expected, strict=True):
        attention = _attention_before(own.name, model)
        if attention is not None:
            yield Place(attention, ATTENTION, "reference", _flat(own.inputs[0]), _flat(other.inputs[0]))
        # A module that only returns the result of the previous call, which is inside it, gets no row.
        returned = before is not None and len(own.outputs) == 1 and torch.equal(own.outputs[0], before.outputs[0])
        if isinstance(get_submodule(model, own.name), WeightLayer) or not returned:
            what = STREAM if BLOCK.fullmatch(own.name + ".") else ""
            yield Place(own.name, what, "reference", _flat(_summed(own)), _flat(_summed(other)))
        before = own


def _attention_before(name: str, model: object) -> str | None:
    """Name the attention layer whose result the product `name` reads, or None for other modules."""
    parent = name.rpartition(".")[0]
    modules = dict(named_modules(model))
    attention = modules.get(parent)  # None if the parent is a list of modules
    return parent if isinstance(attention, Attention) and attention.o_proj is modules[name] else None


def _summed(call: Call) -> Tensor:
    """Add up what a module of ours returns: it may leave the addition of its branches to the next norm."""
    return sum(call.outputs[1:], start=call.outputs[0])


def _flat(tensor: Tensor) -> Tensor:
    return tensor.flatten(1).cpu()


class _Walk:
    """Goes through our trace and finds what to compare each call with."""

    def __init__(self, ours: OurModel, source: CheckpointSource, twin: nn.Module, theirs: Trace, tokens: int) -> None:
        self.ours, self.source, self.twin, self.theirs, self.tokens = ours.model, source, twin, theirs, tokens
        self.pairs = find_pairs(source.parameters, ours.model, twin)
        self.residual_scale = ours.config.residual_scale  # our stream is divided by it
        layers = (name.rpartition(".")[0] for name, item in source.parameters.items() if item.tied_to is None)
        inside = tuple(f"{branch}." for branch in self.pairs.branches)
        known = self.pairs.layouts
        self.single = {layer: None for layer in layers if layer not in known and not layer.startswith(inside)}

    def places(self, trace: Trace) -> Iterator[Place]:
        activated: str | None = None  # the layer whose activation the next product reads
        for call in trace:
            layer = get_submodule(self.ours, call.name)
            if isinstance(layer, ActivatedLinear):
                activated = call.name
            elif isinstance(layer, WeightLayer):
                if isinstance(layer, LMHead):
                    continue  # the log-probabilities are compared instead
                if isinstance(layer, Linear):
                    yield from self._input(call, activated)
                    activated = None
                yield from self._weights(call.name)
                yield from self._output(call, layer)
            elif call.name in self.pairs.branches:
                yield from self._between(call, "", self.pairs.branches[call.name])
                yield from self._experts(call.name)
            elif call.name in self.pairs.blocks:
                yield from self._weights(call.name)
                yield from self._between(call, STREAM, self.pairs.blocks[call.name])

    def _input(self, call: Call, activated: str | None) -> Iterator[Place]:
        """Compare the input of a product if no layer computes it: the result of attention, or an activation."""
        attention = _attention_before(call.name, self.ours)
        layer, layout = attention or activated, self.pairs.layouts.get(call.name)
        if layer is None or layout is None or len(layout.sources) > 1:
            return
        (module,) = modules_of(layout)
        their_call = self.theirs.last(module)
        if their_call is not None:
            ours, theirs = self._rows(call.inputs[0]), self._rows(their_call.inputs[0])
            yield Place(layer, ATTENTION if attention else ACTIVATION, f"{module} (input)", ours, theirs)

    def _output(self, call: Call, layer: WeightLayer) -> Iterator[Place]:
        layout = self.pairs.layouts.get(call.name)
        pieces: dict[str, Tensor] = {}
        if layout is not None and isinstance(layer, HeadNorms):
            pieces = split_heads(layout, tuple(layer.weight.shape), self._rows(call.outputs[0]))
        elif layout is not None:
            pieces = split_columns(layout, self._rows(call.outputs[0]))
        for module, ours in pieces.items():
            their_call, their_layer = self.theirs.last(module), self.twin.get_submodule(module)
            if their_call is None or not their_call.outputs:
                continue
            # A router may return other numbers before its logits, of the same shape: the nearest are compared.
            outputs = [self._rows(item) for item in their_call.outputs if item.numel() == their_call.outputs[0].numel()]
            theirs = min(outputs, key=lambda item: errors(ours, item)[0]) if len(outputs) > 1 else outputs[0]
            if not isinstance(layer, Embedding):
                what = f"({module.rpartition('.')[2]})" if len(pieces) > 1 else ""
                yield Place(call.name, what, module, ours, theirs)
                continue
            # Their module may apply the scale, or the model later; in that case the first block's stream shows it.
            ours = ours / layer.scale if type(their_layer) is nn.Embedding else ours
            yield Place(call.name, "", module, ours, theirs)
            table = their_layer.get_parameter("weight").detach().float()  # the prompt reads only some of its rows
            yield Place(call.name, TABLE, module, layer.table().cpu().float(), table)

    def _between(self, call: Call, what: str, module: str) -> Iterator[Place]:
        """Compare the output of a block or a branch."""
        their_call = self.theirs.last(module)
        if their_call is not None and their_call.outputs:
            ours = _summed(call) * (self.residual_scale if what == STREAM else 1.0)
            yield Place(call.name, what, module, self._rows(ours), self._rows(their_call.outputs[0]))

    def _experts(self, branch: str) -> Iterator[Place]:
        """Compare weights that have no module of theirs: experts, which the prompt may not reach, and sink logits.

        The place shows the worst one.
        """
        places = (
            Place(branch, WEIGHTS, self.pairs.branches[branch], ours, theirs)
            for parameter, ours, theirs in both_values(branch, self.source, self.twin.state_dict())
            if parameter.name.rpartition(".")[0] not in self.pairs.layouts
        )
        worst = max(places, key=lambda place: errors(place.ours, place.theirs)[1], default=None)
        if worst is not None:
            yield worst

    def _weights(self, module: str) -> Iterator[Place]:
        """Compare the weights of a layer, or in a block, that belong to no module of theirs and to no branch."""
        for layer in [item for item in self.single if f"{item}.".startswith(f"{module}.")]:
            del self.single[layer]
            for parameter, ours, theirs in both_values(layer, self.source, self.twin.state_dict()):
                yield Place(layer, "", next(iter(parameter.layouts[0].sources)), ours, theirs)

    def _rows(self, tensor: Tensor) -> Tensor:
        """Reshape values with one entry per token to [T, n]. Theirs have a batch axis, and some an axis of heads. A
        classifier's head may read one state only: [1, n]."""
        tensor = tensor.cpu()
        if tensor.ndim == 2 and len(tensor) == 1:
            return tensor
        if tensor.ndim == 4 and tensor.shape[1] != self.tokens:
            tensor = tensor.transpose(1, 2)
        return tensor.reshape(self.tokens, -1)


def find_cause(found: Comparison) -> str | None:
    """Explain in one line why the first row failed; None if no row failed."""
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
        return _norm(found, place, module.eps * found.ours.config.residual_scale**2)
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
    if theirs is not None and not math.isclose(theirs, ours):
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
    """True if one of their rotary tables equals ours, or None if there are no tables to compare."""
    modules = found.twin.model.named_modules()
    names = {name for name, module in modules if type(module).__name__.endswith("RotaryEmbedding")}
    theirs = [call.outputs for call in found.their_trace if call.name in names and len(call.outputs) == 2]
    if attention.rotary is None or attention.rotary.cos_sin is None or not theirs:
        return None
    ours = attention.rotary.cos_sin.cpu().chunk(2, dim=1)
    return any(all(map(_same_table, ours, pair)) for pair in theirs)


def _same_table(ours: Tensor, theirs: Tensor) -> bool:
    """Compare our [positions, D / 2] with their [.., T, D], which has the same values twice."""
    theirs = theirs.reshape(-1, theirs.shape[-1])[:, : ours.shape[1]]
    return theirs.shape[1] == ours.shape[1] and torch.allclose(ours[: len(theirs)], theirs, atol=1e-4)
