"""The cost of loading a model: peak memory, and the time from process start to the first token.

python -m penstock.bench.loading [--quantization int8] [--keep DIR]

Writes a checkpoint of random weights shaped like a 1.1B Llama, loads it plain and converted, each time in a new
process, and prints the peak memory (VmHWM) beside the bytes of the packed weights.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
REPEATS = 5
SHARD_TENSORS = 32

# Runs in a new process. VmHWM is read when the weights are loaded, before the cache is used.
CHILD = """
import json, sys
from penstock import LLM, SamplingParams
options = json.loads(sys.argv[1])
with LLM(max_num_seqs=4, max_model_len=256, **options) as llm:
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    peak = int(status["VmHWM"].split()[0]) * 1024
    print(json.dumps({"loaded": peak}), flush=True)
    llm.generate([{"prompt_token_ids": [1, 2, 3, 4]}], SamplingParams(temperature=0.0, max_tokens=1, detokenize=False))
    print(json.dumps({"token": True}), flush=True)
"""


def write_checkpoint(directory: Path) -> None:
    """Write config.json and random bfloat16 weights in shards, named as in a Hugging Face checkpoint."""
    import torch
    from safetensors.torch import save_file

    from penstock.models.config_json import load_model_config
    from penstock.models.registry import find_model

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    config = load_model_config(directory)
    table = find_model(config.architecture).read_table()
    sources = {name: shape for item in table.parameters(config).values() for name, shape in item.sources.items()}
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    names = list(sources)
    for start in range(0, len(names), SHARD_TENSORS):
        shard = {}
        for name in names[start : start + SHARD_TENSORS]:
            shape = sources[name]
            values = torch.rand(shape, generator=generator).sub_(0.5) * (1 if len(shape) == 1 else 3 / shape[-1] ** 0.5)
            shard[name] = values.bfloat16()
        file = f"model-{start:05d}.safetensors"
        save_file(shard, directory / file)
        weight_map.update(dict.fromkeys(shard, file))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def load_once(options: dict[str, str]) -> tuple[float, float, int]:
    """Return the seconds from process start until the model is loaded and until its first token, and VmHWM in bytes."""
    started = time.perf_counter()
    command = [sys.executable, "-c", CHILD, json.dumps(options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        if process.stdout is None:
            raise RuntimeError("the child process has no standard output")
        loaded = json.loads(process.stdout.readline())
        loaded_s = time.perf_counter() - started
        json.loads(process.stdout.readline())
        token_s = time.perf_counter() - started
    return loaded_s, token_s, loaded["loaded"]


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
    parser = argparse.ArgumentParser(description="Memory and time of loading a 1.1B-shaped model.")
    parser.add_argument("--quantization", help="the engine's option")
    parser.add_argument("--keep", type=Path, help="directory to write the models to and keep them in")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.keep or Path(temporary)
        source, converted = directory / "checkpoint", directory / f"packed-{args.quantization or 'bfloat16'}"
        if not source.exists():
            write_checkpoint(source)
        options = {"quantization": args.quantization} if args.quantization else {}
        flags = ["--quantization", args.quantization] if args.quantization else []
        if not converted.exists():
            command = [sys.executable, "-m", "penstock", "convert", str(source), str(converted), *flags]
            subprocess.run(command, check=True)
        packed_bytes = sum(file.stat().st_size for file in converted.glob("*.safetensors"))
        report("checkpoint", {"model": str(source), **options}, packed_bytes)
        report("converted", {"model": str(converted), **options}, packed_bytes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
