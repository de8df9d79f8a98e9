"""The ranks of an engine whose model several processes share. Each rank builds its own part from the same plan.

leader:  start_ranks, in the process of the engine      others:  main, which parallel/group.py starts
"""

import contextlib
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.assembly.model import Weights, make_ops
from penstock.assembly.pipeline import open_pipeline
from penstock.assembly.rank_plan import RankPlan, make_runner
from penstock.config import EngineConfig
from penstock.errors import ExecutorLostError, InvalidRequestError, ModelLoadError, NotSupportedError, PenstockError
from penstock.interface.step import Executor
from penstock.kernels.ops import Ops
from penstock.kernels.tensors import is_torch
from penstock.parallel.executor import ParallelExecutor, follow
from penstock.parallel.group import Built, CannotBuild, Group, bytes_read, inherit
from penstock.parallel.launch import HostLauncher, Launcher
from penstock.plugins import entry_points
from penstock.plugins.user_files import import_files
from penstock.runner.following import FollowingRunner
from penstock.runner.structured import Forms
from penstock.spec.model_config import ModelConfig
from penstock.spec.placement import place
from penstock.spec.sharding_map import ShardingMap
from penstock.spec.shares import Degrees, heads_are_together
from penstock.weights import packed
from penstock.weights.safetensors import fingerprint
from penstock.weights.sources import read_parameters, read_table

MODULE = "penstock.assembly.ranks"
EXIT_CANNOT_BUILD = 2
EXIT_FAILED = 1


@dataclass(frozen=True, slots=True)
class Leader:
    """The executor of all ranks, and the bytes of all their caches."""

    executor: Executor
    cache_bytes: int


StartRanks = Callable[[RankPlan, Ops, Forms | None, Launcher], Leader]


def find_degrees(config: EngineConfig, model: ModelConfig) -> Degrees:
    """Return how the ranks of a resolved config split a model: as its parameter table or a sharding map says.

    Raises:
        InvalidRequestError: the model cannot be split so; the message says what is possible.
    """
    parameters = read_parameters(model)
    degrees = config.parallel.degrees(model, together=heads_are_together(parameters, model))
    sharding = read_sharding(config, model)
    if sharding is None or degrees.size == 1:
        return degrees
    try:
        return place(degrees, *sharding, parameters)
    except ValueError as error:
        raise InvalidRequestError(f"sharding_config: {error}", param="sharding_config") from error


def read_sharding(config: EngineConfig, model: ModelConfig) -> tuple[dict[str, int | None], dict[str, bool]] | None:
    """Return the axes and hints of a config's sharding map; None if the config names no map.

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
        raise InvalidRequestError(f"sharding_config: {error}", param="sharding_config") from error


def check_split(config: EngineConfig, model: ModelConfig, weights: Weights) -> None:
    """Check that a model can be split as a resolved config asks, before its weights are read.

    Raises:
        InvalidRequestError: the model cannot be split so; the message says what is possible.
    """
    if config.parallel.is_on_ray and config.numerics.load_format == "mock":
        message = "distributed_executor_backend: load_format = mock has no model to share; use mp"
        raise InvalidRequestError(message, param="distributed_executor_backend")
    num_ranks = config.parallel.num_ranks
    degrees = find_degrees(config, model) if num_ranks > 1 else Degrees()
    if config.numerics.load_format == "auto" and isinstance(weights, Path):
        packed.check_split(weights, degrees)
    if num_ranks == 1:
        return
    name, size = "tensor_parallel_size", num_ranks
    if config.numerics.kernels != "cpu" or is_torch(make_ops(replace_threads(config), model).dtype):
        raise NotSupportedError(
            f"{name}: {size} processes can share only models that the native kernels compute; use 1", param=name
        )
    if not isinstance(weights, Path):
        raise NotSupportedError(
            f"{name}: {size} processes cannot share a model object; save it, and give its directory", param=name
        )
    if config.numerics.load_format == "mock":
        raise InvalidRequestError(f"{name}: load_format = mock has no model to share; use 1", param=name)


def replace_threads(config: EngineConfig) -> EngineConfig:
    """Return the config with one thread, to inspect the backend."""
    return replace(config, numerics=replace(config.numerics, threads=1))


def open_launcher(config: EngineConfig) -> Launcher:
    """Return the launcher of a resolved config's ranks: on this machine, or on a Ray cluster.

    Raises:
        InvalidRequestError: Ray is not installed, or there is no cluster.
        EngineError: the cluster has no room.
    """
    parallel, option = config.parallel, "distributed_executor_backend"
    if not parallel.is_on_ray:
        return HostLauncher()
    launcher: Launcher = entry_points.load("launchers", "ray", option)(config, option)
    return launcher


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
    group = Group(plan.degrees.size, plan.largest_meeting, MODULE, plan, launcher)
    try:
        try:
            runner = make_runner(plan, ops, 0, group.links, forms)
        except ExecutorLostError as error:
            group.wait_until_built()  # the rank that ended may have said why
            raise group.lost(error) from error
        group.wait_until_built()
    except BaseException:
        group.close()
        raise
    return Leader(ParallelExecutor(runner, group), runner.cache_bytes + sum(item.cache_bytes for item in group.built))


def main(words: list[str]) -> int:
    """Run a rank: build a part of the model as the leader says, and compute it until the leader is gone."""
    links, leader = inherit(words)
    with contextlib.suppress(EOFError, OSError):  # the leader is gone
        plan: RankPlan = leader.recv()
        try:
            import_files(plan.config.imports)
            ops, before = make_ops(plan.config, plan.model_config), bytes_read()
            runner = make_runner(plan, ops, links.rank, links)
        except PenstockError as error:
            leader.send(CannotBuild(str(error), getattr(error, "param", None)))
            return EXIT_CANNOT_BUILD
        leader.send(Built(runner.cache_bytes, bytes_read() - before))
        try:
            if isinstance(runner, FollowingRunner):
                follow(runner, leader)
        except ExecutorLostError:
            return EXIT_FAILED  # the leader says what happened
        except Exception:
            print(f"penstock: rank {links.rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            return EXIT_FAILED
    return 0
