"""Starts the processes of a pipeline: which stage has which layers, and what each process is told."""

from pathlib import Path

import msgspec

from penstock.assembly.model import Weights
from penstock.config import EngineConfig
from penstock.errors import NotSupportedError
from penstock.interface.step import CacheGroup
from penstock.layers.stage import split_layers
from penstock.parallel.channel import encode
from penstock.parallel.pipeline import PipelineExecutor
from penstock.spec.model_config import ModelConfig


class Begin(msgspec.Struct, frozen=True):
    """What a rank needs to know. config is resolved; start, stop: its layers."""

    index: int
    config: EngineConfig
    directory: str
    groups: list[CacheGroup]
    start: int
    stop: int


def open_pipeline(
    config: EngineConfig, model_config: ModelConfig, weights: Weights, groups: list[CacheGroup]
) -> PipelineExecutor:
    """Start a process for each stage of a resolved config.

    Raises:
        ModelLoadError: a stage cannot be loaded.
        NotSupportedError: the weights are in this process's memory only.
    """
    if not isinstance(weights, Path):
        message = "pipeline_parallel_size: a model object is in this process; save it, and name the directory"
        raise NotSupportedError(message, param="pipeline_parallel_size")
    stages = split_layers(model_config.num_hidden_layers, config.parallel.pipeline_parallel_size)
    begins = [
        Begin(index, config, str(weights.absolute()), groups, layers.start, layers.stop)
        for index, layers in enumerate(stages)
    ]
    return PipelineExecutor([encode(begin) for begin in begins])
