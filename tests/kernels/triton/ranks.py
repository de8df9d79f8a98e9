"""A model that two ranks share, each a process with Triton's interpreter; gloo moves their arrays.

    python -m tests.kernels.triton.ranks RANK SIZE STORE

prints the checksums of the logits of some steps, as the rank that samples has them.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from penstock.config import EngineConfig
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import CacheGroup, NewRequest, ScheduledRequest, SchedulerOutput
from penstock.kernels.tensors import Array
from penstock.kernels.triton.ops import TritonOps
from penstock.models.config_json import load_model_config
from penstock.ranks.build import RankPlan, make_runner
from penstock.ranks.sharding import Degrees
from tests.kernels.triton.recorded import Shape

TINY = Shape(hidden=32, inner=32, layers=1, heads=2, kv_heads=2, head_dim=16)
VOCAB = 24
PROMPT = [5, 7, 11]


class GlooLinks:
    """Links over a process group: it moves arrays, and adds nothing."""

    buffer_bytes = 2**30
    bytes_received = 0

    def gather(self, x: Array, degree: int, shapes: Sequence[tuple[int, ...]] | None = None) -> list[Array]:
        """Gather one array of each rank, of all ranks."""
        sizes = [tuple(x.shape)] * degree if shapes is None else shapes
        found = [torch.empty(size, dtype=torch.from_numpy(np.empty(0, x.dtype)).dtype) for size in sizes]
        dist.all_gather(found, torch.from_numpy(np.ascontiguousarray(x)))
        return [item.numpy() for item in found]


def checksums(links: GlooLinks | None, rank: int, size: int) -> list[list[int | None]]:
    """Compute a prompt and two more tokens, of which the last one is recorded."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(TINY.fields(VOCAB)))
        model = load_model_config(Path(directory))
        options: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "float32", "kernels": "reference"}
        limits = {"max_num_seqs": 2, "max_model_len": 128, "max_num_batched_tokens": 16, "threads": 1}
        config = EngineConfig.from_options(load_format="dummy", block_size=128, **options, **limits)
        groups = (CacheGroup((0,), None, 2, 128),)
        degrees = Degrees(size, size, size, size)
        plan = RankPlan(config, model, Path(directory), groups, degrees)
        runner = make_runner(plan, TritonOps(torch.float32, "cpu", leaves=8), rank, links)
    params, found, length = SamplingParams(temperature=0.0), [], 0
    for number, count in enumerate((3, 1, 1)):
        new = [] if number else [NewRequest("a", PROMPT, 3, params, 0, [[0]])]
        item = ScheduledRequest("a", length, count, [[]], [0], 1)
        length += count
        result = runner.execute(SchedulerOutput(number, new, [item], checksum_logits=True)).results["a"]
        tokens = [result.new_token_ids]
        if links is not None:
            dist.broadcast_object_list(tokens, 0)
            if rank:
                runner.append_sampled({"a": tokens[0]})
        found.append([result.checksum, *tokens[0]])
    return found


if __name__ == "__main__":
    from tests.kernels.triton import hardware

    hardware.install()
    rank, size = map(int, sys.argv[1:3])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=size)
    with np.errstate(all="ignore"):
        print(json.dumps(checksums(GlooLinks(), rank, size)))
    dist.destroy_process_group()
