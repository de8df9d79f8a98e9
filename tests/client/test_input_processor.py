"""InputProcessor: what a user may send, and what the engine gets."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.client.input_processor import InputProcessor, PromptRequest, assigned_seed
from penstock.errors import InvalidRequestError
from penstock.interface.sampling_params import SamplingParams
from tests.fakes_engine import model_info
from tests.tokenizer import vocabularies as voc

MAX_LEN = 64


@pytest.fixture
def processor():
    tok = voc.make("byte_level")
    return InputProcessor(tok, model_info(MAX_LEN, tok.vocab_size), seed=7)


def process(processor, prompt, params=None, request_id=None):
    return processor.process(PromptRequest.of(prompt, params, request_id))


class TestPrompts:
    def test_forms(self, processor):
        """Guards against one form of a prompt meaning other ids than another."""
        tok = voc.make("byte_level")
        ids = tok.encode("The fox")
        for prompt in ("The fox", {"prompt": "The fox"}, {"prompt": "The fox", "prompt_token_ids": ids}):
            made = process(processor, prompt, SamplingParams())
            assert (made.prompt, made.prompt_token_ids) == ("The fox", ids)
        arrays = (np.array(ids), {"prompt_token_ids": torch.tensor(ids), "multi_modal_data": None})
        for prompt in (ids, tuple(ids), {"prompt_token_ids": ids}, *arrays):
            made = process(processor, prompt, SamplingParams())
            assert (made.prompt, made.prompt_token_ids) == (None, ids)

    @pytest.mark.parametrize(
        "prompt",
        [
            *("", [], {}, {"prompt": ""}, {"prompt": None}, {"prompt_token_ids": []}, None, 5, b"x", 1.5, True),
            *({"prompt": "x", "multi_modal_data": {}}, {"promt": "x"}, {"prompt": [1]}, {1: 2}, "a\ud800"),
            *(np.array([1.5]), np.array([[1]]), np.array(1), np.array([], int)),
            *({"prompt": "\ud800", "prompt_token_ids": [1]}, {"prompt_token_ids": "x"}, {"prompt_token_ids": 5}),
        ],
        ids=repr,
    )
    def test_wrong_prompts(self, processor, prompt):
        """Guards against an empty or misspelt prompt reaching the engine (CVE-2024-8768 killed one)."""
        with pytest.raises(InvalidRequestError) as caught:
            process(processor, prompt, SamplingParams())
        assert caught.value.param in ("prompt", "prompt_token_ids")

    @pytest.mark.parametrize(
        "wrong", [-1, 10**6, 2**40, 2**5000, 1.0, True, None, "1", [1]], ids=lambda w: str(type(w))
    )
    def test_wrong_ids(self, processor, wrong):
        """Guards against an id outside the vocabulary, which reads foreign memory in the embedding."""
        for prompt in ([1, wrong], {"prompt_token_ids": [wrong]}):
            with pytest.raises(InvalidRequestError):
                process(processor, prompt, SamplingParams())

    def test_length(self, processor):
        """Guards against a prompt without room for one token, and against tokenising what cannot fit."""
        assert process(processor, [1] * (MAX_LEN - 1), SamplingParams()).params.max_tokens == 1
        for prompt in ([1] * MAX_LEN, [1] * 200_000, "fox " * 100, "a" * 10_000_000):
            with pytest.raises(InvalidRequestError) as caught:
                process(processor, prompt, SamplingParams())
            assert caught.value.code == "context_length_exceeded"

    @settings(max_examples=100)
    @given(st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()), st.lists))
    def test_anything(self, prompt):
        """Guards against any other exception than the user's error."""
        processor = InputProcessor(voc.make("byte_level"), model_info(MAX_LEN, 500))
        try:
            made = process(processor, prompt, SamplingParams())
        except InvalidRequestError:
            return
        assert made.prompt_token_ids
        assert all(0 <= token_id < 500 for token_id in made.prompt_token_ids)

    def test_without_a_tokenizer(self):
        """Guards against an AttributeError where an engine runs on ids alone."""
        processor = InputProcessor(None, model_info(MAX_LEN, 10))
        assert process(processor, [1], SamplingParams(detokenize=False)).prompt_token_ids == [1]
        for prompt, params in (("x", SamplingParams()), ([1], SamplingParams(bad_words=["x"]))):
            with pytest.raises(InvalidRequestError):
                process(processor, prompt, params)


