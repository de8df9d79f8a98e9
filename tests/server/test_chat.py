"""POST /v1/chat/completions, /tokenize and /detokenize, field by field."""

import dataclasses
from typing import Any

import pytest

from tests.server.fakes import Behaviour, FakeEngineClient
from tests.server.harness import app_client
from tests.server.test_completions import chunks

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}


def chat(body: dict[str, Any], fake: FakeEngineClient | None = None) -> dict[str, Any]:
    response = app_client(fake).post(PATH, json={"messages": [USER], "max_tokens": 4, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refused(body: dict[str, Any], path: str = PATH) -> dict[str, Any]:
    response = app_client().post(path, json=body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def prompt_of(body: dict[str, Any]) -> str:
    """The text that the engine saw."""
    fake = FakeEngineClient()
    chat(body, fake)
    return bytes(fake.seen[0][0]).decode()


def test_exact_shape() -> None:
    """Guards against a field too many, too few or misspelt."""
    answer = chat({})
    assert set(answer) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage", "seed"}
    choice = answer["choices"][0]
    assert set(choice) == {"index", "message", "logprobs", "finish_reason", "stop_reason"}
    assert set(choice["message"]) == {"role", "content", "refusal"}


def test_exact_shape_of_chunks() -> None:
    """Guards against `role` in every delta, a finish reason before the last one, and usage that was not requested."""
    parts = chunks(PATH, {"messages": [USER], "n": 2})
    for index in (0, 1):
        own = [part["choices"][0] for part in parts if part["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [set(choice["delta"]) for choice in own[1:]] == [{"content"}] * 4 + [set()]
        assert [choice["finish_reason"] for choice in own] == [None] * 5 + ["length"]
    assert all("usage" not in part for part in parts)
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}


def test_template_and_parts() -> None:
    """Guards against a prompt with BOS twice, parts glued together, and `developer`, which no template knows."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": parts}]
    assert prompt_of({"messages": messages}) == "<system>Be kind.\n<user>a\nb\n<assistant>"


def test_generation_prompt() -> None:
    """Guards against flags of the template that are accepted and ignored."""
    assert prompt_of({"add_generation_prompt": False}) == "<user>Hi\n"
    continued = [USER, {"role": "assistant", "content": "Once"}]
    assert prompt_of({"messages": continued, "continue_final_message": True}) == "<user>Hi\n<assistant>Once"
    both = {"messages": continued, "continue_final_message": True, "add_generation_prompt": True}
    assert refused(both)["param"] == "continue_final_message"


def test_answer_can_be_sent_back() -> None:
    """Guards against refusing the nulls that the openai client sends in an earlier answer."""
    nulls = dict.fromkeys(("refusal", "tool_calls", "function_call", "audio", "annotations", "name"))
    earlier: dict[str, Any] = {"role": "assistant", "content": "Yes.", **nulls, "tool_calls": []}
    assert prompt_of({"messages": [USER, earlier, USER]}).count("<user>") == 2


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "Hi",
        [USER] * 5000,
        [{"role": "king", "content": "Hi"}],
        [{"content": "Hi"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "smell", "text": "a"}]}],
        [{"role": "user", "content": "Hi", "mood": "good"}],
        [{"role": "user", "content": "a" * 5000}],
        [{"role": "tool", "content": "4", "tool_call_id": "x"}],
        [{"role": "user", "content": [{"type": ["text"], "text": "a"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}],
        [{"role": "user", "content": [{"type": "file", "file": {"file_data": "file:///etc/passwd"}}]}],
    ],
)
def test_bad_messages(messages: Any) -> None:
    """Guards against a crash of the template, and against fetching what a message points to (CVE-2026-24779)."""
    error = refused({"messages": messages})
    assert error["param"].split("[")[0].split(".")[0] in ("messages", "tool_call_id")


def test_template_errors_are_the_users() -> None:
    """Guards against a 500 when the model's template does not like the conversation."""
    fake = FakeEngineClient(chat_template="{{ raise_exception('Roles must alternate') }}")
    response = app_client(fake).post(PATH, json={"messages": [USER]})
    assert response.status_code == 400
    assert "Roles must alternate" in response.json()["error"]["message"]


def test_model_without_a_template() -> None:
    """Guards against a made-up format for a model that was never trained to chat."""
    response = app_client(FakeEngineClient(chat_template=None)).post(PATH, json={"messages": [USER]})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "no_chat_template"


@pytest.mark.parametrize("name", ["image_url", "file", "refusal"])
def test_fields_beside_a_text_are_refused(name: str) -> None:
    """Guards against an image that is accepted and ignored because the part that carries it calls itself a text."""
    part = {"type": "text", "text": "Look", name: "x"}
    error = refused({"messages": [{"role": "user", "content": [part]}]})
    assert (error["param"], error["code"]) == (name, "not_implemented")
    assert prompt_of({"messages": [{"role": "user", "content": [{**part, name: None}]}]}).startswith("<user>Look")


@pytest.mark.parametrize("field", [{"modalities": ["audio"]}, {"echo": True}, {"audio": {}}])
def test_planned_fields_are_refused_by_name(field: dict[str, Any]) -> None:
    """Guards against accepting what is not built: an answer that looks right and is not what was asked for."""
    (name,) = field
    error = refused({"messages": [USER], **field})
    assert (error["param"], error["code"]) == (name, "not_implemented")


@pytest.mark.parametrize("name", ["chat_template", "chat_template_kwargs", "mm_processor_kwargs", "media_io_kwargs"])
def test_templates_of_requests_are_refused(name: str) -> None:
    """Guards against running a program from a request in the server (CVE-2026-115911, CVE-2026-115918)."""
    value = "{{ 'a' * 999999999 }}" if name == "chat_template" else {"chat_template": "x", "tokenize": True}
    error = refused({"messages": [USER], name: value})
    assert (error["param"], error["code"]) == (name, "not_allowed")
    if name.startswith("chat"):
        assert refused({"messages": [USER], name: value}, "/tokenize")["param"] == name
        assert refused({"prompt": "a", name: value}, "/v1/completions")["param"] == name


def test_values_that_change_nothing_are_accepted() -> None:
    """Guards against breaking clients that spell out the defaults."""
    chat(
        {
            "response_format": {"type": "text"},
            "tools": [],
            "tool_choice": "none",
            "store": False,
            "modalities": ["text"],
        }
    )
    nulls = ("tools", "response_format", "stop", "temperature", "n", "seed", "logit_bias", "stream", "stream_options")
    chat(dict.fromkeys((*nulls, "max_completion_tokens", "user", "logprobs", "top_logprobs", "parallel_tool_calls")))


# The bodies of vLLM's clients that write out every field with its default.
BOTH: dict[str, Any] = {
    "frequency_penalty": 0.0, "n": 1, "presence_penalty": 0.0, "stop": [], "stream": False, "use_beam_search": False,
    "length_penalty": 1.0, "early_stopping": False, "stop_token_ids": [], "include_stop_str_in_output": False,
    "ignore_eos": False, "min_tokens": 0, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "bad_words": [], "priority": 0, "request_id": "a", "echo": False,
    **dict.fromkeys((
        "logit_bias", "response_format", "seed", "stream_options", "temperature", "top_p", "user", "top_k", "min_p",
        "repetition_penalty", "truncate_prompt_tokens", "truncation_side", "allowed_token_ids", "prompt_logprobs",
        "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag",
        "guided_decoding_backend", "guided_whitespace_pattern", "logits_processors", "return_tokens_as_token_ids",
        "return_token_ids", "cache_salt", "kv_transfer_params", "vllm_xargs", "best_of", "repetition_detection",
        "logprob_token_ids", "thinking_token_budget", "documents",
    )),
}  # fmt: skip
TEMPLATE = ("chat_template", "chat_template_kwargs", "mm_processor_kwargs")
DUMPED: dict[str, dict[str, Any]] = {
    PATH: {
        **BOTH, "messages": [USER], "logprobs": False, "top_logprobs": 0, "max_tokens": 2, "include_reasoning": True,
        "tool_choice": "none", "parallel_tool_calls": True, "add_generation_prompt": True, "add_special_tokens": False,
        "continue_final_message": False,
        **dict.fromkeys((*TEMPLATE, "media_io_kwargs", "max_completion_tokens", "tools", "reasoning_effort")),
    },
    "/v1/completions": {
        **BOTH, "prompt": "Hi", "max_tokens": 2, "add_special_tokens": True,
        **dict.fromkeys(("logprobs", "suffix", "prompt_embeds")),
    },
    "/tokenize": {
        "messages": [USER], "add_generation_prompt": True, "continue_final_message": False, "return_token_strs": False,
        "add_special_tokens": False, **dict.fromkeys((*TEMPLATE, "tools", "model")),
    },
    "/v1/responses": {
        "input": "Hi", "background": False, "parallel_tool_calls": True, "service_tier": "auto", "store": True,
        "stream": False, "tool_choice": "auto", "tools": [], "top_logprobs": 0, "truncation": "disabled",
        "request_id": "a", "priority": 0, "enable_response_messages": False, "stop": [], "ignore_eos": False,
        "skip_special_tokens": True, "include_stop_str_in_output": False, "include_reasoning": True,
        **dict.fromkeys((
            *TEMPLATE, "include", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "model",
            "logit_bias", "previous_response_id", "prompt", "reasoning", "temperature", "text", "top_p", "top_k",
            "user", "cache_salt", "previous_input_messages", "structured_outputs", "repetition_penalty", "seed",
            "vllm_xargs", "kv_transfer_params", "prompt_cache_key", "presence_penalty", "frequency_penalty",
        )),
    },
}  # fmt: skip


@pytest.mark.parametrize("path", DUMPED)
def test_vllm_s_defaults_are_accepted(path: str) -> None:
    """Guards against refusing a client that sends vLLM's request model as it is: nothing in it asks for anything."""
    response = app_client().post(path, json=DUMPED[path])
    assert response.status_code == 200, response.text
    for name, value in (("echo", True), ("enable_response_messages", True)):
        if name in DUMPED[path] and path != "/v1/completions":
            assert refused({**DUMPED[path], name: value}, path)["param"] == name


def test_tokenize_continues_a_message() -> None:
    """Guards against counting other tokens than those of the chat completion."""
    messages = [USER, {"role": "assistant", "content": "Once"}]
    ids = app_client().post("/tokenize", json={"messages": messages, "continue_final_message": True}).json()["tokens"]
    assert bytes(ids).decode() == prompt_of({"messages": messages, "continue_final_message": True})
    body = {"prompt": "Hi", "continue_final_message": True}
    assert refused(body, "/tokenize")["param"] == "continue_final_message"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"mood": "good"}, "mood"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"mood": 1}}, "stream_options.mood"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 10**9}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"n": 10**9}, "n"),
        ({"temperature": "NaN"}, "temperature"),
        ({"temperature": 1e-45}, "temperature"),
        ({"temperature": 1e308}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**40}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"AI": 1}}, "logit_bias"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {str(2**63): 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1e30}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 1000}, "stop_token_ids"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 10_000}, "stop"),
        ({"stop": "a" * 1_000_000}, "stop"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
def test_bad_values_name_their_field(fields: dict[str, Any], param: str) -> None:
    """Guards against out-of-range values that reach the engine: each of these has stopped a server somewhere."""
    found = refused({"messages": [USER], **fields})["param"]
    assert found.split("[")[0] == param


def test_max_completion_tokens() -> None:
    """Guards against one of two different limits being silently ignored."""
    assert chat({"max_completion_tokens": 2, "max_tokens": None})["usage"]["completion_tokens"] == 2
    body = {"messages": [USER], "max_completion_tokens": 2, "max_tokens": 7}
    assert app_client().post(PATH, json=body).json()["error"]["param"] == "max_completion_tokens"
    fake = FakeEngineClient()
    fake.info = dataclasses.replace(fake.info, default_sampling={"max_tokens": 3})
    assert chat({"max_tokens": None}, fake)["usage"]["completion_tokens"] == 3


def test_token_ids_and_logprobs_in_chunks() -> None:
    """Guards against log-probabilities lost for tokens that complete no character."""
    body = {"messages": [USER], "max_tokens": 9, "logprobs": True, "return_token_ids": True}
    parts = chunks(PATH, body, FakeEngineClient(Behaviour(text="\u20ac")))
    choices = [part["choices"][0] for part in parts[1:-1]]
    assert [choice["delta"]["content"] for choice in choices] == ["", "", "\u20ac", ""]
    assert [choice["token_ids"] for choice in choices] == [[0xE2], [0x82], [0xAC], [257]]
    assert [choice["logprobs"]["content"][0]["bytes"] for choice in choices[:3]] == [[0xE2], [0x82], [0xAC]]
    assert parts[0]["prompt_token_ids"] == list(b"<user>Hi\n<assistant>")
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"


def test_stop_reason() -> None:
    """Guards against not knowing which of several stop strings it was."""
    answer = chat({"max_tokens": 99, "stop": ["END", "."]}, FakeEngineClient(Behaviour(text="Once. END")))
    assert (answer["choices"][0]["message"]["content"], answer["choices"][0]["stop_reason"]) == ("Once", ".")


def test_tokenize_and_back() -> None:
    """Guards against special tokens added or left out against the request's word."""
    client = app_client()
    answer = client.post("/tokenize", json={"prompt": "h\u00e9", "return_token_strs": True}).json()
    assert answer == {
        "count": 4,
        "max_model_len": 512,
        "tokens": [256, 104, 0xC3, 0xA9],
        "token_strs": ["<s>", "h", "\ufffd", "\ufffd"],
    }
    bare = client.post("/tokenize", json={"prompt": "h", "add_special_tokens": False}).json()
    assert (bare["tokens"], bare["token_strs"]) == ([104], None)
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"] == "<s>h\u00e9"
    rendered = client.post("/tokenize", json={"messages": [USER]}).json()["tokens"]
    assert bytes(rendered) == b"<user>Hi\n<assistant>"
    shown = client.get("/tokenizer_info").json()
    for name, token_id in (("bos_token", 256), ("eos_token", 257)):
        assert client.post("/detokenize", json={"tokens": [token_id]}).json()["prompt"] == shown[name] != ""
    assert shown["model_max_length"] == 512
    assert "<assistant>" in shown["chat_template"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
        ("/tokenize", {"prompt": "a" * 5000}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 5000}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_bad_text_work(path: str, body: dict[str, Any], param: str) -> None:
    """Guards against unbounded tokenising, and ids outside the vocabulary."""
    assert refused(body, path)["param"].split("[")[0] == param
