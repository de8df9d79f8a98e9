"""The memory that loading takes at its peak, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from penstock.models.config_json import load_model_config
from penstock.weights.safetensors import SINGLE
from penstock.weights.sources import read_parameters
from tests.hf_models import make_llama
from tests.kernels import packed
from tests.weights.gguf_files import write_zeros

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
model = load_model(directory, config, ops, sys.argv[2], scheme=Scheme.parse(*sys.argv[3:] or [None]), slices=2)
layers = [layer for _, layer in weight_layers(model)]
print(sum(tensor.nbytes for layer in layers for tensor in layer.state().values()))
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
    weights, peak = _loaded(checkpoint, load_format, "int8")
    assert weights < peak <= weights + ALLOWANCE


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q8_0"])
def test_a_gguf_file_takes_its_own_size(kind: str, tmp_path: Path) -> None:
    """Guards against codes of a byte each beside the packed weights, and against a file whose pages count."""
    config = LlamaConfig(**SIZES["large layers"], **HEADS, vocab_size=256, tie_word_embeddings=False)
    path = write_zeros(config, tmp_path / "model.gguf", kind)
    weights, peak = _loaded(path, "auto")
    assert weights < 1.1 * path.stat().st_size
    assert weights < peak <= weights + ALLOWANCE / 2


def _loaded(place: Path, *arguments: str) -> tuple[int, int]:
    """Run PROGRAM. Return the bytes of the weights, and of what the process took in addition at its peak."""
    command = [sys.executable, "-c", PROGRAM, str(place), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    weights, peak = map(int, done.stdout.split())
    return weights, peak
