"""Messages between an engine and its client: token ids in, token ids out, no text.

The values cross the process boundary unchanged (client/frames.py encodes them), so they hold plain types only.
"""

from dataclasses import dataclass, field
from typing import Any

from penstock.errors import check_str
from penstock.interface.outputs import FinishReason
from penstock.interface.pooling import PoolerConfig
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import SamplerState, TokenLogprobs
from penstock.interface.timeline import Interval

MAX_ADAPTER_NAME = 256


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One choice of one user's request.

    Attributes:
        request_id: unique among the open requests.
        prompt_token_ids: at least one.
        params: with the seed settled. n is not used, because every choice is an EngineRequest of its own, except with
            use_beam_search, where one request searches with n beams and answers with n hypotheses.
        choice: index among the choices of the prompt.
        output_token_ids: tokens generated before, for instance by an engine that died. They count as outputs: in
            penalties, lengths, noise positions and usage, the request continues as if never interrupted.
        sampler_state: as EngineOutput had it after output_token_ids; None without outputs, or if it was None there.
        flow: requests of one flow share its turns, and the engine is fair to all flows. "": no flow; order of arrival.
        cache_salt: the request finds cached prefixes of requests with the same salt only; None counts as a salt.
        adapter: the name of the LoRA adapter that it is computed with (Engine.add_adapter); None: the base model.
        priority: lower comes first, with the policy "priority".
        deadline: when the answer is due, in seconds of time.monotonic(), which all processes of a machine share; None:
            no deadline.
        arrived_at: when the client received the request, on the same clock; None: when the engine receives it.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    choice: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    flow: str = ""
    sampler_state: SamplerState | None = None
    cache_salt: str | None = None
    adapter: str | None = None
    priority: int = 0
    deadline: float | None = None
    arrived_at: float | None = None


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter that a user asks for, as in vLLM, but without a number: its name identifies it.

    Attributes:
        lora_name: the name under which requests find it.
        lora_path: a directory in PEFT's format: adapter_config.json and adapter_model.safetensors.
    """

    lora_name: str
    lora_path: str

    def __post_init__(self) -> None:
        check_str("lora_name", self.lora_name, max_length=MAX_ADAPTER_NAME)
        check_str("lora_path", self.lora_path, max_length=4096)


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An engine's description of an adapter that it has loaded.

    Attributes:
        rank: the largest rank of its matrices.
        targets: the model's parameters that it changes, by the names of the parameter table.
        sha256: of its files. Adapters with the same digest compute the same bits.
        num_bytes: the size of its values.
    """

    name: str
    path: str
    rank: int
    targets: tuple[str, ...]
    sha256: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One answer that a beam search has found.

    Attributes:
        cumulative_logprob: the sum of its tokens' raw log-probabilities, added up in float32.
        logprobs: one entry per token, if requested.
    """

    token_ids: list[int]
    cumulative_logprob: float
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)  # not frozen: one is made per request and step, in a third of the time
class EngineOutput:
    """The result of one step for one request.

    Attributes:
        start_index: position of new_token_ids[0] among the request's outputs, resumed ones included.
        new_token_ids: may be empty (only prompt log-probabilities, an error, an end without a token).
        logprobs: one entry per new id, if requested.
        prompt_logprobs: of the prompt tokens from prompt_logprobs_start on, if requested; in order, over several steps.
        finish_reason: set in the last output of the request.
        stop_reason: the stop token that ended it, if it was one of stop_token_ids.
        num_cached_tokens: prompt tokens found in the cache when the request was first admitted.
        error: the reason of a finish with "error".
        sampler_state: what the draw after the last of new_token_ids needs. Resumption needs it, because the tokens
            alone do not determine it. None without params.has_sampler_state.
        num_accepted_tokens, num_rejected_tokens: drafts that this step computed for the request.
        hypotheses: the answers of a beam search, best first, in its only output, which has no new_token_ids.
        pooled: the result of a request with params.pooling (RequestStepOutput.pooled), in its only output.
        intervals: the intervals of the request's timeline that ended since its last output; None without any.
    """

    request_id: str
    start_index: int
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs_start: int = 1
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    sampler_state: SamplerState | None = None
    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0
    hypotheses: list[Hypothesis] | None = None
    pooled: bytes | None = None
    intervals: list[Interval] | None = None


def _stat(metric: str, help: str, status: str = "", *, also: tuple[str, str] | None = None) -> Any:
    """Define a field of EngineStats.

    Args:
        metric, help: its name and its help text at /metrics; a counter gets "_total" there.
        status: where /status shows it, like "kv_blocks.free"; "": nowhere.
        also: a second metric with the same value.
    """
    return field(default=0, metadata={"metrics": dict([(metric, help), *([also] if also else [])]), "status": status})


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges, and counters (num_*_total) since the engine's start. Blocks are summed over all cache groups.

    This is the one table of them: /metrics and /status (server/context.py) are made from the fields.
    """

    num_running: int = _stat("penstock_requests_running", "Sequences in the current batch", "running")
    num_waiting: int = _stat(
        "penstock_requests_waiting", "Sequences waiting for their first step or for blocks", "waiting"
    )
    kv_blocks_total: int = _stat("penstock_kv_blocks", "Blocks of the key/value cache", "kv_blocks.total")
    kv_blocks_free: int = _stat(
        "penstock_kv_blocks_free", "Free blocks, including those with cached content", "kv_blocks.free"
    )
    kv_blocks_cached: int = _stat("penstock_kv_blocks_cached", "Free blocks with cached content", "kv_blocks.cached")
    kv_blocks_pinned: int = _stat("penstock_kv_blocks_pinned", "Blocks that pinned prefixes hold", "kv_blocks.pinned")
    num_prefilling: int = _stat(
        "penstock_requests_prefilling", "Running sequences whose prompt is being computed", "prefilling"
    )
    num_preempted: int = _stat("penstock_requests_preempted", "Waiting sequences that have run before", "preempted")
    num_slots: int = _stat("penstock_slots", "Sequences that can run at once", "slots")
    num_steps_total: int = _stat("penstock_steps", "Steps of the engine")
    num_prompt_tokens_total: int = _stat("penstock_prompt_tokens", "Prompt tokens received", "prompt_tokens_total")
    num_prefix_queries_total: int = _stat(
        "penstock_prefix_cache_queries", "Prompt tokens that were looked up in the cache"
    )
    num_cached_tokens_total: int = _stat(
        "penstock_cached_tokens",
        "Prompt tokens found in the cache",
        "cached_tokens_total",
        also=("penstock_prefix_cache_hits", "Prompt tokens found in the cache, as vLLM names it"),
    )
    num_generated_tokens_total: int = _stat("penstock_generation_tokens", "Tokens generated", "generated_tokens_total")
    num_preemptions_total: int = _stat(
        "penstock_preemptions", "Sequences preempted for lack of blocks", "preemptions_total"
    )
    num_failed_steps_total: int = _stat("penstock_failed_steps", "Steps that failed")
    num_bytes_received_total: int = _stat(
        "penstock_rank_bytes_received", "Bytes that rank 0 of each stage received from others", "bytes_received_total"
    )
    num_compiled_total: int = _stat(
        "penstock_compiled_kernels", "Kernels that were compiled since the start", "compiled.kernels_total"
    )
    num_recorded_total: int = _stat(
        "penstock_recorded_programs", "Programs recorded: forward passes of a size", "compiled.programs_total"
    )
    num_invalid_frames_total: int = _stat("penstock_invalid_frames", "Messages to the engine process that it dropped")
    num_drafts_total: int = _stat(
        "penstock_spec_decode_num_drafts", "Drafts, counted per sequence and step", "spec_decode.drafts_total"
    )
    num_draft_tokens_total: int = _stat(
        "penstock_spec_decode_num_draft_tokens", "Draft tokens computed", "spec_decode.draft_tokens_total"
    )
    num_accepted_tokens_total: int = _stat(
        "penstock_spec_decode_num_accepted_tokens", "Draft tokens accepted", "spec_decode.accepted_tokens_total"
    )
    num_saved_blocks_total: int = _stat(
        "penstock_kv_offload_saved_blocks", "Blocks saved beyond the cache", "kv_offload.saved_blocks_total"
    )
    num_loaded_blocks_total: int = _stat(
        "penstock_kv_offload_loaded_blocks", "Blocks loaded back into the cache", "kv_offload.loaded_blocks_total"
    )
    num_unreadable_blocks_total: int = _stat(
        "penstock_kv_offload_unreadable_blocks",
        "Block files that were damaged or unreadable",
        "kv_offload.unreadable_blocks_total",
    )
    num_unsaved_blocks_total: int = _stat(  # for lack of room, time or a working disk
        "penstock_kv_offload_unsaved_blocks", "Blocks that could not be saved", "kv_offload.unsaved_blocks_total"
    )
    num_accepted_tokens_per_pos_total: list[int] = field(  # first, second, ... drafts
        default_factory=list, metadata={"metrics": {}, "status": "spec_decode.accepted_tokens_per_pos_total"}
    )


