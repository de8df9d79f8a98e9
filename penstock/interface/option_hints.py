"""Hints for unknown engine options: the equivalents of other engines' options, and corrections of misspelt ones."""

import difflib
import re
from collections.abc import Callable, Iterable

LEAVE_OUT = "leave it out"
NO_GRAPHS = f"there are no graphs to capture; {LEAVE_OUT}"
NO_LORA = "LoRA adapters are not built yet"
NO_TLS = "there is no TLS; put a reverse proxy in front of the server"
ON_CPU = f"engines compute on CPUs; {LEAVE_OUT}"
REVISION = "download the revision, and give its directory as the model"
# Options of vLLM, Transformers and llama.cpp, short flags included. {names} in the texts are options of Penstock.
HINTS = {
    "amp_level": "it is {dtype} here",
    "api_server_count": f"one process serves HTTP; {LEAVE_OUT}",
    "c": "it is {max_model_len} here",
    "chat_template": "the template is the checkpoint's own (chat_template in tokenizer_config.json)",
    "code_revision": "a checkpoint's code is never run",
    "compilation_config": NO_GRAPHS,
    "cpu_offload_gb": f"weights are in the machine's memory anyway; {LEAVE_OUT}",
    "ctx_size": "it is {max_model_len} here",
    "cuda_graph_sizes": NO_GRAPHS,
    "device": ON_CPU,
    "device_map": ON_CPU,
    "disable_custom_all_reduce": ON_CPU,
    "disable_log_requests": "only the server logs requests; --log-level warning stops it",
    "disable_log_stats": f"statistics are at /metrics, not in the log; {LEAVE_OUT}",
    "download_dir": "set the environment variable HF_HOME",
    "dp": "it is {data_parallel_size} here",
    "enable_auto_tool_choice": f"tools are on wherever the chat template knows them; {LEAVE_OUT}",
    "enable_chunked_prefill": f"prompts are always computed in chunks; {LEAVE_OUT}",
    "enable_expert_parallel": "it is {expert_parallel_size} here",
    "enable_lora": NO_LORA,
    "enable_reasoning": f"reasoning is parsed wherever the chat template has it; {LEAVE_OUT}",
    "enforce_eager": NO_GRAPHS,
    "fuse": f"operations are fused wherever kernels can; {LEAVE_OUT}",
    "generation_config": "the model's generation_config.json gives defaults; a request's own values replace them",
    "gpu_memory_utilization": "use {memory}, which limits the size of the whole engine",
    "guided_decoding_backend": f"llguidance is the only one; {LEAVE_OUT}",
    "hf_overrides": "change config.json in a copy of the model's directory",
    "hf_token": "set the environment variable HF_TOKEN",
    "limit_mm_per_prompt": f"prompts are texts; {LEAVE_OUT}",
    "lora_modules": NO_LORA,
    "m": "the model is an argument without a flag",
    "max_batch_size": "it is {max_num_seqs} here",
    "max_logprobs": f"a request may ask for at most 20; {LEAVE_OUT}",
    "max_loras": NO_LORA,
    "max_seq_len": "it is {max_model_len} here",
    "max_seq_len_to_capture": NO_GRAPHS,
    "max_tokens_per_batch": "it is {max_num_batched_tokens} here",
    "n_ctx": "it is {max_model_len} here",
    "n_gpu_layers": ON_CPU,
    "n_threads": "it is {threads} here",
    "ngl": ON_CPU,
    "num_gpu_blocks_override": "{kv_cache_memory_bytes} is the size of the cache",
    "np": "it is {max_num_seqs} here",
    "opt_level": f"kernels are compiled at installation; {LEAVE_OUT}",
    "parallel": "it is {max_num_seqs} here",
    "pp": "it is {pipeline_parallel_size} here",
    "q": "it is {quantization} here",
    "revision": REVISION,
    "runner": f"one engine generates and embeds; {LEAVE_OUT}",
    "skip_tokenizer_init": f"prompts of token ids need no tokenizer; {LEAVE_OUT}",
    "ssl_certfile": NO_TLS,
    "ssl_keyfile": NO_TLS,
    "structured_outputs_config": f"llguidance is the only backend; {LEAVE_OUT}",
    "swap_space": f"a request that loses its blocks is computed again; {LEAVE_OUT}",
    "t": "it is {threads} here",
    "task": f"one engine generates and embeds; {LEAVE_OUT}",
    "tokenizer": "the tokenizer is the one in the model's directory; LLM(tokenizer=...) takes another",
    "tokenizer_mode": f"tokenizer.json is the only format; {LEAVE_OUT}",
    "tokenizer_revision": REVISION,
    "torch_dtype": "it is {dtype} here",
    "tp": "it is {tensor_parallel_size} here",
    "trust_remote_code": "a checkpoint's code is never run; {imports} registers a model of your own",
    "uds": "it listens on TCP only; put a reverse proxy in front of the server",
    "uvicorn_log_level": "it is --log-level here",
}


def hint(name: str, known: Iterable[str], spell: Callable[[str], str] = str) -> str:
    """Return what to do about an unknown option, in a few words for an error message; "" if that is not known.

    Args:
        name: with underscores, and without the dashes of a flag.
        known: the options that there are.
        spell: returns an option as the user writes it.
    """
    if name in HINTS:
        return re.sub(r"\{(\w+)\}", lambda match: spell(match[1]), HINTS[name])
    similar = difflib.get_close_matches(name, list(known), 1, cutoff=0.75)
    return f"did you mean {spell(similar[0])}?" if similar else ""
