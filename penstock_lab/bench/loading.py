"""Measure the loading of a model: its peak memory, and the time from process start to the first token.

python -m penstock_lab.bench.loading [--quantization int8] [--keep DIR]

Writes a checkpoint of random weights with the shape of a 1.1B Llama, and loads it both unchanged and converted, each
time in a new process. Prints the peak memory (VmHWM) beside the bytes of the packed weights.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from penstock.models.config_json import load_model_config
from penstock.models.registry import find_model
from penstock_lab.bench.products import uniform
from penstock_lab.bench.startup import python_process

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
REPEATS = 5

# The program of the new process. It reads VmHWM once the weights are loaded, before the cache is used.
CHILD = """
import json, sys
from penstock import LLM, SamplingParams
options = json.loads(sys.argv[1])
with LLM(max_num_seqs=4, max_model_len=256, **options) as llm:
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    print(int(status["VmHWM"].split()[0]) * 1024, flush=True)
    llm.generate([{"prompt_token_ids": [1, 2, 3, 4]}], SamplingParams(temperature=0.0, max_tokens=1, detokenize=False))
    print("token", flush=True)
"""


def write_checkpoint(directory: Path) -> None:
    """Write config.json and random bfloat16 weights, named as in a Hugging Face checkpoint."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    config = load_model_config(directory)
    table = find_model(config.architecture).read_table()
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for parameter in table.parameters(config).values():
        for name, shape in parameter.sources.items():
            scale = 1 if len(shape) == 1 else 3 / shape[-1] ** 0.5
            tensors[name] = uniform(shape, torch.bfloat16, generator) * scale
    save_file(tensors, directory / "model.safetensors")


def load_once(options: dict[str, str]) -> tuple[float, float, int]:
    """Measure the seconds from process start to the loaded model and to the first token, and VmHWM in bytes."""
    started = time.perf_counter()
    with python_process("-c", CHILD, json.dumps(options)) as output:
        peak = int(output.readline())
        loaded_s = time.perf_counter() - started
        if output.readline() != "token\n":
            raise RuntimeError("the model generated no token; see the error above")
        return loaded_s, time.perf_counter() - started, peak


def report(name: str, options: dict[str, str], packed_bytes: int) -> None:
    """Load a model REPEATS times and print the medians."""
    runs = [load_once(options) for _ in range(REPEATS)]
    loaded_s, token_s, peak = (statistics.median(column) for column in zip(*runs, strict=True))
    beyond = f"{(peak - packed_bytes) / 1e6:,.0f} MB beyond them" if peak > packed_bytes else "which are mapped"
    print(
        f"{name}: loaded after {loaded_s:.2f} s, first token after {token_s:.2f} s; peak while loading "
        f"{peak / 1e6:,.0f} MB, packed weights {packed_bytes / 1e6:,.0f} MB, {beyond}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure memory and time of loading a model of the 1.1B shape.")
    parser.add_argument("--quantization", help="the engine option")
    parser.add_argument("--keep", type=Path, help="directory to write the models to and keep")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.keep or Path(temporary)
        source, converted = directory / "checkpoint", directory / f"packed-{args.quantization or 'bfloat16'}"
        if not source.exists():
            write_checkpoint(source)
        options = {"quantization": args.quantization} if args.quantization else {}
        if not converted.exists():
            flags = [f"--{name}={value}" for name, value in options.items()]
            command = [sys.executable, "-m", "penstock", "convert", str(source), str(converted), *flags]
            subprocess.run(command, check=True)
        packed_bytes = sum(file.stat().st_size for file in converted.glob("*.safetensors"))
        report("checkpoint", {"model": str(source), **options}, packed_bytes)
        report("converted", {"model": str(converted), **options}, packed_bytes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
