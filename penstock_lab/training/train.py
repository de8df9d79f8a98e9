"""Train the demo model's tokenizer and weights, and write a Hugging Face directory with training.json.

    alias train="python -m penstock_lab.training.train"
    train --seed 0 --steps 4500 --out FIRST
    train --from FIRST --seed 1 --steps 4000 --lr 1.5e-3 --tokens-per-step 2048 --out SECOND
    train --from SECOND --muon --float32 --seed 2 --steps 4000 --lr 2e-3 --out THIRD
    train --from THIRD --muon --float32 --seed 3 --steps 1300 --lr 2e-3 --average --out FOURTH
    train --from FOURTH --muon --float32 --seed 4 --steps 1000 --lr 1.5e-3 --out DIR
    train --draft --seed 0 --steps 1800 --lr 6e-3 --processes 1 --out DIR    the draft model

The second training continues from the weights of the first, with a mixture that includes tool calls. The tokenizer has
one token for each of their tags. The third continues from the second, with names that are spelled letter by letter, and
the fourth from the third, with more stories; its result is the mean of the two. The fifth continues from that, with
names and words to copy that consist of any of the tokenizer's tokens, and with requests for stories in many ways.

The model is Transformers' LlamaForCausalLM. Every document is drawn once. Two processes of one thread each share every
batch and average their gradients. This is faster than two threads in one process, which wait for each other on a busy
machine. Equal seeds, steps and processes give equal weights on equal machines.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.multiprocessing.spawn import spawn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from penstock.weights.hub import MODEL_DIR
from penstock_lab.training import export
from penstock_lab.training.corpus import MIXTURES, heldout_documents, training_documents
from penstock_lab.training.packing import IGNORE, Batch, Batches, counted, train_tokenizer, with_tool_tokens

BPE_DOCUMENTS = 30_000
ROW_LENGTHS = (256, export.CONTEXT)
WARMUP_STEPS, FINAL_LR, BETAS, WEIGHT_DECAY, CLIP = 100, 0.02, (0.9, 0.95), 0.1, 1.0
SAVE_SECONDS = 180.0
HAS_BFLOAT16 = torch.cpu._is_avx512_bf16_supported()  # without it, bfloat16 is several times as slow as float32
REPORT_STEPS = 50


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Rise linearly during the warm-up, then follow a cosine down to FINAL_LR times the peak."""
    if step < WARMUP_STEPS:
        return peak * (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return peak * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * done)))


