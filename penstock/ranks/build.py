"""Build the ranks of an engine from a resolved config.

First come the checks that the model can be split so. RankPlan is the plan from which several processes build their
parts of one model, and make_runner builds a part. start_ranks starts a group, whose first rank is this process, or the
stages of a pipeline, which all run elsewhere.
"""

import dataclasses
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from socket import gethostname
from typing import Any, cast

from penstock.config import DEGREES, TRITON, EngineConfig
from penstock.errors import (
    ExecutorLostError,
    ModelLoadError,
    fail,
    invalid,
    unsupported,
)
from penstock.interface.step import CacheGroup
from penstock.kernels.coding import Coding
from penstock.kernels.metadata import KVScales
from penstock.kernels.ops import Ops, RowSource
from penstock.kernels.tensors import LOGITS_ROWS, as_array
from penstock.layers.decoder import reserve_results
from penstock.layers.factory import LayerFactory, Runs
from penstock.ranks.group import Group, ParallelExecutor
from penstock.ranks.launcher import Launcher
from penstock.ranks.layers import RankFactory, Split
from penstock.ranks.links import HostLinks, Links
from penstock.ranks.pipeline import PipelineExecutor
from penstock.ranks.sharding import IN_A_LAYER, LEAVES, Cut, Degrees, Share, cut_all, find_degrees, heads_are_together
from penstock.ranks.sharding_map import ShardingMap, split_by_map
from penstock.ranks.stage import FollowingRunner, RankRunner, Stage, split_layers
from penstock.runner.structured import Forms
from penstock.spec.model_config import ModelConfig
from penstock.spec.param_table import Parameter, leaf_bounds
from penstock.tokenizer.grammars import Grammars
from penstock.weights import packed
from penstock.weights.instance import Weights
from penstock.weights.kv_scales import read_scales
from penstock.weights.loader import ANYWHERE, Place, Stored, make_model, open_stored
from penstock.weights.rows import cut as cut_rows
from penstock.weights.rows import is_cut_between_blocks, joined, runs_of
from penstock.weights.safetensors import fingerprint
from penstock.weights.sources import ParameterSource, read_parameters, read_table


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The plan from which each rank builds its part: a resolved config, the whole model's config, weights, cache
    groups.

    Attributes:
        degrees: how the ranks split the layers; with several stages, how the ranks of each stage do.
        fingerprint: the fingerprint of the weights that every rank must find; None if all ranks have the same files.
        scratch_bytes, exchange_bytes: on each GPU, between the kernels of an operation, and of what a gather brings
            together (assembly/memory.py).
    """

    config: EngineConfig
    model_config: ModelConfig
    weights: Weights
    groups: tuple[CacheGroup, ...]
    degrees: Degrees
    fingerprint: str | None = None
    scratch_bytes: int = 0
    exchange_bytes: int = 0

    @property
    def max_gather_bytes(self) -> int:
        """The most bytes that a rank passes to the others at once."""
        model, rows = self.model_config, max(self.config.scheduler.max_num_batched_tokens or 1, LOGITS_ROWS)
        branches = max(1, model.num_experts_per_tok)
        padding = -model.vocab_size % self.config.parallel.pad_vocab_multiple  # of the last part of the head
        columns = max(model.hidden_size * branches, -(-model.vocab_size // self.degrees.vocab) + 1 + padding)
        # with a sharding map, inputs and results of all products are gathered, too
        products = [item for item in read_parameters(model).values() if IN_A_LAYER.search(item.name)]
        gathered = [max(item.shape) for item in products if item.is_gathered or self.degrees.forms is not None]
        columns = max(columns, self.config.lora.max_lora_rank, *gathered)
        return 4 * max(rows * columns, model.num_experts * model.hidden_size)


@dataclass(frozen=True, slots=True)
class Begin:
    """The first message to a rank of a pipeline.

    Attributes:
        stage, rank: the place of the rank.
        layers: the layers of its stage.
    """

    stage: int
    rank: int
    plan: RankPlan
    layers: range


def degrees_of(config: EngineConfig, model: ModelConfig) -> Degrees:
    """Decide how the ranks of a resolved config split a model: as its parameter table or a sharding map says.

    Raises:
        InvalidRequestError: the model cannot be split so; the message says what is possible.
    """
    parameters = read_parameters(model)
    degrees = find_degrees(config.parallel, model, together=heads_are_together(parameters, model))
    sharding = read_sharding(config, model)
    if sharding is None or degrees.size == 1:
        return degrees
    try:
        return split_by_map(degrees, *sharding, parameters)
    except ValueError as error:
        raise invalid("sharding_config", str(error)) from error


def read_sharding(config: EngineConfig, model: ModelConfig) -> tuple[dict[str, int | None], dict[str, bool]] | None:
    """Read the axes and hints of a config's sharding map; None if the config names no map.

    Raises:
        InvalidRequestError: the map does not fit the model.
    """
    file = config.parallel.sharding_config
    if file is None:
        return None
    try:
        found, parameters = ShardingMap.from_file(Path(file)).of(read_table(model)), read_parameters(model)
        return found.resolve(parameters), found.hints(parameters)
    except ModelLoadError as error:
        raise invalid("sharding_config", str(error)) from error


def explain_sharding(config: EngineConfig, model: ModelConfig) -> dict[str, str]:
    """Check that a config's sharding map fits the model. Return its effect, for EngineConfig.reasons."""
    sharding, size = read_sharding(config, model), config.parallel.num_ranks
    if sharding is None:
        return {}
    axes, _ = sharding
    split = sum(axis is not None for axis in axes.values())
    effect = "on one device nothing is split" if size == 1 else f"over {size} processes"
    reason = f"{config.parallel.sharding_config}: it fits, and splits {split} of {len(axes)} parameters; {effect}"
    return {"sharding_config": reason}


