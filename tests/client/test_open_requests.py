"""OpenRequests: ids to text, whatever way the engine's outputs are cut, and what a new engine would need."""

import asyncio
import dataclasses
from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.client.input_processor import InputProcessor, PromptRequest
from penstock.client.open_requests import OpenRequests
from penstock.errors import EngineDeadError, InvalidRequestError
from penstock.interface.messages import EngineOutput
from penstock.interface.outputs import FinishReason
from penstock.interface.sampling_params import RequestOutputKind, SamplingParams
from penstock.interface.step import TokenLogprobs
from tests.fakes_engine import model_info
from tests.tokenizer import vocabularies as voc

TOK = voc.make("byte_level")
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


@dataclasses.dataclass
class Step:
    """What became of a step's outputs: for readers, and engine requests to abort."""

    outputs: list = dataclasses.field(default_factory=list)
    abort_ids: list = dataclasses.field(default_factory=list)


class Session:
    """One OpenRequests with the requests that a test adds; finished ones are closed, as by a quick reader."""

    def resumable(self):
        return [self.requests.resumed(request_id) for request_id in self.requests.running()]

    def __init__(self, tokenizer=TOK):
        self.inputs = InputProcessor(tokenizer, model_info(1024, TOK.vocab_size))
        self.requests = OpenRequests()

    def add(self, request_id="r", prompt="The fox", **params):
        opened = self.process(prompt, SamplingParams(**{"max_tokens": None, **params}), request_id)
        self.requests.open(opened)
        return [request.request_id for request in opened.engine_requests]

    def process(self, prompt, params, request_id, known=None):
        return self.inputs.process(PromptRequest.of(prompt, params, request_id, output_token_ids=known))

    def step(self, *outputs):
        step = Step()
        for request, output, to_abort in self.requests.add(outputs):
            step.abort_ids += to_abort
            if output is not None:
                step.outputs.append(output)
                if output.finished:
                    assert self.requests.close(request) == []
        return step

    def close(self, request_id):
        return self.requests.close(self.requests.get(request_id))

    @property
    def open_ids(self):
        return [request.request_id for request in self.requests]


def ids_of(text):
    return TOK.encode(text, add_special_tokens=False)


def out(request_id, start, ids, **fields):
    return EngineOutput(request_id, start, list(ids), **fields)


def cut(ids, places):
    starts = sorted({0, *(place for place in places if place < len(ids)), len(ids)})
    return [(i, ids[i:j]) for i, j in pairwise(starts)]


