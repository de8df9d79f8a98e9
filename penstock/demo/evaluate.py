"""Evaluate a model on the fixed prompts and, if asked, write its card.

    python -m penstock.demo.evaluate MODEL_DIR [--json FILE] [--card]

evaluate() needs only a function from prompts to completions, so it measures any engine; transformers_generate() is one.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.demo import sums
from penstock.demo.prompts import (
    ENDING_PROMPTS,
    JSON_PROMPTS,
    SUM_PROMPTS,
    Completion,
    Prompt,
    parsed_json,
    right,
    share,
)

# (texts with special tokens written out, temperature (0 is greedy), max tokens) -> as many completions
Generate = Callable[[Sequence[str], float, int], list[Completion]]

MAX_TOKENS = 400
SHORT_MAX_TOKENS = 80
TEMPERATURE = 0.8
SAMPLE_SEED = 0


def answered(
    generate: Generate, prompts: Sequence[Prompt], temperature: float, limit: int
) -> list[tuple[Prompt, Completion]]:
    """Return each prompt with its completion."""
    return list(zip(prompts, generate([p.text for p in prompts], temperature, limit), strict=True))


def scores(pairs: Sequence[tuple[Prompt, Completion]]) -> dict[str, dict[str, int]]:
    """Count by kind: prompts, prompts that have a right answer, and right answers."""
    result: dict[str, dict[str, int]] = {}
    for prompt, completion in pairs:
        verdict = right(prompt, completion.text)
        row = result.setdefault(prompt.kind, {"prompts": 0, "scored": 0, "right": 0})
        row["prompts"] += 1
        row["scored"] += verdict is not None
        row["right"] += verdict is True
    return result


def sum_shares(pairs: Sequence[tuple[Prompt, Completion]]) -> dict[str, float]:
    """Return the shares of right sums: of all pairs, of those seen in training, and of those held out."""
    hits = {pair: is_right(one) for pair, one in zip(sums.ALL_PAIRS, pairs, strict=True)}
    return {
        "all": share(list(hits.values())),
        "seen": share([hit for pair, hit in hits.items() if pair not in sums.HELD_OUT]),
        "held_out": share([hit for pair, hit in hits.items() if pair in sums.HELD_OUT]),
    }


def is_right(pair: tuple[Prompt, Completion]) -> bool:
    return right(pair[0], pair[1].text) is True


def fixed_prompts(generate: Generate, temperature: float) -> dict[str, object]:
    """Run the fifty prompts at one temperature: how many end by themselves, scores by kind, and every text."""
    pairs = answered(generate, ENDING_PROMPTS, temperature, MAX_TOKENS)
    return {
        "prompts": len(pairs),
        "ended": sum(completion.ended for _, completion in pairs),
        "scores": scores(pairs),
        "texts": [
            {"prompt": prompt.text, "text": completion.text, "ended": completion.ended} for prompt, completion in pairs
        ],
    }


def evaluate(generate: Generate) -> dict[str, object]:
    """Return all figures of the card that need generation."""
    json_pairs = answered(generate, JSON_PROMPTS, 0.0, SHORT_MAX_TOKENS)
    return {
        "greedy": fixed_prompts(generate, 0.0),
        "sampled": fixed_prompts(generate, TEMPERATURE),
        "sums": sum_shares(answered(generate, SUM_PROMPTS, 0.0, SHORT_MAX_TOKENS)),
        "json": {
            "prompts": len(json_pairs),
            "parse": share([parsed_json(completion.text) is not None for _, completion in json_pairs]),
            "right": share([is_right(pair) for pair in json_pairs]),
        },
    }


def transformers_generate(model_dir: Path, batch_size: int = 64) -> Generate:
    """Return generation by Transformers, in bfloat16 as stored, with padding on the left."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    ends = set(model.generation_config.eos_token_id)

    def batch(texts: Sequence[str], temperature: float, limit: int) -> list[Completion]:
        inputs = tokenizer(
            list(texts), return_tensors="pt", padding=True, add_special_tokens=False, return_token_type_ids=False
        )
        drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        how = drawn if temperature > 0 else {"do_sample": False}
        output = model.generate(**inputs, max_new_tokens=limit, **how)[:, inputs["input_ids"].shape[1] :].tolist()
        return [Completion(tokenizer.decode(ids, skip_special_tokens=True), bool(ends & set(ids))) for ids in output]

    def generate(texts: Sequence[str], temperature: float, limit: int) -> list[Completion]:
        torch.manual_seed(SAMPLE_SEED)
        starts = range(0, len(texts), batch_size)
        return [one for start in starts for one in batch(texts[start : start + batch_size], temperature, limit)]

    return generate


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--json", type=Path, help="write all figures and texts here")
    parser.add_argument("--card", action="store_true", help="write MODEL_DIR/README.md (reads MODEL_DIR/training.json)")
    args = parser.parse_args()
    began = time.monotonic()
    figures = evaluate(transformers_generate(args.model_dir))
    figures["seconds"] = round(time.monotonic() - began)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False), encoding="utf-8")
    if args.card:
        from penstock.demo import card

        card.write_card(args.model_dir, figures)
    for name in ("greedy", "sampled"):
        shown = {key: value for key, value in figures[name].items() if key != "texts"}  # type: ignore[attr-defined]
        print(name, json.dumps(shown))
    print("sums", figures["sums"], "json", figures["json"], figures["seconds"], "s")


if __name__ == "__main__":
    main()
