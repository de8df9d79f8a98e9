"""How fast a planned model will be on some hardware, and what would change it. No torch.

Times are bytes and operations over rates (planner/costs.py). Published rates are peaks, so times from them are the
least that is possible; rates that `penstock bench machine` measured are those of this engine's own products.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from penstock.config import EngineConfig
from penstock.errors import InvalidRequestError
from penstock.planner import costs
from penstock.planner.costs import ModelWork
from penstock.planner.fit import Fit, Sizes, quantised
from penstock.planner.machines import Hardware
from penstock.planner.memory import cached_token_bytes
from penstock.spec.model_config import ModelConfig
from penstock.spec.shares import Share

PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True, slots=True)
class Load:
    """The rows that times are predicted for."""

    batches: Sequence[int]
    prompt_lens: Sequence[int]
    contexts: Sequence[int]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The time of one phase.

    Attributes:
        seconds: until every prompt has its first token, or of a step that gives every stream one more.
        tokens_per_s: of the prompts, or of all streams together.
        bound: the limit that takes most of it.
        parts: seconds of each part (planner/costs.py); those to read and to multiply overlap.
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

    def predict(self, fit: Fit, load: Load) -> list[Prediction]:
        """Return the times of every row of a load that the context has room for.

        Raises:
            InvalidRequestError: a batch or a length is beyond what the config serves.
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
                    raise InvalidRequestError(f"{name}: {value} must be from 1 to {option} = {limit}", param=name)
        work, chunk = self.work(fit), config.scheduler.max_num_batched_tokens or 1
        found = []
        for batch in load.batches:
            for prompt in load.prompt_lens:
                steps, seconds = costs.prefill_time(work, hardware, batch, prompt, chunk)
                rate, parts = batch * prompt / seconds, asdict(steps)
                found.append(Prediction(PREFILL, batch, prompt, prompt, seconds, rate, steps.bound, parts))
        for batch in load.batches:
            for context in load.contexts:
                step = costs.decode_time(work, hardware, batch, context)
                rate, parts = batch / step.seconds, asdict(step)
                found.append(Prediction(DECODE, batch, 0, context, step.seconds, rate, step.bound, parts))
        return found

    def what_if(self, fit: Fit, load: Load) -> dict[str, list[Prediction]]:
        """Return the decoding steps of a load under each change that is not made yet."""
        decoding = replace(load, prompt_lens=())
        found = {name: self.predict(replace(fit, config=config), decoding) for name, config in _changes(fit.config)}
        faster = replace(self, hardware=costs.twice_the_bandwidth(self.hardware))
        return found | {"twice the bandwidth": faster.predict(fit, decoding)}

    def work(self, fit: Fit) -> ModelWork:
        """Return what the first device computes in a step."""
        config, share = fit.config, Share(0, fit.degrees)
        own = self.model if fit.degrees.size == 1 else share.config(self.model)
        sizes = self.sizes(config.numerics.scheme, None if fit.degrees.size == 1 else share)
        cache = cached_token_bytes(config, own), config.cache.kv_cache_dtype, config.kv_cache_slices
        return costs.model_work(self.model, sizes.products, cache, fit.degrees)


def _changes(config: EngineConfig) -> Iterator[tuple[str, EngineConfig]]:
    for name in ("int8", "int4"):
        if config.numerics.quantization != name:
            yield f"quantization = {name}", quantised(config, name)
    if config.cache.kv_cache_dtype != "int8":
        yield "kv_cache_dtype = int8", quantised(config, config.numerics.quantization or config.numerics.dtype, "int8")


def as_json(predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Return predictions as JSON."""
    return [asdict(item) for item in predictions]
