"""Which precision and which context of a model fit a machine."""

import json
from pathlib import Path

import pytest

from penstock.assembly import fit_here, fitting, fittings
from penstock.errors import InvalidRequestError
from penstock.kernels.cpu.library import load_library
from tests.models.configs import LLAMA

pytestmark = pytest.mark.skipif(load_library() is None, reason="torch's memory cannot be planned")
SHAPE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "vocab_size": 32000}
CONTEXT = 65536
MIB = 2**20


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model of 285 million weights: 544 MiB as bfloat16."""
    config = LLAMA | SHAPE | {"num_key_value_heads": 1, "max_position_embeddings": CONTEXT, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def usable(megabytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "usable_memory_bytes", lambda: megabytes * MIB)


def test_the_best_precision_that_fits_is_taken(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a model at a lower precision than need be, a context longer than anybody pays for, and one that
    would be refused when it is loaded."""
    usable(8000, monkeypatch)
    first = fit_here({"model": model})
    assert (first.precision, first.max_model_len) == ("bfloat16", fitting.MOST)
    assert [item.precision for item in fittings({"model": model})] == ["bfloat16", "int8", "int4"]
    seen = {first.precision}
    for megabytes in (1000, 700, 500):
        usable(megabytes, monkeypatch)
        found = fit_here({"model": model})
        seen.add(found.precision)
        assert found.num_bytes <= megabytes * MIB + fitting.resident_bytes()
        assert found.options["kv_cache_memory_bytes"] > 0
    assert seen == {"bfloat16", "int8", "int4"}
    usable(50, monkeypatch)
    with pytest.raises(InvalidRequestError, match=r"too large .* takes \d\.\d GiB as int4, and may have 0\.0 GiB here"):
        fit_here({"model": model})


def test_what_the_user_chose_is_kept(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usable(8000, monkeypatch)
    chosen = {"quantization": "int8", "max_model_len": 512, "max_num_seqs": 4}
    found = fit_here({"model": model, **chosen})
    assert {name: found.options[name] for name in chosen} == chosen
    assert [item.precision for item in fittings({"model": model, **chosen})] == ["int8"]
    with pytest.raises(InvalidRequestError, match=r"memory: 100\.0 MiB is too little"):
        fit_here({"model": model, "memory": 100 * MIB})
    with pytest.raises(InvalidRequestError, match="max_model_len"):
        fit_here({"model": model, "max_model_len": 2 * CONTEXT})
