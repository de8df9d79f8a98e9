"""Compares recorded steps with steps that are not, bit for bit, on a GPU or in Triton's interpreter.

    python -m tests.kernels.triton.recorded cuda

Two runners share a small model: one records its steps, the other computes each with the model's Python. Both get the
same steps: as many sequences as a program has, then fewer, then some with a piece of a prompt, then many at once. It
prints one line of JSON per number of rows, and ends with status 1 if a bit differs, or if a step that is launched as a
graph makes the host wait before all of it is launched.
"""

import json
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from penstock.config import EngineConfig
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import CacheGroup, NewRequest, ScheduledRequest, SchedulerOutput, StepOutput
from penstock.kernels.scheme import Scheme
from penstock.kernels.triton.ops import TritonOps
from penstock.kernels.triton.sizes import PROGRAM_ROWS
from penstock.models.config_json import load_model_config
from penstock.runner.model_runner import ModelRunner, RecordedModel
from penstock.weights.loader import load_model

MORE = 2  # sequences with a piece of a prompt
BLOCK, VOCAB = 128, 2000  # a checksum covers 2048 logits, so it covers them all
FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    hidden: int = 1024
    inner: int = 2816
    layers: int = 4
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64

    def fields(self, vocab: int) -> dict[str, Any]:
        return FIELDS | {
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": vocab,
        }


@dataclass
class Pair:
    """The same steps for two runners.

    Attributes:
        blocks: of the cache.
        times: seconds of each step, by "recorded" and "eager".
        waits: by the same names, where the host waited for the GPU while the last step began.
    """

    recorded: ModelRunner
    eager: ModelRunner
    blocks: int
    vocab: int
    lengths: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=lambda: {"recorded": [], "eager": []})
    waits: dict[str, list[str]] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    number: int = 0

    def step(self, new: dict[str, list[int]], old: list[str]) -> bool:
        """Compute prompts of new requests and the next tokens of old ones. Return whether all bits are equal."""
        begun, scheduled = [], []
        for name, prompt in new.items():
            count = -(-(len(prompt) + 16) // BLOCK)
            used = {block for table in self.tables.values() for block in table}
            self.tables[name] = [block for block in range(self.blocks) if block not in used][:count]
            params = SamplingParams(temperature=0.7 * (len(prompt) % 2), seed=len(prompt))
            begun.append(NewRequest(name, prompt, len(prompt), params, 0, [self.tables[name]]))
            scheduled.append(ScheduledRequest(name, 0, len(prompt), [[]], [0], 1))
            self.lengths[name] = len(prompt)
        for name in old:
            scheduled.append(ScheduledRequest(name, self.lengths[name], 1, [[]], [0], 1))
            self.lengths[name] += 1
        plan = SchedulerOutput(self.number, begun, scheduled, self.removed, checksum_logits=True)
        self.number, self.removed = self.number + 1, []
        return self._run("recorded", plan) == self._run("eager", plan)

    def _run(self, name: str, plan: SchedulerOutput) -> StepOutput:
        runner: ModelRunner = getattr(self, name)
        begun = time.perf_counter()
        with watched(is_on_gpu=runner.ops.device.type == "cuda") as self.waits[name]:
            pending = runner.begin(plan)
        found = runner.finish(pending)
        self.times[name].append(time.perf_counter() - begun)
        return found

    def remove(self) -> None:
        self.removed = list(self.tables)
        self.lengths.clear()
        self.tables.clear()


@contextmanager
def watched(*, is_on_gpu: bool) -> Iterator[list[str]]:
    """Note where torch waits for the GPU."""
    waits: list[str] = []
    if not is_on_gpu:
        yield waits
        return
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        yield waits
        torch.cuda.set_sync_debug_mode("default")
    waits += [f"{item.filename}:{item.lineno}" for item in found if "synchroniz" in str(item.message)]


def make_pair(
    ops: TritonOps, shape: Shape, most: int, *, vocab: int = VOCAB, scheme: str | None = None, cache: str = ""
) -> Pair:
    """Load a model of random weights for at most so many sequences."""
    name, blocks = str(ops.dtype).removeprefix("torch."), 8 * most + 8
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(shape.fields(vocab)))
        config = load_model_config(Path(directory))
        model = load_model(Path(directory), config, ops, "dummy", scheme=Scheme.parse(scheme))
    options = {"dtype": name, "kv_cache_dtype": cache or name, "kernels": "reference", "block_size": BLOCK}
    limits = {"max_num_seqs": most + MORE, "max_model_len": 1024, "max_num_batched_tokens": 4096, "threads": 1}
    engine = EngineConfig.from_options(**options, **limits)
    groups = [CacheGroup(tuple(range(shape.layers)), None, blocks, BLOCK)]
    recorded, eager = (ModelRunner(model, ops, groups, engine, config) for _ in range(2))
    assert isinstance(recorded.model, RecordedModel)
    eager.model = model
    return Pair(recorded, eager, blocks, vocab)


