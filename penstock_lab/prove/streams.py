"""Streams for the proofs: requests whose features are mixed at random, and what their readers receive.

A new feature of requests that a death could harm gets a line in FEATURES. Then every proof that reads streams uses it.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from penstock import CompletionOutput, FinishReason, Logprob, RequestOutput, SamplingParams
from penstock.interface.messages import ModelInfo

MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS = 40, 240
SHARE_OF_FEATURE = 0.3  # share of the streams that have a certain feature
STOPS = (".\n", " said", "?", " was", "the", "\n\n", "e")
Make = Callable[[Random, ModelInfo], dict[str, Any]]  # -> fields of SamplingParams

FEATURES: dict[str, Make] = {
    "temperature 1": lambda random, info: {"temperature": 1.0},
    "truncated": lambda random, info: {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "min_p": 0.01},
    "penalties": lambda random, info: {
        "presence_penalty": random.uniform(-1, 1), "frequency_penalty": 0.5, "repetition_penalty": 1.2,
    },
    "logprobs": lambda random, info: {"logprobs": random.randint(0, 4)},
    "prompt logprobs": lambda random, info: {"prompt_logprobs": 1},
    "stop strings": lambda random, info: {"stop": random.sample(STOPS, 2)},
    "stop tokens": lambda random, info: {"stop_token_ids": [random.randrange(info.vocab_size) for _ in range(8)]},
    "late end": lambda random, info: {"min_tokens": random.randint(1, MAX_OUTPUT_TOKENS // 2)},
    "bias": lambda random, info: {"logit_bias": {random.randrange(info.vocab_size): -5.0}},
    "choices": lambda random, info: {"n": random.randint(2, 3)},
    "deltas": lambda random, info: {"output_kind": "delta"},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stream:
    """A request of a proof."""

    features: tuple[str, ...]
    prompt_token_ids: list[int]
    params: SamplingParams

    @classmethod
    def at_random(cls, random: Random, info: ModelInfo, *, has_text: bool = True) -> "Stream":
        """Draw a stream with random features. has_text: the model has a tokenizer."""
        names = [name for name in FEATURES if random.random() < SHARE_OF_FEATURE]
        if not has_text:
            names = [name for name in names if name != "stop strings"]
        room = info.max_model_len // 2
        prompt = [random.randrange(info.vocab_size) for _ in range(random.randint(1, min(MAX_PROMPT_TOKENS, room)))]
        fields: dict[str, Any] = {
            "temperature": 0.0, "seed": random.getrandbits(32), "ignore_eos": random.random() < 0.8,
            "max_tokens": random.randint(MAX_OUTPUT_TOKENS // 2, MAX_OUTPUT_TOKENS),
        }  # fmt: skip
        for name in names:
            fields |= FEATURES[name](random, info)
        fields["max_tokens"] = min(fields["max_tokens"], room)
        fields["min_tokens"] = min(fields.get("min_tokens", 0), fields["max_tokens"])
        return cls(tuple(names), prompt, SamplingParams(**fields))


@dataclass(slots=True)
class ReceivedChoice:
    """All outputs that the reader of one choice has received, together, however they were divided."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def add(self, output: CompletionOutput, *, is_delta: bool) -> None:
        """Take an output. Raise ValueError if it takes back what was given before."""
        tokens, logprobs = output.token_ids, output.logprobs or []
        if is_delta:
            self.token_ids, self.text = self.token_ids + tokens, self.text + output.text
            self.logprobs = self.logprobs + logprobs
        else:
            if tokens[: len(self.token_ids)] != self.token_ids or not output.text.startswith(self.text):
                raise ValueError(f"{self.token_ids} {self.text!r} became {tokens} {output.text!r}")
            self.token_ids, self.text, self.logprobs = tokens, output.text, logprobs
        self.cumulative_logprob = output.cumulative_logprob
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason


@dataclass(slots=True)
class ReceivedStream:
    """All that the reader of one stream has received."""

    choices: dict[int, ReceivedChoice] = field(default_factory=dict)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices.values())

    def add(self, output: RequestOutput, params: SamplingParams) -> None:
        """Take an output of the stream. Raise ValueError if it takes back what was given before."""
        for choice in output.outputs:
            self.choices.setdefault(choice.index, ReceivedChoice()).add(choice, is_delta=params.output_kind == "delta")
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs

    def difference(self, undisturbed: "ReceivedStream") -> str | None:
        """Find where this answer differs from that of an undisturbed run; None if they are equal."""
        for index, expected in undisturbed.choices.items():
            found = self.choices.get(index, ReceivedChoice())
            for name in ReceivedChoice.__slots__:
                ours, theirs = getattr(found, name), getattr(expected, name)
                if ours != theirs:
                    return f"choice {index}: {name} is {ours!r}, undisturbed {theirs!r}"
        same = self.choices.keys() == undisturbed.choices.keys() and self.prompt_logprobs == undisturbed.prompt_logprobs
        return None if same else "there are other choices or prompt log-probabilities"


async def read(outputs: AsyncIterator[RequestOutput], stream: Stream, noticed: Callable[[], None]) -> ReceivedStream:
    """Read a stream to its end. `noticed` is called after each output."""
    answer = ReceivedStream()
    async for output in outputs:
        answer.add(output, stream.params)
        noticed()
    return answer
