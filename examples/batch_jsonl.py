"""Read prompts from a JSONL file, and write the answers to another file.

python examples/batch_jsonl.py prompts.jsonl answers.jsonl

Without arguments, it answers three prompts and prints the answers.
"""

import json
import sys

from penstock import LLM, SamplingParams

lines = ['{"id": 1, "prompt": "Once upon a time"}', '{"id": 2, "prompt": "One day"}', '{"id": 3, "prompt": "The dog"}']
if len(sys.argv) > 1:
    with open(sys.argv[1], encoding="utf-8") as file:
        lines = [line for line in file if line.strip()]
items = [json.loads(line) for line in lines]

with LLM(model="demo") as llm:  # all prompts share the engine's steps; results are in the order of the prompts
    outputs = llm.generate([item["prompt"] for item in items], SamplingParams(temperature=0.0, max_tokens=24))

answers = [
    json.dumps({**item, "text": output.outputs[0].text, "finish_reason": output.outputs[0].finish_reason})
    for item, output in zip(items, outputs, strict=True)
]
if len(sys.argv) > 2:
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        file.write("\n".join(answers) + "\n")
else:
    print("\n".join(answers))
