"""The offline API with the demo model: what users' scripts rely on."""

import asyncio
import gc
import json
import pickle
import shutil
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock import LLM, AsyncLLM, EngineDeadError, InvalidRequestError, RequestOutputKind, SamplingParams
from penstock.weights.hub import MODEL_DIR
from tests.server.fakes import FakeEngineClient
from tests.server.harness import app_client

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def llm():
    with LLM(model="demo", threads=1, max_num_seqs=8) as made:
        yield made


def test_prompts_of_every_kind_in_the_order_given(llm):
    ids = llm.client.tokenizer.encode("Once upon a time")
    prompts = ["Once upon a time", {"prompt": "Once upon a time"}, {"prompt_token_ids": ids}, ids]
    outputs = llm.generate(prompts, GREEDY)
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert [output.prompt for output in outputs] == ["Once upon a time"] * 2 + [None] * 2
    assert all(output.finished and output.prompt_token_ids == ids for output in outputs)
    assert llm.generate("Once upon a time", GREEDY)[0].outputs[0].text == outputs[0].outputs[0].text
    assert llm.generate(ids, GREEDY)[0].outputs[0].text == outputs[0].outputs[0].text
    assert llm.generate([], GREEDY) == []


def test_one_params_for_each_prompt(llm):
    outputs = llm.generate(["One day", "One day"], [GREEDY, SamplingParams(temperature=0.0, max_tokens=3)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12, 3]
    with pytest.raises(InvalidRequestError, match="1 for 2 prompts"):
        llm.generate(["One day", "One day"], [GREEDY])


def test_a_wrong_prompt_among_good_ones_leaves_nothing_behind(llm):
    with pytest.raises(InvalidRequestError):
        llm.generate(["One day", ""], GREEDY)
    assert not llm.client.has_unfinished_requests()
    assert llm.client.engine.stats().kv_blocks_free == llm.client.engine.stats().kv_blocks_total


def test_leaving_a_stream_aborts_the_rest(llm):
    params = SamplingParams(max_tokens=500, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    for _ in llm.stream(["One day", "Once"], params):
        break
    assert not llm.client.has_unfinished_requests()


def test_streams_do_not_steal_each_others_outputs(llm):
    llm.client.add_request("mine", "One day", GREEDY)
    with pytest.raises(InvalidRequestError, match="under way"):
        llm.generate("Once", GREEDY)
    assert llm.client.abort("mine")
    assert llm.generate("Once", GREEDY)[0].finished


def test_the_lower_level(llm):
    assert llm.engine is llm.client  # the name that scripts use
    llm.client.add_request("a", "Once upon a time", GREEDY)
    with pytest.raises(InvalidRequestError, match="in use"):
        llm.client.add_request("a", "One day", GREEDY)
    llm.client.add_request("b", "One day", GREEDY)
    assert llm.client.abort("b")
    assert not llm.client.abort("b")
    seen = []
    while llm.client.has_unfinished_requests():
        seen += llm.client.step()
    assert {output.request_id for output in seen} == {"a"}
    assert [output.finished for output in seen] == [False] * 11 + [True]
    assert seen[-1].outputs[0].text == llm.generate("Once upon a time", GREEDY)[0].outputs[0].text


@pytest.mark.covers("C2")
def test_generate_is_a_loop_of_step(llm):
    """Guards against a `generate` that computes by another way than add_request and step."""
    params = [SamplingParams(max_tokens=9 + 3 * i, seed=i, logprobs=1, n=1 + i % 2) for i in range(4)]
    prompts = ["Once upon a time", "One day", "Tom", "Once upon a time"]
    ids = [llm.engine.add_request(None, prompt, item) for prompt, item in zip(prompts, params, strict=True)]
    last = {}
    while llm.engine.has_unfinished_requests():
        last |= {output.request_id: output for output in llm.engine.step()}
    for index, output in enumerate(llm.generate(prompts, params)):
        assert output.outputs == last[ids[index]].outputs


def test_deltas_make_the_whole(llm):
    params = SamplingParams(temperature=0.0, max_tokens=30, n=1, output_kind=RequestOutputKind.DELTA, logprobs=1)
    pieces = [output.outputs[0] for _, output in llm.stream(["Once upon a time"], params)]
    whole = llm.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=30, logprobs=1))[0].outputs[0]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert sum(len(piece.logprobs or []) for piece in pieces) == len(whole.logprobs) == len(whole.token_ids)