class TestText:
    @settings(max_examples=100)
    @given(
        text=st.text(alphabet="ab \n🙂é", max_size=20),
        stops=st.lists(st.text(alphabet="ab \n🙂", min_size=1, max_size=3), max_size=3),
        include=st.booleans(),
        places=st.lists(st.integers(0, 60), max_size=20),
    )
    def test_kinds_agree(self, text, stops, include, places):
        """Guards against streams that differ from the whole: deltas joined, cumulative and final must be equal."""
        ids = ids_of(text)
        session = Session()
        fields = {"stop": stops, "include_stop_str_in_output": include}
        names = {kind: session.add(kind, output_kind=kind, **fields)[0] for kind in RequestOutputKind}
        told = {kind: [] for kind in RequestOutputKind}
        chunks = cut(ids, places) or [(0, [])]
        for start, chunk in chunks:
            finish = LENGTH if start + len(chunk) == len(ids) else None
            for name in names.values():
                for output in session.step(out(name, start, chunk, finish_reason=finish)).outputs:
                    told[output.request_id].append(output)
        texts = {kind: [output.outputs[0].text for output in outputs] for kind, outputs in told.items()}
        tokens = {kind: [output.outputs[0].token_ids for output in outputs] for kind, outputs in told.items()}
        assert "".join(texts[DELTA]) == texts["cumulative"][-1] == texts[FINAL][0]
        assert list(chain.from_iterable(tokens[DELTA])) == tokens["cumulative"][-1] == tokens[FINAL][0]
        assert len(texts[FINAL]) == 1
        assert all(later.startswith(sooner) for sooner, later in pairwise(texts["cumulative"]))
        found = [stop for stop in stops if stop in text]
        assert (texts[FINAL][0] == text) or found
        assert session.open_ids == []

    def test_stop_string(self):
        """Guards against a leaked stop string, tokens after it, and an engine that goes on for nobody."""
        session = Session()
        (name,) = session.add(stop=["jumps"], output_kind=DELTA)
        ids = ids_of("brown fox jumps over")
        texts, tokens, step = [], [], None
        for position, token_id in enumerate(ids):
            step = session.step(out(name, position, [token_id]))
            texts += [output.outputs[0].text for output in step.outputs]
            tokens += [token for output in step.outputs for token in output.outputs[0].token_ids]
            if step.abort_ids:
                break
        last = step.outputs[0]
        assert "".join(texts) == "brown fox "
        assert TOK.decode(tokens).endswith("jumps")
        assert (last.finished, last.outputs[0].finish_reason, last.outputs[0].stop_reason) == (True, "stop", "jumps")
        assert step.abort_ids == [name]
        late = session.step(
            out(name, len(tokens), [5]), out(name, len(tokens) + 1, [], finish_reason=FinishReason.ABORT)
        )
        assert late == Step()

    def test_stop_string_within_many_tokens(self):
        """Guards against keeping the tokens that came after the stop string in the same step (drafts bring several)."""
        session = Session()
        (name,) = session.add(stop=["b"])
        ids = [ids_of(char)[0] for char in "abcd"]
        step = session.step(out(name, 0, ids, finish_reason=LENGTH))
        choice = step.outputs[0].outputs[0]
        assert (choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason) == ("a", ids[:2], "stop", "b")
        assert step.abort_ids == []  # the engine has ended it by itself

    def test_min_tokens(self):
        """Guards against a stop string ending a text before min_tokens."""
        session = Session()
        (name,) = session.add(stop=["b"], min_tokens=2)
        ids = [ids_of(char)[0] for char in "abab"]
        assert session.step(out(name, 0, ids)).outputs[0].outputs[0].text == "aba"

    @pytest.mark.covers("M27")
    @pytest.mark.parametrize(
        ("include", "skip", "text"), [(False, False, "a"), (True, False, "a</s>"), (True, True, "a")]
    )
    def test_end_token(self, include, skip, text):
        """Guards against an end token in the text, or missing in token_ids."""
        session = Session()
        (name,) = session.add(include_stop_str_in_output=include, skip_special_tokens=skip)
        ids = [*ids_of("a"), TOK.eos_token_id]
        choice = session.step(out(name, 0, ids, finish_reason=STOP)).outputs[0].outputs[0]
        assert (choice.text, choice.token_ids) == (text, ids)
        assert (choice.finish_reason, choice.stop_reason) == ("stop", None)

    def test_stop_token(self):
        """Guards against a lost stop_reason, and a stop token's text in the answer."""
        session = Session()
        ids = ids_of("a") + ids_of("b")
        for include, text in ((False, "a"), (True, "ab")):
            (name,) = session.add(stop_token_ids=[ids[1]], include_stop_str_in_output=include)
            fields = {"finish_reason": STOP, "stop_reason": ids[1]}
            choice = session.step(out(name, 0, ids, **fields)).outputs[0].outputs[0]
            assert (choice.text, choice.stop_reason, choice.token_ids) == (text, ids[1], ids)

    def test_held_back_text_comes_at_the_end(self):
        """Guards against losing half a character, or the beginning of a stop string, when the text ends."""
        session = Session()
        (name,) = session.add(stop=["xyz"], output_kind=DELTA)
        half = [i for i in range(TOK.vocab_size) if TOK.token_to_bytes(i) == b"\xf0"]
        assert session.step(out(name, 0, [ids_of("x")[0], *half])).outputs[0].outputs[0].text == ""
        assert session.step(out(name, 2, [], finish_reason=LENGTH)).outputs[0].outputs[0].text == "x\ufffd"

    def test_without_text(self):
        """Guards against detokenising where nobody wants text."""
        session = Session(tokenizer=None)
        (name,) = session.add(prompt=[1], detokenize=False, logprobs=0)
        fields = {"logprobs": [TokenLogprobs([5], [-1.0], 3)], "finish_reason": LENGTH}
        choice = session.step(out(name, 0, [5], **fields)).outputs[0].outputs[0]
        assert (choice.text, choice.token_ids) == ("", [5])
        assert choice.logprobs[0][5].decoded_token is None
        with pytest.raises(InvalidRequestError, match="stop"):
            session.add("other", prompt=[1], stop=["x"])


