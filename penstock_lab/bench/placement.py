"""Compute a placement on simulated chips and the same model on this machine alone, for `penstock plan --run`.

Every row of the placement is a user with a prompt; greedy and sampled users alternate. Both runs use the real engine.
Tokens and log-probabilities must be equal, bit for bit.
"""

import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock import EngineConfig, RequestFailedError, SamplingParams
from penstock.assembly import PlannedEngine
from penstock.config import CacheConfig, SchedulerConfig
from penstock.engine.engine import Engine
from penstock.errors import check_int, fail, unsupported
from penstock.interface.messages import EngineRequest
from penstock.interface.step import CacheGroup, TokenLogprobs
from penstock.kernels.attention.items import cache_token_bytes
from penstock.kernels.cpu.host import free_memory_bytes
from penstock.layers.weights import HeadLayout
from penstock.models.config_json import load_model_config
from penstock.ranks.sharding import LEAVES
from penstock.runner.model_runner import LocalExecutor, ModelRunner
from penstock.spec.model_config import ModelConfig
from penstock.weights.hub import resolve_model
from penstock.weights.loader import Place, load_model, make_ops
from penstock.weights.sources import read_parameters
from penstock_lab.chips.layers import ChipsPlace
from penstock_lab.chips.machine import ChipsExecutor, Machine, chrome_trace, figures
from penstock_lab.chips.ops import PlacedOps
from penstock_lab.planner.machines import Hardware
from penstock_lab.planner.placement import Placement, PlacementPlan, operation_bytes, plan_placement
from penstock_lab.planner.planned import layer_shapes

PROMPT_LENS, OUTPUT_LEN = (2, 3, 4), 3
CONTEXT = 64  # positions of a row if no max_model_len is given, so that the cache of the whole context need not exist
UNIT = 16  # the positions of a block are a multiple of this


