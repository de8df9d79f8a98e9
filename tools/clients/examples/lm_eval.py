# /// script
# dependencies = ["lm-eval[api]==0.4.13"]
# ///
"""lm-eval with tasks of its own: answers over chat completions, and the likelihoods of choices over completions."""

import json
import os
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from features import MODEL, Server, check

os.environ["OPENAI_API_KEY"] = "sk-x"
CHOICES = {
    "task": "choices",
    "dataset_path": "json",
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "{{prompt}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": 1,
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}
SUMS = {
    "task": "sums",
    "dataset_path": "json",
    "output_type": "generate_until",
    "test_split": "test",
    "doc_to_text": "What is {{a}} + {{b}}?",
    "doc_to_target": "{{a + b}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 20, "temperature": 0},
    "filter_list": [{"name": "last", "filter": [
        {"function": "regex", "regex_pattern": "= ([0-9]+)"}, {"function": "take_first"},
    ]}],
    "metric_list": [{"metric": "exact_match"}],
}  # fmt: skip


def run(kind: str, path: str, server: Server, task: dict[str, Any], rows: list[dict[str, Any]], **options: Any) -> Any:
    """Evaluate a task on these rows, and return its results and samples."""
    import lm_eval

    data = Path(f"{task['task']}.jsonl").absolute()
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = {**task, "dataset_kwargs": {"data_files": {"test": str(data)}}}
    address = f"model={MODEL},base_url={server.v1}/{path},num_concurrent=1,max_retries=1"
    found = lm_eval.simple_evaluate(
        kind, model_args=address + "".join(f",{key}={value}" for key, value in options.items()), tasks=[task],
        apply_chat_template=kind == "local-chat-completions", bootstrap_iters=0,
    )  # fmt: skip
    return found["results"][task["task"]], found["samples"][task["task"]]


def chat(server: Server) -> None:
    rows = [{"a": a, "b": 4} for a in (1, 2, 3)]
    results, _ = run("local-chat-completions", "chat/completions", server, SUMS, rows, tokenizer_backend=None)
    check(results["exact_match,last"], "1.0")


def logprobs(server: Server) -> None:
    """The model's own continuation is the likeliest of two, and greedy. The server tokenises, and adds nothing."""
    prompt = "Once upon a time"
    asked = {"model": MODEL, "prompt": prompt, "add_special_tokens": False, "max_tokens": 8, "temperature": 0}
    body = json.dumps(asked).encode()
    request = Request(f"{server.v1}/completions", body, {"Content-Type": "application/json"})
    likeliest = json.load(urlopen(request))["choices"][0]["text"]
    row = {"prompt": prompt, "choices": [" the the the the", likeliest]}
    results, samples = run("local-completions", "completions", server, CHOICES, [row])
    check(results["acc,none"], "1.0")
    check([is_greedy for _, is_greedy in samples[0]["filtered_resps"]], "[False, True]")
