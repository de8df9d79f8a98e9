"""Measure the first token of a prompt after a restart: computed again, and with its blocks loaded from the disk.

python -m penstock_lab.bench.offload MODEL [--prompt-len 900] [--quantization int8] [--load-format dummy]
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from typing import Any

from penstock import EngineConfig, SamplingParams
from penstock.assembly import BuiltEngine, build_engine
from penstock.interface.messages import EngineRequest

OUTPUT_LEN = 8
WARMUP_LEN = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompt-len", type=int, default=900)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantization")
    parser.add_argument("--load-format", default="auto")
    args = parser.parse_args()
    options = {"model": args.model, "quantization": args.quantization, "load_format": args.load_format}
    computed, found = [], []
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory() as directory:
            seconds, cached, first_ids = restart(options, directory, args.prompt_len, number)
            assert not cached
            computed.append(seconds)
            seconds, cached, second_ids = restart(options, directory, args.prompt_len, number)
            assert second_ids == first_ids, "a restart changed an answer"
            found.append(seconds)
        print(
            f"computed {computed[-1]:.3f} s; after a restart {seconds:.3f} s, {cached} tokens from the disk", flush=True
        )
    gains = [slow / fast for slow, fast in zip(computed, found, strict=True)]
    print(f"{statistics.median(gains):.1f} times as fast, {min(gains):.1f} to {max(gains):.1f}; the same tokens")
    return 0


def restart(options: dict[str, Any], directory: str, prompt_len: int, seed: int) -> tuple[float, int, list[int]]:
    """Start an engine on a directory of blocks, and ask for one prompt. Return what `ask` returns."""
    config = EngineConfig.from_options(
        **options, kv_offload_dir=directory, max_model_len=prompt_len + OUTPUT_LEN, max_num_seqs=2
    )
    built = build_engine(config)
    ask(built, [5] * WARMUP_LEN)
    answer = ask(built, random.Random(seed).choices(range(3, 1000), k=prompt_len))
    built.engine.shutdown()
    return answer


def ask(built: BuiltEngine, prompt: list[int]) -> tuple[float, int, list[int]]:
    """Measure the seconds to a prompt's first token; also return how many of its tokens were cached, and the answer."""
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    built.engine.add_request(EngineRequest("prompt", prompt, params))
    first_s, cached, ids = 0.0, 0, list[int]()
    while built.engine.has_work:
        for output in built.engine.step():
            if output.new_token_ids and not ids:
                first_s, cached = time.perf_counter() - started, output.num_cached_tokens
            ids.extend(output.new_token_ids)
    return first_s, cached, ids


if __name__ == "__main__":
    sys.exit(main())