def batch_loss(model: Any, batch: Batch, bfloat16: bool = HAS_BFLOAT16) -> torch.Tensor:
    """Compute the mean cross-entropy of the tokens that count. The head computes only the positions before them."""
    inputs, labels = torch.from_numpy(batch[0]), torch.from_numpy(batch[1])
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
        counted = labels != IGNORE
        logits = model.lm_head(hidden[counted])
    return torch.nn.functional.cross_entropy(logits.float(), labels[counted])


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Move all singular values of a matrix close to 1, by five Newton-Schulz iterations in float32."""
    scaled = matrix / matrix.norm().clamp(min=1e-7)
    wide: torch.Tensor = scaled if scaled.shape[0] <= scaled.shape[1] else scaled.T
    for _ in range(5):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), wide, beta=3.4445)
    return wide if scaled.shape[0] <= scaled.shape[1] else wide.T


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (Jordan et al., 2024), with updates as large as AdamW's (Liu et al., 2025).

    torch has the same in bfloat16, which takes thirty times as long on processors that have to emulate it.
    """

    def __init__(self, params: list[torch.Tensor], weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                mean.lerp_(param.grad, 1 - group["momentum"])
                update = orthogonal(param.grad.lerp(mean, group["momentum"]))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(update, alpha=-group["lr"] * 0.2 * max(param.shape) ** 0.5)


class Trainer:
    """The model, optimizers and step count of one process, which are the content of a checkpoint.

    With `--muon`, Muon trains the layers' matrices at AdamW's rates, and AdamW trains everything else.
    """

    def __init__(self, model: Any, args: argparse.Namespace, rank: int) -> None:
        self.model, self.rank = model, rank
        self.steps, self.peak, self.processes = args.steps, args.lr, args.processes
        self.bfloat16 = HAS_BFLOAT16 and not args.float32
        self.schedule: list[tuple[int, int]] = []  # (--steps, last step) of earlier commands
        norms = [p for p in model.parameters() if p.ndim == 1]  # without weight decay
        layers = [p for p in model.model.layers.parameters() if p.ndim > 1] if args.muon else []
        matrices = [p for p in model.parameters() if p.ndim > 1 and not any(p is other for other in layers)]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": norms, "weight_decay": 0.0}]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(groups, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
        ]
        if layers:
            self.optimizers.append(Muon(layers, weight_decay=WEIGHT_DECAY))
        self.step = 0
        self.seconds = 0.0

    def train_step(self, batch: Batch) -> float:
        """Take one optimizer step with the rows of all processes, and return the loss of this process's rows."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(self.step, self.steps, self.peak)
        mine = slice(self.rank, None, self.processes)
        loss = batch_loss(self.model, (batch[0][mine], batch[1][mine]), self.bfloat16)
        torch.autograd.backward(loss)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = parameters_to_vector(gradients)
        dist.all_reduce(flat)
        vector_to_parameters(flat / self.processes, gradients)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()
        self.step += 1
        return loss.item()

    def save(self, path: Path) -> None:
        """Write a checkpoint atomically."""
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        state = {"model": self.model.state_dict(), "optimizers": optimizers}
        state |= {"step": self.step, "seconds": self.seconds, "schedule": [*self.schedule, (self.steps, self.step)]}
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint of the same command, or of a command with other --steps."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self.step, self.seconds = state["step"], state["seconds"]
        self.schedule = [(steps, step) for steps, step in state["schedule"] if steps != self.steps]


def run(trainer: Trainer, data: Iterable[Batch], until: int, checkpoint: Path) -> None:
    """Train up to the step `until`. The first process prints reports, and saves a checkpoint every SAVE_SECONDS."""
    began, saved, recent = time.monotonic() - trainer.seconds, time.monotonic(), []
    for batch in islice(data, trainer.step, until):
        recent.append(trainer.train_step(batch))
        trainer.seconds = time.monotonic() - began
        if trainer.rank == 0 and trainer.step % REPORT_STEPS == 0:
            print(f"step {trainer.step}/{trainer.steps} loss {np.mean(recent):.4f} {trainer.seconds:.0f} s", flush=True)
            recent = []
        if trainer.rank == 0 and time.monotonic() - saved > SAVE_SECONDS:
            trainer.save(checkpoint)
            saved = time.monotonic()


def earlier_trainings(directory: Path | None) -> list[dict[str, Any]]:
    """Read the facts of the trainings that led to a model, oldest first; none if `directory` is None."""
    if directory is None:
        return []
    facts = json.loads((directory / "training.json").read_text(encoding="utf-8"))
    return [*facts.pop("earlier", ()), facts]


def worker(rank: int, args: argparse.Namespace, tokenizer_text: str, meeting: str) -> None:
    """Run one training process. The first process exports the model at the end."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=args.processes)
    tokenizer = Tokenizer.from_str(tokenizer_text)
    torch.manual_seed(args.seed)
    shape = export.DRAFT_SHAPE if args.draft else export.SHAPE
    config = transformers.LlamaConfig.from_dict(export.model_config(tokenizer, shape) | {"torch_dtype": "float32"})
    model = transformers.LlamaForCausalLM(config)
    if args.first:
        model.load_state_dict(load_file(args.first / "model.safetensors"), strict=False)  # the tied head is not stored
        model.tie_weights()
    trainer = Trainer(model, args, rank)
    checkpoint = args.out / "checkpoint.pt"
    if args.resume and checkpoint.exists():
        trainer.load(checkpoint)
    documents = training_documents(args.seed, MIXTURES[len(earlier_trainings(args.first))])
    data = Batches(documents, tokenizer, args.tokens_per_step, ROW_LENGTHS)
    until = min(args.until or args.steps, args.steps)
    run(trainer, data, until, checkpoint)
    if rank == 0:
        trainer.save(checkpoint)
        if until == args.steps:
            finish(args, trainer, tokenizer, data.documents)
    dist.barrier()
    dist.destroy_process_group()


