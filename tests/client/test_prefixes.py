"""Pinned prefixes on the client's side: what outlives the engine, who is counted, and what a user's program sees."""

import os
import signal
from dataclasses import replace

import pytest

from penstock import LLM, AsyncLLM, InvalidRequestError, SamplingParams
from penstock.client import frames, prefixes
from penstock.client.fleet import Recovery
from penstock.client.input_processor import PromptRequest, assigned_seed
from penstock.client.open_requests import OpenRequests, request_of
from penstock.client.prefixes import Prefixes
from penstock.interface.messages import EngineRequest
from penstock.interface.sampling_params import SamplingParams as Params
from tests.client.test_process import until
from tests.client.test_recovery import INPUTS

IDS = list(range(3, 103))
SHORT = SamplingParams(temperature=0.0, max_tokens=4)


def asked(prompt: list[int], salt: str | None = None) -> EngineRequest:
    return EngineRequest("a", prompt, Params(max_tokens=1), cache_salt=salt)


# --- counting ---------------------------------------------------------------------------------------------------------


def test_a_hit_counts_for_the_longest_pin_that_it_covers():
    """Guards against hits that are counted twice, or for a prefix that was not found."""
    found = Prefixes()
    for name, length, salt in (("short", 32, None), ("long", 64, None), ("salted", 80, "a")):
        found.pin(name, IDS[:length], salt, 16).is_computed = True
    found.note(asked(IDS), 48)
    found.note(asked(IDS, "b"), 96)
    found.note(asked(IDS, "a"), 96)
    found.note(asked([9, *IDS]), 16)
    uses = {use.name: (use.num_tokens, use.hits, use.tokens_saved) for use in found.most_used(10)}
    assert uses == {"short": (32, 1, 48), "long": (64, 1, 96), "salted": (80, 1, 96), None: (16, 1, 16)}
    assert [use.name for use in found.pinned()] == ["short", "long", "salted"]


def test_prefixes_of_different_salts_are_different_and_the_table_is_bounded():
    found = Prefixes()
    for salt in (None, "a", "a"):
        found.note(asked(IDS, salt), 96)
    assert [(use.hits, use.num_tokens) for use in found.most_used(2)] == [(2, 96), (1, 96)]
    for token in range(2 * prefixes.MAX_PREFIXES):
        found.note(asked([token] * 16), 16)
    assert len(found.most_used(10**6)) == prefixes.MAX_PREFIXES
    found.note(asked(IDS, "a"), 96)
    assert found.most_used(1)[0].hits == 1  # it was forgotten


def test_a_prefix_belongs_to_an_adapter():
    """Guards against a pin that counts for requests which cannot find it, and one that another adapter takes over."""
    found = Prefixes()
    pin = found.pin("sql", IDS, None, 16, "sql@1")
    pin.is_computed = True
    for adapter in (None, "sql@1", "sql@2"):
        found.note(replace(asked(IDS), adapter=adapter), 96)
    assert [(use.name, use.hits) for use in found.most_used(3)] == [("sql", 1), (None, 1), (None, 1)]
    assert found.pin("sql", IDS, None, 16, "sql@1") is pin
    with pytest.raises(InvalidRequestError, match="name of another pin"):
        found.pin("sql", IDS, None, 16, "sql@2")


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "é", "a/b", 5])
def test_names_that_cannot_stand_in_an_address_are_refused(name):
    with pytest.raises(InvalidRequestError, match="name"):
        Prefixes().pin(name, IDS, None, 16)


def test_there_are_at_most_so_many_pins():
    found = Prefixes()
    for index in range(prefixes.MAX_PINS):
        found.pin(None, [index] * 16, None, 16)
    with pytest.raises(InvalidRequestError, match="the most"):
        found.pin(None, IDS, None, 16)


# --- deaths -----------------------------------------------------------------------------------------------------------


class Told:
    """What a client tells its engines of a pin and of one open request."""

    def __init__(self) -> None:
        self.frames: list[frames.ToEngine] = []
        self.requests = OpenRequests()
        self.recovery = Recovery(self.requests, self.frames.append, {})
        self.recovery.engine_ready()
        self.pin = self.requests.prefixes.pin("system", IDS, "a", 16)
        self.recovery.pin(self.pin)

    def next_engine(self) -> list[str]:
        """Return what the next engine is told, by kind and request."""
        self.recovery.engine_lost()
        self.frames.clear()
        self.recovery.engine_ready()
        return [f"{type(frame).__name__} {_request_id(frame)}" for frame in self.frames]


def _request_id(frame: frames.ToEngine) -> str:
    return frame.request.request_id