class SubstringTokenizer:
    """Every part of one text is a token of its own, so that the text can be cut into tokens in every way."""

    special_ids = byte_fallback_ids = frozenset()
    joins_bytes = True

    def __init__(self, text):
        self.words = sorted({text[i:j] for i in range(len(text)) for j in range(i + 1, len(text) + 1)})

    def token_to_bytes(self, token_id):
        return self.words[token_id].encode()


@pytest.mark.covers("F11")
@pytest.mark.parametrize(("include", "text"), [(False, "ab\n"), (True, "ab\n\n\r\n")])
def test_stop_string_over_all_splits_into_tokens(include, text):
    """Guards against a stop string that is found only when it begins or ends where a token does."""
    whole, stop = "ab\n\n\r\ncd", "\n\r\n"
    tok = SubstringTokenizer(whole)
    for places in range(2 ** (len(whole) - 1)):
        cuts = [0, *(i for i in range(1, len(whole)) if places >> (i - 1) & 1), len(whole)]
        ids = [tok.words.index(whole[i:j]) for i, j in pairwise(cuts)]
        session = Session(tok)
        (name,) = session.add(prompt=[1], stop=[stop], include_stop_str_in_output=include, output_kind=DELTA)
        steps = [session.step(out(name, position, [token_id])) for position, token_id in enumerate(ids)]
        told = [output.outputs[0] for step in steps for output in step.outputs]
        assert "".join(choice.text for choice in told) == text
        assert told[-1].stop_reason == stop
        assert [choice.token_ids for choice in told] == [[i] for i in ids[: len(told)]]
        assert cuts[len(told) - 1] < 6 <= cuts[len(told)]


class TestOrder:
    @settings(max_examples=60)
    @given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=12))
    def test_repeated_outputs(self, pieces):
        """Guards against doubled tokens after a restart: whatever is sent again, each token counts once."""
        session = Session()
        (name,) = session.add(logprobs=0)
        ids = ids_of("The quick brown fox jumps over the lazy dog. Once upon a time")[:12]
        assert len(ids) == 12
        have = 0
        for start, length in pieces:
            start = min(start, have)
            chunk = ids[start : start + length]
            session.step(out(name, start, chunk, logprobs=[TokenLogprobs([i], [-1.0], 1) for i in chunk]))
            have = max(have, start + len(chunk))
        entries = [TokenLogprobs([i], [-1.0], 1) for i in ids]
        (output,) = session.step(out(name, 0, ids, logprobs=entries, finish_reason=LENGTH)).outputs
        (choice,) = output.outputs
        assert choice.token_ids == ids
        assert choice.text == TOK.decode(ids)
        assert choice.cumulative_logprob == -12.0
        assert output.error is None

    def test_gap(self):
        """Guards against a text with a hole in it: it must end with an error and stop the engine."""
        session = Session()
        (name,) = session.add()
        session.step(out(name, 0, [5]))
        step = session.step(out(name, 2, [6]))
        assert step.abort_ids == [name]
        assert step.outputs[0].finished
        assert step.outputs[0].outputs[0].finish_reason == "error"
        assert "lost" in step.outputs[0].error
        assert session.resumable() == []
        assert session.open_ids == []

    def test_unknown_ids(self):
        """Guards against a crash on an output that was under way when its request was aborted."""
        assert Session().step(out("nobody", 0, [1])).outputs == []