def heldout_loss(model: Any, tokenizer: Tokenizer) -> dict[str, float]:
    """Compute the mean loss in nats on single held-out documents, over the tokens that count and over all tokens."""
    learned, every = [], []
    for document in heldout_documents():
        ids = np.asarray(tokenizer.encode(document, add_special_tokens=False).ids[: export.CONTEXT], dtype=np.int64)
        tokens = torch.from_numpy(ids)
        with torch.no_grad():
            logits = model(input_ids=tokens[None, :-1]).logits[0].float()
        losses = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
        learned.append(losses[torch.from_numpy(counted(ids)[1:])])
        every.append(losses)
    return {"counted": float(torch.cat(learned).mean()), "all": float(torch.cat(every).mean())}


def finish(args: argparse.Namespace, trainer: Trainer, tokenizer: Tokenizer, documents: int) -> None:
    """Export the model, and training.json for the card. The losses are computed with the weights as stored."""
    if args.average:
        after, before = trainer.model.state_dict(), load_file(args.first / "model.safetensors")
        mean = {name: (after[name] + value.float()) / 2 for name, value in before.items()}
        trainer.model.load_state_dict(mean, strict=False)  # the tied head is not stored
    if args.draft:
        export.write_weights(args.out, tokenizer, trainer.model.state_dict(), export.DRAFT_SHAPE)
    else:
        export.write_model(args.out, tokenizer, trainer.model.state_dict())
    rounded = trainer.model.to(torch.bfloat16).float().eval()
    earlier = earlier_trainings(args.first)
    facts = ({"earlier": earlier} if earlier else {}) | {
        "seed": args.seed,
        "steps": trainer.step,
        "left_schedules": trainer.schedule,
        "tokens_per_step": args.tokens_per_step,
        "tokens": trainer.step * args.tokens_per_step,
        "documents": documents,
        "lr": args.lr,
        "muon": args.muon,
        "float32": args.float32,
        "average": args.average,
        "processes": args.processes,
        "train_seconds": round(trainer.seconds),
        "parameters": sum(p.numel() for p in rounded.parameters()),
        "vocab_size": tokenizer.get_vocab_size(),
        "heldout_loss": heldout_loss(rounded, tokenizer),
    }
    export.write_json(args.out / "training.json", facts)
    print(json.dumps(facts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4500)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--tokens-per-step", type=int, default=4096, help="padding included")
    parser.add_argument("--processes", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--muon", action="store_true", help="train the layers' matrices by Muon instead of AdamW")
    parser.add_argument("--float32", action="store_true", help="no bfloat16, which some Xeons compute more slowly")
    parser.add_argument("--draft", action="store_true", help="the draft model, with the bundled model's tokenizer")
    parser.add_argument("--from", dest="first", type=Path, metavar="DIR", help="go on from the weights of this model")
    parser.add_argument(
        "--average",
        action="store_true",
        help="export the mean of the weights before and after, which forgets less (Wortsman et al., 2022)",
    )
    parser.add_argument("--resume", action="store_true", help="continue from DIR/checkpoint.pt")
    parser.add_argument("--until", type=int, help="stop at this step; --resume goes on, with fewer --steps if need be")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.draft:
        tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    elif args.first:
        tokenizer = with_tool_tokens(Tokenizer.from_file(str(args.first / "tokenizer.json")))
    else:
        tokenizer = with_tool_tokens(train_tokenizer(islice(training_documents(args.seed), BPE_DOCUMENTS)))
    with tempfile.TemporaryDirectory() as folder:
        work = (args, tokenizer.to_str(), f"{folder}/meeting")
        spawn(worker, args=work, nprocs=args.processes)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
