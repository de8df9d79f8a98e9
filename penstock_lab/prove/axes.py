"""The axes of the proof that nothing but the request decides its bits. A new feature adds its axis here, as one entry.

Each axis maps its values, as reports name them, to options of EngineConfig or to fields of SamplingParams.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

from penstock import PoolingParams
from penstock.config import BLOCK_SIZE_UNITS, SCHEDULING_POLICIES, TRITON
from penstock.tokenizer.answer_formats import tool_formats
from penstock.tokenizer.answers import Calls, Function, answer_grammar, literal

Axis = dict[str, dict[str, Any]]

MAX_MODEL_LEN = 144
SELF_DRAFT = "itself"  # in LAYOUTS: the model under test also makes the drafts, so that greedy drafts are right
OFFLOAD_DIRECTORY = "offloaded"  # in LAYOUTS: a directory of the proof, which all engines of a round share
ROOM = "room"  # in LAYOUTS: how many of the longest requests the cache has room for, instead of a size in bytes

# What an answer depends on: each combination has its own answers, with which all others are compared.
FORMS: dict[str, Axis] = {
    "weights": {
        "bfloat16": {"dtype": "bfloat16"},
        "float32": {"dtype": "float32"},
        "int8": {"dtype": "bfloat16", "quantization": "int8"},
        "int8-x2": {"dtype": "bfloat16", "quantization": "int8-x2"},
        "int8-x3 of float32": {"dtype": "float32", "quantization": "int8-x3"},
        "int4": {"dtype": "bfloat16", "quantization": "int4"},
        "int4 in groups of 32": {"dtype": "bfloat16", "quantization": "int4", "quantization_group_size": 32},
        "int4-a16": {"dtype": "bfloat16", "quantization": "int4-a16"},
    },
    "cache": {"as the weights": {}, "int8": {"kv_cache_dtype": "int8"}},
}

# What must not change a bit: how an engine divides, stores and shares the work.
LAYOUTS: dict[str, Axis] = {
    "chunk": {
        "1": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
        "7": {"max_num_batched_tokens": 7, "max_num_seqs": 7},
        "13": {"max_num_batched_tokens": 13, "max_num_seqs": 13},
        "64": {"max_num_batched_tokens": 64},
        "whole": {"max_num_batched_tokens": 2048},
    },
    "threads": {"1": {"threads": 1}, "2": {"threads": 2}, "4": {"threads": 4}},
    "prefixes": {"kept": {"enable_prefix_caching": True}, "dropped": {"enable_prefix_caching": False}},
    "blocks": {
        "of 16": {"block_size": 16},
        "of 64": {"block_size": 64},
        "one per request": {"block_size": MAX_MODEL_LEN, "enable_prefix_caching": False},
    },
    "scheduling_policy": {name: {"scheduling_policy": name} for name in SCHEDULING_POLICIES},
    "offload": {
        "none": {},
        "memory": {"kv_offload_memory_bytes": 2**24},
        "files": {"kv_offload_dir": OFFLOAD_DIRECTORY},
    },
    "stall": {"any": {}, "1 ms": {"max_stall_ms": 1}},
    "room": {"for all": {ROOM: 33}, "for 2": {ROOM: 2}},
    "speculation": {
        "off": {},
        "prompt lookup": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
        "itself": {"speculative_config": {"model": SELF_DRAFT, "num_speculative_tokens": 3}},
    },
    "head": {"whole": {}, "in 3 pieces, padded": {"lm_head_pieces": 3, "pad_vocab_multiple": 128}},
}
ON_GPU = BLOCK_SIZE_UNITS[TRITON]  # of a block
LONGER_ON_GPU = 2  # times as long prompts, so that they fill blocks there
LAYOUTS_ON_GPU: dict[str, Axis] = {name: axis for name, axis in LAYOUTS.items() if name != "threads"} | {
    "blocks": {
        f"of {ON_GPU}": {"block_size": ON_GPU},
        f"of {2 * ON_GPU}": {"block_size": 2 * ON_GPU},
        "one per request": {"block_size": LONGER_ON_GPU * MAX_MODEL_LEN, "enable_prefix_caching": False},
    },
}
NOT_ON_GPU = {
    "threads": "kernels of a GPU have none",
    "blocks: of 16, of 64": f"kernels of a GPU read {ON_GPU} tokens at a time",
}
UNDISTURBED: dict[str, Any] = {  # the undisturbed engine: each request alone, in one piece, one thread, nothing cached
    "max_num_batched_tokens": 2048, "threads": 1, "enable_prefix_caching": False, "max_num_seqs": 1,
}  # fmt: skip

SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "integer"}}, "required": ["a", "b"],
}  # fmt: skip
ADD = Function("add", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, strict=True)
REQUIRED_CALL, OPTIONAL_CALL = (  # tool calls as grammars, in a form without special tokens
    answer_grammar(tool_formats()["llama3_json"], Calls([ADD], required), literal) for required in (True, False)
)
UNSCORED = {"logprobs": None}  # then tokens without a choice are taken without a step
# What a request asks for. Every kind except the unscored ones reports log-probabilities or vectors.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "temperature 1": {"temperature": 1.0, "ignore_eos": True},
    "nucleus": {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "ignore_eos": True},
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "sampled with penalties": {
        "temperature": 0.8,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.1,
        "min_tokens": 3,
    },
    "bias and stop tokens": {"temperature": 0.7, "logit_bias": {5: 2.0, 9: -3.0}, "stop_token_ids": [7, 11]},
    "prompt log-probabilities": {"temperature": 0.8, "prompt_logprobs": 1, "ignore_eos": True},
    "n-grams and lengths": {
        "temperature": 0.0,
        "no_repeat_ngram_size": 2,
        "suppress_tokens": [5, 6],
        "sequence_bias": [[[7], 3.0], [[8, 9], 5.0]],
        "exponential_decay_length_penalty": [2, 1.1],
    },
    "truncations": {"temperature": 1.2, "typical_p": 0.9, "top_h": 0.9, "eta_cutoff": 0.001, "min_p": 0.01},
    "XTC and DRY": {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.01, "dry_multiplier": 0.8},
    "mirostat": {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 4.0, "top_k": 100, "ignore_eos": True},
    "beam search": {"use_beam_search": True, "length_penalty": 0.7},
    "a JSON schema": {"temperature": 1.0, "structured_outputs": {"json": SCHEMA}},
    "a regular expression": {"temperature": 0.0, "structured_outputs": {"regex": "[a-z]{2,9}-0123456789"}, **UNSCORED},
    "demanded tool calls": {"temperature": 1.0, "structured_outputs": {"grammar": REQUIRED_CALL}},
    "tool calls or text": {"temperature": 1.0, "structured_outputs": {"grammar": OPTIONAL_CALL}, **UNSCORED},
    "pooled prompt": {
        "pooling": PoolingParams(pooling_type="MEAN", normalize=False),
        "temperature": 0.0,
        "max_tokens": 1,
        "logprobs": None,
        "detokenize": False,
    },
}
BEAMS = 3  # beams of a beam search, which replace n

# How requests meet in an engine, and what happens to them there.
CROWDS = (1, 2, 3, 4, 7, 8, 16, 33)
CHOICES = {1: 4, 4: 1}  # n -> how often it is taken
ARRIVALS = ("together", "at random steps")
PREEMPTED, RESUMED, KILLED = "preempted at random steps", "resumed after a random token", "engine killed"
DISTURBANCES = ("none", PREEMPTED, RESUMED)  # the last two only if the engine is in the proof's own process
ENGINE_DISTURBANCES = (PREEMPTED, KILLED)
SALTS = ("none", "a", "b")  # drawn for each request of a crowd
PINNED = ("nothing", "a prompt")  # the latter only if the engine is in the proof's own process
ENTRY_WEIGHTS = {"offline": 10, "AsyncLLM": 1, "HTTP": 1}  # way to the engine (askers.OPEN) -> how often it is taken
CROWD_AXES: dict[str, Sequence[str]] = {  # every value that a comparison may have, besides those above
    "crowd": [*map(str, CROWDS)],
    "position": ("first", "between", "last"),
    "n": [*map(str, {*CHOICES, BEAMS})],
    "arrival": ARRIVALS,
    "disturbance": (*DISTURBANCES, KILLED),
    "preempted": ("no", "yes"),
    "salt": SALTS,
    "pinned": PINNED,
    "prefix": ("cold", "partial", "warm"),
    "via": [*ENTRY_WEIGHTS],
    "request": [*KINDS],
}


def kernels_of(given: dict[str, Any]) -> str:
    """Choose the kernels whose bits are compared, by the options of the user."""
    on_gpu = given.get("kernels") == TRITON or given.get("device", "").startswith("cuda")
    return TRITON if on_gpu else "cpu"


def layouts_of(kernels: str) -> dict[str, Axis]:
    return LAYOUTS_ON_GPU if kernels == TRITON else LAYOUTS


def choose(random: Random, axes: dict[str, Axis]) -> tuple[dict[str, str], dict[str, Any]]:
    """Draw a value of each axis, and the options for them. In a conflict, the later axis wins."""
    point = {name: random.choice(list(axis)) for name, axis in axes.items()}
    options: dict[str, Any] = {}
    for name, value in point.items():
        options |= axes[name][value]
    return point, options
