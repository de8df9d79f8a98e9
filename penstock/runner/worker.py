"""Worker: everything that one device holds for an engine: the model, its caches, and the runner that uses them."""

from collections.abc import Sequence

import torch

from penstock.config import EngineConfig
from penstock.errors import EngineError
from penstock.interface.step import CacheGroup, SchedulerOutput, StepOutput
from penstock.kernels.ops import Heads, KVScales, Ops
from penstock.layers.causal_lm import CausalLM
from penstock.runner.kv_cache import allocate_kv_caches
from penstock.runner.model_runner import ModelRunner


class Worker:
    """One device's share of the work, which is all of it until there is more than one."""

    def __init__(
        self,
        model: CausalLM,
        ops: Ops,
        groups: Sequence[CacheGroup],
        config: EngineConfig,
        *,
        heads: Heads,
        eos_token_ids: Sequence[int] = (),
        vocab_size: int | None = None,
        kv_scales: Sequence[KVScales] | None = None,
    ) -> None:
        """Take a loaded model, a resolved config and, for an int8 cache with scales by channel, those of each layer.

        vocab_size: tokens of the model; None: as many as its head has columns.

        Allocates the caches and sets torch's threads, which are the process's: of two engines in one process the
        later decides for both. Native kernels have threads of their own, and torch's would only take the cores from
        them.

        Raises:
            EngineError: the config is not resolved, or the groups do not fit the layers.
        """
        if config.numerics.threads is None:
            raise EngineError("the worker needs a resolved config")
        torch.set_num_threads(1 if config.numerics.kernels == "cpu" else config.numerics.threads)
        caches = allocate_kv_caches(
            ops,
            groups,
            heads.num_kv_heads,
            heads.head_dim,
            config.cache.kv_cache_dtype,
            slices=config.kv_cache_slices,
            scales=kv_scales,
        )
        self.cache_bytes = sum(cache.num_bytes for cache in caches)
        self._runner: ModelRunner | None = ModelRunner(
            model,
            ops,
            groups,
            config,
            heads=heads,
            kv_caches=caches,
            eos_token_ids=eos_token_ids,
            vocab_size=vocab_size,
        )

    def execute(self, scheduler_output: SchedulerOutput) -> StepOutput:
        """Carry out one step.

        Raises:
            EngineError: the step is impossible, or the worker was shut down.
        """
        if self._runner is None:
            raise EngineError("the worker was shut down")
        return self._runner.execute(scheduler_output)

    def shutdown(self) -> None:
        """Let go of the model and the caches. A second call does nothing."""
        self._runner = None
