"""Prompts for a measured server: made of random ids, or taken from a file of conversations.

    random              prompts that share nothing
    prefix_repetition   groups of prompts, each group behind its own prefix, to exercise a prefix cache
    repetitive          prompts that repeat a short pattern, to exercise prompt lookup
    sharegpt            first turns of conversations, with the lengths of the answers they got

Prompts of the first three kinds have exact lengths where the server takes token ids. Names and filters are those of
vLLM's benchmark.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

from penstock import InvalidRequestError
from penstock.errors import check_choice, check_float, check_int, invalid, one_line
from penstock.spec.config_file import CONFIG, read_config
from penstock.tokenizer.hf import HFTokenizer, load_tokenizer
from penstock.weights.hub import resolve_model

DATASETS = ("random", "prefix_repetition", "repetitive", "sharegpt")
PATTERN_LEN = 16  # length of the pattern that a repetitive prompt repeats
MIN_TURN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOTAL_TOKENS = 4, 1024, 2048  # limits for a conversation that is taken


@dataclass(frozen=True, slots=True)
class Dataset:
    """The kind and the lengths of prompts and answers.

    Attributes:
        name: one of DATASETS.
        path: the file of conversations for sharegpt, a JSON list of {"conversations": [{"from", "value"}, ...]}.
        input_len: tokens of a prompt behind its prefix.
        output_len: tokens of an answer; None: 128, or the length in the file.
        range_ratio: lengths are drawn evenly from (1 - range_ratio) to (1 + range_ratio) times the two above.
        prefix_len: tokens that the prompts of one group share; with random, all prompts are one group.
        num_prefixes: number of groups, for prefix_repetition.
    """

    name: str = "random"
    path: str | None = None
    input_len: int = 128
    output_len: int | None = None
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1

    def __post_init__(self) -> None:
        check_choice("dataset_name", self.name, DATASETS)
        check_int("input_len", self.input_len, 1, 10**6)
        check_int("output_len", self.output_len, 1, 10**6, optional=True)
        check_float("random_range_ratio", self.range_ratio, 0.0, 1.0)
        check_int("prefix_len", self.prefix_len, 0, 10**6)
        check_int("num_prefixes", self.num_prefixes, 1, 10**6)
        if (self.name == "sharegpt") != (self.path is not None):
            raise invalid("dataset_path", "--dataset-name sharegpt needs it, and no other dataset takes it")


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt, as ids or, where the server gets messages, as text, and the length of the requested answer."""

    prompt: list[int] | str
    prompt_len: int
    output_len: int


