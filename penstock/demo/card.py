"""Write the model card: every number comes from training.json, the files, the corpus or evaluate.evaluate().

Samples are the first ones in the fixed order, not chosen.
"""

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.demo import corpus, stories, sums
from penstock.demo.export import CONTEXT, SHAPE

SAMPLES = 6  # plain openings that are shown
TEMPLATE = Path(__file__).with_name("card_template.md")


def score_table(figures: Mapping[str, Any]) -> str:
    """Return the right answers by kind, greedy and sampled."""
    rows = ["| kind | greedy | temperature 0.8 |", "|---|---|---|"]
    for kind, row in figures["greedy"]["scores"].items():
        other = figures["sampled"]["scores"][kind]
        if row["scored"]:
            rows.append(f"| {kind} | {row['right']} of {row['scored']} | {other['right']} of {other['scored']} |")
    return "\n".join(rows)


def samples(figures: Mapping[str, Any], mode: str) -> str:
    """Return the first openings and every third of the other prompts, one block each."""
    texts = figures[mode]["texts"]
    return "\n\n".join(
        f"```text\n{one['prompt']}\n-> {one['text']}{'' if one['ended'] else ' [did not end]'}\n```"
        for one in [*texts[:SAMPLES], *texts[10::3]]
    )


def write_card(model_dir: Path, figures: Mapping[str, Any]) -> None:
    """Write MODEL_DIR/README.md from training.json, the files that ship and the figures of evaluate()."""
    files = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors")
    facts = json.loads((model_dir / "training.json").read_text(encoding="utf-8"))
    documents = sum(weight for weight, _ in corpus.MIXTURE.values())
    text = TEMPLATE.read_text(encoding="utf-8").format(
        facts=facts,
        figures=figures,
        shape=SHAPE,
        bytes=sum((model_dir / name).stat().st_size for name in files),
        context=CONTEXT,
        plots=len(stories.plots()),
        mixture="\n".join(f"- {name}: {weight / documents:.0%}" for name, (weight, _) in corpus.MIXTURE.items()),
        train_minutes=facts["train_seconds"] / 60,
        machine=platform.machine(),
        sum_count=len(sums.ALL_PAIRS),
        seen_count=len(sums.SEEN_PAIRS),
        held_count=len(sums.HELD_OUT),
        scores=score_table(figures),
        samples=SAMPLES,
        greedy_samples=samples(figures, "greedy"),
        sampled_samples=samples(figures, "sampled"),
    )
    (model_dir / "README.md").write_text(text, encoding="utf-8")
