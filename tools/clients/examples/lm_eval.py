# /// script
# dependencies = ["lm-eval[api]==0.4.13"]
# ///
"""lm-eval with a task of its own, whose answers come over chat completions."""

import json
import os
from pathlib import Path
from typing import Any

from features import MODEL, Server, check

os.environ["OPENAI_API_KEY"] = "sk-x"
TASK = {
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


def run(kind: str, path: str, server: Server) -> Any:
    import lm_eval

    data = Path("sums.jsonl").absolute()
    data.write_text("".join(json.dumps({"a": a, "b": 4}) + "\n" for a in (1, 2, 3)), encoding="utf-8")
    task = {**TASK, "dataset_kwargs": {"data_files": {"test": str(data)}}}
    options = f"model={MODEL},base_url={server.v1}/{path},num_concurrent=1,tokenizer_backend=None,max_retries=1"
    is_chat = kind == "local-chat-completions"
    found = lm_eval.simple_evaluate(
        kind, model_args=options, tasks=[task], apply_chat_template=is_chat, bootstrap_iters=0
    )
    return found["results"]["sums"]["exact_match,last"]


def chat(server: Server) -> None:
    check(run("local-chat-completions", "chat/completions", server), "1.0")
