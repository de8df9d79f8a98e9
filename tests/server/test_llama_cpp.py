"""llama.cpp's own routes, and ColossalAI's: bodies, answers, events, and whose a body of /completion is."""

import json
from typing import Any

import pytest

from penstock.interface.sampling_params import SamplingParams
from penstock.tokenizer.fill_in import MARKS, REPOSITORIES
from tests.server.fakes import Behaviour, FakeEngineClient
from tests.server.harness import app_client

CODER = (*MARKS[0], *REPOSITORIES[0])
USER: Any = {"role": "user", "content": "What is 1 + 2?"}
ASKED: dict[str, Any] = {"prompt": "Once", "n_predict": 6}


def posted(
    body: dict[str, Any], path: str = "/completion", text: str | None = None, size: int = 256, delay_s: float = 0.0
) -> Any:
    """The answer to a body, and the prompts and parameters that the engine saw."""
    engine = FakeEngineClient(Behaviour(text=text, delay_s=delay_s), max_model_len=size, marks=CODER)
    response = app_client(engine).post(path, json=body)
    return (
        response,
        [bytes(i for i in ids if i < 256).decode() for ids, _, _ in engine.seen],
        [s[1] for s in engine.seen],
    )


def events(response: Any) -> list[Any]:
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


def test_a_completion_and_its_events() -> None:
    """Guards against a stream that joins to another answer than the whole one, and against counts, times and settings
    that llama.cpp's clients look for and do not find."""
    asked = {**ASKED, "seed": 7, "return_tokens": True}
    whole = posted(asked)[0].json()
    streamed = posted({**asked, "stream": True})[0]
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *parts, last = events(streamed)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert [part["stop"] for part in (*parts, last)] == [False] * 6 + [True]
    for answer in (whole, last):
        assert (answer["tokens_predicted"], answer["stop_type"], answer["truncated"]) == (6, "limit", False)
        assert answer["tokens_evaluated"] == answer["timings"]["prompt_n"] + answer["timings"]["cache_n"] == 5
        assert (answer["timings"]["predicted_n"], answer["prompt"], answer["stopping_word"]) == (6, "Once", "")
        settings = answer["generation_settings"]
        assert (settings["n_predict"], settings["seed"], settings["n_ctx"], settings["model"]) == (6, 7, 256, "fake")
    assert "[DONE]" not in streamed.text


def test_ends() -> None:
    """Guards against an answer that has ended for another reason than it says, and a stop string in the text."""
    answer = posted({**ASKED, "n_predict": -1, "stop": [" upon"]}, text="Once upon a time")[0].json()
    assert (answer["content"], answer["stop_type"], answer["stopping_word"]) == ("Once", "word", " upon")
    assert posted({**ASKED, "n_predict": 99}, text="So.")[0].json()["stop_type"] == "eos"
    cut = posted({"prompt": "x"})[0].json()
    assert (cut["stop_type"], cut["truncated"], cut["tokens_predicted"]) == ("limit", True, 254)


def test_nothing_is_predicted() -> None:
    """Guards against a request that only fills the cache and is answered with a token, as editors send it ahead."""
    for stream in (False, True):
        response, _, _ = posted({**ASKED, "n_predict": 0, "cache_prompt": True, "stream": stream})
        answer = events(response)[-1] if stream else response.json()
        assert (answer["content"], answer["tokens_predicted"], answer["truncated"]) == ("", 0, False)


def test_probabilities() -> None:
    """Guards against tokens without ids, and probabilities of other places than those of the tokens."""
    whole = posted({**ASKED, "n_probs": 2, "return_tokens": True})[0].json()
    assert [place["id"] for place in whole["completion_probabilities"]] == whole["tokens"]
    assert all(len(place["top_logprobs"]) == 2 for place in whole["completion_probabilities"])
    parts = events(posted({**ASKED, "n_probs": 2, "stream": True, "seed": 1, "timings_per_token": True})[0])
    assert all(len(part["completion_probabilities"]) == len(part["tokens"]) for part in parts[:-1])
    assert [part["timings"]["predicted_n"] for part in parts] == [1, 2, 3, 4, 5, 6, 6]


def test_several_prompts() -> None:
    """Guards against answers of several prompts that cannot be told apart."""
    answers = posted({"prompt": ["One", "Two"], "n_predict": 2})[0].json()
    assert [(answer["index"], answer["prompt"]) for answer in answers] == [(0, "One"), (1, "Two")]
    both = posted({"prompt": ["One", "Two"], "n_predict": 2, "n_cmpl": 2})[0].json()
    assert [(answer["index"], answer["prompt"]) for answer in both] == list(enumerate(["One", "One", "Two", "Two"]))
    vscode = {**VIM, "n_cmpl": 3, "response_fields": None}
    assert [answer["content"] for answer in filled(vscode, text="x")[0].json()] == ["x"] * 3
    parts = events(posted({"prompt": ["One", "Two"], "n_predict": 2, "stream": True})[0])
    assert sorted(part["index"] for part in parts if part["stop"]) == [0, 1]


