"""/v1/embeddings, /score and /rerank: the shapes that clients send and read, and what is refused."""

import base64
from array import array
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from math import cos, sin
from typing import Any

import openai
import pytest

from penstock.errors import RequestFailedError
from penstock.interface.outputs import CompletionOutput, FinishReason, RequestOutput
from penstock.interface.pooling import PoolerConfig
from penstock.interface.sampling_params import SamplingParams
from tests.official import official_client
from tests.server.fakes import BOS, EOS, Behaviour, FakeEngineClient, FakeTokenizer
from tests.server.harness import RunningServer, app_client, running


class Angles(FakeEngineClient):
    """An engine whose embedding of a text points to an angle: the sum of its ids, in hundredths.

    Attributes:
        most_open: requests that were open at once.
    """

    most_open = 0

    async def _run(self, ids: list[int], params: SamplingParams, request_id: str) -> AsyncIterator[RequestOutput]:
        assert params.pooling is not None
        self.most_open = max(self.most_open, len(self.open))
        await self._wait(0)
        angle = sum(ids) / 100
        choice = CompletionOutput(0, "", [], finish_reason=FinishReason.STOP)
        pooled = array("f", [cos(angle), sin(angle)]).tobytes()
        yield RequestOutput(request_id, None, ids, [choice], finished=True, pooled=pooled)


def vector(text: str) -> list[float]:
    angle = sum([256, *text.encode()]) / 100
    return array("f", [cos(angle), sin(angle)]).tolist()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(Angles()) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with official_client(server.url) as client:
        yield client


def test_texts_that_end_with_eos() -> None:
    """Guards against texts without the EOS that the model was trained with, and against ids that are changed."""
    engine = Angles()
    engine.info = replace(engine.info, pooler=PoolerConfig(add_eos_token=True))
    found = []
    for body in ({"input": "Hi"}, {"input": [256, *b"Hi", 257]}, {"input": "Hi", "add_special_tokens": False}):
        answer = app_client(engine).post("/v1/embeddings", json=body)
        assert answer.status_code == 200, answer.text
        found.append((answer.json()["usage"]["prompt_tokens"], answer.json()["data"][0]["embedding"]))
    assert found[0] == found[1]
    assert found[0][0] == 4
    assert found[2][0] == 2


def test_the_official_client(client: openai.OpenAI) -> None:
    """Guards against base64 that the client reads as other numbers (it asks for it by default), and answers that are
    not in the order of the texts."""
    answer = client.embeddings.create(model="fake", input=["one", "two"], user="somebody")
    assert [(item.index, item.object, item.embedding) for item in answer.data] == [
        (0, "embedding", vector("one")),
        (1, "embedding", vector("two")),
    ]
    assert (answer.object, answer.usage.prompt_tokens, answer.usage.total_tokens) == ("list", 8, 8)
    plain = client.embeddings.create(model="fake", input="one", encoding_format="float")
    assert [item.embedding for item in plain.data] == [vector("one")]
    ids = client.embeddings.create(model="fake", input=[[256, 111], [256]], encoding_format="float")
    assert [item.embedding for item in ids.data] == [vector("o"), vector("")]
    assert client.embeddings.create(model="fake", input=[256, 111]).data[0].embedding == vector("o")


def post(path: str, body: dict[str, Any], engine: FakeEngineClient | None = None) -> Any:
    return app_client(engine or Angles()).post(path, json=body)


def test_scores() -> None:
    """Guards against pairs that are mixed up, and a text that does not score 1 against itself."""
    answer = post("/score", {"text_1": "ab", "text_2": ["ab", "b"]}).json()
    assert [item["score"] for item in answer["data"]] == pytest.approx([1.0, cos(0.97)])
    assert (answer["object"], answer["data"][1]["object"], answer["usage"]["total_tokens"]) == ("list", "score", 8)
    pairs = post("/v1/score", {"text_1": ["a", "b"], "text_2": ["b", "b"]}).json()
    assert [item["score"] for item in pairs["data"]] == pytest.approx([cos(0.01), 1.0])


def test_ranking() -> None:
    """Guards against documents in the wrong order or under a wrong index, and a top_n that keeps the worst."""
    body: dict[str, Any] = {"query": "a", "documents": ["az", {"text": "b"}, "a", "b"]}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        results = post(path, body).json()["results"]
        assert [item["index"] for item in results] == [2, 1, 3, 0]  # of equals, the first in the list comes first
        assert [item["document"]["text"] for item in results] == ["a", "b", "b", "az"]
        assert results[0]["relevance_score"] == pytest.approx(1.0)
    short = post("/rerank", {**body, "top_n": 1, "return_documents": False}).json()
    assert [sorted(item) for item in short["results"]] == [["index", "relevance_score"]]