class TestChoices:
    def test_merged(self):
        """Guards against one RequestOutput a choice, and against choices told that did not move (DELTA)."""
        session = Session()
        names = session.add(n=3, output_kind=DELTA)
        step = session.step(out(names[2], 0, ids_of("c")), out(names[0], 0, ids_of("a")))
        assert [[choice.index for choice in output.outputs] for output in step.outputs] == [[0, 2]]
        assert not step.outputs[0].finished
        step = session.step(*(out(names[i], i % 2 == 0, [], finish_reason=LENGTH) for i in range(3)))
        assert step.outputs[0].finished
        assert [choice.finish_reason for choice in step.outputs[0].outputs] == ["length"] * 3

    def test_cumulative_and_final_tell_all(self):
        """Guards against a last output that lacks the choices which ended earlier."""
        session = Session()
        names = session.add("c", n=2), session.add("f", n=2, output_kind=FINAL)
        for first, second in names:
            early = session.step(out(first, 0, ids_of("a"), finish_reason=LENGTH)).outputs
            late = session.step(out(second, 0, ids_of("b"), finish_reason=LENGTH)).outputs
            assert len(early) == (first == names[0][0])
            assert [choice.text for choice in late[0].outputs] == ["a", "b"]

    def test_one_stops_the_others_go_on(self):
        """Guards against a stop string in one choice ending its siblings."""
        session = Session()
        names = session.add(n=2, stop=["b"])
        step = session.step(out(names[0], 0, ids_of("b")), out(names[1], 0, ids_of("a")))
        assert step.abort_ids == [names[0]]
        assert not step.outputs[0].finished
        assert session.open_ids == ["r"]


class TestNumbers:
    def test_logprobs(self):
        """Guards against a chosen token that is missing, not first, or listed with the wrong rank."""
        session = Session()
        (name,) = session.add(logprobs=2, output_kind=DELTA)
        a, b, c = (ids_of(char)[0] for char in "abc")
        entries = [TokenLogprobs([c, a, b], [-3.0, -0.5, -1.5], 7), TokenLogprobs([b, a, b], [-1.0, -0.5, -1.0], 2)]
        choice = session.step(out(name, 0, [c, b], logprobs=entries)).outputs[0].outputs[0]
        assert [list(at) for at in choice.logprobs] == [[c, a, b], [b, a]]
        assert [(at.logprob, at.rank, at.decoded_token) for at in choice.logprobs[0].values()] == [
            (-3.0, 7, "c"),
            (-0.5, 1, "a"),
            (-1.5, 2, "b"),
        ]
        assert choice.logprobs[1][b].rank == 2
        assert choice.cumulative_logprob == -4.0
        later = session.step(out(name, 2, [a], logprobs=[TokenLogprobs([a], [-1.0], 1)])).outputs[0].outputs[0]
        assert (len(later.logprobs), later.cumulative_logprob) == (1, -5.0)

    def test_prompt_logprobs_in_pieces(self):
        """Guards against prompt log-probabilities lost or doubled when the prompt came in chunks, or a second time."""
        for kind in RequestOutputKind:
            session = Session()
            (name,) = session.add(prompt=[1, 2, 3, 4], prompt_logprobs=0, output_kind=kind)
            entries = [TokenLogprobs([i], [-float(i)], 1) for i in (2, 3, 4)]
            assert session.step(out(name, 0, [], prompt_logprobs=entries[:2])).outputs == []
            again = out(name, 0, [5], prompt_logprobs=entries[1:], prompt_logprobs_start=2, finish_reason=LENGTH)
            (output,) = session.step(again).outputs
            assert output.prompt_logprobs[0] is None
            assert [list(at) for at in output.prompt_logprobs[1:]] == [[2], [3], [4]]

    def test_prompt_logprobs_are_told_once_in_deltas(self):
        """Guards against sending the whole prompt with every token."""
        session = Session()
        (name,) = session.add(prompt=[1], prompt_logprobs=0, output_kind=DELTA)
        told = [session.step(out(name, position, [5])).outputs[0].prompt_logprobs for position in range(2)]
        assert told == [[None], None]

    def test_cached_tokens_and_seed(self):
        """Guards against usage that counts what a choice reused from its own siblings."""
        session = Session()
        names = session.add(n=2, seed=5)
        step = session.step(out(names[1], 0, [5], num_cached_tokens=32))
        assert step.outputs[0].num_cached_tokens == 0
        step = session.step(out(names[0], 0, [5], num_cached_tokens=16))
        assert (step.outputs[0].num_cached_tokens, step.outputs[0].seed) == (16, 5)
        step = session.step(out(names[0], 1, [5], num_cached_tokens=48))  # resumed elsewhere
        assert step.outputs[0].num_cached_tokens == 16


