"""Stage: a part of a model's layers, on a rank of a pipeline; and the runners of ranks.

The model file is the same as for a single device. A stage is cut out of the model before its weights are loaded:

    first       embedding, layers 0 .. a       -> x, h
    middle      x, h -> layers a .. b          -> x, h
    last        x, h -> layers b .. n, final norm, LM head

A decoder (decoder.py) is an embedding, a list of blocks that map (x, h) to (x, h), and a final norm that adds both. x
is the residual stream and h the branch that has not been added yet, [T, hidden] float32 each. So a stage is the whole
model, with the other stages' parts replaced by modules that have no parameters and only pass on x and h.

A RankRunner is a ModelRunner of a rank; a FollowingRunner leaves sampling to another rank. A StageRunner runs one of
them on a stage: every rank gets every step, in the same order. If a step fails in one stage, the later stages treat it
as a step without tokens: they remove the requests that have left, and compute nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import numpy as np

from penstock.config import HALF_GROUPS, EngineConfig
from penstock.errors import unsupported
from penstock.interface.step import SchedulerOutput, StepOutput
from penstock.kernels.tensors import LOGITS_ROWS, Array, Slot, Tensor, as_array
from penstock.layers.decoder import DecoderLM
from penstock.layers.factory import LayerFactory
from penstock.layers.module import Module, children
from penstock.layers.weights import Embedding, WeightLayer
from penstock.ranks.links import Links, NoLinks
from penstock.runner.input_batch import PackedStep, PromptPiece
from penstock.runner.model_runner import ModelRunner, Pending
from penstock.spec.model_config import ModelConfig

Activations = tuple[Tensor, Tensor | None]  # x and h; h is None in families whose blocks add their branches themselves


def split_layers(num_layers: int, num_stages: int) -> list[range]:
    """Divide the layers among stages, in order. If they do not divide evenly, the first stages have one more."""
    size, rest = divmod(num_layers, num_stages)
    cuts = [index * size + min(index, rest) for index in range(num_stages + 1)]
    return [range(start, stop) for start, stop in pairwise(cuts)]


def config_of(model: ModelConfig, layers: range) -> ModelConfig:
    """Reduce the config of a model to some of its layers, for counting: heads, windows and caches are those of them."""
    names = ("layer_windows", "layer_heads", "rotary_layers", "values_are_keys", "sparse_layers")
    by_layer: dict[str, Any] = {name: getattr(model, name)[layers.start : layers.stop] for name in names}
    return replace(model, num_hidden_layers=len(layers), **by_layer)


class Stage:
    """Some of a model's layers.

    Attributes:
        layers: the indices of the stage's layers.
    """

    def __init__(self, layers: range, num_layers: int) -> None:
        self.layers = layers
        self.is_first = layers.start == 0
        self.is_last = layers.stop == num_layers
        self._num_layers = num_layers
        self._input: _StageInput | None = None

    def cut(self, model: Any, make: LayerFactory) -> None:
        """Remove the other stages' parts from the model, in place. Its weights are not loaded yet, so only this stage's
        will be.

        Raises:
            NotSupportedError: the model is not made of penstock.layers.decoder.
        """
        if hasattr(model, "cut"):  # a class of Transformers
            received = _StageInput(make)
            model.cut(self.layers, received.forward)
            self._input = None if self.is_first else received
            return
        if not isinstance(model, DecoderLM):
            message = "only families that are made of penstock.layers.decoder are cut into stages"
            raise unsupported("pipeline_parallel_size", message)
        decoder = model.decoder
        (blocks,) = (value for value in vars(decoder).values() if isinstance(value, list))
        if not self.is_first:
            for name, layer in list(children(decoder)):
                if isinstance(layer, Embedding):
                    setattr(decoder, name, _Absent())
            self._input = _StageInput(make)
            blocks[: self.layers.start] = [_PassThrough()] * (self.layers.start - 1) + [self._input]
        if not self.is_last:
            (norm,) = (name for name, layer in children(decoder) if _is_norm(layer))
            setattr(decoder, norm, _StageOutput())
            setattr(model, "lm_head", _Absent())  # noqa: B010  # it is an LMHead elsewhere
            blocks[self.layers.stop :] = [_PassThrough()] * (self._num_layers - self.layers.stop)

    def receive(self, x: Array, h: Array | None) -> None:
        """Store what the stage before has computed. The next call of the model continues from it."""
        assert (self._input is None) == self.is_first, "the model was not cut, or the first stage gets activations"
        if self._input is not None:
            self._input.store(x, h)


def _is_norm(layer: object) -> bool:
    return isinstance(layer, WeightLayer) and not isinstance(layer, Embedding)


class _Absent(Module):
    """Replaces an embedding or a head."""

    def forward(self, *_: Any) -> None:
        return None


class _PassThrough(Module):
    """Replaces a block: passes on x and h."""

    def forward(self, x: Tensor, h: Tensor | None, ctx: Any) -> Activations:
        return x, h


class _StageInput(Module):
    """Replaces the block before this stage's first one: returns what the stage before has computed, copied into buffers
    of this stage."""

    def __init__(self, make: LayerFactory) -> None:
        self._make = make
        self._slots: tuple[Slot, Slot | None] | None = None
        self._rows = 0

    def store(self, x: Array, h: Array | None) -> None:
        if self._slots is None:
            columns = x.shape[1:]
            branch = None if h is None else self._make.slot("received branch", columns, "float32")
            self._slots = self._make.slot("received", columns, "float32"), branch
        self._rows = len(x)
        for slot, value in zip(self._slots, (x, h), strict=True):
            if slot is not None:
                np.copyto(as_array(slot(self._rows)), cast(Array, value))

    def forward(self, *_: Any) -> Activations:
        if self._slots is None:
            raise ValueError("the previous stage has sent nothing")
        x, h = self._slots
        return x(self._rows), None if h is None else h(self._rows)


class _StageOutput(Module):
    """Replaces the final norm: makes x and h for the next stage the model's result."""

    def add(self, x: Tensor, h: Tensor | None) -> tuple[None, Activations]:
        return None, (x, h)


