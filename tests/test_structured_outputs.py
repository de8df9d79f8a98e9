"""Answers have the form that was asked for, with the same bits in every company, and whatever befalls their engine."""

import json
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llguidance
import pytest
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from penstock import LLM, SamplingParams, StructuredOutputsParams
from penstock.assembly import BuiltEngine, build_engine
from penstock.client import frames
from penstock.client.engine_process import EngineServer, Outbox
from penstock.client.text import IsolatedTokenizer
from penstock.config import EngineConfig
from penstock.errors import InvalidRequestError
from penstock.interface.messages import EngineRequest
from penstock.kernels.cpu.library import best_level
from penstock.runner.structured import Worker
from penstock.tokenizer.grammars import Grammars, grammar_of
from penstock.weights.hub import MODEL_DIR, resolve_model
from tests.forms import schemas
from tests.weights.gguf_files import write_gguf

FORMS: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": {"a": {"enum": ["x", "yy", "zzz"]}, "b": {"type": "integer"}},
              "required": ["a", "b"], "additionalProperties": False}},
    {"regex": "[a-z]{3,9}( [a-z]+){2,5}\\."},
    {"choice": ["alpha", "beta", "a much longer choice that has one continuation only", "été ☃"]},
    {"grammar": 'start: "<" word ("," word)* ">"\nword: /[a-z]{1,5}/'},
    {"json_object": True, "disable_any_whitespace": True},
    {"structural_tag": {"type": "structural_tag", "triggers": ["e"], "structures": [
        {"begin": "ea", "schema": {"type": "integer"}, "end": "!"}, {"begin": "es", "schema": {}, "end": ""}]}},
]  # fmt: skip
SAMPLED = {"temperature": 1.0, "max_tokens": 40}
PROMPT = [1, 5, 9, 13, 17, 21, 25, 29]


def form(**fields: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**fields)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(model="demo", max_num_seqs=100, threads=1) as made:
        yield made


def make(**options: Any) -> BuiltEngine:
    fixed = {"model": "demo", "threads": 1, "max_model_len": 256, "max_num_seqs": 16}
    return build_engine(EngineConfig.from_options(**{**fixed, **options}))


def requests(**more: Any) -> list[EngineRequest]:
    """One request for each form, greedy and sampled, with things beside it that could disturb it."""
    fields = [SAMPLED, {"temperature": 0.0, "max_tokens": 40}]
    disturbing: list[dict[str, Any]] = [
        {}, {"min_tokens": 12}, {"ignore_eos": True}, {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"logit_bias": {5: 4.0}, "top_p": 0.9}, {"xtc_probability": 0.5, "xtc_threshold": 0.01},
    ]  # fmt: skip
    found = []
    for number, fields_of_form in enumerate(FORMS * 2):
        chosen = {**fields[number % 2], **disturbing[number % len(disturbing)], **more}
        params = SamplingParams(seed=number, structured_outputs=form(**fields_of_form), **chosen)
        found.append(EngineRequest(f"r{number}", PROMPT[: 3 + number % 5], params))
    return found