class TestEnds:
    def test_abort(self):
        """Guards against blocks held, and memory kept, for a caller who went away."""
        session = Session()
        names = session.add(n=3)
        session.step(out(names[1], 0, [5], finish_reason=LENGTH))
        assert session.close("r") == [names[0], names[2]]
        assert session.requests.get("r") is None
        assert session.step(out(names[0], 0, [5])).outputs == []
        session.add()  # the id is free again

    def test_error(self):
        """Guards against a failed request that looks like a finished one."""
        session = Session()
        (name,) = session.add()
        step = session.step(out(name, 0, [], finish_reason=FinishReason.ERROR, error="no luck"))
        assert (step.outputs[0].error, step.outputs[0].outputs[0].finish_reason) == ("no luck", "error")
        assert step.abort_ids == []

    def test_cancelled(self):
        """Guards against outputs under way, of a request that was ended with an error, reaching its reader."""
        session = Session()
        names = session.add("a", n=2, output_kind=FINAL)
        session.step(out(names[0], 0, ids_of("x"), finish_reason=LENGTH), out(names[1], 0, [5]))
        request = session.requests.get("a")
        request.mailbox.put(EngineDeadError("the engine died"))
        assert request.mailbox.ended
        assert session.requests.cancel(request) == [names[1]]
        assert session.step(out(names[1], 1, [5], finish_reason=LENGTH)).outputs == []
        with pytest.raises(EngineDeadError, match="the engine died"):
            asyncio.run(request.mailbox.get())
        with pytest.raises(InvalidRequestError, match="in use"):  # until its reader has seen the end
            session.add("a")
        assert session.close("a") == []

    def test_ids_in_use(self):
        """Guards against two open requests answering to one id."""
        session = Session()
        session.add()
        with pytest.raises(InvalidRequestError) as caught:
            session.add()
        assert caught.value.param == "request_id"

    def test_nothing_is_kept(self):
        """Guards against memory that grows with every request served."""
        session = Session()
        for index in range(20):
            (name,) = session.add(f"r{index}", stop=["x"])
            session.step(out(name, 0, ids_of("x") if index % 2 else [5], finish_reason=None if index % 2 else LENGTH))
        assert not session.requests._requests
        assert not session.requests._running


def test_outputs_are_values():
    """Guards against an output that changes under its reader when later tokens come."""
    session = Session()
    (name,) = session.add(logprobs=0)
    entry = TokenLogprobs([5], [-1.0], 1)
    first = session.step(out(name, 0, [5], logprobs=[entry])).outputs[0]
    copy = dataclasses.replace(first, outputs=[dataclasses.replace(choice) for choice in first.outputs])
    before = (list(copy.outputs[0].token_ids), len(copy.outputs[0].logprobs), copy.outputs[0].text)
    session.step(out(name, 1, [6], logprobs=[entry]))
    after = first.outputs[0]
    assert (after.token_ids, len(after.logprobs), after.text) == before


