"""The table of errors: every layer of ours beside the Transformers module, or the kernel, that computes the same.

`compare` runs our model and Transformers' in float32, each on its own values. The rows are in the order of our
computation, so the first one beyond its bound is where the models part; later rows carry that difference on.

`verify` runs the native kernels and the reference. Each reference layer reads what the same native layer has read, so
every row is that layer's own error; in bfloat16, rounding could otherwise choose another expert. It needs no
Transformers.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from penstock.check.ours import OurModel, weight_layers
from penstock.check.pairs import BLOCK, Pairs, Piece, find_pairs, their_values
from penstock.check.report import Row
from penstock.check.trace import Call, Trace
from penstock.check.twin import Twin
from penstock.layers.attention import Attention
from penstock.layers.lm_head import LMHead
from penstock.layers.weights import ActivatedLinear, Embedding, GatedLinear, Linear
from penstock.weights.sources import ParameterSource, open_source, read_parameters

# Bounds of the relative error (RMS). Two orders of summation in float32 differ by about 1e-7 per product, and such
# roundings add up like a random walk along the blocks. A wrong weight, epsilon or angle is far beyond.
LAYER_TOLERANCE = 1e-5
KERNEL_TOLERANCE = {"float32": LAYER_TOLERANCE, "bfloat16": 5e-3}  # a bfloat16 rounding is at most 2^-9
LOGPROB_TOLERANCE = 1e-4  # absolute, the project's bound for every family in float32
ATTENTION, ACTIVATION, STREAM = "attention (rotary, mask, scale)", "activation", "residual stream"
LOGPROBS, TABLE, EXPERTS = "log-probabilities", "(all rows)", "(weights of all experts)"


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """An output of both computations.

    Attributes:
        layer: our layer.
        what: which of its outputs; "" for its result.
        part: which piece of it their module computes, if our layer joins several; else "".
        ours, theirs: [T, n] float32.
    """

    layer: str
    what: str
    part: str
    their_module: str
    ours: Tensor
    theirs: Tensor

    @property
    def block(self) -> int | None:
        """Number of the decoder block that the layer is in, or is."""
        match = BLOCK.match(self.layer + ".")
        return None if match is None else int(match[1].rpartition(".")[2])

    @property
    def name(self) -> str:
        """The row's name, for instance model.layers.0.self_attn.qkv_proj (k_proj)."""
        return " ".join(filter(None, [self.layer, f"({self.part})" if self.part else "", self.what]))


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Both models after one pass each.

    Attributes:
        places: in the order of computation.
        rows: one per place, then the log-probabilities.
    """

    ours: OurModel
    twin: Twin
    their_trace: Trace
    places: tuple[Place, ...]
    rows: tuple[Row, ...]

    @property
    def first_failed(self) -> int | None:
        """Index of the first row that failed."""
        return next((index for index, row in enumerate(self.rows) if not row.passed), None)

    @property
    def differs_in_attention(self) -> bool:
        """Whether the first difference is the result of attention."""
        index = self.first_failed
        return index is not None and index < len(self.places) and self.places[index].what == ATTENTION


def compare(ours: OurModel, twin: Twin, ids: list[int]) -> Comparison:
    """Run both models over a prompt and compare every layer."""
    our_trace, our_logits = ours.run(ids)
    their_trace, their_logits = twin.run(ids)
    pairs = find_pairs(read_parameters(ours.config), ours.model, twin.model)
    source = open_source(ours.directory, ours.config, "auto")
    walk = _Walk(ours.model, twin.model, pairs, their_trace, len(ids), source)
    places = tuple(walk.places(our_trace))
    found = errors(our_logits.cpu().log_softmax(dim=-1), their_logits.log_softmax(dim=-1))
    last = Row(None, LOGPROBS, "logits", *found, LOGPROB_TOLERANCE, absolute=True)
    return Comparison(ours, twin, their_trace, places, (*rows_of(places, LAYER_TOLERANCE), last))


def verify(directory: Path, dtype: str, ids: list[int]) -> tuple[Row, ...]:
    """Run the native kernels and the reference over a prompt and compare every layer."""
    native, reference = (
        OurModel.load(directory, dtype=dtype, kernels=kernels, tokens=len(ids)) for kernels in ("cpu", "reference")
    )
    found, _ = native.run(ids)
    expected, _ = reference.run(ids, follow=found)
    return compare_traces(native, found, expected, dtype)


def compare_traces(model: OurModel, found: Trace, expected: Trace, dtype: str) -> tuple[Row, ...]:
    """Return the rows of two passes of the same model."""
    return tuple(rows_of(_kernel_places(model, found, expected), KERNEL_TOLERANCE[dtype]))


def rows_of(places: Iterable[Place], tolerance: float) -> Iterator[Row]:
    """Yield each place as a row. The bound grows with the number of blocks passed, as roundings add up."""
    blocks = 0
    for place in places:
        blocks = blocks if place.block is None else place.block + 1
        found = errors(place.ours, place.theirs)
        yield Row(place.block, place.name, place.their_module, *found, tolerance * math.sqrt(1 + blocks))


def errors(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Return the largest difference, and the RMS of the difference over the RMS of theirs; infinite for NaN."""
    if ours.shape != theirs.shape:
        return math.inf, math.inf
    if torch.equal(ours, theirs):  # false for NaN
        return 0.0, 0.0
    difference, scale = (ours - theirs).double(), theirs.double().square().mean().sqrt().item()
    largest, rms = difference.abs().max().item(), difference.square().mean().sqrt().item()
    if not math.isfinite(largest):
        return math.inf, math.inf
    return largest, rms / scale if scale else (math.inf if rms else 0.0)


