"""ForwardPass: one pass over known tokens, to inspect a model: the logits of every position, and the hidden states and
attention weights of every layer, with or without the LM head.

It has its own cache and disturbs no request. With the native kernels a row's bits do not depend on the other rows, so
the results are those that the engine computes for a request with these tokens.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from penstock.config import EngineConfig
from penstock.errors import NotSupportedError, invalid
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import NO_ADAPTER, CacheGroup, NewRequest, ScheduledRequest
from penstock.kernels.attention.items import first_seen
from penstock.kernels.metadata import AttentionParams, KVScales
from penstock.kernels.ops import Ops
from penstock.kernels.tensors import FLOAT32, LOGITS_ROWS, Array, Tensor, as_array
from penstock.layers.decoder import Attention
from penstock.layers.module import CausalLM, named_modules, replaced
from penstock.runner.model_runner import ModelRunner
from penstock.spec.model_config import ModelConfig

BLOCK = re.compile(r"(.*?\.\d+)\.")  # the name of the decoder block that a module is in, up to the first number
BLOCK_SIZE = 128  # which the kernels of every backend read
NAME, GREEDY = "forward", SamplingParams(temperature=0.0)  # of the request that the pass is
MAX_BYTES = 2**30  # limit of the results' size, unless the caller sets another


@dataclass(frozen=True, slots=True, eq=False)
class ForwardOutput:
    """The results of a pass over T tokens, as Transformers' models give them, but without a batch dimension.

    Attributes:
        token_ids: the tokens of the pass.
        last_hidden_state: [T, hidden] float32, after the final norm.
        logits: [T, V] float32; None with skip_lm_head.
        hidden_states: [T, hidden] float32 each: the input of every decoder block, and last_hidden_state; or None.
        attentions: [H, T, T] float32 for each layer: the weight that each query (row) gives to each key; or None.
    """

    token_ids: list[int]
    last_hidden_state: Array
    logits: Array | None = None
    hidden_states: tuple[Array, ...] | None = None
    attentions: tuple[Array, ...] | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """Optional results of a pass, besides the last hidden state."""

    logits: bool = True
    hidden_states: bool = False
    attentions: bool = False


@dataclass(slots=True)
class _Seen:
    """Copies of what the chunks of a pass have computed, in order."""

    states: list[list[Array]]  # per block
    queries: list[list[Array]]  # per layer, [t, H, D] or [2, t, H, D] each, as Ops.attend takes them
    last: list[Array] = field(default_factory=list)
    logits: list[Array] = field(default_factory=list)


class ForwardPass:
    """Computes passes with a loaded model. It uses memory only during a pass."""

    def __init__(
        self,
        model: CausalLM,
        ops: Ops,
        config: EngineConfig,
        model_config: ModelConfig,
        kv_scales: Sequence[KVScales] | None = None,
    ) -> None:
        self._model, self._ops = model, ops
        self._config, self._numbers, self._kv_scales = config, model_config, kv_scales

    def run(
        self, token_ids: Sequence[int], wanted: Wanted, *, max_bytes: int = MAX_BYTES, adapter: int = NO_ADAPTER
    ) -> ForwardOutput:
        """Compute a pass over at least one token. adapter: the slot of the LoRA adapter to compute it with.

        Raises:
            InvalidRequestError: the results would take more than max_bytes; `param` names the largest.
            NotSupportedError: the model is not made of penstock.layers, so its parts are not known.
        """
        blocks = self._blocks()
        self._check_size(len(token_ids), wanted, max_bytes)
        seen = _Seen([[] for _ in blocks], [[] for _ in blocks])
        runner = self._runner(token_ids, adapter)
        most = self._config.scheduler.max_num_batched_tokens or len(token_ids)
        with runner.computing(), _watching(blocks, seen, wanted):
            for start in range(0, len(token_ids), most):
                self._compute(runner, start, min(most, len(token_ids) - start), seen, wanted)
            attentions = self._attentions(blocks, runner, seen) if wanted.attentions else None
        last = np.concatenate(seen.last)
        states = (*map(self._stream, seen.states), last) if wanted.hidden_states else None
        logits = np.concatenate(seen.logits) if wanted.logits else None
        return ForwardOutput(list(token_ids), last, logits, states, attentions)

    def _blocks(self) -> list[tuple[Any, Attention]]:
        if self._config.numerics.load_format == "mock":
            raise NotSupportedError("forward: load_format = mock has no model to look into", param="load_format")
        modules = dict(named_modules(self._model))
        named = ((BLOCK.match(name), item) for name, item in modules.items() if isinstance(item, Attention))
        found = [(modules[match[1]], item) for match, item in named if match is not None]
        if sorted(attention.layer for _, attention in found) != list(range(self._numbers.num_hidden_layers)):
            name = type(self._model).__name__
            raise NotSupportedError(f"forward: {name} is not made of penstock.layers, so its inside is not known")
        return sorted(found, key=lambda pair: pair[1].layer)

    def _check_size(self, tokens: int, wanted: Wanted, max_bytes: int) -> None:
        numbers = self._numbers
        layers, row = numbers.num_hidden_layers, 4 * tokens
        sizes = {
            "logits": wanted.logits * row * numbers.vocab_size,
            "output_hidden_states": wanted.hidden_states * row * numbers.hidden_size * (layers + 1),
            "output_attentions": wanted.attentions * row * tokens * numbers.num_attention_heads * layers,
        }
        if sum(sizes.values()) > max_bytes:
            largest = max(sizes, key=sizes.__getitem__)
            raise invalid(
                largest,
                f"{tokens} tokens make results of {sum(sizes.values())} bytes, of which these are "
                f"{sizes[largest]}; max_bytes allows {max_bytes}",
            )

    def _stream(self, chunks: list[Array]) -> Array:
        """Join the chunks of a residual stream, which is kept divided by the scale of the branches."""
        whole = np.concatenate(chunks)
        if self._numbers.residual_scale != 1.0:
            whole *= FLOAT32.type(self._numbers.residual_scale)
        return whole

    def _runner(self, token_ids: Sequence[int], adapter: int) -> ModelRunner:
        """Make a runner that knows the tokens, with caches for them alone: a token's slot is its position."""
        num_blocks = -(-len(token_ids) // BLOCK_SIZE)
        sinks, rules = self._numbers.num_sink_tokens, self._rules()
        groups = [
            CacheGroup(layers, window, num_blocks, BLOCK_SIZE, num_sink_tokens=sinks, **rules)
            for layers, window in self._numbers.cache_groups()
        ]
        runner = ModelRunner(self._model, self._ops, groups, self._config, self._numbers, self._kv_scales)
        tables = [list(range(num_blocks)) for _ in groups]
        request = NewRequest(NAME, list(token_ids), len(token_ids), GREEDY, 0, tables, adapter=adapter)
        runner.batch.add_request(request)
        return runner

    def _compute(self, runner: ModelRunner, start: int, count: int, seen: _Seen, wanted: Wanted) -> None:
        """Compute `count` tokens, which follow those in the caches."""
        nothing: list[list[int]] = [[] for _ in runner.groups]
        step = runner.batch.pack([ScheduledRequest(NAME, start, count, nothing, [0] * len(nothing), 0)])
        hidden = self._model(self._ops.tensor(step.input_ids), runner.context(step))
        seen.last.append(_copy(hidden))
        for first in range(0, count if wanted.logits else 0, LOGITS_ROWS):
            logits = self._model.compute_logits(hidden[first : first + LOGITS_ROWS])
            seen.logits.append(_copy(logits[:, : self._numbers.vocab_size]))

    def _attentions(self, blocks: list[tuple[Any, Attention]], runner: ModelRunner, seen: _Seen) -> tuple[Array, ...]:
        """Compute each layer's weights [H, T, T] with the keys as its cache holds them."""
        found = []
        windows, rules = self._numbers.layer_windows, self._rules()
        for (_, attention), cache, queries, window in zip(blocks, runner.kv_caches, seen.queries, windows, strict=True):
            q = np.concatenate(queries, axis=-3)
            keys, _ = self._ops.load_kv(cache, self._ops.tensor(np.arange(q.shape[-3])))
            sinks = self._numbers.num_sink_tokens
            found.append(attention_weights(q, _copy(keys), attention.params, window, sinks, **rules))
        return tuple(found)

    def _rules(self) -> dict[str, bool]:
        return {"chunked": self._numbers.chunked_windows, "bidirectional": self._numbers.bidirectional}


@contextmanager
def _watching(blocks: list[tuple[Any, Attention]], seen: _Seen, wanted: Wanted) -> Iterator[None]:
    """Copy the residual stream before each block, and each layer's queries."""
    with ExitStack() as stack:
        for layer, (block, attention) in enumerate(blocks):
            if wanted.hidden_states:
                watched = partial(_watched_block, block.forward, seen.states[layer])
                stack.enter_context(replaced(block, "forward", watched))
            if wanted.attentions:
                watching = _WatchedOps(attention.ops, seen.queries[layer])
                stack.enter_context(replaced(attention, "ops", watching))
        yield


def _watched_block(forward: Callable[..., Any], states: list[Array], x: Tensor, *args: Any) -> Any:
    """Copy the residual stream x, plus the branch h that the block's first norm adds, if any; then run the block.

    The arguments of a block are (x, h, ctx) or (x, ctx).
    """
    h = args[0] if len(args) > 1 else None
    states.append(_copy(x) if h is None else _copy(x) + as_array(h))
    return forward(x, *args)


class _WatchedOps:
    """A layer's operations, but `attend` also copies its queries."""

    def __init__(self, ops: Ops, queries: list[Array]) -> None:
        self._ops, self._queries = ops, queries

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def attend(self, q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._queries.append(_copy(q))
        return self._ops.attend(q, *args, **kwargs)


def attention_weights(
    q: Array,
    keys: Array,
    params: AttentionParams,
    window: int | None,
    num_sinks: int = 0,
    *,
    chunked: bool = False,
    bidirectional: bool = False,
) -> Array:
    """Compute softmax(q k^T), [H, T, T] float32, with scale, bias and softcap as AttentionParams orders them.

    A hidden key has weight 0. q: [T, H, D] or [2, T, H, D], as Ops.attend takes it, keys: [T, Hkv, D], both float32.
    window, num_sinks, chunked, bidirectional: as in AttentionMetadata.
    """
    group = q.shape[-2] // keys.shape[1]
    columns = keys.repeat(group, axis=1).transpose(1, 2, 0)
    q, sink_q = q if q.ndim == 4 else (q, q)
    weights = np.matmul(q.transpose(1, 0, 2), columns)
    weights[:, :, :num_sinks] = np.matmul(sink_q.transpose(1, 0, 2), columns[:, :, :num_sinks])
    at = np.arange(len(q))
    distance = at[None, :] - at[:, None]  # key position minus query position
    slopes = None if params.alibi_slopes is None else as_array(params.alibi_slopes)[:, None, None]
    bias = FLOAT32.type(0.0) if slopes is None else slopes * distance.astype(FLOAT32)
    if params.bias_before_scale:
        weights += bias
    weights *= FLOAT32.type(params.scale)
    if params.softcap is not None:
        weights = FLOAT32.type(params.softcap) * np.tanh(weights / FLOAT32.type(params.softcap))
    if not params.bias_before_scale:
        weights += bias
    if params.distance_bias is not None:
        table = as_array(params.distance_bias)
        reach = table.shape[1] // 2
        weights += table[:, distance.clip(-reach, reach) + reach]
    first = 0 if window is None else first_seen(at[:, None], window, chunked=chunked)
    last = (len(q) if window is None else window - 1) if bidirectional else 0
    hidden = (distance > last) | ((at < first) & (at >= num_sinks))
    weights[:, hidden] = -np.inf
    sinks = -np.inf if params.sink_logits is None else as_array(params.sink_logits)[:, None, None]
    greatest = np.maximum(weights.max(axis=-1, keepdims=True), sinks)
    weights = np.exp(weights - greatest)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(sinks - greatest)
    return np.asarray(weights / total, dtype=FLOAT32)


def _copy(tensor: Tensor) -> Array:
    return np.array(as_array(tensor), dtype=FLOAT32)
