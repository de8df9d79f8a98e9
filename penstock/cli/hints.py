"""Hints for unknown options: the equivalents of vLLM's and llama.cpp's options, and corrections of misspelt ones."""

import difflib
from collections.abc import Iterable, Sequence

LEAVE_OUT = "leave it out"
HINTS = {
    "--chat-template": "the template is the checkpoint's own (chat_template in tokenizer_config.json)",
    "--cpu-offload-gb": f"weights are in the machine's memory anyway; {LEAVE_OUT}",
    "--ctx-size": "it is --max-model-len here",
    "--device": f"engines compute on CPUs; {LEAVE_OUT}",
    "--disable-log-requests": "it is --log-level warning here",
    "--disable-log-stats": f"statistics are at /metrics and not in the log; {LEAVE_OUT}",
    "--download-dir": "set the environment variable HF_HOME",
    "--enable-auto-tool-choice": f"tools are on wherever the chat template knows them; {LEAVE_OUT}",
    "--enable-chunked-prefill": f"prompts are always computed in chunks; {LEAVE_OUT}",
    "--enable-lora": "LoRA adapters are not built yet",
    "--enforce-eager": f"there are no graphs to capture; {LEAVE_OUT}",
    "--gpu-memory-utilization": "--memory bounds what an engine takes, as a size",
    "--guided-decoding-backend": f"llguidance is the only one; {LEAVE_OUT}",
    "--max-tokens-per-batch": "it is --max-num-batched-tokens here",
    "--parallel": "it is --max-num-seqs here",
    "--ssl-certfile": "there is no TLS; put a reverse proxy in front of the server",
    "--ssl-keyfile": "there is no TLS; put a reverse proxy in front of the server",
    "--swap-space": f"a request that loses its blocks is computed again; {LEAVE_OUT}",
    "--trust-remote-code": "a checkpoint's code is never run; --import FILE registers a model of yours",
    "--uvicorn-log-level": "it is --log-level here",
}


def hints(words: Sequence[str], known: Iterable[str]) -> str:
    """Return the end of the error about unknown words of a command line: what each option may have meant.

    `known` are the options that the command has.
    """
    found = []
    for name in [word.partition("=")[0] for word in words if word.startswith("--")]:
        similar = difflib.get_close_matches(name, list(known), 1, cutoff=0.75)
        if name in HINTS:
            found.append(f"; {name}: {HINTS[name]}")
        elif similar:
            found.append(f"; {name}: did you mean {similar[0]}?")
    return "".join(found)