def _kernel_places(model: OurModel, found: Trace, expected: Trace) -> Iterator[Place]:
    layers, modules = weight_layers(model.model), dict(model.model.named_modules())
    before: Call | None = None
    for own, other in zip(found.calls, expected.calls, strict=True):
        attention = _attention_before(own.name, modules)
        if attention is not None:
            yield Place(attention, ATTENTION, "", "reference", _flat(own.inputs[0]), _flat(other.inputs[0]))
        if own.name in layers or not _returns_inner(own, before):
            block = BLOCK.fullmatch(own.name + ".") is not None
            ours, theirs = (_summed(call.outputs) for call in (own, other))
            yield Place(own.name, STREAM if block else "", "", "reference", _flat(ours), _flat(theirs))
        before = own


def _returns_inner(call: Call, before: Call | None) -> bool:
    """Return whether a module only returns the result of the call before it, one inside of it."""
    return before is not None and len(call.outputs) == 1 and torch.equal(call.outputs[0], before.outputs[0])


def _attention_before(name: str, modules: dict[str, nn.Module]) -> str | None:
    """Return the attention layer whose result the product of that name reads; None for other modules."""
    parent = name.rpartition(".")[0]
    attention = modules[parent]
    return parent if isinstance(attention, Attention) and attention.o_proj is modules[name] else None


def _summed(outputs: tuple[Tensor, ...]) -> Tensor:
    """Return the output of a module of ours, which may leave its branches to be added by the next norm."""
    return sum(outputs[1:], start=outputs[0])


def _flat(tensor: Tensor) -> Tensor:
    return tensor.flatten(1).cpu()


@dataclass(slots=True, eq=False)
class _Walk:
    """Goes along our trace and finds what to compare each call with."""

    model: nn.Module
    twin: nn.Module
    pairs: Pairs
    theirs: Trace
    tokens: int
    source: ParameterSource

    def places(self, trace: Trace) -> Iterator[Place]:
        layers, modules = weight_layers(self.model), dict(self.model.named_modules())
        activated: str | None = None  # the layer whose activation the next product reads
        for call in trace.calls:
            layer = layers.get(call.name)
            if isinstance(layer, GatedLinear | ActivatedLinear):
                activated = call.name
                continue
            if isinstance(layer, Linear) and not isinstance(layer, LMHead):
                yield from self._input(call, activated, modules)
                activated = None
            if layer is not None and not isinstance(layer, LMHead):
                yield from self._output(call, layer)
            elif call.name in self.pairs.branches:
                yield from self._between(call, "", self.pairs.branches[call.name])
                yield from self._experts(call.name)
            elif call.name in self.pairs.blocks:
                yield from self._between(call, STREAM, self.pairs.blocks[call.name])

    def _output(self, call: Call, layer: nn.Module) -> Iterator[Place]:
        for piece in self.pairs.pieces.get(call.name, ()):
            theirs = self._their_output(piece)
            if theirs is None:
                continue
            ours, module = self._rows(call.outputs[0]), self.twin.get_submodule(piece.module)
            if not isinstance(layer, Embedding):
                part = piece.module.rpartition(".")[2] if piece.is_part else ""
                yield Place(call.name, "", part, piece.module, piece.of_ours(ours), theirs)
                continue
            # Theirs may be scaled by the module, or later: then the stream of the first block shows it.
            ours = ours / layer.scale if type(module) is nn.Embedding else ours
            yield Place(call.name, "", "", piece.module, ours, theirs)
            table = module.get_parameter("weight").detach().float()  # the prompt reads only some rows of it
            yield Place(call.name, TABLE, "", piece.module, layer.weight.detach().cpu().float(), table)

    def _input(self, call: Call, activated: str | None, modules: dict[str, nn.Module]) -> Iterator[Place]:
        """Compare the input of a product that no layer computes: the result of attention, or an activation."""
        attention = _attention_before(call.name, modules)
        pieces = self.pairs.pieces.get(call.name, ())
        layer = attention or activated
        their_call = self.theirs.of(pieces[0].module) if len(pieces) == 1 else None
        if layer is not None and their_call is not None:
            ours, theirs = self._rows(call.inputs[0]), self._rows(their_call.inputs[0])
            what = ATTENTION if attention else ACTIVATION
            yield Place(layer, what, "", f"{pieces[0].module} (input)", ours, theirs)

    def _between(self, call: Call, what: str, module: str) -> Iterator[Place]:
        """Compare the output of a block or branch."""
        their_call = self.theirs.of(module)
        if their_call is not None and their_call.outputs:
            ours = self._rows(_summed(call.outputs))
            yield Place(call.name, what, "", module, ours, self._rows(their_call.outputs[0]))

    def _experts(self, branch: str) -> Iterator[Place]:
        """Compare the weights of all experts, as the prompt reaches only some; the worst one makes the place."""
        state, worst = self.twin.state_dict(), -1.0
        place: Place | None = None
        for parameter in self.pairs.experts[branch]:
            theirs = their_values(parameter, state)
            if theirs is None:
                continue
            ours = self.source.rows(parameter).read(0, parameter.shape[0]).float()
            error = errors(ours, theirs)[1]
            if error > worst:
                worst, place = error, Place(branch, EXPERTS, "", self.pairs.branches[branch], ours, theirs)
        if place is not None:
            yield place

    def _their_output(self, piece: Piece) -> Tensor | None:
        call = self.theirs.of(piece.module)
        return None if call is None or not call.outputs else piece.in_our_order(self._rows(call.outputs[0]))

    def _rows(self, tensor: Tensor) -> Tensor:
        """Return values with one entry per token as [T, n]; theirs have a batch before it, and some heads."""
        tensor = tensor.cpu()
        if tensor.ndim == 4 and tensor.shape[1] != self.tokens:
            tensor = tensor.transpose(1, 2)
        return tensor.reshape(self.tokens, -1)
