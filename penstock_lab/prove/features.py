"""Random requests for proofs, each with a few of all the options that a request can have."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from penstock import InvalidRequestError, SamplingParams

PROCESSOR = "prove_ramp"  # a processor of the proof, registered where it is used
MAX_TOKENS = 40
SALTS = (None, None, None, "a", "b")
SHARED_RATE = 0.5  # share of prompts that begin like others
REPEAT_RATE = 0.3  # share of prompts that repeat themselves, so that lookups find drafts
SEARCH_RATE = 0.1
MAX_PRIORITY = 3
Fields = dict[str, Any]


def ramp(logits: Any, args: Any) -> Any:
    """Make every second token less likely, as an example of a user's own logits processor."""
    logits[:, 1::2] -= args or 1.0
    return logits


def _ids(random: Random, vocab_size: int, most: int) -> list[int]:
    return random.choices(range(vocab_size), k=random.randint(1, most))


FEATURES: dict[str, tuple[float, Callable[[Random, int], Fields]]] = {  # name -> (how often, its fields)
    "greedy": (0.4, lambda random, size: {"temperature": 0.0}),
    "temperature": (0.3, lambda random, size: {"temperature": random.choice([0.3, 0.8, 1.4])}),
    "top_p": (0.2, lambda random, size: {"top_p": random.choice([0.5, 0.9])}),
    "top_k": (0.15, lambda random, size: {"top_k": random.choice([1, 5, 100])}),
    "min_p": (0.1, lambda random, size: {"min_p": 0.05}),
    "penalties": (0.2, lambda random, size: {
        "presence_penalty": random.choice([0.0, 0.7]), "frequency_penalty": random.choice([-0.4, 0.5]),
        "repetition_penalty": random.choice([1.0, 1.2]),
    }),
    "n": (0.15, lambda random, size: {"n": random.randint(2, 4)}),
    "logprobs": (0.3, lambda random, size: {"logprobs": random.choice([0, 1, 5, 20])}),
    "prompt_logprobs": (0.08, lambda random, size: {"prompt_logprobs": random.choice([0, 2])}),
    "stop": (0.2, lambda random, size: {
        "stop": random.sample(["e", " the", "\n", "ing", ". ", "you"], 2),
        "include_stop_str_in_output": random.random() < 0.5,
    }),
    "stop_token_ids": (0.1, lambda random, size: {"stop_token_ids": random.sample(range(size), min(size, 40))}),
    "ignore_eos": (0.3, lambda random, size: {"ignore_eos": True}),
    "min_tokens": (0.15, lambda random, size: {"min_tokens": random.randint(1, 20)}),
    "min_length": (0.05, lambda random, size: {"min_length": random.randint(1, 40), "min_new_tokens": 2}),
    "logit_bias": (0.1, lambda random, size: {"logit_bias": {i: random.uniform(-9, 9) for i in _ids(random, size, 9)}}),
    "bad_words": (0.1, lambda random, size: {"bad_words": random.sample(["the", "a", "is", ".", "and"], 2)}),
    "bad_words_ids": (0.05, lambda random, size: {"bad_words_ids": [_ids(random, size, 3) for _ in range(3)]}),
    "suppress_tokens": (0.05, lambda random, size: {"suppress_tokens": _ids(random, size, 20)}),
    "sequence_bias": (0.05, lambda random, size: {"sequence_bias": [[_ids(random, size, 2), 4.0] for _ in range(4)]}),
    "no_repeat_ngram_size": (0.08, lambda random, size: {"no_repeat_ngram_size": random.randint(1, 4)}),
    "forced_eos_token_id": (0.04, lambda random, size: {"forced_eos_token_id": random.randrange(size)}),
    "exponential_decay": (0.04, lambda random, size: {"exponential_decay_length_penalty": [3, 1.2]}),
    "truncations": (0.08, lambda random, size: {"typical_p": 0.9, "eta_cutoff": 0.001, "top_h": 0.9}),
    "dry": (0.12, lambda random, size: {"dry_multiplier": 0.8, "dry_allowed_length": random.randint(1, 3)}),
    "xtc": (0.08, lambda random, size: {"xtc_probability": 0.5, "xtc_threshold": 0.05}),
    "mirostat": (0.08, lambda random, size: {"mirostat": random.randint(1, 2), "mirostat_tau": 4.0}),
    "processor": (0.05, lambda random, size: {"logits_processors": {PROCESSOR: random.choice([None, 2.5])}}),
    "no text": (0.05, lambda random, size: {"detokenize": False}),
    "special tokens": (0.05, lambda random, size: {"skip_special_tokens": False}),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asked:
    """A random request.

    Attributes:
        features: the names of its FEATURES.
        leaves_after: number of tokens of its first choice after which it is aborted; None: never.
    """

    prompt: Fields
    params: SamplingParams
    priority: int
    features: tuple[str, ...]
    leaves_after: int | None


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes random requests for a model.

    Attributes:
        lengths: shortest and longest prompt; the logarithm of the length is evenly distributed.
        shared: texts with which some of the prompts begin.
    """

    vocab_size: int
    lengths: tuple[int, int]
    shared: list[list[int]]
    abort_rate: float = 0.1

    def make(self, random: Random) -> Asked:
        """Return a valid request. Features that exclude each other are drawn again."""
        prompt = {"prompt_token_ids": self._prompt(random), "cache_salt": random.choice(SALTS)}
        leaves_after = random.randint(1, MAX_TOKENS // 2) if random.random() < self.abort_rate else None
        while True:
            names, fields = self._fields(random)
            try:
                params = SamplingParams(max_tokens=random.randint(1, MAX_TOKENS), seed=random.getrandbits(60), **fields)
            except InvalidRequestError:
                continue
            return Asked(prompt, params, random.randint(-MAX_PRIORITY, MAX_PRIORITY), names, leaves_after)

    def _fields(self, random: Random) -> tuple[tuple[str, ...], Fields]:
        if random.random() < SEARCH_RATE:
            fields: Fields = {"use_beam_search": True, "n": random.randint(1, 4), "logprobs": random.choice([None, 2])}
            fields |= {"length_penalty": random.choice([0.0, 1.0, 2.0]), "early_stopping": random.random() < 0.3}
            return ("beam search",), fields
        names = tuple(name for name, (rate, _) in FEATURES.items() if random.random() < rate)
        fields = {}
        for name in names:
            fields |= FEATURES[name][1](random, self.vocab_size)
        return names or ("none",), fields

    def _prompt(self, random: Random) -> list[int]:
        least, most = self.lengths
        length = min(most, round(least * (most / least) ** random.random()))
        ids: list[int] = []
        if random.random() < SHARED_RATE:
            ids = random.choice(self.shared)[: random.randint(1, length)]
        phrase = random.choices(
            range(self.vocab_size), k=random.randint(2, 12) if random.random() < REPEAT_RATE else length
        )
        while len(ids) < length:
            ids = ids + phrase
        return ids[:length]
