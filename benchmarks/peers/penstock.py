"""Penstock, in the environment that runs the comparison, with weights from `penstock convert` or in GGUF files."""

import subprocess
import sys
from pathlib import Path

from benchmarks.peers.base import GGUF_PRECISIONS, Engine, LoadOptions, Peer, Record
from benchmarks.peers.llama_cpp import FILE, FILES, HEADS, LlamaCpp


class Penstock(Peer):
    name = "penstock"
    distribution = "penstock"
    precisions = (*Peer.precisions, *GGUF_PRECISIONS)

    def files(self, precision: str) -> tuple[str, str]:
        return (LlamaCpp.name, FILES[precision]) if precision in GGUF_PRECISIONS else (self.name, precision)

    def convert(self, source: Path, target: Path, precision: str) -> None:
        quantization = [] if precision == "bf16" else ["--quantization", precision]
        subprocess.run([sys.executable, "-m", "penstock", "convert", source, target, *quantization], check=True)

    def load(self, options: LoadOptions) -> Engine:
        return _Engine(options)


class _Engine(Engine):
    def __init__(self, options: LoadOptions) -> None:
        from penstock import LLM

        is_gguf = options.precision in GGUF_PRECISIONS
        self._llm = LLM(
            str(Path(options.directory) / FILE) if is_gguf else options.directory,
            activation_dtype="int8" if options.precision.endswith("-int8") else "auto",
            threads=options.threads,
            max_model_len=options.max_length,
            max_num_seqs=options.max_streams,
        )
        self._precision = options.precision

    def generate(self, prompts: list[list[int]], output: int, shared: int, record: Record) -> None:
        from penstock import SamplingParams
        from penstock.interface.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        record.start()
        for stream, answer in self._llm.stream([{"prompt_token_ids": prompt} for prompt in prompts], params):
            for token in answer.outputs[0].token_ids:
                record.token(stream, token)

    def facts(self) -> dict[str, str]:
        own = {"bf16": "bf16", "int8": "int8 per channel", "int4": "int4 per group of 128"}
        file = FILES[self._precision]
        activations = "bf16" if self._precision == "bf16" else "int8 per token"
        if self._precision in GGUF_PRECISIONS:
            activations = f"{self._llm.config.numerics.activation_dtype} per token"
        return {
            "weights": own.get(self._precision, f"as in the {file} file"),
            "activations": activations,
            "cache": self._llm.config.cache.kv_cache_dtype.replace("bfloat", "bf"),
            "head": own["int8"] if self._precision in ("int8", "int4") else HEADS[file],
            "notes": f"kernels {self._llm.config.numerics.kernels}",
        }
