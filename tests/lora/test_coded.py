"""Adapters over weights in codes: PEFT on the dequantised model is the oracle, and a row's bits depend on nothing
else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.assembly import BuiltEngine, build_engine
from penstock.config import EngineConfig
from penstock.runner.forward_pass import Wanted
from tests.answers import MAX_MODEL_LEN, PROMPTS, WATCHED, answer, ask, check
from tests.hf_models import hf_logprobs, random_ids
from tests.kernels.packed import levels
from tests.lora.peft_adapters import make_adapter
from tests.lora.test_bits import FIELDS, with_adapter
from tests.weights.files import FILES, File
from tests.weights.test_files import LOGPROBS

pytestmark = pytest.mark.skipif(not levels(), reason="no native library")
CODED = (  # one for each way in which values are coded
    "Q4_0", "Q4_K_M", "MXFP4", "awq", "gptq act-order", "pack-quantized, 3 bits", "int-quantized", "fp8",
    "fp8 whole blocks", "gpt-oss", "ct_mxfp4", "nvfp4", "nf4", "bnb_int8",
)  # fmt: skip
FILE = {file.name: file for file in FILES}  # of two with one name, the later, in which all products are coded
UNQUANTISED = ("fp8", "fp8 whole blocks", "nf4")  # whose products take activations as they are
SIZE = 0.08  # of an adapter's values: of wider products than in the other tests of adapters
SPLIT = ["Q4_K_M", "awq", "fp8"]
PROMPT = random_ids(60)
ENGINE: dict[str, Any] = {
    "kernels": "cpu", "enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "max_num_seqs": len(PROMPTS),
    "max_model_len": MAX_MODEL_LEN,
}  # fmt: skip
Make = Callable[..., BuiltEngine]


@pytest.fixture(scope="module", params=CODED)
def file(request: pytest.FixtureRequest) -> File:
    return FILE[request.param]


@pytest.fixture(scope="module")
def model(file: File, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """The model's place, and the log-probabilities [T, V] of its twin with each adapter. These lie beside it."""
    place, twin = file.make(tmp_path_factory.mktemp("coded"))
    expected = {}
    before = hf_logprobs(AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32).eval(), PROMPT)
    for seed, (name, fields) in enumerate(FIELDS.items()):
        base = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32).eval()
        fields = fields | ({"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]} if "oss" in file.name else {})
        adapted = make_adapter(base, place.parent / name, seed=seed, size=SIZE, **fields)
        expected[name] = hf_logprobs(adapted, PROMPT)
        assert (expected[name] - before).abs().max() > 0.2  # else nothing would be proved
    return place, expected


@pytest.fixture(scope="module")
def make(model: tuple[Path, dict[str, Tensor]]) -> Make:
    """Makes an engine. order: the adapters that it loads."""
    place, _ = model

    def build(order: str = "abc", **options: Any) -> BuiltEngine:
        modules = [f"{name}={place.parent / name}" for name in order]
        return build_engine(
            EngineConfig.from_options(**{"model": str(place), "lora_modules": modules} | ENGINE | options)
        )

    return build


def test_logits(make: Make, file: File, model: tuple[Path, dict[str, Tensor]]) -> None:
    """Guards against a product in codes that loses its adapter, or adds it in other rows, and against norms of DoRA
    that are not those of the decoded weights."""
    built = make(dtype="float32", activation_dtype="auto" if file.name in UNQUANTISED else "int8-x3")
    for slot, expected in enumerate(model[1].values()):
        found = built.forward_pass.run(PROMPT, Wanted(), adapter=slot).logits
        assert found is not None
        assert float((torch.from_numpy(found).log_softmax(-1) - expected).abs().max()) < LOGPROBS[3]


def test_crowds(make: Make) -> None:
    """Guards against sums of a coded product that depend on the rows, the chunk, the threads or the slots beside a row
    with an adapter."""
    whole = make(threads=1, max_num_batched_tokens=2048, enable_prefix_caching=False).engine
    alone = {index: answer(ask(whole, [with_adapter(index)])[index]) for index in WATCHED}
    assert len({tuple(ids) for ids, _, _ in alone.values()}) > 3
    crowd = make("cab", threads=2, max_num_batched_tokens=29, max_num_seqs=6).engine
    check(ask(crowd, map(with_adapter, range(len(PROMPTS)))), alone)
    again = ask(crowd, [with_adapter(index, prompt_logprobs=False) for index in WATCHED])
    check(again, alone, prompts=False)


@pytest.mark.parametrize("file", SPLIT, indirect=True)
def test_ranks(make: Make) -> None:
    """Guards against a rank's part of an adapter that meets another part of the codes."""
    options = {"threads": 1, "enable_prefix_caching": False}
    whole, split = (make(tensor_parallel_size=size, **options).engine for size in (1, 2))
    try:
        alone = {index: answer(outputs) for index, outputs in ask(whole, map(with_adapter, WATCHED)).items()}
        check(ask(split, map(with_adapter, WATCHED)), alone)
    finally:
        split.shutdown()
