"""Request: one choice of one user's request inside the engine. Token ids only; no text, no blocks.

    token_ids:  [ prompt ............ | outputs ........ ]
                0      num_prompt_tokens          num_tokens
    computed:   [ keys and values cached |  to be computed ]
                0          num_computed_tokens

There is no prefill phase and no decode phase: num_computed_tokens catches up with num_tokens. A decode lacks one
token; a preempted request lacks all of them again.
"""

from penstock.engine.adapters import Adapter
from penstock.engine.block_pool import NO_PARENT, salt_bytes
from penstock.interface.messages import EngineRequest
from penstock.interface.outputs import FinishReason
from penstock.interface.sampling_params import RepetitionDetectionParams
from penstock.interface.step import TokenLogprobs


class Request:
    """State of one request. The engine appends tokens; the engine and the KVCacheManager set num_computed_tokens.

    Attributes:
        source_id: the id under which outputs go to the client. Beams of a search share it; request_id is their own.
        arrival: order of arrival; the youngest is preempted first.
        flow: name of the flow that it belongs to (scheduler.py); "" for none.
        priority, deadline: see EngineRequest; the policy decides what they mean (policies.py).
        arrived_at, waits_since: times on the engine's clock; a preemption renews waits_since.
        max_output_tokens: number of outputs at which it ends with "length"; 0 where it only pools its prompt.
        block_hashes: content hashes of the leading full blocks of token_ids, as far as computed.
        adapter: the LoRA adapter that it is computed with, to its end; None: the base model.
        root_hash: the parent of its first block's hash. It holds the content of the adapter, never its name.
        pending_salt: what the cache_salt adds to the hash of a block; b"" once it was added, or without a salt.
        num_cached_tokens: prompt tokens found in the cache at first admission; None before.
        sampler_state: the sampler's after the last token; None before the first, or if draws do not depend on others.
        num_prompt_logprobs: how many have been delivered, so that a recomputed prompt delivers none twice.
    """

    def __init__(
        self, source: EngineRequest, arrival: int, max_model_len: int, now: float = 0.0, adapter: Adapter | None = None
    ) -> None:
        self.request_id = self.source_id = source.request_id
        self.params = source.params
        self.choice = source.choice
        self.arrival = arrival
        self.flow = source.flow
        self.priority = source.priority
        self.deadline = source.deadline
        self.arrived_at = now if source.arrived_at is None else min(now, source.arrived_at)
        self.waits_since = now
        self.token_ids = [*source.prompt_token_ids, *source.output_token_ids]
        self.num_prompt_tokens = len(source.prompt_token_ids)
        self.num_computed_tokens = 0
        room = max_model_len - self.num_prompt_tokens
        self.max_output_tokens = room if self.params.max_tokens is None else min(self.params.max_tokens, room)
        if self.params.pooling is not None:
            self.max_output_tokens = 0
        self.block_hashes: list[bytes] = []
        self.adapter = adapter
        self.root_hash = NO_PARENT if adapter is None else bytes.fromhex(adapter.info.sha256)
        self.pending_salt = salt_bytes(source.cache_salt)
        self.num_cached_tokens: int | None = None
        self.num_prompt_logprobs = 0
        self.sampler_state = source.sampler_state

    @property
    def has_run(self) -> bool:  # if it waits now, it was preempted
        return self.num_cached_tokens is not None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Count the tokens whose keys and values are not computed yet: at least one, the last."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_stream(self) -> bool:
        """Tell whether a running request lacks only its last output, and nothing of its prompt."""
        num_tokens = len(self.token_ids)
        return num_tokens - self.num_computed_tokens == 1 and num_tokens > self.num_prompt_tokens

    @property
    def max_total_tokens(self) -> int:
        return self.num_prompt_tokens + self.max_output_tokens

    def ending(self, eos_token_ids: frozenset[int]) -> tuple[FinishReason | None, int | None]:
        """Find out why the request ends with its last token, if it does, and the stop token if that is the reason."""
        count = len(self.token_ids) - self.num_prompt_tokens
        if count == 0:
            return None, None
        last, params = self.token_ids[-1], self.params
        if last in eos_token_ids:
            if params.structured_outputs is not None:  # its answer is complete
                return FinishReason.STOP, None
            if count >= params.min_tokens and not params.ignore_eos:
                return FinishReason.STOP, None
        if params.stop_token_ids and count >= params.min_tokens and last in params.stop_token_ids:
            return FinishReason.STOP, last
        if (endless := params.repetition_detection) is not None and count >= params.min_tokens:
            assert isinstance(endless, RepetitionDetectionParams), "in its normal form"
            if endless.found_in(self.token_ids[-min(count, endless.max_pattern_size * endless.min_count) :]):
                return FinishReason.REPETITION, None
        return (FinishReason.LENGTH if count >= self.max_output_tokens else None), None

    def new_prompt_logprobs(self, num_computed: int, found: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """Take the entries of `found` not delivered yet. Its first entry is for the token at num_computed + 1."""
        fresh = found[max(0, self.num_prompt_logprobs - num_computed) :]
        self.num_prompt_logprobs += len(fresh)
        return fresh