@pytest.mark.parametrize(
    ("path", "body", "param", "word"),
    [
        ("/v1/embeddings", {}, "input", "required"),
        ("/v1/embeddings", {"input": ""}, "input", "at least one character"),
        ("/v1/embeddings", {"input": []}, "input", "must be a text"),
        ("/v1/embeddings", {"input": ["a", 1]}, "input", "must be a text"),
        ("/v1/embeddings", {"input": [[1], []]}, "input", "no tokens"),
        ("/v1/embeddings", {"input": [300]}, "input", "300"),
        ("/v1/embeddings", {"input": "a" * 512}, "input", "exceed the context of 512"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input", "at most 2048"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "int8"),
        ("/v1/embeddings", {"input": "a", "dimensions": 1}, "dimensions", "pooler_config"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ("/v1/embeddings", {"input": "a", "n": 2}, "n", "unknown"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "as many as"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "at least one"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n", "-1"),
    ],
)
def test_what_is_refused(path: str, body: dict[str, Any], param: str, word: str) -> None:
    """Guards against a wrong body that fails as a 500, or an error that does not name the field."""
    answer = post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert word in error["message"]


def test_truncation_and_the_whole_context() -> None:
    """Guards against a prompt that fills the context and is refused, and usage that counts what was cut off."""
    assert post("/v1/embeddings", {"input": "a" * 511}).json()["usage"]["prompt_tokens"] == 512
    cut = post("/v1/embeddings", {"input": ["abc", "a"], "truncate_prompt_tokens": 2}).json()
    assert [item["embedding"] for item in cut["data"]] == [vector("a"), vector("a")]
    assert cut["usage"]["prompt_tokens"] == 4
    left = post("/v1/embeddings", {"input": [1, 2, 3], "truncate_prompt_tokens": 1, "truncation_side": "left"}).json()
    assert left["data"][0]["embedding"] == pytest.approx([cos(0.03), sin(0.03)])


def test_a_long_list_takes_turns() -> None:
    """Guards against one call that fills the queue of all others, and dimensions that the model has."""
    engine = Angles(Behaviour(delay_s=1e-4))
    engine.info = replace(engine.info, max_num_seqs=3, pooler=PoolerConfig(is_matryoshka=True))
    answer = post("/v1/embeddings", {"input": ["a"] * 20, "encoding_format": "base64", "dimensions": 2}, engine)
    assert len(answer.json()["data"]) == 20
    assert array("f", base64.b64decode(answer.json()["data"][19]["embedding"])).tolist() == vector("a")
    assert engine.most_open == 3
    assert {params.pooling.dimensions for _, params, _ in engine.seen if params.pooling} == {2}


def test_one_failure_ends_the_call() -> None:
    """Guards against a list with a gap, and requests of the call that go on after it has failed."""
    engine = Angles(Behaviour(failure=RequestFailedError("not finite")))
    answer = post("/v1/embeddings", {"input": ["a"] * 5}, engine)
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "not finite")
    assert not engine.open


class Pairs(FakeTokenizer):
    """Ends a pair's second text with EOS."""

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        ids = self.encode(first)
        return [*ids, *second.encode(), EOS], len(ids)


class Classes(FakeEngineClient):
    """A classifier's engine: the score of each label, of a text or of each token, is the sum of the ids in thousandths
    plus the label's number."""

    def __init__(self, *labels: str, token_types: int = 0) -> None:
        super().__init__()
        self.tokenizer = Pairs()
        pooler = PoolerConfig(labels=labels, pooling_type="CLS", num_token_types=token_types)
        self.info = replace(self.info, pooler=pooler)

    async def _run(self, ids: list[int], params: SamplingParams, request_id: str) -> AsyncIterator[RequestOutput]:
        assert params.pooling is not None
        of_tokens = params.pooling.task == "token_classify"
        scores = [sum(item) / 1000 + label for item in ([[i] for i in ids] if of_tokens else [ids])
                  for label in range(len(self.info.pooler.labels))]  # fmt: skip
        choice = CompletionOutput(0, "", [], finish_reason=FinishReason.STOP)
        yield RequestOutput(request_id, None, ids, [choice], finished=True, pooled=array("f", scores).tobytes())


def test_classes() -> None:
    """Guards against the worst label, scores of another text, and an answer that is not vLLM's."""
    engine = Classes("bad", "good")
    answer = post("/classify", {"input": ["a", "b"], "use_activation": False}, engine).json()
    first, second = answer["data"]
    assert (first["label"], first["num_classes"], first["index"]) == ("good", 2, 0)
    assert first["probs"] == pytest.approx([0.353, 1.353])
    assert second["probs"] == pytest.approx([0.354, 1.354])
    assert answer["id"].startswith("classify-")
    assert (answer["object"], answer["usage"]["total_tokens"]) == ("list", 4)
    assert {params.pooling.use_activation for _, params, _ in engine.seen if params.pooling} == {False}


def test_pooling_of_texts_and_tokens() -> None:
    """Guards against a matrix that comes as one row, a default that is not vLLM's, and a task that is left out."""
    engine = Classes("bad", "good")
    (tokens,) = post("/pooling", {"input": "a"}, engine).json()["data"]
    assert tokens["object"] == "pooling"
    assert tokens["data"] == [pytest.approx([0.256, 1.256]), pytest.approx([0.097, 1.097])]
    (text,) = post("/pooling", {"input": "a", "task": "classify"}, engine).json()["data"]
    assert text["data"] == pytest.approx([0.353, 1.353])
    coded = post("/pooling", {"input": "a", "encoding_format": "base64"}, engine).json()["data"][0]["data"]
    assert array("f", base64.b64decode(coded)).tolist() == pytest.approx([0.256, 1.256, 0.097, 1.097])
    plain = post("/pooling", {"input": "a", "task": "embed"}).json()
    assert plain["data"][0]["data"] == pytest.approx(vector("a"))
    assert plain["id"].startswith("pool-")


def test_cross_encoders() -> None:
    """Guards against the cosine of two scores, texts that are not read together, a pair cut without its end, and one
    whose second text is not told from the first."""
    engine = Classes("relevant", token_types=2)
    answer = post("/score", {"text_1": "a", "text_2": ["b", "bb"]}, engine).json()
    assert [item["score"] for item in answer["data"]] == pytest.approx([0.708, 0.806])
    assert [params.pooling.second_text_start for _, params, _ in engine.seen if params.pooling] == [2, 2]
    results = post("/rerank", {"query": "a", "documents": ["b", "bb"]}, engine).json()["results"]
    assert [(item["index"], item["document"]["text"]) for item in results] == [(1, "bb"), (0, "b")]
    cut = post("/score", {"text_1": "a", "text_2": "bbbb", "truncate_prompt_tokens": 4}, engine)
    assert engine.seen[-1][0] == [BOS, *b"ab", EOS]
    assert cut.json()["usage"]["prompt_tokens"] == 4
    untyped = Classes("relevant")
    assert post("/score", {"text_1": "a", "text_2": "b"}, untyped).status_code == 200
    assert [params.pooling.second_text_start for _, params, _ in untyped.seen if params.pooling] == [None]


def test_prompts_of_sentence_transformers() -> None:
    """Guards against a text without the prompt that was named, and one that gets it twice."""
    engine = Angles()
    engine.info = replace(
        engine.info, pooler=PoolerConfig(prompts={"query": "q: ", "none": ""}, default_prompt="query")
    )
    for body, text in (({"input": "a"}, b"q: a"), ({"input": "a", "prompt_name": "none"}, b"a")):
        assert post("/v1/embeddings", body, engine).status_code == 200
        assert engine.seen[-1][0] == [BOS, *text]
    for body in ({"input": "a", "prompt_name": "poem"}, {"input": [1], "prompt_name": "query"}):
        answer = post("/v1/embeddings", body, engine)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_name")


@pytest.mark.parametrize(
    ("path", "body", "engine", "param", "word"),
    [
        ("/classify", {"input": "a"}, Angles(), "task", "no classifier's head"),
        ("/pooling", {"input": "a", "task": "token_classify"}, Angles(), "task", "no classifier's head"),
        ("/pooling", {"input": "a", "task": "rank"}, Angles(), "task", "rank"),
        ("/pooling", {"input": "a", "use_activation": True}, Angles(), "use_activation", "token_embed"),
        ("/v1/embeddings", {"input": "a"}, Classes("x", "y"), "task", "it is a classifier"),
        ("/classify", {"input": []}, Classes("x", "y"), "input", "must be a text"),
        ("/score", {"text_1": "a", "text_2": "b"}, Classes("x", "y"), "model", "needs one label"),
        ("/score", {"text_1": "a", "text_2": ""}, Classes("x"), "text_2", "a text"),
        ("/rerank", {"query": "a", "documents": [""]}, Classes("x"), "documents", "a text"),
        (
            "/rerank",
            {"query": "a", "documents": ["b"], "add_special_tokens": False},
            Classes("x"),
            "add_special_tokens",
            "apart",
        ),
        ("/rerank", {"query": "a", "documents": ["b" * 512]}, Classes("x"), "query", "exceed the context"),
    ],
)
def test_what_classifiers_refuse(
    path: str, body: dict[str, Any], engine: FakeEngineClient, param: str, word: str
) -> None:
    """Guards against a 500, or the answer of another task."""
    answer = post(path, body, engine)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert word in answer.json()["error"]["message"]
