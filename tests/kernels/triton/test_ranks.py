"""Parts of a model on one device, and in processes that exchange tensors over gloo: the bits of the whole."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton", reason="an extra")

from penstock import LoRARequest, SamplingParams
from penstock.errors import ExecutorLostError
from penstock.kernels.ops import REDUCTION_LEAVES, Packing, SplittingOps, TensorRows
from penstock.kernels.scheme import Scheme
from penstock.kernels.triton import device
from penstock.kernels.triton.ops import TritonOps
from tests.hf_models import random_ids
from tests.kernels.triton.compare import DEVICE, bits, draw
from tests.kernels.triton.test_engine import answers, made, start
from tests.lora.peft_adapters import make_adapter

K, N, LEAF = 256, 12, 32


def cut(ends: Sequence[int], scheme: Scheme | None) -> Packing:
    return Packing(tuple(ends), scheme)


@pytest.mark.parametrize(("rows", "scheme"), [(3, None), (30, None), (3, "int8"), (3, "int4")])
def test_parts_have_the_bits_of_the_whole(rows: int, scheme: str | None) -> None:
    """Guards against parts that are added in another order than leaves, scales of a part instead of the whole weight's,
    and a bias that every rank adds."""
    ops, packing = TritonOps(torch.bfloat16, DEVICE), Scheme.parse(scheme, 32 if scheme == "int4" else None)
    assert isinstance(ops, SplittingOps)
    x, weight, bias = draw(rows, K, dtype=torch.bfloat16), draw(N, K).bfloat16() / 16, draw(N).bfloat16()
    leaves = range(LEAF, K + 1, LEAF)
    whole = ops.linear(x, ops.pack_linear(weight, bias, cut(leaves, packing)))
    magnitudes = weight.float().abs().amax(dim=1).cpu().numpy() if scheme == "int8" else None
    for degree in (2, 4, 8):
        size, parts, scales = K // degree, [], None
        for begin in range(0, K, size):
            own = TensorRows(weight[:, begin : begin + size].contiguous())
            part, scales = ops.pack_part(own, magnitudes, cut(range(LEAF, size + 1, LEAF), packing))
            parts.append(ops.linear(x[:, begin : begin + size].contiguous(), part))
        assert (scales is None) == (scheme != "int8")
        total = ops.add_parts(parts, scales, bias.float().cpu().numpy(), out=torch.empty_like(whole))
        assert torch.equal(bits(total), bits(whole)), degree


SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 67}
LORA = {"enable_lora": True, "max_lora_rank": 40}  # more than the model is wide
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {  # family, ranks, options
    "llama with an adapter, 4 ranks": ("llama", 4, {"dtype": "float32"} | LORA),
    "mixtral, 2 ranks": ("mixtral", 2, {"quantization": "int8", "kv_cache_dtype": "int8"}),  # experts meet on the host
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=1)
SAMPLED = SamplingParams(temperature=1.0, seed=1, max_tokens=2, ignore_eos=True, logprobs=1)


@pytest.mark.skipif(DEVICE != "cpu", reason="processes of an interpreter each")
@pytest.mark.parametrize("name", CASES)
def test_ranks_have_the_bits_of_one_device(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a rank's part that is another one's, a tensor that is read before it has come or after the next
    one has, a recorded pass that leaves out an exchange, and a fingerprint that is not that of 8 leaves."""
    family, ranks, options = CASES[name]
    model, directory = made(family, tmp_path, **SIZES, num_attention_heads=4, num_key_value_heads=4)
    rule = tmp_path / "rule.py"  # every process multiplies as the hardware does
    rule.write_text("from tests.kernels.triton import hardware\n\nhardware.install()\n")
    limits = {"max_num_batched_tokens": 13, "max_num_seqs": 2, "imports": [str(rule)]}
    shared = start(directory, **limits, **options, tensor_parallel_size=ranks)
    prompts, params = [random_ids(15, 0, 67), random_ids(3, 1, 67)], [GREEDY, SAMPLED]
    adapters: list[LoRARequest | None] = [None, None]
    if "enable_lora" in options:
        make_adapter(model, tmp_path / "adapter")
        adapters[0] = LoRARequest("a", str(tmp_path / "adapter"))
    requests: dict[str, Any] = {"prompts": prompts, "sampling_params": params, "lora_request": adapters}
    found = [answers(shared.generate(**requests)) for _ in range(2)]  # computed, then cached and recorded
    monkeypatch.setattr(device, "LEAVES", REDUCTION_LEAVES)
    alone = start(directory, **limits, **options)
    assert found == [answers(alone.generate(**requests))] * 2
    assert shared.engine.model_info.system_fingerprint == alone.engine.model_info.system_fingerprint
    executor = cast(Any, shared.engine.engine)._executor
    assert executor.group.bytes_received
    executor.group._processes[0].kill()
    with pytest.raises(ExecutorLostError, match="rank 1"):
        shared.generate(prompts, params)