class TestJournal:
    """What a new engine would need to go on with the open requests."""

    def test_each_token_is_noted_once(self):
        session = Session()
        (name,) = session.add()
        for start, ids, mu in ((0, [5, 6], 1.0), (1, [6, 7], 2.0), (3, [8], 3.0), (2, [7], 2.0)):  # the last again
            session.step(out(name, start, ids, sampler_state=(mu,)))
        (resumed,) = session.resumable()
        assert resumed.output_token_ids == [5, 6, 7, 8]
        assert resumed.sampler_state == (3.0,), "the state after the last token"
        assert (resumed.request_id, session.requests.num_running, session.requests.num_tokens) == (name, 1, 4)
        session.step(out(name, 4, [9], finish_reason=STOP))
        assert (session.requests.num_running, session.requests.num_tokens) == (0, 0)

    def test_a_resumed_request_keeps_what_it_came_with(self):
        """Guards against a continuation, on another engine, whose first tokens or their text are lost."""
        session = Session()
        opened = session.process("The fox", SamplingParams(seed=3), "r", [ids_of("ab")])
        (sent,) = opened.engine_requests
        assert sent.output_token_ids == ids_of("ab")
        session.requests.open(opened)
        more = ids_of("c")
        step = session.step(out(sent.request_id, len(sent.output_token_ids), more))
        assert session.resumable()[0].output_token_ids == sent.output_token_ids + more
        assert step.outputs[0].outputs[0].text == "abc"
        session.step(out(sent.request_id, 9, [8]))  # a gap ends it
        assert session.resumable() == []
        assert session.requests.num_tokens == 0

    def test_only_running_choices(self):
        """Guards against a choice that has ended, here or in the engine, being generated again."""
        session = Session()
        names = session.add(n=3, stop=["b"])
        session.step(
            out(names[0], 0, ids_of("b")), out(names[1], 0, [5], finish_reason=LENGTH), out(names[2], 0, ids_of("a"))
        )
        assert [request.request_id for request in session.resumable()] == [names[2]]
        session.close("r")
        assert session.resumable() == []


class TestContinuation:
    """A stream that is computed again, or goes on from known tokens, comes in the same pieces."""

    @settings(max_examples=60)
    @given(
        text=st.text(alphabet="ab \n🙂é", min_size=1, max_size=20),
        stops=st.lists(st.text(alphabet="ab \n🙂", min_size=1, max_size=3), max_size=2),
        known=st.integers(0, 40),
        places=st.lists(st.integers(0, 60), max_size=5),
    )
    def test_pieces_depend_on_the_tokens_alone(self, text, stops, known, places):
        """Guards against a position in a stream that means another place after a restart."""
        ids = ids_of(text)
        undisturbed = self.pieces(ids, stops, 0, [])
        assert self.pieces(ids, stops, 0, places) == undisturbed  # several tokens in one step
        known = min(known, sum(len(token_ids) for _, token_ids, _ in undisturbed) - 1)
        assert self.pieces(ids, stops, known, places) == undisturbed

    def pieces(self, ids, stops, known, places):
        """What the reader gets of each token; the first `known` ones come with the request."""
        session = Session()
        params = SamplingParams(max_tokens=None, stop=stops, output_kind=DELTA, seed=1)
        request = session.process("The fox", params, "r", [ids[:known]])
        session.requests.open(request)
        seen = list(request.mailbox._items)
        (engine_request,) = request.engine_requests
        for start, chunk in cut(ids[known:], places):
            finish = LENGTH if start + len(chunk) == len(ids) - known else None
            whole = out(engine_request.request_id, known + start, chunk, finish_reason=finish)
            parts = session.requests.add([whole], token_by_token=True)
            seen += [output for _, output, _ in parts if output is not None]
        return [(o.outputs[0].text, o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in seen]

    def test_what_does_not_fit_is_refused(self):
        """Guards against known tokens that belong to another request, and log-probabilities that would be missing."""
        session = Session()
        for params, known in (({"n": 2}, [[5]]), ({"max_tokens": 2}, [[5, 6]]), ({"logprobs": 1}, [[5]])):
            params = SamplingParams(**{"max_tokens": 9, **params})
            with pytest.raises(InvalidRequestError, match="output_token_ids"):
                session.process("The fox", params, "r", known)