def check_split(config: EngineConfig, model: ModelConfig, weights: Weights) -> None:
    """Check that a model can be split as a resolved config asks, before its weights are read.

    Raises:
        InvalidRequestError: the model cannot be split so; the message says what is possible.
    """
    if config.parallel.is_on_ray and config.numerics.load_format == "mock":
        raise invalid("distributed_executor_backend", "load_format = mock has no model to share; use mp")
    num_ranks = config.parallel.num_ranks
    degrees = degrees_of(config, model) if num_ranks > 1 else Degrees()
    if config.numerics.load_format == "auto" and isinstance(weights, Path):
        packed.check_split(weights, degrees.name)
    if num_ranks == 1:
        return
    name, size = "tensor_parallel_size", num_ranks
    if config.numerics.kernels not in ("cpu", TRITON):
        raise unsupported(
            name, f"{size} processes can share only models that the native kernels or GPUs compute; use 1"
        )
    if not isinstance(weights, Path):
        raise unsupported(name, f"{size} processes cannot share a model object; save it, and give its directory")
    if config.numerics.load_format == "mock":
        raise invalid(name, "load_format = mock has no model to share; use 1")


def check_codes(config: EngineConfig, model: ModelConfig, stored: Stored) -> None:
    """Check that ranks cut every coded weight between its blocks, so that the parts keep its codes.

    Raises:
        InvalidRequestError: a cut falls inside a block; the message says which degrees are possible.
    """
    if config.parallel.num_ranks == 1:
        return
    cuts = cut_all(read_parameters(model), Share(0, degrees_of(config, model)), model).values()
    runs = stored.runs(ANYWHERE, {cut.whole.name: cut.whole for cut in cuts if cut.ranges and cut.axis == 1})
    for cut in cuts:
        for coding in [item for _, item in runs.get(cut.whole.name, ()) if item is not None and cut.axis == 1]:
            ends, degree = (
                [end for _, end in leaf_bounds(cut.whole.shape[1], LEAVES, cut.whole.unit_size)],
                cut.part.degree,
            )
            possible = [item for item in DEGREES if _fits_blocks(ends, coding, item)]
            if degree not in possible:
                allowed = ", ".join(map(str, possible))
                why = "stores its columns in another order" if coding.order else f"has blocks of {coding.block} columns"
                raise fail("tensor_parallel_size", degree, f"{allowed}: {cut.whole.name} ({coding.name}) {why}")