def test_options() -> None:
    """Guards against an option that is accepted without effect: each against the parameters that it stands for."""
    own = {"n_predict": -1, "repeat_penalty": 1.5, "repeat_last_n": -1, "logit_bias": [[5, 1.5], [6, False]]}
    same = {"temperature": 0.5, "top_k": 3, "min_p": 0.1, "dry_multiplier": 0.5, "mirostat": 2, "ignore_eos": True}
    hints = {"cache_prompt": False, "id_slot": 0, "n_keep": -1, "dynatemp_range": 0, "penalize_nl": True, "lora": []}
    _, _, (params,) = posted({"prompt": "a", **own, **same, **hints, "seed": -1})
    expected = {**same, "max_tokens": None, "repetition_penalty": 1.5, "logit_bias": {5: 1.5}, "suppress_tokens": (6,)}
    assert {name: getattr(params, name) for name in expected} == expected
    assert params.seed is None
    for form, kept in (({"json_schema": {"type": "integer"}}, "json"), ({"grammar": 'root ::= "a"'}, "grammar")):
        _, _, (params,) = posted({**ASKED, **form})
        assert getattr(params.structured_outputs, kept) is not None


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"n_predict": -3}, "n_predict"),
        ({"n_cmpl": 10**6}, "n_cmpl"),
        ({"n_probs": 2**21}, "n_probs"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"samplers": ["top-k"]}, "samplers"),
        ({"max_new_tokens": 3}, "n_predict"),
        ({"stream": "maybe"}, "stream"),
        ({"grammar": "x", "json_schema": {}}, "json_schema"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"model": "other"}, "model"),
    ],
)
def test_what_is_refused(wrong: dict[str, Any], param: str) -> None:
    """Guards against an error about a name that the client has not sent, and fields of both APIs in one body."""
    response, _, seen = posted({**ASKED, **wrong})
    assert response.status_code in (400, 404)
    assert (response.json()["error"]["param"], seen) == (param, [])