def test_the_next_engine_is_told_of_pins_first_and_computes_them_last():
    """Guards against a pin that is lost with its engine, and against open streams that wait until it is computed."""
    told = Told()
    pin_id = told.pin.request.request_id
    assert told.frames == [frames.Pin("system", told.pin.request)]
    assert (told.pin.request.prompt_token_ids, told.pin.request.cache_salt) == (IDS[:96], "a")
    told.requests.open(request_of(told.pin))
    told.recovery.submit([pin_id])
    assert told.next_engine() == [f"Pin {pin_id}", f"AddRequest {pin_id}"]  # it is an open request still
    told.requests.close(told.requests.owner(pin_id))
    told.pin.is_computed = True
    stream = INPUTS.process(PromptRequest([1, 2], params=Params(seed=1, max_tokens=5)))
    told.requests.open(stream)
    stream_id = stream.engine_requests[0].request_id
    told.recovery.submit([stream_id])
    assert told.next_engine() == [f"Pin {pin_id}", f"AddRequest {stream_id}", f"AddRequest {pin_id}"]


def test_a_pin_that_ends_engines_is_computed_no_more():
    """Guards against a server that gives up because every new engine dies of the same pin, which nobody asks for."""
    told = Told()
    told.pin.is_computed = True
    pin_id = told.pin.request.request_id
    both = [f"Pin {pin_id}", f"AddRequest {pin_id}"]
    assert told.next_engine() == both
    told.recovery.received([pin_id])  # computed: what this engine dies of is something else
    assert [told.next_engine() for _ in range(3)] == [both, both, [f"Pin {pin_id}"]]


# --- engines ----------------------------------------------------------------------------------------------------------


def test_offline():
    """Guards against a pin that changes an answer or a seed, and against one that is left behind by a failure."""
    prompt = [*IDS, 5, 6, 7]
    with LLM(model="demo", threads=1, max_num_seqs=4) as llm:
        expected = llm.generate([prompt], SHORT)[0].outputs[0].token_ids
        assert llm.pin_prefix(IDS, "system").num_tokens == 96
        assert llm.pin_prefix(IDS, "system").name == "system"
        with pytest.raises(InvalidRequestError, match="another pin"):
            llm.pin_prefix(IDS[:50], "system")
        with pytest.raises(InvalidRequestError, match="do not fill a block"):
            llm.pin_prefix(IDS[:15], "short")
        for salt, cached in (("a", 96), ("b", 96), (None, 96)):
            (output,) = llm.generate([{"prompt_token_ids": prompt, "cache_salt": salt}], SHORT)
            assert (output.num_cached_tokens, output.outputs[0].token_ids) == (cached, expected)
        (use,) = llm.pinned_prefixes()
        assert (use.hits, use.tokens_saved) == (3, 288)
        assert llm.generate("Once", SamplingParams(max_tokens=8))[0].seed == assigned_seed(0, 4)  # a pin is no arrival
        assert llm.unpin_prefix("system")
        assert not llm.unpin_prefix("system")
        llm.client.engine.check_integrity()
        assert llm.client.engine.stats().kv_blocks_free == llm.client.engine.stats().kv_blocks_total
        with pytest.raises(InvalidRequestError, match="cache_salt"):
            llm.generate({"prompt": "Once", "cache_salt": ""})
        with pytest.raises(InvalidRequestError, match="cache_salt"):
            llm.generate({"prompt": "Once", "cache_salt": "\ud800"})


async def test_a_pin_outlives_its_engine_and_is_computed_before_anybody_asks():
    """Guards against a system prompt that every user waits for after a death; salts go on too."""
    options = {"max_model_len": 512, "kv_cache_memory_bytes": 32 * 20 * 2**10}  # 32 blocks
    async with AsyncLLM(model="demo", threads=1, max_num_seqs=4, **options) as llm:
        first = await llm.pin_prefix(IDS, "system")
        assert first.num_tokens == 96
        with pytest.raises(InvalidRequestError, match="at most 16 may be"):
            await llm.pin_prefix(IDS * 3, "large")
        assert [use.name for use in llm.pinned_prefixes()] == ["system"]
        os.kill(llm.status().pid, signal.SIGKILL)
        await until(lambda: llm.status().restarts == 1 and llm.status().stats.kv_blocks_pinned == 6)
        async for output in llm.generate({"prompt_token_ids": [*IDS, 7], "cache_salt": "x"}, SHORT):
            assert output.num_cached_tokens == 96
        assert [use.hits for use in llm.pinned_prefixes()] == [1]
        assert llm.unpin_prefix("system")
        await until(lambda: llm.status().stats.kv_blocks_pinned == 0)
