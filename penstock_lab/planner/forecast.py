"""The speed of a planned model on some hardware, and what would change it. No torch.

Times are bytes and operations divided by rates (planner/costs.py). Published rates are peaks, so times from them are
lower bounds; `penstock bench machine` measures the rates of this engine's own products.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from penstock import EngineConfig
from penstock.assembly.memory import all_token_bytes
from penstock.errors import invalid
from penstock.ranks.sharding import Share
from penstock.ranks.stage import config_of, split_layers
from penstock.spec.model_config import ModelConfig
from penstock_lab.planner import costs
from penstock_lab.planner.costs import ModelWork
from penstock_lab.planner.fit import Fit, Sizes, quantised
from penstock_lab.planner.machines import Hardware

PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True, slots=True)
class Load:
    """The batch sizes, prompt lengths and contexts for which times are predicted."""

    batches: Sequence[int]
    prompt_lens: Sequence[int]
    contexts: Sequence[int]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The time of one phase.

    Attributes:
        seconds: time until every prompt has its first token, or of a step that gives every stream one token.
        tokens_per_s: prompt tokens, or tokens of all streams together, per second.
        bound: the binding limit.
        parts: seconds of each part (planner/costs.py); reading and multiplying overlap.
        prompt_len: 0 for decode.
    """

    phase: str
    batch: int
    prompt_len: int
    context: int
    seconds: float
    tokens_per_s: float
    bound: str
    parts: dict[str, float]


@dataclass(frozen=True, slots=True)
class Forecaster:
    """Predicts the times of one model on one kind of hardware."""

    model: ModelConfig
    sizes: Sizes
    hardware: Hardware
    formats: str = ""  # as in Fitter

    def predict(self, fit: Fit, load: Load) -> list[Prediction]:
        """Predict the times for every combination of batch size and length in a load.

        Raises:
            InvalidRequestError: a batch size or a length is more than the config serves.
        """
        config, hardware = fit.config, self.hardware
        length, most = config.scheduler.max_model_len or 0, config.scheduler.max_num_seqs
        for name, values, limit in (
            ("batch", load.batches, most),
            ("prompt_len", load.prompt_lens, length),
            ("context", load.contexts, length),
        ):
            for value in values:
                if not 1 <= value <= limit:
                    option = "max_num_seqs" if name == "batch" else "max_model_len"
                    raise invalid(name, f"{value} must be from 1 to {option} = {limit}")
        works, chunk = self.works(fit), config.scheduler.max_num_batched_tokens or 1
        found = []
        for batch in load.batches:
            for prompt in load.prompt_lens:
                prefill = partial(costs.prefill_time, prompt_len=prompt, max_num_batched_tokens=chunk)
                steps, seconds = costs.pipelined(works, hardware, batch, prompt, prefill)
                rate, parts = batch * prompt / seconds, asdict(steps)
                found.append(Prediction(PREFILL, batch, prompt, prompt, seconds, rate, steps.bound, parts))
        for batch in load.batches:
            for context in load.contexts:
                step, seconds = costs.pipelined(works, hardware, batch, 0, partial(_decode, context=context))
                rate, parts = batch / seconds, asdict(step)
                found.append(Prediction(DECODE, batch, 0, context, seconds, rate, step.bound, parts))
        return found

    def what_if(self, fit: Fit, load: Load) -> dict[str, list[Prediction]]:
        """Predict the decode times of a load after each change that the config does not already have."""
        decoding = replace(load, prompt_lens=())
        found = {
            name: self.predict(replace(fit, config=config), decoding) for name, config in self._changes(fit.config)
        }
        faster = replace(self, hardware=costs.twice_the_bandwidth(self.hardware))
        return found | {"twice the bandwidth": faster.predict(fit, decoding)}

    def works(self, fit: Fit) -> list[ModelWork]:
        """Count the work of the first device of each stage in a step."""
        count = fit.config.parallel.pipeline_parallel_size
        if count == 1:
            return [self.work(fit)]
        return [self.work(fit, layers) for layers in split_layers(self.model.num_hidden_layers, count)]

    def work(self, fit: Fit, layers: range | None = None) -> ModelWork:
        """Count the work of the first device in a step, or of the first of the stage with these layers."""
        config, share = fit.config, Share(0, fit.degrees)
        whole = self.model if layers is None else config_of(self.model, layers)
        own = whole if fit.degrees.size == 1 else share.config(whole)
        sizes = self.sizes(config.numerics.scheme, None if fit.degrees.size == 1 else share, layers)
        token_bytes = all_token_bytes(config, own) // own.num_hidden_layers
        cache = token_bytes, config.cache.kv_cache_dtype, config.kv_cache_slices
        return costs.model_work(whole, sizes.products, cache, fit.degrees)

    def _changes(self, config: EngineConfig) -> Iterator[tuple[str, EngineConfig]]:
        for name in () if self.formats else ("int8", "int4"):
            if config.numerics.quantization != name:
                yield f"quantization = {name}", quantised(config, name)
        if config.cache.kv_cache_dtype != "int8":
            own = config.numerics.quantization or config.numerics.dtype
            yield "kv_cache_dtype = int8", quantised(config, own, "int8")


def _decode(work: ModelWork, hardware: Hardware, batch: int, context: int) -> tuple[costs.StepTime, float]:
    step = costs.decode_time(work, hardware, batch, context)
    return step, step.seconds


def as_json(predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    return [asdict(item) for item in predictions]
