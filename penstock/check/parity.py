"""The table of errors: every layer of ours beside the module of Transformers that does the same.

Both models compute the same prompt in float32, each on its own. The rows come in the order of our computation, so the
first one beyond its bound is where the models part; those after it only carry the difference on.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.check.ours import OurModel, weight_layers
from penstock.check.pairs import BLOCK, Pairs, Piece, find_pairs, their_values
from penstock.check.report import Row
from penstock.check.trace import Call, Trace
from penstock.check.twin import Twin
from penstock.layers.attention import Attention
from penstock.layers.embedding import Embedding
from penstock.layers.linear import ActivatedLinear, GatedLinear, Linear
from penstock.layers.lm_head import LMHead
from penstock.weights.sources import ParameterSource, open_source, read_parameters

# Bounds of the relative error (RMS). Two orders of summing in float32 differ by about 1e-7 a product; such roundings
# add up like a random walk along the blocks. A wrong weight, epsilon or angle is far beyond.
LAYER_TOLERANCE = 1e-5
LOGPROB_TOLERANCE = 1e-4  # absolute, the project's bound for every family in float32
ATTENTION, ACTIVATION, STREAM = "attention (rotary, mask, scale)", "activation", "residual stream"
LOGPROBS, TABLE, EXPERTS = "log-probabilities", "(all rows)", "(weights of all experts)"


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """One place of both computations, before it is a row.

    Attributes:
        layer: of ours.
        what: "" is the layer's own output; else what stands beside its name.
        part: of what their module makes, where a layer of ours joins several; else "".
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
        """For instance model.layers.0.self_attn.qkv_proj (k_proj)."""
        return " ".join(filter(None, [self.layer, f"({self.part})" if self.part else "", self.what]))


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Both models after one pass each.

    Attributes:
        places: in the order of computation.
        rows: one a place, then the log-probabilities.
    """

    ours: OurModel
    twin: Twin
    their_trace: Trace
    places: tuple[Place, ...]
    rows: tuple[Row, ...]


def compare(ours: OurModel, twin: Twin, ids: list[int]) -> Comparison:
    """Run both over a prompt."""
    our_trace, our_logits = ours.run(ids)
    their_trace, their_logits = twin.run(ids)
    pairs = find_pairs(read_parameters(ours.config), ours.model, twin.model)
    source = open_source(ours.directory, ours.config, "auto")
    walk = _Walk(ours.model, twin.model, pairs, their_trace, len(ids), source)
    places = tuple(walk.places(our_trace))
    found = errors(our_logits.cpu().log_softmax(dim=-1), their_logits.log_softmax(dim=-1))
    last = Row(None, LOGPROBS, "logits", *found, LOGPROB_TOLERANCE, absolute=True)
    return Comparison(ours, twin, their_trace, places, (*rows_of(places, LAYER_TOLERANCE), last))


def differs_in_attention(found: Comparison) -> bool:
    """Whether attention is the first that differs."""
    index = next((index for index, row in enumerate(found.rows) if not row.passed), len(found.places))
    return index < len(found.places) and found.places[index].what == ATTENTION


def rows_of(places: Iterable[Place], tolerance: float) -> Iterator[Row]:
    """Each place as a row. What is allowed grows with the blocks that were passed, as roundings add up."""
    blocks = 0
    for place in places:
        blocks = blocks if place.block is None else place.block + 1
        found = errors(place.ours, place.theirs)
        yield Row(place.block, place.name, place.their_module, *found, tolerance * math.sqrt(1 + blocks))


def errors(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """The largest difference, and the RMS of the difference over the RMS of theirs. Infinite where one is no number."""
    if ours.shape != theirs.shape:
        return math.inf, math.inf
    if torch.equal(ours, theirs):  # NaN is not
        return 0.0, 0.0
    difference, scale = (ours - theirs).double(), theirs.double().square().mean().sqrt().item()
    largest, rms = difference.abs().max().item(), difference.square().mean().sqrt().item()
    if not math.isfinite(largest):
        return math.inf, math.inf
    return largest, rms / scale if scale else (math.inf if rms else 0.0)


@dataclass(slots=True, eq=False)
class _Walk:
    """Goes along our trace and finds what to compare with."""

    model: nn.Module
    twin: nn.Module
    pairs: Pairs
    theirs: Trace
    tokens: int
    source: ParameterSource

    def places(self, trace: Trace) -> Iterator[Place]:
        layers, modules = weight_layers(self.model), dict(self.model.named_modules())
        activated: str | None = None  # the layer whose result the next product reads
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
                yield from self._between(call.name, "", self.pairs.branches[call.name], call.outputs)
                yield from self._experts(call.name)
            elif call.name in self.pairs.blocks:
                yield from self._between(call.name, STREAM, self.pairs.blocks[call.name], call.outputs)

    def _output(self, call: Call, layer: nn.Module) -> Iterator[Place]:
        for piece in self.pairs.pieces.get(call.name, ()):
            theirs = self._their_output(piece)
            if theirs is None:
                continue
            ours = self._rows(call.outputs[0])
            if isinstance(layer, Embedding):
                # Theirs may be scaled by the module, or later: then the stream of the first block shows it.
                plain = type(self.twin.get_submodule(piece.module)) is nn.Embedding
                ours = ours / layer.scale if plain else ours
            else:
                ours = piece.of_ours(ours)
            part = piece.module.rpartition(".")[2] if piece.is_part else ""
            yield Place(call.name, "", part, piece.module, ours, theirs)
            if isinstance(layer, Embedding):  # the prompt shows some rows only
                table = self.twin.get_submodule(piece.module).get_parameter("weight").detach().float()
                yield Place(call.name, TABLE, "", piece.module, layer.weight.detach().cpu().float(), table)

    def _input(self, call: Call, activated: str | None, modules: dict[str, nn.Module]) -> Iterator[Place]:
        """What a product reads, where no layer of its own has made it: attention's result, or an activation's."""
        parent = modules[call.name.rpartition(".")[0]]
        attends = isinstance(parent, Attention) and parent.o_proj is modules[call.name]
        pieces = self.pairs.pieces.get(call.name, ())
        if len(pieces) != 1 or not (attends or activated):
            return
        their_call = self.theirs.of(pieces[0].module)
        if their_call is None:
            return
        name = call.name.rpartition(".")[0] if attends else activated or ""
        ours, theirs = self._rows(call.inputs[0]), self._rows(their_call.inputs[0])
        what = ATTENTION if attends else ACTIVATION
        yield Place(name, what, "", f"{pieces[0].module} (input)", ours, theirs)

    def _between(self, name: str, what: str, module: str, outputs: tuple[Tensor, ...]) -> Iterator[Place]:
        """What modules hand on: ours may leave branches unadded."""
        their_call = self.theirs.of(module)
        if their_call is not None and their_call.outputs:
            ours = sum((self._rows(tensor) for tensor in outputs[1:]), self._rows(outputs[0]))
            yield Place(name, what, "", module, ours, self._rows(their_call.outputs[0]))

    def _experts(self, branch: str) -> Iterator[Place]:
        """The weights of all experts, as one place: of the one that differs most. The prompt reaches only some."""
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
        """Anything with one entry a token as [T, n]: theirs have a batch before it, and some the heads."""
        tensor = tensor.cpu()
        if tensor.ndim == 4 and tensor.shape[1] != self.tokens:
            tensor = tensor.transpose(1, 2)
        return tensor.reshape(self.tokens, -1)
