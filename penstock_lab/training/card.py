"""Evaluate a model and write its card.

    python -m penstock_lab.training.card MODEL_DIR

Every number comes from MODEL_DIR/training.json, the files, the corpus or evaluate.evaluate().

The samples are taken by their place in a fixed order, not selected by hand.
"""

import argparse
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock_lab.training import corpus, evaluate, stories, story_check, sums
from penstock_lab.training.export import CONTEXT, SHAPE

SAMPLES = 6  # number of plain openings that are shown
Trainings = Sequence[Mapping[str, Any]]  # the facts of each training
TOOLS_TEXT = "Given a tool that adds two numbers, or one that tells the weather of a city, it calls them."
TEMPLATE = Path(__file__).with_name("card_template.md")


def score_table(figures: Mapping[str, Any]) -> str:
    """Tabulate the right answers by kind, greedy and sampled."""
    rows = ["| kind | greedy | temperature 0.8 |", "|---|---|---|"]
    for kind, row in figures["greedy"]["scores"].items():
        other = figures["sampled"]["scores"][kind]
        if row["scored"]:
            rows.append(f"| {kind} | {row['right']} of {row['scored']} | {other['right']} of {other['scored']} |")
    return "\n".join(rows)


def settings(facts: Mapping[str, Any]) -> str:
    """Write out the sampling settings of generation_config.json."""
    return ", ".join(f"{name} {facts[name]}" for name in ("temperature", "top_k", "top_p"))


def story_table(figures: Mapping[str, Any], own: str) -> str:
    """Tabulate the odd stories with what was odd about them, and the answers in conversations of the kind asked for."""
    rows = [f"| | its own settings ({own}) | temperature 1, nothing cut off |", "|---|---|---|"]
    found = [figures["stories"], figures["stories_at_1"]]
    rows.append("| odd stories | " + " | ".join(f"{one['odd']} of {one['stories']}" for one in found) + " |")
    for reason, meaning in story_check.REASONS.items():
        rows.append(f"| ... {meaning} | " + " | ".join(str(one["reasons"].get(reason, 0)) for one in found) + " |")
    talks = [figures["conversations"], figures["conversations_at_1"]]
    for kind, name in (("story", "stories"), ("sum", "sums")):
        cells = [f"{one[kind]['of_kind']} of {one[kind]['asked']}" for one in talks]
        rows.append(f"| {name}, asked for in a conversation: answers that are {name} | " + " | ".join(cells) + " |")
    cells = [f"{one['sum']['right']} of {one['sum']['asked']}" for one in talks]
    return "\n".join([*rows, "| ... and right sums | " + " | ".join(cells) + " |"])


def case_table(figures: Mapping[str, Any]) -> str:
    """Tabulate the shares of right answers to the held-out cases."""
    rows = ["| held-out cases | number | greedy | temperature 0.8 |", "|---|---|---|---|"]
    for kind, row in figures["held_out"].items():
        rows.append(f"| {kind} | {row['cases']} | {row['greedy']:.1%} | {row['sampled']:.1%} |")
    return "\n".join(rows)


def mixture_list(mixture: corpus.Mixture) -> str:
    """List the kinds of documents with their shares."""
    documents = sum(weight for weight, _ in mixture.values())
    return "\n".join(f"- {name}: {weight / documents:.0%}" for name, (weight, _) in mixture.items())


def data_text(trainings: Trainings) -> str:
    return "\n\n".join(
        f"Training {number}, seed {facts['seed']}: {facts['documents']:,} documents, {facts['tokens']:,} tokens "
        "with padding.\n\n" + mixture_list(corpus.MIXTURES[number - 1])
        for number, facts in enumerate(trainings, 1)
    )


def training_text(trainings: Trainings) -> str:
    return "\n".join(
        f"- training {number}: {facts['steps']:,} steps of {facts['tokens_per_step']:,} tokens, peak learning rate "
        f"{facts['lr']}, {'Muon, ' * bool(facts.get('muon'))}{facts['processes']} processes of one thread, "
        f"{'the mean of the weights before and after, ' * bool(facts.get('average'))}"
        f"{facts['train_seconds'] / 60:.0f} minutes of wall time beside other work"
        for number, facts in enumerate(trainings, 1)
    )


def commands(trainings: Trainings) -> str:
    """List the commands of the trainings. A training whose schedule was changed on the way has several commands."""
    lines = []
    folders = [*("FIRST", "SECOND", "THIRD", "FOURTH")[: len(trainings) - 1], "DIR"]
    for number, facts in enumerate(trainings, 1):
        start = "    python -m penstock_lab.training.train" + (f" --from {folders[number - 2]}" if number > 1 else "")
        start += "".join(f" --{option}" for option in ("muon", "float32", "average") if facts.get(option))
        start += f" --seed {facts['seed']} --lr {facts['lr']} --tokens-per-step {facts['tokens_per_step']}"
        start += f" --processes {facts['processes']} --out {folders[number - 1]}"
        stages = [f"--steps {steps} --until {step}" for steps, step in facts.get("left_schedules", ())]
        stages.append(f"--steps {facts['steps']}")
        lines += [f"{start} {stage}{' --resume' if place else ''}" for place, stage in enumerate(stages)]
    return "\n".join(lines)


def samples(figures: Mapping[str, Any], mode: str) -> str:
    """Show the first openings, and every third prompt from the eleventh on, one block each."""
    texts = figures[mode]["texts"]
    return "\n\n".join(
        f"```text\n{one['prompt']}\n-> {one['text']}{'' if one['ended'] else ' [did not end]'}\n```"
        for one in [*texts[:SAMPLES], *texts[10::3]]
    )


def write_card(model_dir: Path, figures: Mapping[str, Any]) -> None:
    """Write MODEL_DIR/README.md from training.json, the files that ship and the figures of evaluate()."""
    files = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors")
    facts = json.loads((model_dir / "training.json").read_text(encoding="utf-8"))
    trainings = [*facts.get("earlier", ()), facts]
    own = settings(json.loads((model_dir / "generation_config.json").read_text(encoding="utf-8")))
    text = TEMPLATE.read_text(encoding="utf-8").format(
        facts=facts,
        figures=figures,
        shape=SHAPE,
        bytes=sum((model_dir / name).stat().st_size for name in files),
        context=CONTEXT,
        plots=len(stories.plots()),
        data=data_text(trainings),
        training=training_text(trainings),
        commands=commands(trainings),
        tools=TOOLS_TEXT
        if len(trainings) > 1
        else "It was not trained to call tools, though its template writes them.",
        machine=platform.machine(),
        sum_count=len(sums.ALL_PAIRS),
        seen_count=len(sums.SEEN_PAIRS),
        held_count=len(sums.HELD_OUT),
        scores=score_table(figures),
        cases=case_table(figures),
        own=own,
        stories=story_table(figures, own),
        story_prompts=len(evaluate.STORY_PROMPTS),
        story_count=evaluate.STORIES,
        shortest=story_check.SHORTEST,
        max_tokens=evaluate.MAX_TOKENS,
        talks=evaluate.CONVERSATIONS,
        samples=SAMPLES,
        greedy_samples=samples(figures, "greedy"),
        sampled_samples=samples(figures, "sampled"),
    )
    (model_dir / "README.md").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    model_dir = parser.parse_args().model_dir
    write_card(model_dir, evaluate.measure(model_dir))


if __name__ == "__main__":
    main()
