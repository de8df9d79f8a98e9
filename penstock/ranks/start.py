"""Starts the ranks of an engine whose model several processes share: a group, whose first rank is this process, or the
stages of a pipeline, which all run elsewhere. Each rank builds its own part from the same plan (build.py)."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.errors import ExecutorLostError, NotSupportedError
from penstock.interface.step import Executor
from penstock.kernels.ops import Ops
from penstock.ranks.build import Begin, RankPlan, make_runner
from penstock.ranks.group import Group, ParallelExecutor
from penstock.ranks.launcher import Launcher
from penstock.ranks.pipeline import PipelineExecutor
from penstock.ranks.stage import split_layers
from penstock.runner.structured import Forms
from penstock.weights.safetensors import fingerprint


@dataclass(frozen=True, slots=True)
class Leader:
    """The executor of all ranks, and the bytes of all their caches."""

    executor: Executor
    cache_bytes: int


StartRanks = Callable[[RankPlan, Ops, Forms | None, Launcher], Leader]


def start_ranks(plan: RankPlan, ops: Ops, forms: Forms | None, launcher: Launcher) -> Leader:
    """Start the ranks, and wait until all are ready. Without stages, this process is the first rank.

    Raises:
        ModelLoadError, InvalidRequestError: a part cannot be built.
        EngineError: a rank ended.
    """
    if plan.config.parallel.is_on_ray and isinstance(plan.weights, Path):
        digest = fingerprint(plan.weights) if plan.config.numerics.load_format == "auto" else None
        plan = replace(plan, fingerprint=digest, weights=plan.weights.absolute())
    if plan.config.parallel.pipeline_parallel_size > 1:
        pipeline = open_pipeline(plan, launcher)
        return Leader(pipeline, pipeline.cache_bytes)
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
    return Leader(ParallelExecutor(runner, group), runner.cache_bytes + group.cache_bytes)


def open_pipeline(plan: RankPlan, launcher: Launcher) -> PipelineExecutor:
    """Start the ranks of each stage of a resolved config.

    Raises:
        ModelLoadError: a stage cannot be loaded.
        NotSupportedError: the weights are in this process's memory only.
    """
    if not isinstance(plan.weights, Path):
        message = (
            "pipeline_parallel_size: a model object cannot be split over processes; save it, and give its directory"
        )
        raise NotSupportedError(message, param="pipeline_parallel_size")
    plan = replace(plan, weights=plan.weights.absolute())
    stages = split_layers(plan.model_config.num_hidden_layers, plan.config.parallel.pipeline_parallel_size)
    begins = [
        [pickle.dumps(Begin(index, rank, plan, layers)) for rank in range(plan.degrees.size)]
        for index, layers in enumerate(stages)
    ]
    return PipelineExecutor(begins, plan.max_gather_bytes, launcher)
