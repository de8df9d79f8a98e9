"""The native kernels beside the reference, layer by layer: the same weights, the same prompt, the same hooks.

Each layer of the reference reads what the same layer of the native kernels has read, so every row is that layer's own
error and none is carried on; in bfloat16 a rounding that goes the other way could otherwise choose another expert. It
needs no Transformers.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from penstock.check.ours import OurModel, weight_layers
from penstock.check.pairs import BLOCK
from penstock.check.parity import ATTENTION, LAYER_TOLERANCE, STREAM, Place, rows_of
from penstock.check.report import Row
from penstock.check.trace import Call, Trace
from penstock.layers.attention import Attention

# Of a layer's relative error: another order of sums in float32; a rounding here and there in bfloat16, of 2^-9 at most.
TOLERANCE = {"float32": LAYER_TOLERANCE, "bfloat16": 5e-3}


def verify(directory: Path, dtype: str, ids: list[int]) -> tuple[Row, ...]:
    """Both backends over one prompt; the first row that fails is where the native kernels part from the reference."""
    native, reference = (
        OurModel.load(directory, dtype=dtype, kernels=kernels, tokens=len(ids)) for kernels in ("cpu", "reference")
    )
    found, _ = native.run(ids)
    expected, _ = reference.run(ids, follow=found)
    return compare_traces(native, found, expected, dtype)


def compare_traces(model: OurModel, found: Trace, expected: Trace, dtype: str) -> tuple[Row, ...]:
    """Two passes of the same model."""
    return tuple(rows_of(_places(model, found, expected), TOLERANCE[dtype]))


def _places(model: OurModel, found: Trace, expected: Trace) -> Iterator[Place]:
    layers, modules = weight_layers(model.model), dict(model.model.named_modules())
    before: Call | None = None
    for own, other in zip(found.calls, expected.calls, strict=True):
        parent = modules[own.name.rpartition(".")[0]]
        if isinstance(parent, Attention) and parent.o_proj is modules[own.name]:
            name = own.name.rpartition(".")[0]
            yield Place(name, ATTENTION, "", "reference", _flat(own.inputs[0]), _flat(other.inputs[0]))
        if own.name in layers or not _hands_on(own, before):
            block = BLOCK.fullmatch(own.name + ".") is not None
            # A block may leave its branches unadded.
            ours, theirs = (sum(call.outputs[1:], start=call.outputs[0]) for call in (own, other))
            yield Place(own.name, STREAM if block else "", "", "reference", _flat(ours), _flat(theirs))
        before = own


def _hands_on(call: Call, before: Call | None) -> bool:
    """Whether a module returns what the call before it, one inside of it, has returned."""
    return before is not None and len(call.outputs) == 1 and torch.equal(call.outputs[0], before.outputs[0])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten(1).cpu()
