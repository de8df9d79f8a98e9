"""Measure how long streams wait for other requests' prompts, in one server with two threads, and in a prefill server
and a decode server with one thread each.

python -m penstock_lab.bench.kv_transfer MODEL [--prompt-len N] [options of penstock serve, such as --quantization int8]
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from typing import Any

import httpx

from penstock.models.config_json import load_model_config
from penstock.weights.hub import resolve_model
from penstock_lab.bench.startup import python_process

NUM_STREAMS = 4
NUM_PROMPTS = 4
STREAM_PROMPT_LEN = 32
TIMEOUT_S = 600.0
READY_S = 300.0
ONE_SERVER, TWO_SERVERS = "one server, 2 threads", "prefill and decode server, 1 thread each"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompt-len", type=int, default=1024)
    args, options = parser.parse_known_args()
    vocab_size = load_model_config(resolve_model(args.model)).vocab_size
    common = [args.model, "--max-num-seqs", "8", *options]
    print(f"{NUM_STREAMS} streams, and {NUM_PROMPTS} prompts of {args.prompt_len} tokens one after the other")
    for name in (ONE_SERVER, TWO_SERVERS):
        with ExitStack() as stack:
            if name == ONE_SERVER:
                url = _serve(stack, *common, "--threads", "2")
            else:
                stores = [stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")) for _ in range(2)]
                role = [*common, "--threads", "1", "--kv-role"]
                prefill = _serve(stack, *role, "prefill", "--kv-offload-dir", stores[0])
                url = _serve(stack, *role, "decode", "--kv-prefill-url", prefill, "--kv-offload-dir", stores[1])
            gaps, times = asyncio.run(_measure(url, args.prompt_len, vocab_size))
        percentiles = ", ".join(f"p{share} {_percentile(gaps, share):.0f}" for share in (50, 90, 99))
        longest = f"longest {max(gaps) * 1e3:.0f} ms"
        print(f"{name}: gaps {percentiles}, {longest}; a prompt took {statistics.median(times):.2f} s")


def _percentile(gaps: list[float], share: int) -> float:
    """Compute a percentile in milliseconds."""
    return sorted(gaps)[share * (len(gaps) - 1) // 100] * 1e3


def _serve(stack: ExitStack, *options: str) -> str:
    """Start a server that ends with the stack. Return its URL once it is ready."""
    output = stack.enter_context(
        python_process("-m", "penstock", "serve", *options, "--port", "0", "--log-level", "warning")
    )
    line = output.readline()
    url = next(word for word in line.split() if word.startswith("http://"))
    deadline = time.monotonic() + READY_S
    while httpx.get(f"{url}/health").status_code != httpx.codes.OK:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url} was not ready within {READY_S:g} s")
        time.sleep(0.1)
    return url


async def _measure(url: str, prompt_len: int, vocab_size: int) -> tuple[list[float], list[float]]:
    """Measure the gaps of the streams while prompts are computed, and the duration of each prompt, in seconds."""
    random_ids = random.Random(0)
    prompts = [random_ids.choices(range(3, vocab_size), k=prompt_len) for _ in range(NUM_PROMPTS)]
    gaps: list[float] = []
    times: list[float] = []
    begun = asyncio.Semaphore(0)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
        streams = [
            asyncio.create_task(
                _stream(http, random_ids.choices(range(3, vocab_size), k=STREAM_PROMPT_LEN), gaps, begun)
            )
            for _ in range(NUM_STREAMS)
        ]
        for _ in streams:
            await begun.acquire()
        gaps.clear()
        for prompt in prompts:
            started = time.perf_counter()
            await _complete(http, prompt, max_tokens=1)
            times.append(time.perf_counter() - started)
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return gaps, times


async def _complete(http: httpx.AsyncClient, prompt: list[int], **fields: Any) -> None:
    answer = await http.post("/v1/completions", json={"prompt": prompt, "ignore_eos": True, **fields})
    answer.raise_for_status()


async def _stream(http: httpx.AsyncClient, prompt: list[int], gaps: list[float], begun: asyncio.Semaphore) -> None:
    """Record the time between consecutive tokens of an endless series of streams."""
    max_model_len = (await http.get("/v1/models")).json()["data"][0]["max_model_len"]
    body = {"prompt": prompt, "ignore_eos": True, "stream": True, "max_tokens": max_model_len - len(prompt) - 1}
    while True:
        last: float | None = None
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append(now - last)
                    else:
                        begun.release()
                    last = now


if __name__ == "__main__":
    main()