def prompts(count: int, vocab: int, longest: int) -> dict[str, list[int]]:
    """Prompts of mixed lengths; the first one is the longest."""
    rng = random.Random(count)
    lengths = [longest, *(rng.randint(1, 12) for _ in range(count - 1))]
    return {str(row): [rng.randrange(vocab) for _ in range(length)] for row, length in enumerate(lengths)}


def compare(pair: Pair, rows: int, *, longest: int = 600) -> dict[str, Any]:
    """Run steps of so many rows, and of fewer."""
    given, equal = prompts(rows, pair.vocab, longest), True
    most, part = 4096 - longest, dict[str, list[int]]()
    for name, prompt in given.items():
        part[name] = prompt
        if sum(map(len, part.values())) > most // 2:
            equal, part = pair.step(part, []) and equal, {}
    equal = (not part or pair.step(part, [])) and equal
    names = list(given)
    pair.times = {"recorded": [], "eager": []}
    for _ in range(4):  # not recorded yet, captured, launched twice
        equal = pair.step({}, names) and equal
    found: dict[str, Any] = {"rows": rows, "waits": pair.waits["recorded"]}
    for name, seconds in pair.times.items():
        found[f"{name} ms"] = [round(1000 * item, 3) for item in seconds]
    for _ in range(3 if rows > 1 else 0):  # with a padded row
        equal = pair.step({}, names[1:]) and equal
    for more in range(MORE):  # with a piece of a prompt; the second time, it is captured
        equal = (
            pair.step({f"more {more}": given[names[0]][: 6 + more]}, names[: max(1, min(rows, 200) - more)]) and equal
        )
    pair.remove()
    recorded = pair.recorded.model
    assert isinstance(recorded, RecordedModel)
    programs: list[Any] = [item.program for item in recorded._recorded.values()]
    return found | {"equal": equal, "graphs": sum(program.num_graphs for program in programs)}


VARIANTS: tuple[tuple[torch.dtype, str | None, str], ...] = (  # types, quantizations, types of the cache
    (torch.bfloat16, None, ""),
    (torch.bfloat16, "int8", "int8"),
    (torch.bfloat16, "int4", ""),
    (torch.float32, None, ""),
)


def run(device: str, variants: Sequence[tuple[torch.dtype, str | None, str]] = VARIANTS) -> Iterator[dict[str, Any]]:
    """Compare for every number of rows that programs have."""
    for dtype, scheme, cache in variants:
        pair = make_pair(TritonOps(dtype, device), Shape(), PROGRAM_ROWS[-1], scheme=scheme, cache=cache)
        name = f"{dtype}, {scheme or 'weights as they are'}, {cache or 'the same'} cache".removeprefix("torch.")
        for rows in PROGRAM_ROWS:
            before = torch.cuda.mem_get_info()[0]
            line = compare(pair, rows)
            yield {"name": name, **line, "bytes": before - torch.cuda.mem_get_info()[0]}


if __name__ == "__main__":
    wrong = 0
    for line in run(sys.argv[1]):
        print(json.dumps(line), flush=True)
        wrong += not line["equal"] or bool(line["waits"])
    sys.exit(1 if wrong else 0)
