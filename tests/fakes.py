"""Small honest implementations of the runner's protocols, for tests of what surrounds them.

A fake keeps the calling convention exactly and makes mistakes visible: FakeCache starts as poison, and CacheModel
computes its tokens from what it finds in the cache, so a wrong slot, block or position becomes a wrong token.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.config import EngineConfig
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import CacheGroup, NewRequest, ScheduledRequest, SchedulerOutput
from penstock.kernels.metadata import AttentionMetadata, CacheSpec, Heads
from penstock.kernels.sampling import NO_TOKEN, SamplingTensors, TokenScores, score_tokens
from penstock.kernels.tensors import as_array, as_torch
from penstock.layers.module import ForwardContext
from penstock.spec.model_config import ModelConfig

POISON = -(10**6)  # what a slot holds before anything is stored there
ANY_ID = 2**40  # what is chosen in a row that is not healthy

# --- configuration ---------------------------------------------------------------------------------------------------


def resolved_config(**options: Any) -> EngineConfig:
    """A resolved EngineConfig for small float32 tests."""
    defaults = {"max_num_seqs": 8, "max_model_len": 128, "max_num_batched_tokens": 256, "threads": 1}
    numerics = {"dtype": "float32", "kv_cache_dtype": "float32", "kernels": "reference", "block_size": 16}
    return EngineConfig.from_options(**{**defaults, **numerics, **options})


def tiny_config(vocab_size: int, heads: tuple[int, int, int] = (1, 1, 1), **fields: Any) -> ModelConfig:
    """A ModelConfig for a runner with a fake model of one layer; heads are H, Hkv and D."""
    num_heads, num_kv_heads, head_dim = heads
    numbers: dict[str, Any] = {
        "architecture": "TinyForCausalLM", "model_type": "tiny", "vocab_size": vocab_size, "hidden_size": 1,
        "intermediate_size": 1, "num_hidden_layers": 1, "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads, "head_dim": head_dim, "hidden_act": "silu", "norm_eps": 1e-6,
        "max_position_embeddings": 128, "tie_word_embeddings": False, "dtype": "float32", "layer_windows": (None,),
        "rope": None,
    }  # fmt: skip
    return ModelConfig(**numbers | fields)


# --- arithmetic ------------------------------------------------------------------------------------------------------


class FakeCache:
    """Slots of token values, [num_blocks * block_size] int64, all poison at first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.slots = torch.full((num_blocks * block_size,), POISON, dtype=torch.int64)
        self.num_bytes = self.slots.nbytes


class FakeOps:
    """What the runner asks of a backend: caches, log-probabilities, and choose as plain loops."""

    name = "fake"
    dtype = torch.float32
    device = torch.device("cpu")

    def new_kv_cache(self, spec: CacheSpec) -> FakeCache:
        return FakeCache(spec.num_blocks, spec.block_size)

    def tensor(self, array: Any) -> Tensor:
        found: Tensor = as_torch(array).to(self.device)
        return found

    def plan(self, meta: AttentionMetadata, heads: Heads, cache: FakeCache) -> AttentionMetadata:
        return meta.to(self.tensor)

    def is_lost(self) -> bool:
        return False

    def log_softmax(self, logits: Tensor, *, out: Tensor | None = None) -> Tensor:
        return torch.log_softmax(logits, dim=-1, out=out)

    def choose(self, logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
        healthy = torch.isfinite(logits.amax(dim=-1))
        pairs = zip(adjusted(logits, params), healthy.tolist(), strict=True)
        ids = [self._choose(row, params, m) if is_healthy else ANY_ID for m, (row, is_healthy) in enumerate(pairs)]
        return torch.tensor(ids, dtype=torch.int64), healthy

    def token_scores(self, logits: Tensor, ids: Tensor, num_top: int) -> TokenScores:
        found = score_tokens(as_array(self.log_softmax(logits)), as_array(ids), num_top)
        return TokenScores(*(torch.from_numpy(np.ascontiguousarray(part)) for part in astuple(found)))

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[np.ndarray]]:
        return lambda: [as_array(tensor) for tensor in tensors]

    def _choose(self, row: list[float], params: SamplingTensors, m: int) -> int:
        temperature = float(params.temperature[m])
        if max(row) == -math.inf:
            return NO_TOKEN
        if temperature == 0.0:
            return max(range(len(row)), key=lambda v: (row[v], -v))
        assert params.noise_key is not None
        key = [word % 2**64 for word in params.noise_key[m].tolist()]
        noise = np.random.default_rng(key).gumbel(size=len(row))
        return int(np.argmax(np.array(row) / temperature + noise))