class TestParameters:
    def test_max_tokens(self, processor):
        """Guards against running past the end of the context."""
        for given_tokens, settled in ((None, MAX_LEN - 4), (10**9, MAX_LEN - 4), (5, 5)):
            made = process(processor, [1] * 4, SamplingParams(max_tokens=given_tokens))
            assert made.params.max_tokens == made.engine_requests[0].params.max_tokens == settled

    def test_min_tokens_without_room(self, processor):
        """Guards against a minimum that the context cannot hold being dropped in silence."""
        with pytest.raises(InvalidRequestError, match="min_tokens"):
            process(processor, [1] * 60, SamplingParams(min_tokens=10, max_tokens=None))

    def test_vocabulary(self, processor):
        """Guards against a stop token or bias that no kernel can index."""
        for params in (SamplingParams(stop_token_ids=[10**6]), SamplingParams(logit_bias={10**6: 1.0})):
            with pytest.raises(InvalidRequestError):
                process(processor, [1], params)

    def test_seeds(self, processor):
        """Guards against seeds that differ between two runs of an engine, or repeat within one."""
        seeds = [process(processor, [1], SamplingParams()).params.seed for _ in range(50)]
        assert seeds == [assigned_seed(7, arrival) for arrival in range(50)]
        assert len(set(seeds)) == 50
        assert all(0 <= seed < 2**64 for seed in seeds)
        assert assigned_seed(8, 0) != assigned_seed(7, 0)
        assert process(processor, [1], SamplingParams(seed=-5)).engine_requests[0].params.seed == -5

    def test_choices(self, processor):
        """Guards against choices that share noise, and prompt log-probabilities computed once a choice."""
        made = process(processor, "fox", SamplingParams(n=3, seed=1, prompt_logprobs=2, stop=["x"], bad_words=["y"]))
        assert [request.choice for request in made.engine_requests] == [0, 1, 2]
        assert [request.params.prompt_logprobs for request in made.engine_requests] == [2, None, None]
        assert all(request.prompt_token_ids == made.prompt_token_ids for request in made.engine_requests)
        assert made.params.stop == ("x",)
        assert all(not request.params.stop and not request.params.bad_words for request in made.engine_requests)

    def test_engine_ids_never_collide(self, processor):
        """Guards against "a" with choice 0 meeting "a-0", and a late output meeting a reused id."""
        names = ["a", "a-0", "a#0", "a#0-0", "a", None, None, "request-5"]
        made = [process(processor, [1], SamplingParams(n=2), name) for name in names]
        ids = [request.request_id for prepared in made for request in prepared.engine_requests]
        assert len(set(ids)) == 2 * len(names)

    def test_ids_after_a_change_of_the_model(self):
        """Guards against engine ids that come again because a client has made another InputProcessor."""
        arrivals = itertools.count()
        processors = [InputProcessor(None, model_info(64, 100), arrivals=arrivals) for _ in "12"]
        made = [process(processor, [1], request_id="a") for processor in processors]
        assert len({prepared.engine_requests[0].request_id for prepared in made}) == 2

    @pytest.mark.parametrize("request_id", ["", "x" * 129, 5, "\ud800"])
    def test_wrong_request_ids(self, processor, request_id):
        """Guards against an id that cannot be sent to the engine process."""
        with pytest.raises(InvalidRequestError) as caught:
            process(processor, [1], SamplingParams(), request_id)
        assert caught.value.param == "request_id"

    def test_sequence_breakers(self, processor):
        """Guards against a breaker that is not seen inside a token, or where two tokens make it together."""
        tok = voc.make("byte_level")
        made = process(processor, [1], SamplingParams(dry_multiplier=0.8, dry_sequence_breakers=["o", "fox"]))
        found = set(made.engine_requests[0].params.dry_sequence_breaker_ids)
        texts = {token_id: tok.token_to_bytes(token_id) for token_id in range(tok.vocab_size)}
        assert {ids[0] for ids in found if len(ids) == 1} == {i for i, text in texts.items() if b"o" in text}
        for start, rest in (("f", "ox"), ("fo", "x")):
            tail = tuple(tok.encode(rest, add_special_tokens=False))
            heads = {i for i, text in texts.items() if text.endswith(start.encode()) and b"fox" not in text}
            assert {(head, *tail) for head in heads} <= found
        assert made.engine_requests[0].params.dry_sequence_breakers == ()
        off = process(processor, [1], SamplingParams(dry_sequence_breakers=["x"]))
        assert off.engine_requests[0].params.dry_sequence_breaker_ids == ()
        with pytest.raises(InvalidRequestError, match="dry_sequence_breakers"):
            process(processor, [1], SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=["\ud800"]))

    def test_bad_words(self, processor):
        """Guards against a bad word that is only refused at the start of a text."""
        tok = voc.make("byte_level")
        made = process(processor, [1], SamplingParams(bad_words=[" fox", "fox"]))
        words = made.engine_requests[0].params.bad_words_token_ids
        expected = [tuple(tok.encode(text, add_special_tokens=False)) for text in ("fox", " fox")]
        assert list(words) == expected
        for wrong in (" ", "\ud800"):
            with pytest.raises(InvalidRequestError, match="bad_words"):
                process(processor, [1], SamplingParams(bad_words=[wrong]))
