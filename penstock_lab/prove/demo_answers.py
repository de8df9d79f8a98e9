"""Ask the demo model for JSON as users do, under a schema, and count the answers that hold what the sentence says.

    python -m penstock_lab.prove.demo_answers [--model DIR]

The requests are the held-out ones of penstock_lab/training/heldout_cases.py, with people and cities that training
never names.
`penstock_lab.training.evaluate` asks the same without a schema.
"""

import argparse
import json
from collections.abc import Iterator, Sequence

from penstock import LLM, SamplingParams, StructuredOutputsParams
from penstock_lab.training import heldout_cases
from penstock_lab.training.heldout_cases import Case

MAX_TOKENS = 120
TEMPERATURES = (0.0, 1.0)
Verdicts = list[tuple[str, bool]]  # (field, whether its value is right), for one answer


def verdicts_of(expected: str, text: str) -> Verdicts:
    """Judge for each field whether the answer has its right value. An answer that was cut off has no right value."""
    try:
        answer = json.loads(text)
    except ValueError:
        answer = {}
    return [(name, answer.get(name) == value) for name, value in json.loads(expected).items()]


def answers(llm: LLM, cases: Sequence[Case], temperature: float, schema: bool = True) -> list[str]:
    """Generate the answers to the cases. `schema`: each under the schema of its fields."""
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None  # prompts are texts, so the engine was made with a tokenizer
    prompts = [{"prompt_token_ids": tokenizer.encode(prompt, add_special_tokens=False)} for _, prompt, _ in cases]
    forms = [StructuredOutputsParams(json=heldout_cases.schema_of(expected)) if schema else None
             for _, _, expected in cases]  # fmt: skip
    params = [
        SamplingParams(temperature=temperature, seed=0, max_tokens=MAX_TOKENS, structured_outputs=form)
        for form in forms
    ]
    return [output.outputs[0].text for output in llm.generate(prompts, params)]


def rows(llm: LLM, cases: Sequence[Case]) -> Iterator[str]:
    """Yield the rows of a table: right answers and right fields, with and without the schema."""
    yield f"| {len(cases)} held-out requests for JSON | temperature | right answers | right fields |"
    yield "|---|---|---|---|"
    for schema in (True, False):
        for temperature in TEMPERATURES:
            texts = answers(llm, cases, temperature, schema)
            found = [verdicts_of(right, text) for (_, _, right), text in zip(cases, texts, strict=True)]
            fields = [hit for verdicts in found for _, hit in verdicts]
            whole = sum(all(hit for _, hit in verdicts) for verdicts in found) / len(found)
            how = "under their schema" if schema else "without a schema"
            yield f"| {how} | {temperature} | {whole:.0%} | {sum(fields) / len(fields):.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    with LLM(model=args.model, threads=1, max_num_seqs=64) as llm:
        for row in rows(llm, heldout_cases.json_cases()):
            print(row, flush=True)


if __name__ == "__main__":
    main()
