"""The router on a virtual fleet: caches are found again, and nobody starves for their sake."""

from collections import OrderedDict
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.client.admission import MAX_LOOKED_AT, QueuedTokens, Router, block_hashes
from penstock.engine.adapters import Adapter
from penstock.engine.kv_cache_manager import KVCacheManager
from penstock.engine.request import Request
from penstock.interface.messages import AdapterInfo, EngineRequest
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import CacheGroup

BLOCK = 16
NUM_ENGINES = 4
OUTPUTS = 40


@dataclass
class VirtualEngine:
    """A cache of blocks, least recently used first out, and a queue that is worked off at a token a tick."""

    num_blocks: int = 400
    queued: QueuedTokens = field(default_factory=QueuedTokens)
    cache: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    line: list[str] = field(default_factory=list)

    def take(self, name: str, hashes: list[bytes]) -> int:
        """Compute a prompt; return how many of its blocks were there."""
        found = next((index for index, one in enumerate(hashes) if one not in self.cache), len(hashes))
        for one in reversed(hashes):
            self.cache[one] = None
            self.cache.move_to_end(one)
        while len(self.cache) > self.num_blocks:
            self.cache.popitem(last=False)
        self.line.append(name)
        return found


class Fleet:
    """Requests on their way to virtual engines. way: `router`, `load` (without caches) or `turns`."""

    def __init__(self, way: str) -> None:
        self.engines = [VirtualEngine() for _ in range(NUM_ENGINES)]
        self.router: Router[int] = Router(BLOCK, 400)
        self.way = way
        self.num_found = self.num_blocks = self.num_requests = 0
        self.excess = 0.0  # the most that an engine was given beyond the one with the least to do

    def send(self, prompt: list[int]) -> int:
        hashes = block_hashes(prompt, None, BLOCK)
        queued = {index: engine.queued.total for index, engine in enumerate(self.engines)}
        if self.way == "turns":
            index = self.num_requests % NUM_ENGINES
        else:
            index = self.router.choose(hashes if self.way == "router" else [], len(prompt), queued)
        self.excess = max(self.excess, queued[index] - min(queued.values()))
        self.router.note(index, hashes)
        name = f"request {self.num_requests}"
        found = self.engines[index].take(name, hashes)
        self.engines[index].queued.add(name, len(prompt) - BLOCK * found, OUTPUTS)
        self.num_found, self.num_blocks = self.num_found + found, self.num_blocks + len(hashes)
        self.num_requests += 1
        return index

    def work(self, num_tokens: int) -> None:
        """Let each engine compute so many tokens of the first request in its line."""
        for engine in self.engines:
            if engine.line:
                engine.queued.computed(engine.line[0], num_tokens)
                if engine.queued._work[engine.line[0]].outputs == 0:
                    engine.queued.remove(engine.line.pop(0))

    @property
    def hit_share(self) -> float:
        return self.num_found / self.num_blocks


def conversations(random: Random, count: int) -> list[list[int]]:
    """Prompts of tenants, each of which has a long prefix of its own, with a short question at the end."""
    prefixes = [[random.randrange(1000) for _ in range(512)] for _ in range(24)]
    return [random.choice(prefixes) + [random.randrange(1000) for _ in range(32)] for _ in range(count)]


def test_a_prefix_is_found_where_it_was_computed():
    """Guards against routing that spreads every prefix over all caches, none of which has room for all of them."""
    prompts = conversations(Random(1), 600)
    shares = {}
    for way in ("router", "load", "turns"):
        fleet = Fleet(way)
        for prompt in prompts:
            fleet.send(prompt)
            fleet.work(60)
        shares[way] = fleet.hit_share
    assert shares["router"] > 0.85
    assert max(shares["load"], shares["turns"]) < 0.6


def test_one_prefix_for_all_does_not_fill_one_engine():
    """Guards against a shared system prompt that sends everybody to the same engine while the others are idle."""
    fleet = Fleet("router")
    prefix = list(range(512))
    given = [fleet.send([*prefix, *([number] * 32)]) for number in range(100)]
    assert {given.count(index) for index in range(NUM_ENGINES)} <= set(range(20, 31))
    assert fleet.hit_share > 0.85