@dataclass(frozen=True)
class Trial:
    """A model, the files of its weights, and their places on chips. Both runs have this config."""

    config: EngineConfig
    model: ModelConfig
    directory: Path
    placement: Placement
    hardware: Hardware

    @classmethod
    def of(
        cls, config: EngineConfig, placement: Placement, hardware: Hardware, hidden_size: int | None = None
    ) -> "Trial":
        """Read a model's config.json. hidden_size: of a similar model with random weights; None: the model itself.

        Raises:
            ModelLoadError: there is no such model, or it cannot be served.
            InvalidRequestError: an option does not fit the model.
            NotSupportedError: chips do not compute such a model.
        """
        dummy = hidden_size is not None or config.numerics.load_format == "dummy"
        directory = resolve_model(config.model, weights=not dummy)
        model = load_model_config(directory)
        if hidden_size is not None:
            model = at_width(model, hidden_size)
        _refuse(config, model)
        context = -(-min(config.scheduler.max_model_len or CONTEXT, model.context) // UNIT) * UNIT
        threads = config.numerics.threads or (1 if dummy else None)  # narrow products are too small to share
        numerics = replace(
            config.numerics,
            load_format="dummy" if dummy else "auto",
            dtype="bfloat16" if config.numerics.dtype == "auto" else config.numerics.dtype,
            kernels="cpu",
            threads=threads,
        )
        own = EngineConfig(
            model=config.model,
            numerics=numerics,
            cache=CacheConfig(block_size=context, enable_prefix_caching=False, kv_cache_dtype=placement.cache_type),
            scheduler=SchedulerConfig(
                max_model_len=context, max_num_seqs=placement.rows, max_num_batched_tokens=placement.rows
            ),
        ).resolve(model)
        return cls(own, model, directory, replace(placement, context=context), hardware)

    @property
    def plan(self) -> PlacementPlan:
        sizes = operation_bytes(self.model, layer_shapes(read_parameters(self.model)), self.placement.head_pad)
        return plan_placement(self.model, sizes, self.placement)

    @property
    def groups(self) -> list[CacheGroup]:
        """The cache groups, with one block for each row."""
        rows, context = self.placement.rows, self.placement.context
        chunked = self.model.chunked_windows
        return [
            CacheGroup(layers, window, rows, context, chunked=chunked) for layers, window in self.model.cache_groups()
        ]

    def on_chips(self, depth: int = 1) -> tuple[Engine, Machine]:
        """Load the model onto chips. depth: steps in flight.

        Raises:
            OverBudgetError: a chip has no room.
            InvalidRequestError: the placement is impossible.
        """
        machine = Machine(self.plan, self.model, self.hardware)
        self._check_cache()
        columns = self.model.vocab_size + self.placement.head_pad
        machine.place(read_parameters(self.model), columns)
        ops: Any = PlacedOps(make_ops(self.config, self.model))
        site = machine.site("lm_head.weight")
        head = HeadLayout() if site is None else HeadLayout(len(site.chips), columns)
        runner = self._runner(ops, head, ChipsPlace(free_memory_bytes, machine))
        machine.check()
        return self._engine(ChipsExecutor(runner, machine, depth)), machine

    def alone(self) -> Engine:
        """Load the model on this machine."""
        runner = self._runner(make_ops(self.config, self.model), HeadLayout(), Place(free_memory_bytes))
        return self._engine(LocalExecutor(runner))

    def _runner(self, ops: Any, head: HeadLayout, place: Place) -> ModelRunner:
        length, load_format = self.config.scheduler.max_model_len, self.config.numerics.load_format
        model = load_model(self.directory, self.model, ops, load_format, max_model_len=length, head=head, place=place)
        return ModelRunner(model, ops, self.groups, self.config, self.model)

    def _check_cache(self) -> None:
        """Refuse a cache for which this machine has no memory. Its kernels pad short heads."""
        model, placement, free = self.model, self.placement, free_memory_bytes()
        token = cache_token_bytes(model.num_key_value_heads, model.head_dim, placement.cache_type)
        size = token * model.num_hidden_layers * placement.rows * placement.context
        if size > free:
            allowed = f"smaller: {placement.rows} rows take {size} bytes here, where {free} are free"
            raise fail("max_model_len", placement.context, allowed)

    def _engine(self, executor: LocalExecutor) -> Engine:
        return PlannedEngine(self.config, self.model, self.groups).make(executor, time.monotonic)


def at_width(model: ModelConfig, hidden_size: int) -> ModelConfig:
    """Narrow a model's config: the same layers, key/value heads and vocabulary.

    There are at most two query heads to each key/value head.

    Raises:
        InvalidRequestError: the heads would not have an even size.
    """
    kv_heads = model.num_key_value_heads
    heads = kv_heads * min(2, model.num_attention_heads // kv_heads)
    if hidden_size % (2 * heads) or not 0 < hidden_size <= model.hidden_size:
        allowed = f"a multiple of {2 * heads}, up to {model.hidden_size}"
        raise fail("hidden_size", hidden_size, allowed)
    intermediate = model.intermediate_size * hidden_size // model.hidden_size // LEAVES * LEAVES
    return replace(
        model,
        hidden_size=hidden_size,
        intermediate_size=max(LEAVES, intermediate),
        num_attention_heads=heads,
        head_dim=hidden_size // heads,
    )


def _refuse(config: EngineConfig, model: ModelConfig) -> None:
    """Refuse what chips do not compute and what a placement does not count."""
    asked = {
        "quantization": config.numerics.scheme is not None,
        "load_format": config.numerics.load_format == "mock",
        "experts": model.num_experts > 0,
        "layer_heads": bool(model.layer_heads),
    }
    for name, given in asked.items():
        if given:
            raise unsupported(name, "simulated chips do not compute it")


@dataclass(slots=True)
class RowOutput:
    """The tokens of one row and their log-probabilities."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


def answers(engine: Engine, rows: int) -> dict[str, RowOutput]:
    """Ask an engine for one answer per row, and shut it down. Raise RequestFailedError if a request fails."""
    found = {str(row): RowOutput() for row in range(rows)}
    try:
        for row in range(rows):
            prompt = [(7 + 5 * row + 31 * place) % engine.vocab_size for place in range(PROMPT_LENS[row % 3])]
            params = SamplingParams(
                max_tokens=OUTPUT_LEN, ignore_eos=True, logprobs=2, temperature=float(row % 2), seed=row
            )
            engine.add_request(EngineRequest(str(row), prompt, params))
        while engine.has_work:
            for output in engine.step():
                if output.error is not None:
                    raise RequestFailedError(f"row {output.request_id}: {output.error}")
                found[output.request_id].token_ids.extend(output.new_token_ids)
                found[output.request_id].logprobs.extend(output.logprobs or ())
    finally:
        engine.executor.shutdown()
    return found


def run_placement(trial: Trial, micro_batches: int = 1) -> tuple[dict[str, Any], Machine]:
    """Compute a placement on chips, and the same model alone. Return the figures, and the machine for its trace.

    micro_batches: steps in flight.
    """
    rows = trial.placement.rows
    check_int("micro_batches", micro_batches, 1, rows)
    engine, machine = trial.on_chips(micro_batches)
    found, expected = answers(engine, rows), answers(trial.alone(), rows)
    plan = trial.plan.figures()
    return {
        "hidden_size": trial.model.hidden_size,
        "rows": rows,
        "context": trial.placement.context,
        "micro_batches": micro_batches,
        "tokens": sum(len(answer.token_ids) for answer in found.values()),
        "equal": found == expected,
        "planned_sram_bytes": plan["peak_sram_bytes_per_chip"],
        "planned_dram_bytes": plan["peak_dram_bytes_per_chip"],
        **figures(machine),
    }, machine


def write_trace(machine: Machine, path: Path) -> None:
    """Write what the chips did, for chrome://tracing or Perfetto."""
    path.write_text(json.dumps(chrome_trace(machine)), encoding="utf-8")