class RankRunner(ModelRunner):
    """The ModelRunner of a rank.

    Attributes:
        links: to the other ranks.
    """

    links: Links = NoLinks()

    def finish(self, pending: Pending) -> StepOutput:
        """Finish as every runner does. Raise ExecutorLostError if a rank has ended meanwhile."""
        output = super().finish(pending)
        self.links.check()
        return output

    def may_record(self, config: EngineConfig, model_config: ModelConfig) -> bool:
        """Forbid recording where passes over the same number of tokens differ: where ranks share experts, the calls
        depend on the tokens, and a sharding map, halves of groups, or the table of a class of Transformers, may put
        results in new memory."""
        is_split = config.parallel.num_ranks > 1
        gathers = config.parallel.sharding_config is not None or config.parallel.attention_parallel_size == HALF_GROUPS
        moves = gathers or getattr(self.model, "repeats_torch", False)
        differs = is_split and (model_config.num_experts or moves)
        return not differs and ModelRunner.may_record(self, config, model_config)

    def append_sampled(self, sampled: Mapping[str, Sequence[int]]) -> None:
        """Append tokens that another rank has sampled, by request id. Tokens of removed requests are dropped."""
        self.batch.extend({self.batch.row(name): ids for name, ids in sampled.items() if self.batch.has_request(name)})

    def compute_stage(self, scheduler_output: SchedulerOutput) -> Any:
        """Compute a step with a stage that is not the last. Return its x and h; None for a step without tokens."""
        self.batch.update(scheduler_output)
        self._copy_blocks(scheduler_output.block_copies)
        if not scheduler_output.scheduled:
            return None
        with self.computing():
            step = self.batch.pack(scheduler_output.scheduled)
            return self.model(self.ops.tensor(step.input_ids), self.context(step))


class FollowingRunner(RankRunner):
    """Computes the same hidden states and its part of the same logits, in the same order, as the rank that samples."""

    def _draw(self, logits: Tensor, pending: Pending, step: PackedStep) -> None:
        """Sample nothing, because this rank has only some columns of the logits."""

    def _score(self, hidden: Tensor, piece: PromptPiece, pending: Pending) -> None:
        """Compute this rank's part of the logits of each slice."""
        for start in range(0, len(piece.targets), LOGITS_ROWS):
            self.model.compute_logits(hidden[start : start + LOGITS_ROWS])


class StageRunner:
    """Computes the layers of one stage, step by step."""

    def __init__(self, runner: RankRunner, stage: Stage) -> None:
        self.runner = runner
        self._stage = stage
        self._samples = stage.is_last and not isinstance(runner, FollowingRunner)

    @property
    def cache_bytes(self) -> int:
        return self.runner.cache_bytes

    def skip(self, plan: SchedulerOutput, sampled: Mapping[str, Sequence[int]]) -> None:
        """Process a step that an earlier stage could not compute: remove requests and append outputs only."""
        self._compute(replace(plan, new_requests=[], scheduled=[], block_copies=[]), sampled)

    def compute(
        self, plan: SchedulerOutput, sampled: Mapping[str, Sequence[int]], activations: Sequence[Any] | None
    ) -> Any:
        """Compute a step. Return x and h for the next stage or, from the last stage, a StepOutput.

        activations: what the stage before returned; None for the first stage.
        """
        has_input = not self._stage.is_first and bool(plan.scheduled)
        assert (activations is not None) == has_input, "a stage would compute with the x and h of an earlier step"
        if activations is not None:
            assert len(activations[0]) == plan.num_tokens, "the stages are at different steps"
            self._stage.receive(activations[0], activations[1])
        return self._compute(plan, sampled)

    def _compute(self, plan: SchedulerOutput, sampled: Mapping[str, Sequence[int]]) -> Any:
        if not self._samples:
            self.runner.append_sampled(sampled)
        return self.runner.execute(plan) if self._stage.is_last else self.runner.compute_stage(plan)