def test_equal_engines_take_turns():
    """Guards against the first of several idle engines getting everything that has little to compute."""
    router: Router[str] = Router(BLOCK)
    idle = {"a": 0.0, "b": 0.0, "c": 0.0}
    assert [router.choose([], 5, idle) for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=80)


@settings(max_examples=60)
@given(st.lists(st.tuples(TOKENS, st.integers(0, 60)), min_size=1, max_size=40))
def test_nobody_is_given_more_than_a_prompt_beyond_the_least(load):
    """Guards against an engine that starves, and one that is overrun, whatever prompts come in whatever order."""
    fleet = Fleet("router")
    for prompt, done in load:
        fleet.send(prompt)
        fleet.work(done)
    assert fleet.excess <= max(len(prompt) for prompt, _ in load)


@settings(max_examples=60)
@given(TOKENS, TOKENS, st.sampled_from([None, "a", "b"]), st.sampled_from([None, "a", "b"]))
def test_what_counts_as_cached(one, other, salt, other_salt):
    """Guards against prefixes that are counted across salts, against tokens that differ, and against a prompt without a
    token left to compute."""
    router: Router[int] = Router(BLOCK)
    router.note(0, block_hashes(one, salt, BLOCK))
    found = router.cached_tokens(0, block_hashes(other, other_salt, BLOCK), len(other))
    equal = next((index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    equal = min(len(one), len(other)) if equal is None else equal
    expected = min(equal // BLOCK, (len(other) - 1) // BLOCK) * BLOCK if salt == other_salt else 0
    assert found == expected
    router.forget(0)
    assert router.cached_tokens(0, block_hashes(other, other_salt, BLOCK), len(other)) == 0


@pytest.mark.parametrize("salt", [None, "a"])
@pytest.mark.parametrize("sha256", [None, "0f" * 32, "10" * 32])
def test_the_client_hashes_as_the_engine_does(salt, sha256):
    """Guards against blocks of an adapter that no other server finds, or that requests of another adapter find."""
    prompt = list(range(3 * BLOCK + 1))
    adapter = None if sha256 is None else Adapter(AdapterInfo("a", "/a", 1, (), sha256, 0), 0)
    request = Request(EngineRequest("a", prompt, SamplingParams(max_tokens=1), cache_salt=salt), 0, 256, 0.0, adapter)
    cache = KVCacheManager([CacheGroup((0,), None, 8, BLOCK)])
    root = b"" if sha256 is None else bytes.fromhex(sha256)
    assert cache._hashes(request) == block_hashes(prompt, salt, BLOCK, root=root)


def test_memory_is_bounded_and_the_beginning_is_forgotten_last():
    """Guards against an index that grows with every prompt, and against one that keeps the end of a prefix, which
    cannot be found without its beginning."""
    router: Router[int] = Router(BLOCK, 10)
    hashes = block_hashes(list(range(20 * BLOCK)), None, BLOCK)
    router.note(0, hashes)
    assert router.cached_tokens(0, hashes, 20 * BLOCK) == 10 * BLOCK
    assert len(router._known[0]) == 10
    assert len(block_hashes([1] * BLOCK * (MAX_LOOKED_AT + 9), None, BLOCK)) == MAX_LOOKED_AT


def test_tokens_are_counted_until_they_are_computed():
    """Guards against a queue that drifts away from what is in it."""
    queued = QueuedTokens()
    queued.add("a", 100, 10)
    queued.add("b", 5, 20, rows=4)
    assert (queued.total, queued.rows, len(queued)) == (135, 5, 2)
    queued.computed("a", 0)  # its prompt is not computed yet
    queued.computed("c", 5)
    assert queued.total == 135
    queued.computed("a", 1)
    assert queued.total == 34
    queued.computed("a", 50)  # more than was expected
    assert queued.total == 25
    queued.remove("b")
    queued.remove("b")
    queued.remove("a")
    assert (queued.total, queued.rows, len(queued)) == (0, 0, 0)