def adjusted(logits: Tensor, params: SamplingTensors) -> list[list[float]]:
    """logits [M, V] after mask, bias and penalties, as `kernels/sampling.py` orders them, with loops."""
    rows: list[list[float]] = logits.tolist()
    for m, bits in [] if params.allowed is None else zip(*(part.tolist() for part in params.allowed), strict=True):
        rows[m] = [x if bits[v // 32] >> v % 32 & 1 else -math.inf for v, x in enumerate(rows[m])]
    for m, v in [] if params.masked is None else params.masked.tolist():
        rows[m][v] = -math.inf
    if params.bias is not None:
        for (m, v), value in zip(params.bias[0].tolist(), params.bias[1].tolist(), strict=True):
            rows[m][v] += value
    if params.repetition is not None:
        for m, v in params.repetition[1].tolist():
            penalty = float(params.repetition[0][m])
            rows[m][v] = rows[m][v] / penalty if rows[m][v] > 0 else rows[m][v] * penalty
    if params.counts is not None:
        frequency, presence, pairs, counts = params.counts
        for (m, v), count in zip(pairs.tolist(), counts.tolist(), strict=True):
            rows[m][v] -= float(frequency[m]) * count + float(presence[m])
    return rows


# --- models ----------------------------------------------------------------------------------------------------------


class TinyModel:
    """Logits that depend on a token and its position alone; `nan_token` poisons the rows where it is read.

    It draws a table [V, V] of logits from a seed, and turns its row by the position.
    """

    def __init__(
        self, vocab_size: int = 40, seed: int = 0, nan_token: int | None = None, bad: float = math.nan
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab_size = vocab_size
        self.table = torch.randn((vocab_size, vocab_size), generator=generator) * 3
        if nan_token is not None:
            self.table[nan_token, vocab_size // 2] = bad
        self.logits_rows: list[int] = []  # rows of every call of compute_logits

    def __call__(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        return torch.stack([input_ids, ctx.positions], dim=1).to(torch.float32)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        self.logits_rows.append(len(hidden))
        rows = [self.logits(int(token), int(position)) for token, position in hidden.tolist()]
        return torch.stack(rows)

    def logits(self, token: int, position: int) -> Tensor:
        """[V] float32 after this token at this position."""
        return self.table[token].roll(position)


class CacheModel:
    """The next token is a sum over all tokens that each layer can see, read back from that layer's cache."""

    def __init__(self, windows: Sequence[int | None], vocab_size: int = 50) -> None:
        """One layer for each of `windows`."""
        self.windows = list(windows)
        self.vocab_size = vocab_size

    def __call__(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        columns = []
        for layer in range(len(self.windows)):
            cache, meta = ctx.layer(layer)
            assert isinstance(cache, FakeCache)
            columns.append(self._attend(input_ids, ctx.positions, cache, meta))
        return torch.stack(columns, dim=1)

    def _attend(self, input_ids: Tensor, positions: Tensor, cache: FakeCache, meta: AttentionMetadata) -> Tensor:
        """[T] float32 sums of (token + 1) * (position + 1) over the visible positions. New tokens are stored last: in
        a ring they may take the rows of cached ones that the first of them still see."""
        sums = []
        bounds = itertools.pairwise(meta.query_start_loc.tolist())
        for b, (start, end) in enumerate(bounds):
            assert positions[start:end].tolist() == list(range(int(meta.seq_lens[b]) - (end - start), meta.seq_lens[b]))
            new = input_ids[start:end] + 1
            sums += [self._sum(int(p), new, int(positions[start]), b, cache, meta) for p in positions[start:end]]
        stored = meta.slot_mapping >= 0
        cache.slots[meta.slot_mapping[stored]] = input_ids[stored] + 1
        return torch.tensor(sums, dtype=torch.float32)

    def _sum(self, position: int, new: Tensor, computed: int, b: int, cache: FakeCache, meta: AttentionMetadata) -> int:
        """Of what the token at `position` of sequence b sees; `new` are the values from position `computed` on."""
        first = 0 if meta.sliding_window is None else max(0, position - meta.sliding_window + 1)
        old, seen = torch.arange(min(first, computed), computed), torch.arange(first, position + 1)
        blocks = meta.block_table[b][old // meta.block_size].to(torch.int64)
        assert bool((blocks >= 0).all()), "a visible token has no block"
        cached = cache.slots[blocks * meta.block_size + old % meta.block_size]
        return int((torch.cat([cached, new[max(0, first - computed) : position + 1 - computed]]) * (seen + 1)).sum())

    def compute_logits(self, hidden: Tensor) -> Tensor:
        best = hidden.sum(dim=1, keepdim=True).to(torch.int64) % self.vocab_size
        return -((torch.arange(self.vocab_size) - best) % self.vocab_size).to(torch.float32)

    def expected(self, token_ids: Sequence[int]) -> int:
        """The greedy token after these, without any cache."""
        last = len(token_ids) - 1
        total = 0
        for window in self.windows:
            first = 0 if window is None else max(0, last - window + 1)
            total += sum((token_ids[p] + 1) * (p + 1) for p in range(first, last + 1))
        return total % self.vocab_size

    def continued(self, prompt: list[int], count: int) -> list[int]:
        """The next `count` greedy tokens, without any cache."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(self.expected(tokens))
        return tokens[len(prompt) :]


# --- scheduler outputs by hand ---------------------------------------------------------------------------------------


@dataclass
class HandRequest:
    """A request whose steps a test writes by hand. It keeps tokens and blocks as the scheduler would."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    num_prompt_tokens: int
    choice: int = 0
    num_computed: int = 0
    introduced: bool = False


class HandScheduler:
    """Steps for one full-attention cache group. Request k owns the blocks k * stride .. , so none ever clash."""

    def __init__(self, block_size: int = 16, max_model_len: int = 128, max_requests: int = 8) -> None:
        self.stride = -(-max_model_len // block_size)
        self.group = CacheGroup((0,), None, self.stride * max_requests, block_size)
        self.requests: dict[str, HandRequest] = {}
        self._forgotten: list[str] = []
        self._next_step_id = 0

    def add(
        self, request_id: str, prompt: list[int], *, outputs: Sequence[int] = (), choice: int = 0, **params: Any
    ) -> None:
        params = {"temperature": 0.0, **params}
        tokens = [*prompt, *outputs]
        self.requests[request_id] = HandRequest(request_id, tokens, SamplingParams(**params), len(prompt), choice)

    def remove(self, request_id: str) -> None:
        del self.requests[request_id]
        self._forgotten.append(request_id)

    def step(self, chunk: int = 10**6, only: Sequence[str] | None = None) -> SchedulerOutput:
        """Every request (or only those) gets up to `chunk` tokens."""
        new, scheduled = [], []
        for slot, request in enumerate(self.requests.values()):
            if only is not None and request.request_id not in only:
                continue
            if not request.introduced:
                new.append(self._introduce(request, slot))
            count = min(chunk, len(request.token_ids) - request.num_computed)
            done = request.num_computed + count == len(request.token_ids)
            scheduled.append(
                ScheduledRequest(request.request_id, request.num_computed, count, [[]], [0], 1 if done else 0)
            )
            request.num_computed += count
        self._next_step_id += 1
        forgotten, self._forgotten = self._forgotten, []
        return SchedulerOutput(self._next_step_id - 1, new, scheduled, forgotten)

    def _introduce(self, request: HandRequest, slot: int) -> NewRequest:
        request.introduced = True
        blocks = list(range(slot * self.stride, (slot + 1) * self.stride))
        return NewRequest(
            request.request_id,
            list(request.token_ids),
            request.num_prompt_tokens,
            request.params,
            request.choice,
            [blocks],
        )

    def note(self, request_id: str, new_token_ids: Sequence[int]) -> None:
        """Take what a step sampled."""
        self.requests[request_id].token_ids += new_token_ids