def test_seeds(llm):
    """Given, it repeats; not given, it is reported, and sending it again repeats."""
    params = SamplingParams(temperature=1.0, max_tokens=12)
    first = llm.generate("Once upon a time", params)[0]
    other = llm.generate("Once upon a time", params)[0]
    assert first.seed != other.seed
    again = llm.generate("Once upon a time", SamplingParams(temperature=1.0, max_tokens=12, seed=first.seed))[0]
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_two_engines_in_one_process_and_equal_seeds():
    """No ambient state: the second engine counts its own arrivals."""
    params = SamplingParams(temperature=1.0, max_tokens=8)
    with LLM(model="demo", threads=1, seed=5) as one, LLM(model="demo", threads=1, seed=5) as two:
        assert one.generate("Once", params)[0].seed == two.generate("Once", params)[0].seed
        with LLM(model="demo", threads=1, seed=6) as three:
            assert three.generate("Once", params)[0].seed != one.generate("Once", params)[0].seed


def test_chat_also_inside_a_running_loop(llm):
    """A notebook has one; the template is rendered by a coroutine."""
    conversation = [{"role": "user", "content": "What is 2 + 3?"}]
    plain = llm.chat(conversation, GREEDY)[0].outputs[0].text

    async def notebook():
        return llm.chat([conversation, conversation], GREEDY)

    assert [output.outputs[0].text for output in asyncio.run(notebook())] == [plain, plain]


def test_chat_with_parts_prompts_as_over_http(llm):
    """Guards against parts that reach the model as Python text: [{'type': 'text', ..."""
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "3 + 4?"}]
    outputs = llm.chat([[{"role": "user", "content": content}] for content in (parts, "What is\n3 + 4?")], GREEDY)
    assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids
    fake = FakeEngineClient()
    fake.tokenizer = llm.client.tokenizer
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    assert app_client(fake).post("/v1/chat/completions", json=body).status_code == 200
    assert fake.seen[0][0] == outputs[0].prompt_token_ids


def test_variables_of_the_chat_template(tmp_path):
    """Guards against a model whose thinking cannot be switched off (`enable_thinking` of Qwen 3)."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_DIR / name, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ messages[-1].content }}{% if enable_thinking %} Hm{% endif %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    messages = [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "It is"}]
    one = SamplingParams(temperature=0.0, max_tokens=1)
    with LLM(model="demo", threads=1, tokenizer=str(tmp_path)) as llm:
        assert llm.chat(messages, one)[0].prompt == "It is"
        assert llm.chat(messages, one, chat_template_kwargs={"enable_thinking": True})[0].prompt == "It is Hm"
        options = {"add_generation_prompt": False, "continue_final_message": True}
        assert llm.chat(messages, one, chat_template_kwargs={"enable_thinking": True}, **options)[0].prompt == "It is"
        for name in ("messages", "tokenize", "chat_template"):
            with pytest.raises(InvalidRequestError, match=f"chat_template_kwargs: {name} cannot be set"):
                llm.chat(messages, one, chat_template_kwargs={name: "x"})


def test_a_terminal_shows_how_far_a_call_is(llm, capsys, monkeypatch):
    """Guards against a call of minutes that looks like a hang, and against a bar in a log file."""
    for is_terminal, shown in ((False, {}), (True, {}), (True, {"use_tqdm": False})):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        outputs = llm.generate(["One", "Two"], GREEDY, **shown)
        assert len(outputs) == 2
        assert ("prompts" in capsys.readouterr().err) is (is_terminal and not shown)


def test_vllms_names_of_arguments():
    """Guards against a TypeError in a script that was written for vLLM's AsyncLLM."""

    async def main():
        async with AsyncLLM(model="demo", threads=1) as llm:
            outputs = llm.generate(prompt="Once", sampling_params=GREEDY, request_id="a")
            return [output.request_id async for output in outputs]

    assert set(asyncio.run(main())) == {"a"}


