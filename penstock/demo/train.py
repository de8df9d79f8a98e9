"""Trains the demo model from nothing: corpus, tokenizer, weights; writes a Hugging Face directory and
training.json beside it.

    python -m penstock.demo.train --seed 0 --steps 4000 --out DIR [--compile]

Needs torch and transformers (whose LlamaForCausalLM is trained here; nothing else in the package imports it).
Every training token is seen once. Knows nothing of the evaluation (evaluate.py) or of the engine. --compile needs
a C++ compiler and is about a third faster.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.demo import export
from penstock.demo.bpe import train_tokenizer
from penstock.demo.corpus import heldout_documents, training_documents
from penstock.demo.packing import IGNORE, batches, encode, loss_mask

BPE_DOCUMENTS = 30_000
PER_STEP = 4096
ROW_LENGTHS = (512, 512, 512, 512, 1024)
WARMUP_STEPS, FINAL_LR, BETAS, WEIGHT_DECAY, CLIP = 100, 0.02, (0.9, 0.95), 0.1, 1.0
SAVE_SECONDS = 180.0
REPORT_STEPS = 50

Batch = tuple[NDArray[np.int64], NDArray[np.int64]]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then a cosine down to FINAL_LR of the peak."""
    if step < WARMUP_STEPS:
        return peak * (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return peak * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * done)))


def new_model(tokenizer: Tokenizer, seed: int) -> LlamaForCausalLM:
    """Random float32 weights in the shape of config.json."""
    torch.manual_seed(seed)
    config = {
        key: value
        for key, value in export.model_config(tokenizer).items()
        if key not in ("torch_dtype", "architectures")
    }
    return LlamaForCausalLM(LlamaConfig(**config)).float()


def make_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """AdamW; norms do not decay."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=BETAS, fused=True)


class Trainer:
    """Model, optimizer and step count: what a checkpoint holds."""

    def __init__(self, model: LlamaForCausalLM, steps: int, peak: float, compiled: bool) -> None:
        self.model, self.steps, self.peak = model, steps, peak
        self.optimizer = make_optimizer(model)
        self.body: Callable[..., object] = torch.compile(model.model, dynamic=False) if compiled else model.model
        self.step = 0
        self.seconds = 0.0

    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean cross-entropy of the tokens that count. The head sees only the positions before them."""
        inputs, labels = torch.from_numpy(batch[0]), torch.from_numpy(batch[1])
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.body(input_ids=inputs, use_cache=False).last_hidden_state  # type: ignore[attr-defined]
            counted = labels != IGNORE
            logits = self.model.lm_head(hidden[counted])
        return torch.nn.functional.cross_entropy(logits.float(), labels[counted])

    def train_step(self, batch: Batch) -> float:
        """One step of the optimizer."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.steps, self.peak)
        loss = self.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss.item()

    def save(self, path: Path) -> None:
        """Write a checkpoint in one move."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        """Go on where a checkpoint of the same command stopped."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]


def run(trainer: Trainer, data: Iterator[Batch], checkpoint: Path) -> None:
    """Train to the end, report, and save every few minutes."""
    began, saved, recent = time.monotonic() - trainer.seconds, time.monotonic(), []
    for batch in islice(data, trainer.step, trainer.steps):
        recent.append(trainer.train_step(batch))
        trainer.seconds = time.monotonic() - began
        if trainer.step % REPORT_STEPS == 0:
            print(f"step {trainer.step}/{trainer.steps} loss {np.mean(recent):.4f} {trainer.seconds:.0f} s", flush=True)
            recent = []
        if time.monotonic() - saved > SAVE_SECONDS:
            trainer.save(checkpoint)
            saved = time.monotonic()


def heldout_loss(model: LlamaForCausalLM, tokenizer: Tokenizer) -> dict[str, float]:
    """Mean loss in nats over the held-out documents, each alone: of the tokens that count, and of all tokens."""
    sums = {"counted": [0.0, 0], "all": [0.0, 0]}
    for document in heldout_documents():
        ids = np.asarray(tokenizer.encode(document, add_special_tokens=False).ids[: export.CONTEXT], dtype=np.uint16)
        tokens = torch.from_numpy(ids.astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=tokens[None, :-1]).logits[0].float()
        losses = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
        mask = torch.from_numpy(loss_mask(ids, tokenizer)[1:])
        for name, part in (("counted", losses[mask]), ("all", losses)):
            sums[name][0] += float(part.sum())
            sums[name][1] += len(part)
    return {name: total / count for name, (total, count) in sums.items()}


def train(args: argparse.Namespace) -> dict[str, object]:
    """The whole pipeline but the evaluation; returns what training.json states."""
    began = time.monotonic()
    documents = training_documents(args.seed)
    tokenizer = train_tokenizer(islice(training_documents(args.seed), BPE_DOCUMENTS))
    # rows drop the rest of their last document: a quarter more tokens than steps need is enough
    tokens = encode(documents, tokenizer, int(args.steps * PER_STEP * 1.25))
    prepared = time.monotonic() - began
    print(f"{len(tokens.ids)} tokens, {len(tokens.starts)} documents, {prepared:.0f} s", flush=True)
    trainer = Trainer(new_model(tokenizer, args.seed), args.steps, args.lr, args.compile)
    checkpoint = args.out / "checkpoint.pt"
    args.out.mkdir(parents=True, exist_ok=True)
    if args.resume and checkpoint.exists():
        trainer.load(checkpoint)
    run(trainer, batches(tokens, PER_STEP, ROW_LENGTHS), checkpoint)
    trainer.save(checkpoint)
    export.write_model(args.out, tokenizer, trainer.model.state_dict())
    rounded = trainer.model.to(torch.bfloat16).float().eval()
    return {
        "seed": args.seed, "steps": trainer.step, "tokens_per_step": PER_STEP, "tokens": trainer.step * PER_STEP,
        "lr": args.lr, "documents": len(tokens.starts), "prepare_seconds": round(prepared),
        "train_seconds": round(trainer.seconds),
        "compiled": args.compile, "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in rounded.parameters()),
        "vocab_size": tokenizer.get_vocab_size(), "heldout_loss": heldout_loss(rounded, tokenizer),
    }  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="compile the model (needs a C++ compiler)")
    parser.add_argument("--resume", action="store_true", help="go on from DIR/checkpoint.pt")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    facts = train(args)
    export.write_json(args.out / "training.json", facts)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
