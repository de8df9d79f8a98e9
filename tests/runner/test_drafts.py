"""Drafts on real models with the native kernels: tokens and log-probabilities have the bits that they have without."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.assembly import BuiltEngine, build_engine
from penstock.config import EngineConfig
from penstock.engine.speculation import Speculation
from penstock.interface.plugins import PROCESSORS, register_logits_processor
from penstock_lab.prove import axes, tiny_models
from penstock_lab.prove.askers import Offline
from penstock_lab.prove.completions import Completion, Key, Member, Query, ask_alone
from penstock_lab.prove.every_draft import EveryDraft
from tests.fakes_drafts import Oracle
from tests.kernels.packed import levels

pytestmark = [pytest.mark.skipif(not levels(), reason="no native library"), pytest.mark.covers("C18")]
LENGTH = 112
KINDS = {
    **axes.KINDS,
    "bad words": {"temperature": 0.9, "bad_words_token_ids": ((5, 6), (7,)), "min_tokens": 6},
    "processor": {"temperature": 0.8, "logits_processors": {"no_repeat": {}}},
}


@pytest.fixture(scope="module", autouse=True)
def _processor() -> Any:
    @register_logits_processor("no_repeat")
    def no_repeat(logits: Any, args: dict[str, Any], token_ids: list[int]) -> Any:
        """Depends on the whole text, as n-gram blocking does; a guess too many shows as another token."""
        logits[0, token_ids[-8:]] -= 3.0
        return logits + 0.01 * (len(token_ids) % 5)

    yield
    del PROCESSORS["no_repeat"]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {"demo": "demo", **tiny_models.write(Path(tmp_path_factory.mktemp("models")))}


def built(model: str, places: dict[str, str], **options: Any) -> BuiltEngine:
    dummy = {} if model == "demo" else {"load_format": "dummy"}
    common = {"kernels": "cpu", "threads": 1, "max_model_len": LENGTH, "max_num_seqs": 12, "dtype": "bfloat16"}
    return build_engine(EngineConfig.from_options(model=places[model], **{**common, **dummy, **options}))


def queries(vocab_size: int) -> list[Query]:
    random = Random(0)
    common = {"max_tokens": 14, "logprobs": 2}
    return [
        Query(random.choices(range(3, vocab_size), k=random.randint(1, 60)), {**common, **kind, "seed": 5 + i}, name)
        for i, (name, kind) in enumerate(KINDS.items())
    ]


def oracle(asked: list[Query], crowd: list[Member], expected: dict[Key, Completion], share: float) -> Oracle:
    """A proposer that knows what each member of a crowd will answer."""

    def truth(request_id: str, token_ids: list[int], count: int) -> list[int]:
        index, choice = map(int, request_id.split())
        member = crowd[index]
        start = len(token_ids) - len(asked[member.query].prompt)
        return expected[member.query, choice].ids[start : start + count] or [3]

    return Oracle(truth, share, vocab_size=40)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("demo", {}),
        ("Gemma 2", {}),
        ("Mistral with a window", {"block_size": LENGTH, "enable_prefix_caching": False}),
        ("Llama", {"kv_cache_dtype": "int8", "max_num_batched_tokens": 24}),
    ],
)
def test_drafts_change_no_bit(model: str, options: dict[str, Any], places: dict[str, str]) -> None:
    """Guards, for every kind of request in one crowd, preempted and resumed, against noise, penalties, masks and
    processors that count a draft too many or too few, and a window, ring or prefix with a rejected draft in it."""
    engine = built(model, places, **options).engine
    asked = queries(engine.vocab_size)
    cuts = [0 if query.is_search or query.is_pooled else index % 3 for index, query in enumerate(asked)]
    crowd = [Member(index, 1 + index % 2, delay=index, cut=cut) for index, cut in enumerate(cuts)]
    wanted = sorted({(member.query, choice) for member in crowd for choice in range(member.n)})
    expected = ask_alone(engine, asked, wanted)
    for share in (1.0, 0.6):
        proposer = oracle(asked, crowd, expected, share)
        engine.speculate(Speculation(proposer, 6, policy=EveryDraft()))
        found = Offline(engine, asked, expected).ask(crowd, Random(share), disturbed=True)
        for (index, choice), answer in found.items():
            assert answer.difference(expected[crowd[index].query, choice], crowd[index].cut) is None
        stats = engine.stats()
        assert 0 < stats.num_accepted_tokens_total <= stats.num_draft_tokens_total
        assert (stats.num_accepted_tokens_total == stats.num_draft_tokens_total) is (share == 1.0)
    engine.shutdown()
