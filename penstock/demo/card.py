"""Writes the model card: every number in it comes from training.json, the files, the corpus or the evaluation,
none from a hand.

In: the model directory and the figures of evaluate.evaluate(). Samples are the first ones in the fixed order, not
chosen.
"""

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.demo import corpus, sums
from penstock.demo.export import CONTEXT, SHAPE

SAMPLES = 6  # of the plain openings
TEMPLATE = Path(__file__).with_name("card_template.md")


def mixture_table() -> str:
    """The kinds of documents and their shares."""
    total = sum(weight for weight, _ in corpus.MIXTURE.values())
    return "\n".join(f"- {name}: {weight / total:.0%}" for name, (weight, _) in corpus.MIXTURE.items())


def score_table(figures: Mapping[str, Any]) -> str:
    """Right answers by kind, greedy and sampled."""
    rows = ["| kind | greedy | temperature 0.8 |", "|---|---|---|"]
    for kind, row in figures["greedy"]["scores"].items():
        other = figures["sampled"]["scores"][kind]
        if row["scored"]:
            rows.append(f"| {kind} | {row['right']} of {row['scored']} | {other['right']} of {other['scored']} |")
    return "\n".join(rows)


def sample_text(sample: Mapping[str, Any]) -> str:
    """One prompt and what came back, as a block."""
    return f"```text\n{sample['prompt']}\n-> {sample['text']}{'' if sample['ended'] else ' [did not end]'}\n```"


def samples(figures: Mapping[str, Any], mode: str) -> str:
    """The first openings, then every third of the other prompts."""
    texts = figures[mode]["texts"]
    return "\n\n".join(sample_text(one) for one in [*texts[:SAMPLES], *texts[10::3]])


def directory_bytes(model_dir: Path) -> int:
    """Size of the files that ship, without the card itself."""
    names = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors")
    return sum((model_dir / name).stat().st_size for name in names)


def numbers(model_dir: Path, figures: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that the card's text asks for."""
    from penstock.demo.stories import plots

    return {
        "layers": SHAPE["num_hidden_layers"], "hidden": SHAPE["hidden_size"], "heads": SHAPE["num_attention_heads"],
        "kv_heads": SHAPE["num_key_value_heads"], "parameters": facts["parameters"],
        "bytes": directory_bytes(model_dir),
        "context": CONTEXT, "vocab": facts["vocab_size"], "plots": len(plots()), "seed": facts["seed"],
        "documents": facts["documents"], "tokens": facts["tokens"], "mixture": mixture_table(), "steps": facts["steps"],
        "per_step": facts["tokens_per_step"], "lr": facts["lr"], "processes": facts["processes"],
        "train_minutes": facts["train_seconds"] / 60, "machine": platform.machine(),
        "loss_counted": facts["heldout_loss"]["counted"], "loss_all": facts["heldout_loss"]["all"],
        "greedy_ended": figures["greedy"]["ended"], "greedy_prompts": figures["greedy"]["prompts"],
        "sampled_ended": figures["sampled"]["ended"], "sampled_prompts": figures["sampled"]["prompts"],
        "sum_count": len(sums.ALL_PAIRS), "seen_count": len(sums.SEEN_PAIRS), "held_count": len(sums.HELD_OUT),
        "sums_all": figures["sums"]["all"], "sums_seen": figures["sums"]["seen"],
        "sums_held": figures["sums"]["held_out"],
        "json_prompts": figures["json"]["prompts"], "json_parse": figures["json"]["parse"],
        "json_right": figures["json"]["right"],
        "scores": score_table(figures), "samples": SAMPLES, "greedy_samples": samples(figures, "greedy"),
        "sampled_samples": samples(figures, "sampled"),
    }  # fmt: skip


def write_card(model_dir: Path, figures: Mapping[str, Any]) -> None:
    """Write MODEL_DIR/README.md."""
    facts = json.loads((model_dir / "training.json").read_text(encoding="utf-8"))
    text = TEMPLATE.read_text(encoding="utf-8").format(**numbers(model_dir, figures, facts))
    (model_dir / "README.md").write_text(text, encoding="utf-8")
