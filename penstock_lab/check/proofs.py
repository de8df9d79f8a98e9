"""The engine's guarantees, tested on one model with the real engine: the answer does not depend on how it is computed.

A few prompts are run one by one, each in one piece and with nothing cached, and then in every other way. The answers
must be equal: bit for bit with the native kernels, within a tolerance with the reference, which is plain torch. int8
weights and caches give different answers, within a bound.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock import EngineConfig, PoolingParams, RequestFailedError, SamplingParams
from penstock.assembly import build_engine
from penstock.config import BLOCK_SIZE_UNIT, BLOCK_SIZE_UNITS, MAX_CONTEXT, TRITON
from penstock.engine.engine import Engine
from penstock.interface.messages import EngineOutput, EngineRequest
from penstock.spec.model_config import ModelConfig
from penstock.spec.pooler import usual_pooler
from penstock_lab.check.report import Proof

NUM_TOKENS = 8  # generated after each prompt
CHUNK = 13  # tokens per step when prompts are chunked
# Largest allowed difference of a log-probability with the reference kernels. In bfloat16, a sum in another order may
# round differently, and the difference grows from layer to layer.
REFERENCE_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25}
# Largest usual median difference of a log-probability from the unquantised model, over the spread of the
# log-probabilities. int8 weights and activations each change a product by about 1 % of its size. Measured: 0.006 to
# 0.022 for the demo model and for random models, 0.03 with experts; int8 keys and values: 0.001 to 0.007. Some trained
# models lose more (Gemma 3 270M by int8 keys: 0.06); another model's answers differ by about 1.
INT8_WEIGHTS, INT8_CACHE, WRONG = 0.04, 0.015, 0.25
SPREAD = "median difference of a log-probability, over their spread"


@dataclass(frozen=True, slots=True)
class Generated:
    """The result of one prompt.

    Attributes:
        ids, logprobs: the generated tokens and their log-probabilities.
        prompt_logprobs: the log-probability of each prompt token except the first, if requested.
        num_cached_tokens: prompt tokens found in the cache.
    """

    ids: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Setting:
    """The options that all engines of one check share."""

    directory: Path
    dtype: str
    kernels: str
    prompts: tuple[list[int], ...]
    is_coded: bool = False  # the checkpoint's weights are quantised already
    device: str = "auto"

    @property
    def unit(self) -> int:
        """The cached tokens that the kernels read at a time."""
        return BLOCK_SIZE_UNITS.get(self.kernels, BLOCK_SIZE_UNIT)

    def layouts(self) -> dict[str, dict[str, Any]]:
        """Name the options under which every answer must stay the same."""
        rows = "user rows = blocks" if self.kernels == TRITON else "user rows and rings = blocks"
        return {
            f"chunks of {CHUNK} = whole": {"max_num_batched_tokens": CHUNK, "max_num_seqs": 3},
            f"blocks of {4 * self.unit} = blocks of {self.unit}": {"block_size": 4 * self.unit},
            rows: {"block_size": MAX_CONTEXT},  # at least max_model_len: one block per request
        }

    @contextmanager
    def engine(self, **options: Any) -> Iterator[Engine]:
        """Build an engine without prefix caching and chunked prompts, unless the options say so."""
        longest = max(map(len, self.prompts)) + NUM_TOKENS + 1
        max_model_len = -(-longest // self.unit) * self.unit
        given = {
            "model": str(self.directory),
            "dtype": self.dtype,
            "kernels": self.kernels,
            "device": self.device,
            "max_model_len": max_model_len,
            "max_num_seqs": len(self.prompts),
            "max_num_batched_tokens": max_model_len * len(self.prompts),
            "enable_prefix_caching": False,
        }
        engine = build_engine(EngineConfig.from_options(**given | options)).engine
        try:
            yield engine
        finally:
            engine.shutdown()


def make_prompts(count: int, vocab_size: int) -> tuple[list[int], ...]:
    """Draw prompts. The first has `count` tokens; the last shares a prefix with it, then differs."""
    generator = torch.Generator().manual_seed(0)
    lengths = [count, max(1, count // 3), 1, max(1, count // 2)]
    first, *others = [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]
    return first, *others, first[: 2 * count // 3] + others[0]


def prove(setting: Setting) -> Iterator[Proof]:
    """Test every guarantee, one after the other."""
    is_exact = setting.kernels != "reference"
    allowed = 0.0 if is_exact else REFERENCE_TOLERANCE[setting.dtype]
    meaning = "bit for bit" if is_exact else "largest difference of a log-probability"
    indices = range(len(setting.prompts))

    def proof(name: str, error: float) -> Proof:
        return Proof(name, error, allowed, meaning)

    with setting.engine() as engine:
        alone = [ask(engine, setting, [index])[0] for index in indices]
        yield proof("one pass over the answer = its steps", _rescore(engine, setting, alone))
        yield proof("batch = solo", max(map(difference, ask(engine, setting, indices), alone)))
    for name, options in setting.layouts().items():
        with setting.engine(**options) as engine:
            yield proof(name, max(map(difference, ask(engine, setting, indices), alone)))
    with setting.engine(enable_prefix_caching=True) as engine:  # a cache hit is part of the proof
        ask(engine, setting, indices, prompt_logprobs=None)
        warm = ask(engine, setting, indices, prompt_logprobs=None)
        hit = any(answer.num_cached_tokens for answer in warm)
        yield proof("cached prefix = computed", max(map(_generated_difference, warm, alone)) if hit else math.inf)
    for name, bound, option in (
        ("int8 weights", INT8_WEIGHTS, "quantization"),
        ("int8 cache", INT8_CACHE, "kv_cache_dtype"),
    ):
        if option == "quantization" and setting.is_coded:
            continue
        with setting.engine(**{option: "int8"}) as engine:
            yield Proof(name, _median_error(ask(engine, setting, indices), alone), bound, SPREAD, WRONG)


def prove_vectors(setting: Setting, model: ModelConfig) -> Iterator[Proof]:
    """Test what holds for a model without a language-model head: the states of a text, or the scores of its tokens."""
    allowed = 0.0 if setting.kernels != "reference" else REFERENCE_TOLERANCE[setting.dtype]
    meaning = "bit for bit" if not allowed else "largest difference"
    with setting.engine() as engine:
        alone = [_vectors(engine, model, [prompt])[0] for prompt in setting.prompts]
        found = {"batch = solo": _vectors(engine, model, setting.prompts)}
    for name, options in setting.layouts().items():
        if not model.bidirectional or "max_num_batched_tokens" not in options:  # an encoder's texts are never cut
            with setting.engine(**options) as engine:
                found[name] = _vectors(engine, model, setting.prompts)
    for name, vectors in found.items():
        errors = (abs(own - other).max().item() for own, other in zip(vectors, alone, strict=True))
        yield Proof(name, max(error if math.isfinite(error) else math.inf for error in errors), allowed, meaning)


def _vectors(engine: Engine, model: ModelConfig, prompts: Sequence[list[int]]) -> list[np.ndarray]:
    """Pool prompts together: all states of each, or its scores of labels."""
    task = "token_classify" if model.labels else "token_embed"
    for index, prompt in enumerate(prompts):
        params = usual_pooler(model).settle(PoolingParams(task=task), len(prompt))
        engine.add_request(EngineRequest(str(index), prompt, SamplingParams.for_pooling(params)))
    found: dict[str, np.ndarray] = {}
    while engine.has_work:
        for output in engine.step():
            if output.pooled is None:
                raise RequestFailedError(f"the engine failed on a prompt of the check: {output.error}")
            found[output.request_id] = np.frombuffer(output.pooled, dtype="<f4")
    return [found[str(index)] for index in range(len(prompts))]


def ask(
    engine: Engine, setting: Setting, indices: Iterable[int], *, prompt_logprobs: int | None = 0
) -> list[Generated]:
    """Ask the engine these prompts together. Odd indices are sampled, even ones are greedy."""
    fields = {"prompt_logprobs": prompt_logprobs, "max_tokens": NUM_TOKENS}
    return _run(engine, [(setting.prompts[index], fields | {"temperature": 0.8 * (index % 2)}) for index in indices])


def difference(found: Generated, expected: Generated) -> float:
    """Find the largest difference of a log-probability, up to and including the first token that differs."""
    return max(_largest(found.prompt_logprobs, expected.prompt_logprobs), _generated_difference(found, expected))


def _generated_difference(found: Generated, expected: Generated) -> float:
    worst = 0.0
    for own, other, ours, theirs in zip(found.ids, expected.ids, found.logprobs, expected.logprobs, strict=True):
        worst = max(worst, _largest([ours], [theirs]))
        if own != other:  # counts as a difference even if the log-probabilities are equal
            return worst or math.inf
    return worst


def _rescore(engine: Engine, setting: Setting, alone: list[Generated]) -> float:
    """Score prompt and answer as one prompt. Return the largest difference from the generated log-probabilities."""
    worst = 0.0
    for prompt, answer in zip(setting.prompts, alone, strict=True):
        (whole,) = _run(engine, [(prompt + answer.ids, {"prompt_logprobs": 0, "max_tokens": 1})])
        worst = max(worst, _largest(whole.prompt_logprobs[-len(answer.ids) :], answer.logprobs))
    return worst


def _run(engine: Engine, requests: list[tuple[list[int], dict[str, Any]]]) -> list[Generated]:
    """Run requests together, each a prompt and fields of SamplingParams."""
    outputs: dict[str, list[EngineOutput]] = {str(index): [] for index in range(len(requests))}
    for name, (prompt, fields) in zip(outputs, requests, strict=True):
        params = SamplingParams(seed=3, ignore_eos=True, logprobs=0, **fields)
        engine.add_request(EngineRequest(name, prompt, params))
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise RequestFailedError(f"the engine failed on a prompt of the check: {output.error}")
            outputs[output.request_id].append(output)
    return [
        Generated(
            [token for output in found for token in output.new_token_ids],
            [entry.logprobs[0] for output in found for entry in output.logprobs or []],
            [entry.logprobs[0] for output in found for entry in output.prompt_logprobs or []],
            max(output.num_cached_tokens for output in found),
        )
        for found in outputs.values()
    ]


def _largest(found: list[float], expected: list[float]) -> float:
    """Find the largest difference; infinite if the lengths differ or a value is not finite."""
    if len(found) != len(expected) or not all(map(math.isfinite, found)):
        return math.inf
    return max((abs(own - other) for own, other in zip(found, expected, strict=True)), default=0.0)


def _median_error(found: list[Generated], expected: list[Generated]) -> float:
    """Compute the median error of the prompts' log-probabilities over their standard deviation.

    It is the median, because a router with a close choice may choose another expert, which is not an error.
    """
    scores = ([score for answer in answers for score in answer.prompt_logprobs] for answers in (found, expected))
    ours, theirs = (torch.tensor(values, dtype=torch.float64) for values in scores)
    error = ((ours - theirs).abs().median() / theirs.std()).item()
    return error if math.isfinite(error) else math.inf