@dataclass(frozen=True, slots=True)
class BlockDirectory:
    """The directory in which an engine keeps full blocks of its cache as files (runner/block_store.py).

    Attributes:
        root, name: the files are in root/name. Engines with the same name compute the same bits and lay out their
            blocks alike, wherever they run.
        max_bytes: limit for all files below root.
        block_bytes: bytes of a block, by cache group.
    """

    root: str
    name: str
    max_bytes: int
    block_bytes: list[int]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """An engine's description of its model, sent when it is ready.

    Attributes:
        system_fingerprint: names all that can change a bit: weights, dtype, quantisation, kernels, numerics version.
        default_sampling: sampling fields set by the model's generation_config.json (temperature, top_p, ...).
        choices_made: option -> the automatic choice and its reason, for the start-up message.
        max_num_seqs: requests that run at once.
        block_size: tokens per block of the cache. Prefixes are reused and pinned in whole blocks.
        scheduling_policy: which request comes next (engine/policies.py).
        certificate: what `penstock check` has proved (models/certificate.py), with `same_weights`: whether it was
            proved with these weights; None if nothing was proved.
        memory: planned bytes by purpose (assembly/memory.py); empty where torch computes.
        pooler: how the model's hidden states become embeddings.
        has_lm_head: whether the model can generate; without a head it gives embeddings only.
        block_directory: None without kv_offload_dir.
        max_loras: LoRA adapters that the engine has room for; 0: it takes none.
    """

    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    system_fingerprint: str
    default_sampling: dict[str, Any] = field(default_factory=dict)
    choices_made: dict[str, str] = field(default_factory=dict)
    certificate: dict[str, Any] | None = None
    memory: dict[str, int] = field(default_factory=dict)
    max_num_seqs: int = 1
    block_size: int = 16
    scheduling_policy: str = "fcfs"
    pooler: PoolerConfig = field(default_factory=PoolerConfig)
    has_lm_head: bool = True
    block_directory: BlockDirectory | None = None
    max_loras: int = 0
