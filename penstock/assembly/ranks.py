"""The ranks of an engine whose model several processes share: each builds its own part, from the same plan.

leader:  start_ranks, in the process of the engine      others:  main, which parallel/group.py starts
"""

import contextlib
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.assembly.model import Weights, make_model, make_ops, read_scales
from penstock.config import EngineConfig
from penstock.errors import ExecutorLostError, InvalidRequestError, NotSupportedError, PenstockError
from penstock.interface.step import CacheGroup, Executor
from penstock.kernels.arena import LOGITS_ROWS
from penstock.kernels.metadata import KVScales
from penstock.kernels.ops import Ops
from penstock.kernels.tensors import as_array, is_torch
from penstock.layers.split import Ranks, Split
from penstock.parallel.executor import ParallelExecutor, follow
from penstock.parallel.group import Built, CannotBuild, Group, bytes_read, inherit
from penstock.plugins.user_files import import_files
from penstock.runner.following import FollowingRunner
from penstock.runner.model_runner import ModelRunner
from penstock.runner.structured import Forms
from penstock.spec.model_config import ModelConfig
from penstock.spec.shares import Degrees, Share, heads_are_together
from penstock.weights import packed
from penstock.weights.sources import read_parameters

MODULE = "penstock.assembly.ranks"
EXIT_CANNOT_BUILD = 2
EXIT_FAILED = 1


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What every rank builds its part from: a resolved config, the whole model's numbers, its files, the cache."""

    config: EngineConfig
    model_config: ModelConfig
    weights: Weights
    groups: tuple[CacheGroup, ...]

    @property
    def degrees(self) -> Degrees:
        together = heads_are_together(read_parameters(self.model_config), self.model_config)
        return self.config.parallel.degrees(self.model_config, together=together)

    @property
    def largest_meeting(self) -> int:
        """The most bytes that a rank gives the others at once."""
        model, rows = self.model_config, max(self.config.scheduler.max_num_batched_tokens or 1, LOGITS_ROWS)
        branches = max(1, model.num_experts_per_tok)
        columns = max(model.hidden_size * branches, -(-model.vocab_size // self.degrees.vocab) + 1)
        return 4 * max(rows * columns, model.num_experts * model.hidden_size)


@dataclass(frozen=True, slots=True)
class Leader:
    """The executor of all ranks, and the memory of their caches together."""

    executor: Executor
    cache_bytes: int


StartRanks = Callable[[RankPlan, Ops, Forms | None], Leader]


def check_split(config: EngineConfig, model: ModelConfig, weights: Weights) -> None:
    """Check that a model can be split as a resolved config asks, before anything of it is read.

    Raises:
        InvalidRequestError: it cannot; the message says what can.
    """
    if config.parallel.num_ranks == 1:
        return
    together = heads_are_together(read_parameters(model), model)
    config.parallel.degrees(model, together=together)
    name, size = "tensor_parallel_size", config.parallel.num_ranks
    if config.numerics.kernels != "cpu" or is_torch(make_ops(replace_threads(config), model).dtype):
        raise NotSupportedError(f"{name}: {size} processes share only models of the native kernels; use 1", param=name)
    if not isinstance(weights, Path):
        raise NotSupportedError(f"{name}: {size} processes cannot share a model object; give its directory", param=name)
    if config.numerics.load_format == "auto" and packed.find_packed(weights) is not None:
        message = f"{name}: {size} processes cannot share packed weights; give the directory they come from, or use 1"
        raise NotSupportedError(message, param=name)
    if config.numerics.load_format == "mock":
        raise InvalidRequestError(f"{name}: load_format = mock has no model to share; use 1", param=name)


def replace_threads(config: EngineConfig) -> EngineConfig:
    """Return a config with one thread, for a look at the backend."""
    return replace(config, numerics=replace(config.numerics, threads=1))


def start_ranks(plan: RankPlan, ops: Ops, forms: Forms | None) -> Leader:
    """Start every other rank, build the leader's part meanwhile, and wait until all are ready.

    Raises:
        ModelLoadError, InvalidRequestError: a part cannot be built.
        EngineError: a rank ended.
    """
    group = Group(plan.degrees.size, plan.largest_meeting, MODULE, plan)
    try:
        runner = make_runner(plan, ops, Share(0, plan.degrees), group.links, forms)
        group.wait_until_built()
    except ExecutorLostError as error:
        group.wait_until_built()  # the rank that ended may have said why
        raise group.lost(error) from error
    except BaseException:
        group.close()
        raise
    return Leader(ParallelExecutor(runner, group), runner.cache_bytes + sum(item.cache_bytes for item in group.built))


def make_runner(plan: RankPlan, ops: Ops, share: Share, ranks: Ranks, forms: Forms | None = None) -> ModelRunner:
    """Load a rank's part of the model and allocate its part of the cache."""
    config, whole = plan.config, plan.model_config
    model = make_model(config, whole, plan.weights, ops, Split(share, ranks))
    scales = read_scales(config, whole)
    own_scales = None if scales is None else [_own_scales(item, share, whole) for item in scales]
    kind = ModelRunner if share.rank == 0 else FollowingRunner
    return kind(model, ops, plan.groups, config, share.config(whole), own_scales, forms)


def _own_scales(scales: KVScales, share: Share, whole: ModelConfig) -> KVScales:
    """Return the scales of the key/value heads that a rank has."""
    first, last = share.attention.bounds(whole.num_key_value_heads)
    parts = (scales.key_scales, scales.key_offsets, scales.value_scales, scales.value_offsets)
    return KVScales(*(as_array(item)[first:last].copy() for item in parts))


def main(words: list[str]) -> int:
    """Be a rank: build a part of the model as the leader says, and compute it until the leader is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole process group, they are for the client
    links, leader = inherit(words)
    with contextlib.suppress(EOFError, OSError):  # the leader is gone
        plan: RankPlan = leader.recv()
        try:
            import_files(plan.config.imports)
            ops, before = make_ops(plan.config, plan.model_config), bytes_read()
            runner = make_runner(plan, ops, Share(links.rank, plan.degrees), links)
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