class Vocabulary:
    """The token ids of a model, from which prompts are made, and its tokenizer, which is read on first use.

    Args:
        model: a directory, a hub name or demo. A config.json is enough for prompts of ids.

    Raises:
        ModelLoadError: there is no such model.
        InvalidRequestError: the model's config.json has no vocab_size.
    """

    def __init__(self, model: str) -> None:
        self._path = resolve_model(model, weights=False)
        size = read_config(self._path).get("vocab_size")
        if not isinstance(size, int) or size < 1:
            raise invalid("model", f"{self._path / CONFIG} has no vocab_size")
        self.size = size
        self._tokenizer: HFTokenizer | None = None

    @property
    def tokenizer(self) -> HFTokenizer:
        """The model's tokenizer. Raise ModelLoadError if it has none."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._path)
        return self._tokenizer


def draw_samples(dataset: Dataset, vocabulary: Vocabulary, count: int, seed: int, *, as_text: bool) -> list[Sample]:
    """Draw `count` samples; equal seeds give equal samples.

    Args:
        as_text: make texts of the prompts, for servers and routes that take no ids.

    Raises:
        InvalidRequestError: the file has no conversation of a fitting length.
        ModelLoadError: the tokenizer is needed and missing.
    """
    rng = random.Random(seed)
    if dataset.name == "sharegpt":
        return _from_conversations(dataset, vocabulary, count, rng, as_text=as_text)
    prefixes = [_ids(rng, vocabulary, dataset.prefix_len) for _ in range(dataset.num_prefixes)]
    samples = []
    for index, (length, output_len) in enumerate(draw_lengths(dataset, count, seed)):
        own = _ids(rng, vocabulary, min(length, PATTERN_LEN) if dataset.name == "repetitive" else length)
        ids = prefixes[index % len(prefixes)] + (own * (1 + length // len(own)))[:length]
        samples.append(_sample(ids, output_len, vocabulary, as_text))
    return samples


def draw_lengths(dataset: Dataset, count: int, seed: int) -> Iterator[tuple[int, int]]:
    """Yield the number of tokens of each prompt, without its prefix, and of its answer. Not for sharegpt."""
    rng = random.Random(f"lengths {seed}")  # separate from the ids' generator, because a simulation draws no ids
    inputs = _limits(dataset.input_len, dataset.range_ratio)
    outputs = _limits(dataset.output_len or 128, dataset.range_ratio)
    if inputs[0] == inputs[1] and outputs[0] == outputs[1]:
        yield from repeat((inputs[0], outputs[0]), count)  # fast, because a simulation has millions of requests
        return
    for _ in range(count):
        length = rng.randint(*inputs)
        yield length, rng.randint(*outputs)


def _ids(rng: random.Random, vocabulary: Vocabulary, length: int) -> list[int]:
    return rng.choices(range(vocabulary.size), k=length)


def _limits(mean: int, ratio: float) -> tuple[int, int]:
    return max(1, round(mean * (1 - ratio))), max(1, round(mean * (1 + ratio)))


def _sample(ids: list[int], output_len: int, vocabulary: Vocabulary, as_text: bool) -> Sample:
    prompt = vocabulary.tokenizer.decode(ids) if as_text else ids
    return Sample(prompt, len(ids), output_len)


def _from_conversations(
    dataset: Dataset, vocabulary: Vocabulary, count: int, rng: random.Random, *, as_text: bool
) -> list[Sample]:
    turns = list(_first_turns(Path(dataset.path or "")))
    rng.shuffle(turns)
    samples: list[Sample] = []
    for question, answer in turns:
        ids = vocabulary.tokenizer.encode(question)
        wanted = len(vocabulary.tokenizer.encode(answer, add_special_tokens=False))
        output_len = dataset.output_len or wanted
        if len(ids) < MIN_TURN_TOKENS or output_len < MIN_TURN_TOKENS:
            continue
        if len(ids) <= MAX_PROMPT_TOKENS and len(ids) + output_len <= MAX_TOTAL_TOKENS:
            samples.append(Sample(question if as_text else ids, len(ids), output_len))
        if len(samples) == count:
            return samples
    if not samples:
        raise invalid("dataset_path", f"{dataset.path}: no conversation has two turns of a fitting length")
    return [samples[index % len(samples)] for index in range(count)]


def _first_turns(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the first two turns of each conversation that has at least two.

    Raises:
        InvalidRequestError: the file cannot be read or is not a list of conversations.
    """
    if path.exists() and not path.is_file():
        raise _refused(path, "is not a file")  # a device may have no end
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"is not JSON: {one_line(error)}") from None
    if not isinstance(found, list):
        raise _refused(path, "must be a list of objects with conversations")
    for entry in found:
        turns = entry.get("conversations", entry.get("conversation")) if isinstance(entry, dict) else None
        texts = [_text(turn) for turn in turns[:2]] if isinstance(turns, list) else []
        if len(texts) == 2 and all(texts):
            yield texts[0], texts[1]


def _text(turn: Any) -> str:
    value = turn.get("value", turn.get("content")) if isinstance(turn, dict) else None
    return value if isinstance(value, str) else ""


def _refused(path: Path, reason: str) -> InvalidRequestError:
    return invalid("dataset_path", f"{path} {reason}")
