"""Proof that the memory plan holds: a completely filled engine takes what its ledger says, within 5 %.

Each trial is a separate process with another set of options, because the peak of a process cannot be reset. It runs the
largest prompts that the options allow, with log-probabilities, until every block of the cache is taken.
"""

import json
import subprocess
import sys
from typing import Any, ClassVar

from penstock_lab.prove.proof import Trials

TOLERANCE = 0.05  # difference allowed, as a share of the plan
TIMEOUT_S = 900.0
CHOICES: dict[str, tuple[Any, ...]] = {
    "max_num_seqs": (4, 16, 32),
    "max_num_batched_tokens": (256, 1024, 2048),
    "kv_cache_dtype": ("auto", "int8"),
    "quantization": (None, "int8", "int4"),
    "threads": (1, 2),
}
CONTEXT = 512  # value of max_model_len in tokens, small so that filling takes seconds


class MemoryPlanProof:
    """Compares the measured peak of an engine with its plan."""

    name: ClassVar[str] = "memory"
    promise: ClassVar[str] = "An engine takes the memory that its plan says, within 5 %"
    unit: ClassVar[str] = "engines"
    goal: ClassVar[int] = 20
    weight: ClassVar[float] = 1.0

    def run(self, trials: Trials) -> None:
        """Fill one engine per trial."""
        shares: list[float] = []
        while trials.go_on():
            chosen = {name: trials.random.choice(values) for name, values in CHOICES.items()}
            options = {"max_model_len": CONTEXT} | chosen | trials.subject.options | {"model": trials.subject.model}
            result = _fill(options)
            trials.tried()
            if "error" in result:
                trials.wrong(f"{options}: {result['error']}")
                continue
            shares.append(result["peak"] / result["planned"])
            if abs(shares[-1] - 1) > TOLERANCE:
                trials.wrong(f"{options}: peak {result['peak']:,} bytes, but {result['planned']:,} were planned")
        if shares:
            trials.figure("smallest_peak_of_plan", min(shares))
            trials.figure("largest_peak_of_plan", max(shares))


def _fill(options: dict[str, Any]) -> dict[str, Any]:
    """Fill an engine in a separate process. Return its planned and its peak bytes, or the error."""
    command = [sys.executable, "-m", "penstock_lab.prove.memory", json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1:] or f"exit code {done.returncode}"}
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def fill(options: dict[str, Any]) -> dict[str, int]:
    """Build an engine, take every block of its cache and make its largest steps. Return planned and peak bytes."""
    from penstock import EngineConfig, SamplingParams
    from penstock.assembly import build_engine
    from penstock.interface.messages import EngineRequest
    from penstock.kernels.cpu.host import resident_bytes

    built = build_engine(EngineConfig.from_options(**options))
    engine = built.engine
    length = engine.max_model_len - 2
    rows = [
        SamplingParams(max_tokens=2, ignore_eos=True, seed=row, logprobs=5)
        for row in range(engine.scheduler.max_num_seqs)
    ]
    rows.append(SamplingParams(max_tokens=2, ignore_eos=True, seed=0, prompt_logprobs=5))
    for row, params in enumerate(rows):
        prompt = [(row * 7919 + 31 * position) % engine.vocab_size for position in range(length)]
        engine.add_request(EngineRequest(str(row), prompt, params))
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
    return {"planned": sum(built.info.memory.values()), "peak": resident_bytes(peak=True)}


if __name__ == "__main__":
    print(json.dumps(fill(json.loads(sys.argv[1]))))
