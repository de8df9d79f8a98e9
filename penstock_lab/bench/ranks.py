"""Compare one process that uses N threads with N ranks of one thread each: speed, memory, and the bytes read.

python -m penstock_lab.bench.ranks DIR [--ranks 2] [--quantization int8] [--write]

DIR is a model's directory. --write first writes a model of the 1.1B shape with random weights there. Both engines are
loaded at the same time and measured alternately; the one that waits uses no core.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock import EngineConfig, SamplingParams
from penstock.client.input_processor import PromptRequest
from penstock.client.process import ProcessClient
from penstock.ranks.sharding import Share, find_degrees
from penstock_lab.bench.loading import write_checkpoint
from penstock_lab.planner.planned import PlannedModel

SHORT_PROMPT_LEN, OUTPUT_LEN = 16, 33
MIB = 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quantization")
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="make DIR a model of the 1.1B shape with random weights")
    args = parser.parse_args()
    if args.write:
        write_checkpoint(args.model)
    options = {
        "model": str(args.model),
        "quantization": args.quantization,
        "max_model_len": max(args.prompt_len, SHORT_PROMPT_LEN) + OUTPUT_LEN,
        "max_num_seqs": 2,
        "enable_prefix_caching": False,
    }
    asyncio.run(compare(options, args.ranks, args.prompt_len, args.rounds))
    return 0


async def compare(options: dict[str, Any], num_ranks: int, prompt_len: int, rounds: int) -> None:
    """Print the memory and the speed of both engines."""
    one = {**options, "threads": num_ranks}
    split = {**options, "threads": 1, "tensor_parallel_size": num_ranks}
    async with engine(one) as whole, engine(split) as ranks:
        print_memory(split, list(processes(ranks)), next(processes(whole)))
        found: dict[str, list[float]] = {}
        for _ in range(rounds + 1):
            for name, client in (("process", whole), ("ranks", ranks)):
                prefill, decode = await tokens_per_second(client, prompt_len)
                found.setdefault(f"prefill {name}", []).append(prefill)
                found.setdefault(f"decode {name}", []).append(decode)
    for phase in ("prefill", "decode"):
        process, parts = (found[f"{phase} {name}"][1:] for name in ("process", "ranks"))  # the first runs warm up
        shares = [100 * mine / its for mine, its in zip(parts, process, strict=True)]
        print(
            f"{phase}: one process of {num_ranks} threads {statistics.median(process):.1f} tokens/s, {num_ranks} ranks "
            f"of one thread {statistics.median(parts):.1f}: {statistics.median(shares):.0f} % "
            f"({min(shares):.0f} to {max(shares):.0f})"
        )


@asynccontextmanager
async def engine(options: dict[str, Any]) -> AsyncIterator[ProcessClient]:
    """Start an engine in its own process, and end it with the block."""
    client = ProcessClient(options, None)
    try:
        await client.start()
        yield client
    finally:
        await client.shutdown()


async def tokens_per_second(client: ProcessClient, prompt_len: int) -> tuple[float, float]:
    """Measure the rate of a prompt, and the rate of one stream after a short prompt."""
    prefill_s = await seconds(client, prompt_len, 1)
    decode_s = await seconds(client, SHORT_PROMPT_LEN, OUTPUT_LEN) - await seconds(client, SHORT_PROMPT_LEN, 1)
    return prompt_len / prefill_s, (OUTPUT_LEN - 1) / decode_s


async def seconds(client: ProcessClient, prompt_len: int, output_len: int) -> float:
    ids = random.Random(0).choices(range(3, 1000), k=prompt_len)
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    async for _ in client.generate(PromptRequest(ids, params=params)):
        pass
    return time.perf_counter() - started


def processes(client: ProcessClient) -> Iterator[int]:
    """Yield the process of an engine, which is its first rank, and then the processes of the other ranks."""
    pid = client.status().replicas[0].pid
    assert pid is not None
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        yield from map(int, (task / "children").read_text().split())


def print_memory(options: dict[str, Any], ranks: list[int], whole: int) -> None:
    """Print the resident memory of each rank, and of the single process, beside the weights that it holds."""
    planned = PlannedModel.read(EngineConfig.from_options(**options))
    config = planned.resolved()
    degrees = find_degrees(config.parallel, planned.model, together=planned.together)
    for rank, pid in [*enumerate(ranks), (None, whole)]:
        share = None if rank is None else Share(rank, degrees)
        weights = planned.sizes(config.numerics.scheme, share).weights
        name = "one process" if rank is None else f"rank {rank}"
        print(
            f"{name}: weights {weights / MIB:.0f} MiB, resident {_resident(pid) / MIB:.0f} MiB, "
            f"read {_read(pid) / MIB:.0f} MiB"
        )


def _resident(pid: int) -> int:
    """Read the bytes in memory that only this process uses, plus its part of the shared ones."""
    return _field(Path(f"/proc/{pid}/smaps_rollup"), "Pss:") * 1024


def _read(pid: int) -> int:
    return _field(Path(f"/proc/{pid}/io"), "rchar:")


def _field(file: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(name))


if __name__ == "__main__":
    sys.exit(main())