def answers(
    built: BuiltEngine, asked: list[EngineRequest], steps: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Return ids and finish_reason of each request, all asked together. steps: called after each step."""
    for item in asked:
        built.engine.add_request(item)
    found: dict[str, tuple[list[int], Any]] = {item.request_id: ([], None) for item in asked}
    number = 0
    while built.engine.has_work:
        for output in built.engine.step():
            assert output.error is None, output.error
            ids, _ = found[output.request_id]
            found[output.request_id] = (ids + output.new_token_ids, output.finish_reason)
        number += 1
        if steps is not None:
            steps(number)
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What each request answers by itself, without forced tokens: they are not taken where log-probabilities are."""
    built = make(max_num_seqs=1, enable_prefix_caching=False)
    return {key: value for item in requests(logprobs=0) for key, value in answers(built, [item]).items()}


# --- answers have the form ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_finished_answer_fits_its_schema(llm: LLM, temperature: float) -> None:
    """Guards against a keyword that the mask lets through, a token that spells two things, or an answer that ends
    before it is complete. jsonschema judges."""
    asked = schemas()
    assert len(asked) >= 100
    params = [
        SamplingParams(
            temperature=temperature,
            max_tokens=120,
            seed=number,
            structured_outputs=form(json=schema, disable_any_whitespace=number % 4 > 0),
        )
        for number, schema in enumerate(asked)
    ]
    finished = 0
    for schema, output in zip(asked, llm.generate(["In JSON:"] * len(asked), params), strict=True):
        answer = output.outputs[0]
        if answer.finish_reason == "stop":
            finished += 1
            Draft202012Validator(schema).validate(json.loads(answer.text))
    assert finished >= 90


def test_a_gguf_file_has_forms(tmp_path: Path) -> None:
    """Guards against forms for those models only that have a tokenizer.json."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR)
    model.config.eos_token_id = model.config.eos_token_id[-1]
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    file = write_gguf(model, tmp_path / "demo.gguf", "Q8_0", tokenizer=tokenizer)
    params = SamplingParams(temperature=0.0, structured_outputs=form(choice=["été ☃", "alpha"]))
    (ids, reason) = answers(make(model=str(file)), [EngineRequest("a", PROMPT, params)])["a"]
    assert (tokenizer.decode(ids) in ("été ☃", "alpha"), reason) == (True, "stop")


def test_choices_beams_and_stop_strings(llm: LLM) -> None:
    """Guards against a form that only the first choice follows, or that a search for the likeliest answer leaves."""
    words = form(choice=["red", "green", "blue"])
    sampled = llm.generate("A colour:", SamplingParams(n=8, temperature=9.0, seed=1, structured_outputs=words))[0]
    assert {choice.text for choice in sampled.outputs} <= {"red", "green", "blue"}
    assert len({choice.text for choice in sampled.outputs}) > 1
    digits = form(regex="[a-z]{2,5}-[0-9]{2}")
    beams = llm.generate("A code:", SamplingParams(use_beam_search=True, n=3, max_tokens=20, structured_outputs=digits))
    assert len(beams[0].outputs) == 3
    for choice in beams[0].outputs:
        head, _, tail = choice.text.partition("-")
        assert 2 <= len(head) <= 5
        assert len(tail) == 2
        assert tail.isdigit()
    stopped = llm.generate("A code:", SamplingParams(stop=["-"], max_tokens=20, structured_outputs=digits, seed=1))[0]
    assert stopped.outputs[0].finish_reason == "stop"
    assert stopped.outputs[0].text.isalpha()


def test_too_few_answers_for_the_beams_are_an_error(llm: LLM) -> None:
    """Guards against a search that waits for beams that the form does not have, or answers with fewer than n."""
    only = form(regex="ab")
    search = SamplingParams(use_beam_search=True, n=8, max_tokens=9, structured_outputs=only)
    assert "answers can be chosen" in str(llm.generate("x", search)[0].error)


@pytest.mark.parametrize("more", [{"min_tokens": 30}, {"ignore_eos": True}, {"min_length": 60}, {"min_new_tokens": 30}])
def test_a_complete_answer_ends(llm: LLM, more: dict[str, Any]) -> None:
    """Guards against a request that fails, or goes on without a form, where its answer is complete and may not end."""
    output = llm.generate(
        "x", SamplingParams(max_tokens=40, seed=2, structured_outputs=form(choice=["yes", "no"]), **more)
    )
    assert output[0].outputs[0].text in ("yes", "no")
    assert output[0].outputs[0].finish_reason == "stop"
    longer = SamplingParams(max_tokens=40, seed=2, structured_outputs=form(regex="(ab ?)*"), **more)
    assert len(llm.generate("x", longer)[0].outputs[0].token_ids) >= 30


def test_max_tokens_in_the_middle_ends_with_length(llm: LLM) -> None:
    """Guards against forced tokens that go beyond max_tokens, and against a cut answer that looks complete."""
    for count in range(1, 8):
        params = SamplingParams(max_tokens=count, structured_outputs=form(regex="abcdefghijklmnopqrstuvwxyz0123456789"))
        found = llm.generate("x", params)[0].outputs[0]
        assert (len(found.token_ids), found.finish_reason) == (count, "length")


# --- the same bits ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(best_level() is None, reason="the reference kernels' bits depend on the batch")
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}, "max_num_seqs": 3},
        {"speculative_config": {"model": "demo-draft", "num_speculative_tokens": 3}},
    ],
    ids=["in chunks", "with drafts", "with a draft model"],
)
def test_forms_in_a_crowd_change_no_token(options: dict[str, Any], alone: dict[str, Any]) -> None:
    """Guards against a mask of another row or of another position, and against forced tokens that differ from those
    that the model would have been given."""
    assert answers(make(**options), requests()) == alone


def test_forms_survive_preemption(alone: dict[str, Any]) -> None:
    """Guards against a grammar that begins anew where its request was computed again, or that was left further on."""
    built = make()

    def preempt(number: int) -> None:
        if number % 3 == 0 and built.engine.scheduler.running:
            built.engine.scheduler.preempt(built.engine.scheduler.running[number % len(built.engine.scheduler.running)])

    assert answers(built, requests(), preempt) == alone
    assert built.engine.scheduler.num_preemptions > 5


def test_forms_go_on_after_the_tokens_that_another_engine_gave(alone: dict[str, Any]) -> None:
    """Guards against an answer that begins its form anew after an engine died in the middle of it."""
    cuts = {name: len(ids) * 2 // 3 for name, (ids, _) in alone.items()}
    resumed = [
        replace(item, output_token_ids=alone[item.request_id][0][: cuts[item.request_id]]) for item in requests()
    ]
    found = answers(make(), resumed)
    assert {name: (alone[name][0][: cuts[name]] + ids, why) for name, (ids, why) in found.items()} == alone


def test_forced_tokens_need_no_step() -> None:
    """Guards against a model step for a token that was certain, and against one that is taken where its log-probability
    was asked for."""
    certain = form(regex="[ab]0123456789" * 3)
    built = make()
    steps = {}
    for logprobs in (None, 0):
        before = built.engine.stats().num_steps_total
        params = SamplingParams(max_tokens=60, seed=1, logprobs=logprobs, structured_outputs=certain)
        ((ids, why),) = answers(built, [EngineRequest("r", PROMPT, params)]).values()
        assert why == "stop"
        steps[logprobs] = (built.engine.stats().num_steps_total - before, ids)
    assert steps[None][1] == steps[0][1]
    assert steps[None][0] < steps[0][0] == len(steps[0][1])


# --- what cannot be followed --------------------------------------------------------------------------------------

DEEP: dict[str, Any] = {"type": "string"}
for _ in range(120):
    DEEP = {"type": "object", "properties": {"a": DEEP}, "required": ["a"]}
LOOP = {"a": {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}}
HOSTILE: dict[str, dict[str, Any]] = {
    "and of 200 patterns": {"json": {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(200)]}},
    "a million": {"regex": "a{1000000}"},
    "a million, later": {"regex": "bca{1000000}"},
    "alternatives": {"regex": "(a|aa|aaa){500}b"},
    "parentheses": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "looking ahead": {"regex": "(?=a)b"},
    "back reference": {"regex": "(a)\\1"},
    "unclosed": {"regex": "[unclosed"},
    "deep": {"json": DEEP},
    "itself": {"json": {"$ref": "#"}},
    "each other": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
    "remote": {"json": {"$ref": "http://169.254.169.254/latest"}},
    "file": {"json": {"$ref": "file:///etc/passwd"}},
    "no type has both": {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
    "no number": {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
    "nothing": {"json": "false"},
    "unknown keyword": {"json": {"not": {"type": "string"}}},
    "keyword made lenient": {"json": {"uniqueItems": True, "type": "array", "x-guidance": {"lenient": True}}},
    "unknown format": {"json": {"type": "string", "format": "weird"}},
    "a large multiple": {"json": {"type": "number", "multipleOf": 982451653}},
    "thousands of options": {"json": {"type": "object", "properties": {f"key_{i}": {} for i in range(3000)}}},
    "bounds that are none": {"json": {"type": "number", "exclusiveMinimum": 2, "maximum": 2.5}},
    "whitespace": {"json_object": True, "whitespace_pattern": "("},
    "grammar without a start": {"grammar": 'x: "a"'},
    "grammar of parentheses": {"grammar": "start: " + "(" * 30000 + '"a"' + ")" * 30000},
    "left recursion": {"grammar": 'start: start "a"'},
}


@pytest.fixture(scope="module")
def isolated() -> Iterator[IsolatedTokenizer]:
    made = IsolatedTokenizer(resolve_model("demo"))
    made.load()
    yield made
    made.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_forms_are_refused(name: str, isolated: IsolatedTokenizer) -> None:
    """Guards against a form that stalls or ends the process that compiles it, and against a keyword that is ignored.

    The kernel ends what takes more processor time than it may; whoever asks next is not kept waiting for that."""
    with pytest.raises(InvalidRequestError) as caught:
        isolated.check_form(form(**HOSTILE[name]), 4096, [2, 6])
    assert caught.value.param == "structured_outputs"
    assert len(caught.value.message) < 500
    isolated.check_form(form(**FORMS[0]), 4096, [2, 6])


def test_a_form_that_fails_in_the_middle_ends_its_request_alone(llm: LLM) -> None:
    """Guards against an answer that ends as if it were complete where nothing is left, and against others that pay."""
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    letter = tokenizer.encode("z", add_special_tokens=False)
    hopeless = SamplingParams(max_tokens=100, seed=1, suppress_tokens=letter, structured_outputs=form(regex="z"))
    fine = SamplingParams(max_tokens=9, seed=1, structured_outputs=form(choice=["yes", "no"]))
    llm.client.add_request("hopeless", "x", hopeless)
    llm.client.add_request("fine", "x", fine)
    found = {}
    while llm.client.has_unfinished_requests():
        for output in llm.client.step():
            found[output.request_id] = output
    assert "no token may be chosen" in str(found["hopeless"].error)
    assert found["fine"].outputs[0].text in ("yes", "no")


def test_compiled_forms_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a server that remembers every schema that anyone ever sent."""
    from penstock.tokenizer import grammars
    from penstock.tokenizer.hf import load_tokenizer

    monkeypatch.setattr(grammars, "MAX_GRAMMARS", 3)
    made = Grammars(lambda: load_tokenizer(resolve_model("demo")), 4096, (2, 6))
    first = form(regex="a0")
    for number in range(grammars.MAX_GRAMMARS + 5):
        made.check(form(regex=f"a{number}"))
    assert not made.knows(first)
    assert made.knows(form(regex=f"a{grammars.MAX_GRAMMARS + 4}"))


class Compiler:
    """Compiles when it is told to."""

    def __init__(self) -> None:
        from threading import Event

        self.go = Event()
        self.known: set[Any] = set()

    def knows(self, form: StructuredOutputsParams) -> bool:
        return form.key in self.known

    def check(self, form: StructuredOutputsParams) -> None:
        self.go.wait(10)
        if form.regex == "wrong":
            raise InvalidRequestError("structured_outputs: wrong", param="structured_outputs")
        self.known.add(form.key)


def test_requests_wait_while_their_forms_are_compiled() -> None:
    """Guards against streams that stand still meanwhile, and a request that is computed although it was aborted."""
    compiler, inbox, added = Compiler(), queue.SimpleQueue[Any](), list[str]()
    ours, theirs = socket.socketpair()
    engine: Any = SimpleNamespace(add_request=lambda request: added.append(request.request_id), abort=lambda _: None)
    server = EngineServer(engine, Outbox(theirs, 3), inbox, forms=compiler)  # type: ignore[arg-type]

    def handle(frame: frames.ToEngine) -> None:
        server._handle(frames.pack(frame)[frames.HEADER_BYTES :])

    def ask(name: str, regex: str | None) -> None:
        asked = None if regex is None else form(regex=regex)
        handle(frames.AddRequest(EngineRequest(name, [1], SamplingParams(structured_outputs=asked, seed=1))))

    with ours, theirs:
        for name, regex in (("fine", "a"), ("wrong", "wrong"), ("aborted", "b"), ("reused", "c"), ("plain", None)):
            ask(name, regex)
        handle(frames.Abort(["aborted", "reused"]))
        ask("reused", "d")  # by another request: it is added once
        assert added == ["plain"]
        compiler.go.set()
        for _ in range(5):
            server._handle(inbox.get(timeout=100))
        rejected = frames.unpack_from_engine(frames.receive(ours) or b"")
        assert isinstance(rejected, frames.Rejected)
        assert (rejected.request_id, rejected.param) == ("wrong", "structured_outputs")
        assert added[0] == "plain"
        assert sorted(added[1:]) == ["fine", "reused"]  # two threads compile: either may be first
        ask("again", "a")  # its form is known
    assert added[-1] == "again"
    assert inbox.empty()


def test_a_form_is_blamed_for_its_work_and_not_for_a_busy_machine() -> None:
    """Guards against a request that fails because others took the processor, and one that never ends."""
    waited, stop, done = threading.Event(), threading.Event(), list[str]()
    timer = threading.Timer(0.2, waited.set)
    timer.start()

    def work(item: str) -> None:
        if item == "waits":
            waited.wait()
        while item == "spins" and not stop.is_set():
            pass
        done.append(item)

    worker = Worker("test", work)
    worker.start(["waits", "fine"])
    assert worker.wait(0.05) == []
    assert done == ["waits", "fine"]
    worker.start(["fine", "spins", "others", "go on"])
    assert worker.wait(0.05) == ["spins"]
    assert done[2:] == ["fine", "others", "go on"]
    stop.set()
    assert worker.wait(0.05) == []


@pytest.mark.parametrize(("text", "fits"), [('"1.50"', True), ('"-2"', True), ('"+."', False), ('""', False)])
def test_the_pattern_of_pydantics_decimal(text: str, fits: bool) -> None:
    """Guards against a refusal of every model with a Decimal, and against its look-ahead that is left out."""
    pattern = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
    source = grammar_of(StructuredOutputsParams(json={"type": "string", "pattern": pattern}))
    tokens = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokens, source)
    ids = tokens.tokenize_str(text)
    assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is fits