def test_tokens_and_template() -> None:
    """Guards against ids that /completion would not compute, and a conversation rendered as no chat is."""
    client = app_client()
    assert client.post("/tokenize", json={"content": "hé"}).json()["tokens"] == [104, 195, 169]
    assert client.post("/tokenize", json={"content": "a", "add_special": True}).json()["tokens"] == [256, 97]
    pieces = client.post("/tokenize", json={"content": "hé", "with_pieces": True}).json()["tokens"]
    assert pieces == [{"id": 104, "piece": "h"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    assert client.post("/tokenize", json={"content": "a", "prompt": "b"}).json()["error"]["param"] == "prompt"
    assert client.post("/detokenize", json={"tokens": [104, 195, 169]}).json()["content"] == "hé"
    assert client.post("/apply-template", json={"messages": [USER]}).json() == {
        "prompt": "<user>What is 1 + 2?\n<assistant>"
    }


def test_the_server_describes_itself() -> None:
    """Guards against clients that wait for ever for a server that is ready, and slots that are busy for nobody."""
    client = app_client()
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ping").json() == {"status": "Healthy"}
    assert client.get("/engine_check").json() == {"status": "Running"}
    shown = client.get("/props").json()
    assert (shown["default_generation_settings"]["n_ctx"], shown["total_slots"], shown["model_path"]) == (
        512,
        1,
        "fake",
    )
    assert shown["chat_template"].startswith("{% for message")
    assert shown["default_generation_settings"]["params"]["n_predict"] == -1
    assert [slot["is_processing"] for slot in client.get("/slots").json()] == [False]
    engine = FakeEngineClient()
    engine.open.add("a")
    assert [slot["is_processing"] for slot in app_client(engine).get("/slots").json()] == [True]
    assert app_client(engine).get("/slots?fail_on_no_slot=1").status_code == 503


# --- infilling --------------------------------------------------------------------------------------------------------

# What llama.vim sends for a suggestion, and ahead of it to have pieces of other files computed.
PIECES = [{"filename": "a.py", "text": "x = 1\n", "time": [1, 2]}, {"filename": "", "text": "y = 2\n", "time": [3, 4]}]
TIMES = ("n", "ms", "per_token_ms", "per_second")
VIM: dict[str, Any] = {
    "id_slot": 0, "input_prefix": "def f():\n", "input_suffix": "\nf()\n", "input_extra": PIECES, "prompt": "    ",
    "n_predict": 128, "stop": ["STOP"], "n_indent": 4, "top_k": 40, "top_p": 0.9, "stream": False,
    "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 5000,
    "response_fields": ["content", *(f"timings/{what}_{time}" for what in ("prompt", "predicted") for time in TIMES),
                        "truncated", "tokens_cached"],
}  # fmt: skip
AHEAD: dict[str, Any] = {
    **VIM, "input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0, "temperature": 0.0, "samplers": [],
    "t_max_prompt_ms": 1, "t_max_predict_ms": 1, "response_fields": [""],
}  # fmt: skip
BEGIN, FILES = [256], b"\x03repository\n\x04a.py\nx = 1\n\x04\ny = 2\n\x04current\n"


def filled(body: dict[str, Any], **options: Any) -> tuple[Any, bytes, SamplingParams]:
    """The answer, the prompt with numbers for the five marks, and the parameters."""
    engine = FakeEngineClient(Behaviour(text=options.pop("text", None)), marks=CODER, **options)
    answer = app_client(engine).post("/infill", json=body)
    assert answer.status_code == 200, answer.text
    ids, params, _ = engine.seen[0]
    assert ids[0] == 256
    return answer, bytes(i - 258 if i >= 258 else i for i in ids[1:]), params


def test_llama_vim() -> None:
    """Guards against an editor whose request is refused, texts in each other's place, an answer without the values that
    it shows, and a request sent ahead whose prompt is not the beginning of the one that follows."""
    answer, prompt, params = filled(VIM, text="return 1")
    assert prompt == FILES + b"\x00def f():\n    \x01\nf()\n\x02"
    assert (answer.json()["content"], list(answer.json())) == ("return 1", VIM["response_fields"])
    assert answer.json()["timings/predicted_n"] == len("return 1") + 1
    assert answer.headers["x-ignored-fields"] == "t_max_prompt_ms, time"
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.0, 40, 0.9, 128)
    assert set(params.stop_token_ids or ()) == set(range(258, 263))
    assert filled({**VIM, "stop": []}, text="return 1")[0].json()["content"] == "return 1"
    ahead, prompt, params = filled(AHEAD)
    assert ahead.json() == {}
    assert prompt == FILES + b"\x00\x01\x02"


def test_what_has_no_room_is_left_out() -> None:
    """Guards against an editor that gets nothing in a small context, and against losing what is nearest instead."""
    whole = len(filled(VIM)[1])
    kept = b"\x03repository\n\x04\ny = 2\n\x04current\n\x00def f():\n    \x01\nf()\n\x02"
    assert filled({**VIM, "n_predict": 0}, max_model_len=whole + 1)[1] == kept
    long = {**VIM, "input_prefix": "a" * 300 + "b", "input_suffix": "c" + "d" * 300, "n_predict": 0}
    assert filled(long, max_model_len=100)[1] == b"\x00" + b"a" * 67 + b"b    \x01c" + b"d" * 22 + b"\x02"


@pytest.mark.parametrize("stream", [False, True])
def test_lines_with_less_indentation_end_the_answer(stream: bool) -> None:
    """Guards against a suggestion that goes on after the block, one that is cut in its first line or by an empty line,
    and an engine that goes on for nobody."""
    text = "return [\n        1,\n\n    ]\n  x\ny"
    body = {**VIM, "response_fields": [], "stream": stream}
    answer, _, _ = filled(body, text=text)
    parts = events(answer) if stream else [answer.json()]
    assert "".join(part["content"] for part in parts) == "return [\n        1,\n\n    ]\n  "
    assert (parts[-1]["stop_type"], parts[-1]["truncated"]) == ("limit", False)
    for tokens in ({"n_indent": 0}, {"n_indent": 2, "input_extra": None}):
        answer, _, _ = filled({**VIM, **tokens}, text=text)
        assert answer.json()["content"] == (text if not tokens["n_indent"] else text[:-1])


class OneEndsEarly(FakeEngineClient):
    """Answers prompts that end with a 1 with a line that has no indentation."""

    def _tokens(self, ids: list[int], *rest: Any) -> Any:
        self.behaviour = Behaviour(text="a\nb" + "c" * 20 if ids[-1] == ord("1") else " d e f")
        return super()._tokens(ids, *rest)


def test_one_of_two_answers_ends_at_a_line() -> None:
    """Guards against an answer that ends with another one's, or goes on after its end."""
    for prompt, texts, most in ((["x1", "x2"], ["a\n", " d e f"], 99), (["x1"], ["a\n"], 5)):
        engine = OneEndsEarly()
        answers = app_client(engine).post("/completion", json={"prompt": prompt, "n_indent": 2}).json()
        answers = answers if len(prompt) > 1 else [answers]
        assert [answer["content"] for answer in answers] == texts
        assert [answer["stop_type"] for answer in answers] == ["limit", "eos"][: len(prompt)]
        assert engine.num_tokens < most
        assert not engine.open


def test_lines_that_come_too_late() -> None:
    """Guards against a limit without effect, and one that cuts within the first line."""
    body = {**VIM, "n_indent": 0, "response_fields": [], "t_max_predict_ms": 10}
    response, _, _ = posted(body, "/infill", text="one two three\n four\n five", delay_s=0.005)
    answer = response.json()
    assert (answer["content"], answer["tokens_predicted"]) == ("one two three\n", 14)
    assert (answer["stop_type"], answer["truncated"]) == ("limit", False)
    response, _, _ = posted({**body, "t_max_predict_ms": 60_000}, "/infill", text="a\nb")
    assert response.json()["content"] == "a\nb"


def test_infilling_that_is_refused() -> None:
    """Guards against marks that a model has never seen, and errors about a field of another route."""
    plain = app_client(FakeEngineClient())
    assert plain.post("/infill", json=VIM).json()["error"]["param"] == "input_suffix"
    for wrong, param in (
        ({"input_suffix": None}, "input_suffix"), ({"input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
        ({"stream": "true"}, "stream"), ({"n_indent": -1}, "n_indent"), ({"input_prefix": "x" * 10**5}, "input_prefix"),
    ):  # fmt: skip
        response, _, seen = posted({**VIM, **wrong}, "/infill")
        assert (response.status_code, response.json()["error"]["param"], seen) == (400, param, [])


# --- ColossalAI -------------------------------------------------------------------------------------------------------


def test_colossalai_completes() -> None:
    """Guards against a body of ColossalAI's that gets llama.cpp's answer, beams in the wrong order, and a stream whose
    record does not end as its clients look for it."""
    (response, prompts, (params,)) = posted({"prompt": "hello, who are you? ", "stream": "False"}, text="A model.")
    assert response.json() == {"request_id": response.json()["request_id"], "text": "A model."}
    assert (prompts, params.max_tokens) == (["hello, who are you? "], None)
    _, _, (params,) = posted({"prompt": "a", "max_new_tokens": 5, "do_sample": False, "num_beams": 3})
    assert (params.max_tokens, params.temperature, params.use_beam_search, params.n) == (5, 0.0, True, 3)
    _, _, (params,) = posted({"prompt": "a", "max_new_tokens": 5, "do_sample": True, "temperature": 0.5})
    assert (params.temperature, params.use_beam_search) == (0.5, False)
    streamed = posted({"prompt": "a", "stream": "True"}, text="A model.")[0]
    record, rest = streamed.text.split("\0")
    assert (json.loads(record)["text"], rest) == ("A model.", "")
    assert posted({"prompt": "a", "max_new_tokens": 0})[0].json()["error"]["param"] == "max_new_tokens"
    assert posted({"prompt": "a", "do_sample": True, "temperature": -1})[0].json()["error"]["param"] == "temperature"


def test_colossalai_chats() -> None:
    """Guards against a conversation rendered as another one, and an answer that is not in its stream."""
    asked = {"messages": [USER], "add_generation_prompt": True, "max_new_tokens": 9, "top_k": 3}
    response, prompts, (params,) = posted(asked, "/chat", text="Three.")
    assert response.json() == {"role": "assistant", "text": "Three."}
    assert (prompts, params.max_tokens, params.top_k) == (["<user>What is 1 + 2?\n<assistant>"], 9, 3)
    response, prompts, _ = posted({"messages": [USER]}, "/chat", text="Three.")
    assert (response.json()["role"], prompts) == ("user", ["<user>What is 1 + 2?\n"])
    streamed = posted({**asked, "stream": "True"}, "/chat", text="Three.")[0]
    role, *texts = events(streamed)
    assert role == {"index": 0, "message": {"role": "assistant"}}
    assert "".join(text["content"] for text in texts) == "Three."
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert posted({"messages": []}, "/chat")[0].json()["error"]["param"] == "messages"


def test_what_is_left_open_is_the_models_own() -> None:
    """Guards against llama.cpp's defaults, with which the same prompt would have other tokens than over /v1."""
    _, _, (params,) = posted({"prompt": "a"})
    kept = {"max_tokens": None, "output_kind": params.output_kind}
    assert params == SamplingParams(**kept)
