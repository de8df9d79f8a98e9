"""What a GPU serves: the tables of docs/gpu.md, a row of which each test here proves, in Triton's interpreter.

`PENSTOCK_WRITE_TABLES=1 pytest tests/kernels/triton/test_served.py -n0` writes the rows again.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("triton", reason="an extra")

from penstock import LLM, SamplingParams
from penstock.config import option_names
from penstock.errors import InvalidRequestError
from penstock_lab.planner.table_template import table_text
from tests.families.case import Case, all_cases
from tests.hf_models import make_llama
from tests.kernels.triton.test_engine import made
from tests.lora.peft_adapters import make_adapter
from tests.support_matrix import ROOT
from tests.test_fingerprint import CANNOT_CHANGE, MAY_CHANGE
from tests.weights.quantized_files import MODELS, quantise

PAGE = ROOT / "docs" / "gpu.md"
PROMPT = [5, 9, 4]
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=1)
CHOSEN = ("model", "kernels", "device")  # what every engine here has
VALUES = MAY_CHANGE | CANNOT_CHANGE | {"block_size": 256, "activation_dtype": "int8-x3", "max_num_batched_tokens": 64}
VALUES |= dict.fromkeys(("tensor_parallel_size", "attention_parallel_size", "expert_parallel_size"), 2)
VALUES |= {"max_loras": 2, "max_lora_rank": 8, "lora_modules": ["a=ADAPTER"], "merge_lora": "ADAPTER"}
VALUES |= {"mlp_parallel_size": 2, "distributed_executor_backend": "ray"}
NEEDED: dict[str, dict[str, Any]] = {  # options that another one needs
    "attention_sinks": {"sliding_window": 20}, "sliding_window": {"attention_sinks": 4},
    "prefill_ratio": {"scheduling_policy": "length_classes"}, "quantization_group_size": {"quantization": "int4"},
    "kv_offload_dir_bytes": {"kv_offload_dir": "STORE"}, "kv_cache_scales": {"kv_cache_dtype": "int8"},
    "max_loras": {"enable_lora": True}, "max_lora_rank": {"enable_lora": True}, "lora_modules": {"enable_lora": True},
    "distributed_executor_backend": {"tensor_parallel_size": 2}, "activation_dtype": {"model": "CODED"},
    "tensor_parallel_size": {"imports": ["RULE"]}, "mlp_parallel_size": {"imports": ["RULE"]},
    "attention_parallel_size": {"imports": ["RULE"], "model": "HEADS"},
    "expert_parallel_size": {"imports": ["RULE"], "model": "EXPERTS"},
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths by the names that VALUES has for them: MODEL is the model itself, CODED one of FP8; RULE lets the processes
    of ranks multiply as this one does."""
    directory = tmp_path_factory.mktemp("files")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1}
    base, model = make_llama(directory, **sizes, vocab_size=48)
    _, coded = make_llama(directory / "coded", **sizes, vocab_size=48)
    quantise(coded, *MODELS["fp8"])
    _, heads = make_llama(directory / "heads", **sizes | {"num_attention_heads": 2, "num_key_value_heads": 2})
    _, experts = made("mixtral", directory / "experts", **sizes, num_hidden_layers=1, vocab_size=48)
    make_adapter(base, directory / "adapter")
    (directory / "own.py").write_text("import penstock\n")
    (directory / "rule.py").write_text("from tests.kernels.triton import hardware\n\nhardware.install()\n")
    (directory / "sharding.yaml").write_text(table_text(model, sharding=True))
    names = (f"layers.{index}.{kind}" for index in range(2) for kind in ("key_scale", "value_scale"))
    save_file({name: torch.tensor(0.05) for name in names}, directory / "scales.safetensors")
    found = {"RULE": "rule.py", "OWN": "own.py", "SHARDING": "sharding.yaml", "SCALES": "scales.safetensors"}
    found |= {"STORE": "store", "ADAPTER": "adapter"}
    models = {"MODEL": model, "CODED": coded, "HEADS": heads, "EXPERTS": experts}
    paths = {name: str(path) for name, path in models.items()}
    paths |= {name: str(directory / file) for name, file in found.items()}
    return paths | {"a=ADAPTER": f"a={paths['ADAPTER']}"}


def check_row(name: str, text: str) -> None:
    """The page has this row."""
    row, page = f"| `{name}` | {text} |\n", PAGE.read_text()
    if os.environ.get("PENSTOCK_WRITE_TABLES"):
        page, count = re.subn(rf"^\| `{re.escape(name)}` \| .*\n", row.replace("\\", ""), page, flags=re.M)
        assert count == 1, row
        PAGE.write_text(page)
    assert row in page


@pytest.mark.parametrize("case", all_cases(shapes=False), ids=str)
def test_families(case: Case, tmp_path: Path) -> None:
    """Guards against a family whose layers call an operation in a way that only other backends take."""
    model, directory = case.make(tmp_path)
    llm = LLM(model=str(directory), kernels="triton", dtype="float32", max_model_len=128, max_num_seqs=1)
    output = llm.generate([PROMPT], ONE)[0]
    assert output.error is None
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    for token_id, entry in (output.outputs[0].logprobs or [])[0].items():
        assert abs(entry.logprob - float(expected[token_id])) < 1e-4
    check_row(case.architecture, "yes")


@pytest.mark.parametrize("name", [name for name in option_names() if name not in CHOSEN])
def test_options(name: str, files: dict[str, str]) -> None:
    """Guards against an option that is accepted and does not work, and against one that is refused without a reason."""
    given = {name: VALUES[name], **NEEDED.get(name, {})}
    for option, value in given.items():
        if isinstance(value, str):
            given[option] = files.get(value, value)
        elif isinstance(value, list):
            given[option] = [files.get(item, item) for item in value]
    defaults = {"model": files["MODEL"], "kernels": "triton", "max_model_len": 128, "max_num_seqs": 2}
    try:
        with LLM(**defaults | given) as llm:
            output = llm.generate([PROMPT], ONE)[0]
    except InvalidRequestError as error:
        reason = str(error).partition("cannot be used: ")[2] or str(error).partition("it must be ")[2] or str(error)
        check_row(name, f"no: {reason}")
    else:
        assert output.error is None
        assert len(output.outputs[0].token_ids) == 1
        check_row(name, "yes")


def test_a_wide_head(tmp_path: Path) -> None:
    """Guards against a program that a GPU cannot hold."""
    _, directory = make_llama(tmp_path, head_dim=320, num_attention_heads=1, num_key_value_heads=1)
    with pytest.raises(InvalidRequestError, match="have 320 elements; there, they may have 256"):
        LLM(model=str(directory), kernels="triton")


def test_no_other_rows() -> None:
    """Guards against rows of what is gone."""
    rows = re.findall(r"^\| `(\w+)` \| (?:yes|no:)", PAGE.read_text(), flags=re.M)
    architectures = dict.fromkeys(case.architecture for case in all_cases(shapes=False))
    assert rows == [*architectures, *(name for name in option_names() if name not in CHOSEN)]
