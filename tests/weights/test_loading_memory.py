"""The memory that loading takes at its peak, in a process of its own.

`python -m tests.weights.test_loading_memory` prints it for every format with codes.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

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
from tests.weights.quantized_files import MODELS, Written, awq, gptq, pack_quantized

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
import json, os, sys
from pathlib import Path
import torch
from penstock.kernels.backends import load_ops
from penstock.models.config_json import load_model_config
from penstock.kernels.scheme import Scheme
from penstock.weights.loader import load_model, weight_layers

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

def measure(directory, load_format, scheme):
    ops = load_ops("cpu", torch.bfloat16, threads=2)
    config, before = load_model_config(directory), peak()
    model = load_model(directory, config, ops, load_format, scheme=Scheme.parse(scheme), slices=2)
    tensors = [tensor for _, layer in weight_layers(model) for tensor in layer.state().values()]
    print(sum(tensor.nbytes for tensor in tensors), peak() - before, flush=True)

for line in sys.stdin:  # each in a child, whose peak begins with what the parent holds after its imports
    directory, load_format, scheme = json.loads(line)
    if not os.fork():
        measure(Path(directory), load_format, scheme)
        os._exit(0)
    if os.wait()[1]:
        sys.exit(1)
"""


@dataclass(frozen=True)
class Format:
    """A format with codes.

    Attributes:
        write: makes the tensors of a module; a name: of GGUF's blocks.
        description: quantization_config.
        most: maximum of the packed weights' bytes over the file's. Codes of 2, 3 and 5 bits are packed as 4 and 6 (of 7
            as 8), and a zero point per group becomes a number in float32, which with small groups is much.
    """

    write: str | Callable[[torch.Tensor], Written]
    description: Mapping[str, Any] = field(default_factory=dict)
    most: float = 1.1


def _described(name: str, write: Callable[[torch.Tensor], Written], group: int, most: float = 1.1) -> Format:
    """A format of tests/weights/quantized_files.py with groups of another size."""
    text = json.dumps(MODELS[name][0]).replace('"group_size": 32', f'"group_size": {group}')
    return Format(write, json.loads(text), most)


KINDS = {"Q4_0": 1.1, "Q4_1": 1.1, "Q4_K": 1.1, "Q5_0": 1.25, "Q5_1": 1.25, "Q5_K": 1.25, "Q6_K": 1.1, "Q8_0": 1.1,
         "Q2_K": 2.2, "Q3_K": 1.6, "IQ4_NL": 1.1, "IQ4_XS": 1.1, "MXFP4": 1.1}  # fmt: skip
FORMATS = {f"GGUF, {kind}": Format(kind, most=most) for kind, most in KINDS.items()} | {
    "AWQ, groups of 128": _described("awq", partial(awq, group=128), 128),
    "AWQ, groups of 32": _described("awq", awq, 32, 1.35),
    "GPTQ, 4 bits": _described("gptq", lambda w: gptq(w, 4, None, symmetric=True, group=128), 128),
    "GPTQ, 4 bits, `desc_act`": _described("gptq act-order", lambda w: gptq(w, 4, 5, symmetric=False, group=128), 128),
    "GPTQ, 8 bits": Format(
        lambda w: gptq(w, 8, None, symmetric=True, group=128), MODELS["gptq"][0] | {"bits": 8, "group_size": 128}),
    "compressed-tensors, 4 bits": _described("pack-quantized, 4 bits", partial(pack_quantized, bits=4, group=128), 128),
    "compressed-tensors, 8 bits": _described("pack-quantized, 8 bits", partial(pack_quantized, bits=8, group=128), 128),
    **{name: Format(MODELS[key][1], MODELS[key][0]) for name, key in {
        "compressed-tensors, int8": "int-quantized", "FP8, a scale per tensor": "fp8",
        "FP8, a scale per block": "fp8 blocks", "bitsandbytes, NF4": "nf4"}.items()},
    "NVFP4": Format(MODELS["nvfp4"][1], MODELS["nvfp4"][0], 1.15),
}  # fmt: skip


def write_repeated(directory: Path, item: Format) -> Path:
    """Write a model of 88 million weights in a format, quickly: modules of the same shape have the same tensors."""
    sizes = SIZES["large layers"] | HEADS
    if isinstance(item.write, str):
        config = LlamaConfig(**sizes, vocab_size=256, tie_word_embeddings=False)
        return write_zeros(config, directory / "model.gguf", item.write)
    _, place = make_llama(directory)
    config = json.loads((place / "config.json").read_text()) | sizes
    (place / "config.json").write_text(json.dumps(config | {"quantization_config": item.description}))
    made: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}
    held: dict[str, torch.Tensor] = {}
    parameters = read_parameters(load_model_config(place)).values()
    for name, shape in ((name, shape) for found in parameters for name, shape in found.sources.items()):
        if "_proj." not in name:
            held[name] = torch.full(shape, 0.5, dtype=torch.float16)
            continue
        if shape not in made:
            generator = torch.Generator().manual_seed(1)
            made[shape] = item.write(torch.randn(shape, generator=generator))[0]
        held |= {name.removesuffix("weight") + key: tensor.clone() for key, tensor in made[shape].items()}
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, place / SINGLE, {"format": "pt"})
    return place


def file_of(place: Path) -> Path:
    """The file with a model's weights."""
    return place if place.is_file() else place / SINGLE


class Loader:
    """The process that loads models, each in a child."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", PROGRAM]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def load(self, place: Path, load_format: str = "auto", scheme: str | None = None) -> tuple[int, int]:
        """Load a model. Return the bytes of the weights, and of what the process took in addition at its peak."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(place), load_format, scheme]) + "\n")
        self.process.stdin.flush()
        weights, peak = map(int, self.process.stdout.readline().split())
        return weights, peak

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()


@pytest.fixture(scope="module")
def loader() -> Iterator[Loader]:
    with Loader() as found:
        yield found


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
def test_loading_never_holds_a_second_copy(load_format: str, checkpoint: Path, loader: Loader) -> None:
    """Guards against a mapped checkpoint whose pages count, a heap that keeps what was read, and whole random tensors:
    the checkpoint alone is far larger than what is allowed beside the packed weights. Small layers leave their holes
    in the heap."""
    assert (checkpoint / SINGLE).stat().st_size > 2 * ALLOWANCE
    weights, peak = loader.load(checkpoint, load_format, "int8")
    assert weights < peak <= weights + ALLOWANCE


@pytest.mark.parametrize("name", FORMATS)
def test_codes_take_the_size_of_their_file(name: str, loader: Loader, tmp_path: Path) -> None:
    """Guards against codes of a byte each beside the packed weights, and against a file whose pages count."""
    place = write_repeated(tmp_path, FORMATS[name])
    weights, peak = loader.load(place)
    assert weights < FORMATS[name].most * file_of(place).stat().st_size
    assert weights < peak <= weights + (ALLOWANCE / 2 if place.is_file() else ALLOWANCE)


def main() -> None:
    print("| format | file, MiB | packed / file | beside it at the peak, MiB |\n|---|---|---|---|")
    with Loader() as loader:
        for name, item in FORMATS.items():
            with TemporaryDirectory() as directory:
                place = write_repeated(Path(directory), item)
                size, (weights, peak) = file_of(place).stat().st_size, loader.load(place)
            print(
                f"| {name} | {size / 2**20:.1f} | {weights / size:.3f} | {(peak - weights) / 2**20:.1f} |", flush=True
            )


if __name__ == "__main__":
    main()
