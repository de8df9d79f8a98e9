"""Measures what Transformers' own modules cost: the same Llama by them and by the family here, in turns.

    python tools/fallback_cost.py [LAYERS [HIDDEN [ROUNDS]]]

The model has random weights in bfloat16. It prints the medians over the rounds, and the ratio of the two.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from transformers import LlamaConfig

from penstock.assembly import build_engine
from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.interface.messages import EngineRequest
from penstock.interface.sampling_params import SamplingParams

PROMPT, TOKENS = 384, 24
IMPLEMENTATIONS = ("default", "transformers")


def run(engine: Engine, name: str, prompt: int, tokens: int) -> list[float]:
    """Return the seconds of each step of one greedy request."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    engine.add_request(EngineRequest(name, [17 + 7 * at % 1000 for at in range(prompt)], params))
    steps = []
    while engine.has_work:
        began = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - began)
    return steps


def decode(engine: Engine, name: str) -> float:
    return 1e3 * median(run(engine, name, 16, TOKENS)[2:])  # the second step may be recorded


def prefill(engine: Engine, name: str) -> float:
    return 1e3 * sum(run(engine, name, PROMPT, 1))


MEASURED: dict[str, Callable[[Engine, str], float]] = {
    "ms per token of one stream": decode,
    f"ms for a prompt of {PROMPT} tokens": prefill,
}


def main(layers: int = 12, hidden: int = 1024, rounds: int = 5) -> None:
    """Measure both implementations in turns."""
    with tempfile.TemporaryDirectory() as directory:
        sizes = {"hidden_size": hidden, "intermediate_size": 11 * hidden // 4, "num_hidden_layers": layers}
        heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 256}
        config = LlamaConfig(**sizes, **heads, vocab_size=32000, architectures=["LlamaForCausalLM"])
        config.save_pretrained(directory)
        fixed: dict[str, Any] = {"model": directory, "load_format": "dummy", "dtype": "bfloat16"}
        fixed |= {"kernels": "cpu", "max_model_len": 1024, "max_num_seqs": 4, "enable_prefix_caching": False}
        engines = {
            name: build_engine(EngineConfig.from_options(**fixed, model_impl=name)).engine for name in IMPLEMENTATIONS
        }
    found: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 1):
        for name, engine in engines.items():
            for what, measure in MEASURED.items():
                taken = measure(engine, f"{turn} {what}")
                if turn:  # the first round warms up
                    found.setdefault((what, name), []).append(taken)
    for what in MEASURED:
        ours, theirs = (median(found[what, name]) for name in IMPLEMENTATIONS)
        print(f"{what}: {ours:.1f} by the family, {theirs:.1f} by Transformers' modules ({ours / theirs:.2f} x)")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
