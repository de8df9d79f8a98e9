"""Transformers' generate with torch: the batch is fixed, and a shared prefix is computed for each request."""

from pathlib import Path
from typing import Any

from benchmarks.peers.base import Engine, LoadOptions, Peer, Record


class Transformers(Peer):
    name = "transformers"
    distribution = "transformers"
    requirements = ("transformers==5.23.0", "torch==2.13.0")
    precisions = ("bf16",)

    def convert(self, source: Path, target: Path, precision: str) -> None:
        target.symlink_to(source, target_is_directory=True)

    def load(self, options: LoadOptions) -> Engine:
        return _Engine(options)


class _Engine(Engine):
    def __init__(self, options: LoadOptions) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(options.threads)
        self._model = AutoModelForCausalLM.from_pretrained(options.directory, dtype=torch.bfloat16)
        self._model.generation_config.eos_token_id = None

    def generate(self, prompts: list[list[int]], output: int, shared: int, record: Record) -> None:
        import torch

        def watch(ids: Any, scores: Any, **_: Any) -> Any:
            for stream, token in enumerate(ids[:, -1].tolist()):
                record.token(stream, token)
            return torch.zeros(len(ids), dtype=torch.bool)

        ids = torch.tensor(prompts)
        record.start()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=[watch],
            )

    def facts(self) -> dict[str, str]:
        import torch

        notes = f"torch {torch.__version__}, eager, static batches, no shared prefix"
        return {"weights": "bf16", "activations": "bf16", "cache": "bf16", "head": "bf16", "notes": notes}
