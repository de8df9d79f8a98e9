"""The memory that loading takes at its peak, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.models.config_json import load_model_config
from penstock.weights.safetensors import SINGLE
from penstock.weights.sources import read_parameters
from tests.hf_models import make_llama
from tests.kernels import packed

pytestmark = pytest.mark.skipif(
    not packed.levels() or not Path("/proc/self/status").exists(), reason="needs the native library and /proc"
)
SIZES = {
    "large layers": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6},
    "many small layers": {"hidden_size": 512, "intermediate_size": 900, "num_hidden_layers": 44},
}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
ALLOWANCE = 64 * 2**20  # beside the packed weights: rows that are read and converted, and what torch makes for itself
PROGRAM = """
import sys
from pathlib import Path
import torch
from penstock.kernels.backends import load_ops
from penstock.models.config_json import load_model_config
from penstock.kernels.scheme import Scheme
from penstock.weights.loader import load_model, weight_layers

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

directory, ops = Path(sys.argv[1]), load_ops("cpu", torch.bfloat16, threads=2)
config, before = load_model_config(directory), peak()
model = load_model(directory, config, ops, sys.argv[2], scheme=Scheme.parse("int8"))
layers = [layer for _, layer in weight_layers(model)]
print(sum(layer.packed[0].num_bytes if hasattr(layer, "packed") else layer.weight.nbytes for layer in layers))
print(peak() - before)
"""


@pytest.fixture(scope="module", params=SIZES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More than 150 MB of float16, which is converted on its way."""
    _, directory = make_llama(tmp_path_factory.mktemp("model"))
    config = json.loads((directory / "config.json").read_text()) | SIZES[request.param] | HEADS
    (directory / "config.json").write_text(json.dumps(config))
    parameters = read_parameters(load_model_config(directory)).values()
    shapes = {name: shape for item in parameters for name, shape in item.sources.items()}
    save_file({name: torch.full(shape, 0.5, dtype=torch.float16) for name, shape in shapes.items()}, directory / SINGLE)
    return directory


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_loading_never_holds_a_second_copy(load_format: str, checkpoint: Path) -> None:
    """Guards against a mapped checkpoint whose pages count, a heap that keeps what was read, and whole random tensors:
    the checkpoint alone is far larger than what is allowed beside the packed weights. Small layers leave their holes
    in the heap."""
    assert (checkpoint / SINGLE).stat().st_size > 2 * ALLOWANCE
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(checkpoint), load_format], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    weights, peak = map(int, done.stdout.split())
    assert weights < peak <= weights + ALLOWANCE