def test_a_program_that_ends_without_shutdown():
    """Guards against a supervisor that takes the end of the program for the death of its engine: a traceback."""
    lines = (
        "import atexit, time; atexit.register(time.sleep, 0.5)",  # a logger that is flushed, for instance
        "from penstock import LLM, SamplingParams",
        "llm = LLM('demo', engine_in_process=False)",
        "print(llm.generate('Once', SamplingParams(max_tokens=2))[0].finished)",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_chat_template_kwargs(tmp_path):
    """Guards against variables of the template that LLM.chat takes and does not pass on, or that nothing reads."""
    shutil.copytree(MODEL_DIR, tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ messages[0].content }}{{ style }}")
    messages, params = [{"role": "user", "content": "Once"}], SamplingParams(max_tokens=1)
    with LLM(model=str(tmp_path / "m"), max_model_len=128) as llm:
        plain, styled = (llm.chat(messages, params, chat_template_kwargs=given) for given in (None, {"style": " upon"}))
        assert [output.prompt for output in (*plain, *styled)] == ["Once", "Once upon"]
        for wrong in ({"stile": 1}, {"messages": []}, {"style": object()}, 5):
            with pytest.raises(InvalidRequestError) as caught:
                llm.chat(messages, params, chat_template_kwargs=wrong)
            assert caught.value.param == "chat_template_kwargs"


TEXT = {"type": "text", "text": "x"}


@pytest.mark.parametrize(
    "messages",
    [
        *([], [{"role": "user"}], [{"content": "x"}], ["x"], "x", None, [["x"]], [[["x"]]], [[]], [[[]]]),
        [[{"role": "user", "content": "x"}], {"role": "user", "content": "x"}],
        *([{"role": "user", "content": content}] for content in (5, None, [], {}, b"x", TEXT)),
        *([{"role": "user", "content": [part]}] for part in ("x", ["x"], [["x"]], {}, None, {"type": "text"})),
        *([{"role": "user", "content": [TEXT, {**TEXT, **extra}]}] for extra in ({"text": 5}, {"type": "smell"})),
        *([{"role": "user", "content": [{**TEXT, **extra}]}] for extra in ({"type": []}, {"image_url": "x"})),
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}],
    ],
    ids=repr,
)
def test_what_is_no_conversation_is_refused(llm, messages):
    """Guards against lists and pictures that are put into the prompt as Python writes them."""
    with pytest.raises(InvalidRequestError) as caught:
        llm.chat(messages, GREEDY)
    assert caught.value.param == "messages"


def test_threads_take_turns(llm):
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: llm.generate("Once upon a time", GREEDY)[0].outputs[0].text, range(8)))
    assert len(set(found)) == 1


def test_used_after_the_end():
    with LLM(model="demo", threads=1) as llm:
        pass
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate("Once", GREEDY)
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.forward("Once")


def test_shutdown_frees_the_model():
    """Guards against an LLM that refers to its weights and cache for as long as the program keeps it."""
    with LLM(model="demo", threads=1) as llm:
        model = weakref.ref(llm.built.model)
    gc.collect()
    assert model() is None


def test_what_is_no_sampling_params_is_refused(llm):
    for wrong in ({"temperature": 0}, 5, [None], ["x"]):
        with pytest.raises(InvalidRequestError, match="sampling_params"):
            llm.generate("Once", wrong)


def test_outputs_can_be_pickled(llm):
    output = llm.generate("One day", SamplingParams(temperature=0.0, max_tokens=3, logprobs=2))[0]
    assert pickle.loads(pickle.dumps(output)) == output


def test_repetition_penalty_and_bad_words_reach_the_sampler(llm):
    plain = llm.generate("Once upon a time", GREEDY)[0].outputs[0].text
    word = plain.split()[0]
    changed = llm.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=12, bad_words=[word]))
    assert word not in changed[0].outputs[0].text.split()


def test_max_tokens_none_goes_to_the_end_of_the_context():
    with LLM(model="demo", threads=1, max_model_len=64) as llm:
        output = llm.generate("Once upon a time", SamplingParams(max_tokens=None, ignore_eos=True, seed=1))[0]
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 64
        assert output.outputs[0].finish_reason == "length"