def _fits_blocks(ends: Sequence[int], coding: Coding, degree: int) -> bool:
    """Return whether the parts of a degree, which end where leaves end, consist of whole blocks."""
    own = ends[LEAVES // degree - 1 :: LEAVES // degree]
    return degree == 1 or all(is_cut_between_blocks(coding, 0, end, ends[-1]) for end in own)


@dataclass(frozen=True, slots=True)
class RankPlace(Place):
    """The place of a rank's part of a model, of a stage, or of a rank's part of a stage.

    Attributes:
        split: which part of every layer the rank has; None: the whole of every layer.
        stage: which layers are loaded; None: all.
    """

    split: Split | None = None
    stage: Stage | None = None

    @property
    def prefix(self) -> str:
        return "" if self.split is None else f"rank.{self.split.share.rank}."

    @property
    def is_whole(self) -> bool:
        return self.stage is None

    def factory(self, whole: LayerFactory) -> LayerFactory:
        if self.split is None:
            return whole
        own = {name: cut.own for name, cut in self.split.cuts.items()}
        fields = {item.name: getattr(whole, item.name) for item in dataclasses.fields(LayerFactory)}
        return RankFactory(**fields | {"parameters": own}, split=self.split)

    def source(self, source: ParameterSource) -> ParameterSource:
        return source if self.split is None else CutSource(source, self.split.cuts)

    def trim(self, model: Any, make: LayerFactory) -> None:
        if self.stage is not None:
            self.stage.cut(model, make)


def split_of(model: ModelConfig, share: Share, links: Links) -> Split:
    return Split(share, links, cut_all(read_parameters(model), share, model))


@dataclass(frozen=True, slots=True)
class CutSource:
    """One rank's parts of the parameters."""

    source: ParameterSource
    cuts: Mapping[str, Cut]

    def runs(self, parameter: Parameter) -> Runs:
        cut = self.cuts[parameter.name]
        return runs_of(self.rows(parameter)) if cut.ranges else self.source.runs(cut.whole)

    def rows(self, parameter: Parameter) -> RowSource:
        cut = self.cuts[parameter.name]
        rows = self.source.rows(cut.whole)
        if not cut.ranges or parameter is cut.whole:
            return rows
        return joined([cut_rows(rows, begin, end, cut.axis) for begin, end in cut.ranges], cut.axis)


def make_runner(
    plan: RankPlan, ops: Ops, rank: int, links: Links | None, forms: Forms | None = None, stage: Stage | None = None
) -> RankRunner:
    """Load a rank's part of the model, or of a stage of it, and allocate its part of the cache.

    links: how it exchanges arrays with the other ranks; None: the layers are not split over ranks.

    Raises:
        ModelLoadError, InvalidRequestError: the part cannot be loaded.
    """
    if (
        plan.fingerprint is not None
        and isinstance(plan.weights, Path)
        and fingerprint(plan.weights) != plan.fingerprint
    ):
        raise ModelLoadError(
            f"{plan.weights} on {gethostname()} differs from the engine's; give all machines the same files"
        )
    config, whole, share = plan.config, plan.model_config, Share(rank, plan.degrees)
    weights: Weights | Stored = plan.weights
    if config.numerics.kernels == TRITON:
        weights = open_stored(cast(Path, weights), whole, config.numerics.load_format).decoded()
        if isinstance(links, HostLinks):
            links = _on_devices(links, plan, ops)
    split = None if links is None else split_of(whole, share, links)
    model = make_model(config, whole, weights, ops, RankPlace(ops.free_bytes, split, stage))
    if plan.scratch_bytes:
        cast(Any, ops).scratch.reserve(plan.scratch_bytes)
        reserve_results(model, config.scheduler.max_num_batched_tokens or 0, config.scheduler.max_num_seqs)
    scales = read_scales(config, whole)
    own_scales = (
        None if scales is None else [_own_scales(item, share, whole.at(layer)) for layer, item in enumerate(scales)]
    )
    kind = RankRunner if rank == 0 else FollowingRunner
    layers = None if stage is None else stage.layers
    runner = kind(model, ops, plan.groups, config, share.config(whole), own_scales, forms, layers)
    runner.links = links or runner.links
    return runner


def _on_devices(links: HostLinks, plan: RankPlan, ops: Ops) -> Links:
    from penstock.ranks.device_links import DeviceLinks  # which imports torch

    return DeviceLinks(links, plan.degrees.size, ops.device, plan.exchange_bytes)


def open_grammars(weights: object, vocab_size: int, eos_token_ids: Sequence[int]) -> Grammars:
    """Make the compiler of forms for a model, with its tokenizer, which is loaded with the first form.

    weights: its directory or GGUF file; anything else, such as a model object, has no tokenizer.
    """

    def load() -> Any:
        from penstock.tokenizer.hf import has_tokenizer, load_tokenizer  # most engines never need its libraries

        return load_tokenizer(weights) if isinstance(weights, Path) and has_tokenizer(weights) else None

    return Grammars(load, vocab_size, eos_token_ids)


def _own_scales(scales: KVScales, share: Share, layer: ModelConfig) -> KVScales:
    """Cut the scales of the key/value heads that a rank has."""
    first, last = share.attention.bounds(layer.num_key_value_heads)
    parts = (scales.key_scales, scales.key_offsets, scales.value_scales, scales.value_offsets)
    return KVScales(*(as_array(item)[first:last].copy() for item in parts))


RanksExecutor = ParallelExecutor | PipelineExecutor
StartRanks = Callable[[RankPlan, Ops, Forms | None, Launcher], RanksExecutor]


def start_ranks(plan: RankPlan, ops: Ops, forms: Forms | None, launcher: Launcher) -> RanksExecutor:
    """Start the ranks, and wait until all are ready. Without stages, this process is the first rank.

    Raises:
        ModelLoadError, InvalidRequestError: a part cannot be built.
        EngineError: a rank ended.
    """
    if plan.config.parallel.is_on_ray and isinstance(plan.weights, Path):
        digest = fingerprint(plan.weights) if plan.config.numerics.load_format == "auto" else None
        plan = replace(plan, fingerprint=digest, weights=plan.weights.absolute())
    if plan.config.parallel.pipeline_parallel_size > 1:
        return open_pipeline(plan, launcher)
    group = Group(plan.degrees.size, plan.max_gather_bytes, plan, launcher)
    try:
        try:
            runner = make_runner(plan, ops, 0, group.links, forms)
        except ExecutorLostError as error:
            group.wait_until_ready()  # the rank that ended may have said why
            raise group.lost(error) from error
        group.wait_until_ready()
    except BaseException:
        group.close()
        raise
    return ParallelExecutor(runner, group)


def open_pipeline(plan: RankPlan, launcher: Launcher) -> PipelineExecutor:
    """Start the ranks of each stage of a resolved config.

    Raises:
        ModelLoadError: a stage cannot be loaded.
        NotSupportedError: the weights are in this process's memory only.
    """
    if not isinstance(plan.weights, Path):
        message = "a model object cannot be split over processes; save it, and give its directory"
        raise unsupported("pipeline_parallel_size", message)
    plan = replace(plan, weights=plan.weights.absolute())
    stages = split_layers(plan.model_config.num_hidden_layers, plan.config.parallel.pipeline_parallel_size)
    begins = [
        [pickle.dumps(Begin(index, rank, plan, layers)) for rank in range(plan.degrees.size)]
        for index, layers in enumerate(stages)
    ]
    return PipelineExecutor(begins, plan.max_gather_bytes, launcher)
