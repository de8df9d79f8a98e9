"""Starts the processes of a pipeline. Decides which stage has which layers, and what each process is sent."""

import pickle
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.assembly.model import make_grammars, make_ops
from penstock.assembly.rank_plan import RankPlan, make_runner
from penstock.errors import NotSupportedError
from penstock.interface.plugins import import_files
from penstock.layers.stage import Stage, split_layers
from penstock.layers.wires import Ranks
from penstock.parallel.launch import Launcher
from penstock.parallel.pipeline import PipelineExecutor
from penstock.runner.stage_runner import StageRunner


@dataclass(frozen=True, slots=True)
class Begin:
    """The first message to a rank.

    Attributes:
        stage, rank: the place of the rank.
        layers: the layers of its stage.
    """

    stage: int
    rank: int
    plan: RankPlan
    layers: range


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
    return PipelineExecutor(begins, plan.largest_meeting, launcher)


def make_stage_runner(begin: Begin, ranks: Ranks | None) -> StageRunner:
    """Load the part that a rank computes. ranks: how it exchanges arrays with the other ranks of its stage; None if it
    is the only one.

    Raises:
        ModelLoadError, InvalidRequestError: the part cannot be loaded.
    """
    plan = begin.plan
    import_files(plan.config.imports)
    ops = make_ops(plan.config, plan.model_config)
    stage = Stage(begin.layers, plan.model_config.num_hidden_layers)
    forms = make_grammars(plan.model_config, plan.weights) if stage.is_last and begin.rank == 0 else None
    return StageRunner(make_runner(plan, ops, begin.rank, ranks, forms, stage), stage)
