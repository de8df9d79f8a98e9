"""Pooling: vectors for a prompt instead of tokens. PoolingParams says which, PoolerConfig what a model is made for.

    prompt of T tokens -> final hidden states [T, hidden] -> pooled [hidden], cut to `dimensions`, divided by its length
                       -> a classifier's head: logits of the pooled state [labels] -> softmax, sigmoid or as they are

Values that a request leaves open (None) are settled by the client from the model's PoolerConfig. Names are vLLM's.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import fsum
from operator import mul
from typing import Any, Generic, TypeVar

from penstock.errors import (
    NotSupportedError,
    check_bool,
    check_choice,
    check_int,
    check_options,
    fail,
    int_tuple,
    invalid,
    option,
)

# LAST, CLS: hidden state of the last or the first token; MEAN: average over all tokens; ALL: every token, [T, hidden].
POOLING_TYPES = ("LAST", "MEAN", "CLS", "ALL")
# vLLM's tasks, and whether they are a classifier's; the token tasks pool ALL
POOLING_TASKS = {"embed": False, "token_embed": False, "classify": True, "token_classify": True}
# of pooler_config
POOLER_OPTIONS = ("pooling_type", "normalize", "add_eos_token", "is_matryoshka", "matryoshka_dimensions")
TRUNCATION_SIDES = ("right", "left")
MAX_DIMENSIONS = 2**20
MAX_POOLED_BYTES = 2**26  # limit for the hidden states of one request
FLOAT_BYTES = 4

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """The vector or vectors that a request wants of the hidden states of its prompt.

    Attributes:
        task: one of POOLING_TASKS; None: that of a classifier, otherwise "embed".
        pooling_type: one of POOLING_TYPES.
        normalize: divide each vector by its length.
        use_activation: make scores of a classifier's logits; None: yes.
        prompt_name: which of the model's prompts is put before the text; None: its default, if it has one.
        dimensions: keep this many leading numbers; only for models that are made for it.
        truncate_prompt_tokens: a longer prompt is cut to this many tokens; -1: to the context; None: it is refused.
        truncation_side: "right" keeps its first tokens, "left" its last ones.
        second_text_start: in a pair of texts, the index of the first token of the second one; only a model with token
            types makes a difference of it. None: there is one text.

    Raises:
        InvalidRequestError: a value has the wrong type or is out of range; `param` names the field.
    """

    task: str | None = option(None, tuple(POOLING_TASKS))
    pooling_type: str | None = option(None, POOLING_TYPES)
    normalize: bool | None = option(None, bool)
    use_activation: bool | None = option(None, bool)
    prompt_name: str | None = option(None, str)
    dimensions: int | None = option(None, range(1, MAX_DIMENSIONS + 1))
    truncate_prompt_tokens: int | None = option(None, range(-1, 2**31))
    truncation_side: str = option("right", TRUNCATION_SIDES)
    second_text_start: int | None = option(None, range(1, 2**31))

    def __post_init__(self) -> None:
        check_options(self)
        if self.truncate_prompt_tokens == 0:
            raise fail("truncate_prompt_tokens", 0, "-1, or at least 1")

    @property
    def is_classified(self) -> bool:
        return POOLING_TASKS.get(self.task or "", False)

    @property
    def needs_whole_prompt(self) -> bool:
        """True if other tokens than the last one count, so that no cached prefix may be reused."""
        return self.pooling_type != "LAST"

    def truncated(
        self, token_ids: Sequence[int], max_model_len: int, special_ids: Collection[int] = frozenset()
    ) -> list[int]:
        """Cut the ids of a prompt that is too long. Those of `special_ids` that it begins and ends with stay."""
        if self.truncate_prompt_tokens is None:
            return list(token_ids)
        limit = max_model_len if self.truncate_prompt_tokens < 0 else min(self.truncate_prompt_tokens, max_model_len)
        if len(token_ids) <= limit:
            return list(token_ids)
        is_right = self.truncation_side == "right"
        cut_first = list(token_ids)[:: -1 if is_right else 1]
        kept = list(takewhile(special_ids.__contains__, cut_first))[:limit]
        rest = cut_first[len(kept) + len(token_ids) - limit :]
        return [*kept, *rest][:: -1 if is_right else 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerConfig:
    """The embedding that a model makes of its hidden states, unless a request says otherwise.

    Attributes:
        add_eos_token: whether EOS follows a text that is encoded with special tokens.
        hidden_size: length of a hidden state; 0: not known.
        labels: the names of the classes of a classifier, as in ModelConfig; (): it gives embeddings.
        num_token_types: as in ModelConfig.
        prompts: what the model was trained to see before a text, by name.
        default_prompt: the name of the prompt of a text without one; None: there is none.
        is_matryoshka: whether leading numbers of an embedding are an embedding too, so that any `dimensions` may be
            requested.
        matryoshka_dimensions: the only dimensions that may be requested; (): none, or any with is_matryoshka.
        unsupported: why this model's embeddings cannot be computed: its files ask for more than is built.
    """

    pooling_type: str = "LAST"
    normalize: bool = True
    add_eos_token: bool = False
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    hidden_size: int = 0
    labels: tuple[str, ...] = ()
    num_token_types: int = 0
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    unsupported: str | None = None

    def with_options(self, given: Mapping[str, Any] | None) -> "PoolerConfig":
        """Apply the engine option pooler_config. A pooling_type in it overrides `unsupported`.

        Raises:
            InvalidRequestError: it has an unknown key or a wrong value.
        """
        if given is None:
            return self
        for name in given:
            if name not in POOLER_OPTIONS:
                raise fail("pooler_config", name, f"a mapping of some of {', '.join(POOLER_OPTIONS)}")
        for name in ("normalize", "add_eos_token", "is_matryoshka"):
            check_bool(f"pooler_config.{name}", given.get(name, False))
        check_choice("pooler_config.pooling_type", given.get("pooling_type", "LAST"), POOLING_TYPES[:3])
        ids = given.get("matryoshka_dimensions", ())
        dimensions = int_tuple("pooler_config", ids, low=1, high=MAX_DIMENSIONS, max_items=1024)
        unsupported = None if "pooling_type" in given else self.unsupported
        return replace(self, **{**given, "matryoshka_dimensions": dimensions, "unsupported": unsupported})

    def settle(self, params: PoolingParams, num_tokens: int) -> PoolingParams:
        """Settle every parameter that a request leaves open.

        Raises:
            InvalidRequestError: the model is not made for these dimensions, or the result would be too large.
            NotSupportedError: the model's files say that its embeddings need more than is built.
        """
        of_labels = "token_classify" if self.pooling_type == "ALL" else "classify"
        task = params.task or (of_labels if self.labels else "embed")
        if POOLING_TASKS[task] != bool(self.labels):
            why = "it is a classifier" if self.labels else "it has no classifier's head"
            raise invalid("task", f"this model does not {task}: {why}")
        self._check_fields_of(task, params)
        kind = params.pooling_type or ("ALL" if task.startswith("token_") else self.pooling_type)
        if task == "classify" and kind == "ALL":
            raise invalid("task", "this classifier gives scores to tokens: token_classify")
        if self.unsupported is not None and params.pooling_type is None:
            raise NotSupportedError(f"{self.unsupported}; pooler_config, or pooling_type, decides", param="model")
        self._check_dimensions(params.dimensions)
        width = len(self.labels) or self.hidden_size
        if kind == "ALL" and num_tokens * width * FLOAT_BYTES > MAX_POOLED_BYTES:
            raise invalid(
                "pooling_type",
                f"the hidden states of {num_tokens} tokens take more than {MAX_POOLED_BYTES} bytes; at "
                f"most {MAX_POOLED_BYTES // (width * FLOAT_BYTES)} tokens are allowed",
            )
        usual = self.normalize and kind != "ALL" and not self.labels
        normalize = usual if params.normalize is None else params.normalize
        return replace(params, task=task, pooling_type=kind, normalize=normalize)

    def _check_fields_of(self, task: str, params: PoolingParams) -> None:
        """Refuse the fields that mean nothing with a task, or for the model."""
        if task.startswith("token_") and params.pooling_type not in (None, "ALL"):
            raise fail("pooling_type", params.pooling_type, f"ALL, or absent, with the task {task}")
        names = ("normalize", "dimensions", "prompt_name") if POOLING_TASKS[task] else ("use_activation",)
        for name in names:
            if getattr(params, name) is not None:
                raise invalid(name, f"not allowed with the task {task}")
        if params.second_text_start is not None and self.num_token_types < 2:
            raise invalid("second_text_start", "this model has no types of tokens")

    def prompted(self, text: str, name: str | None) -> str:
        """Put a prompt before a text: the one of this name, or else the default. Raise InvalidRequestError if there is
        none of the name."""
        name = self.default_prompt if name is None else name
        if name is None:
            return text
        check_choice("prompt_name", name, tuple(self.prompts))
        return self.prompts[name] + text

    def ended(self, token_ids: Sequence[int], eos_token_id: int | None) -> list[int]:
        """Add the EOS that follows a text, unless the tokenizer has added it already."""
        is_missing = self.add_eos_token and eos_token_id is not None and token_ids[-1:] != [eos_token_id]
        return [*token_ids, eos_token_id] if is_missing else list(token_ids)  # type: ignore[list-item]

    def _check_dimensions(self, dimensions: int | None) -> None:
        if dimensions is None:
            return
        if not self.is_matryoshka and not self.matryoshka_dimensions:
            raise invalid(
                "dimensions",
                f"{dimensions} is not allowed: nothing says that the leading numbers of this model's "
                "embeddings are embeddings too; if they are, start it with pooler_config = "
                '{"is_matryoshka": true}',
            )
        if self.matryoshka_dimensions and dimensions not in self.matryoshka_dimensions:
            raise fail("dimensions", dimensions, f"one of {', '.join(map(str, self.matryoshka_dimensions))}")
        if self.hidden_size:
            check_int("dimensions", dimensions, 1, self.hidden_size)


def cosine(first: Iterable[float], second: Iterable[float]) -> float:
    """Compute the cosine of two unit vectors: an exact sum, rounded once, whatever the order of its terms."""
    return max(-1.0, min(1.0, fsum(map(mul, first, second))))


# --- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class PoolingOutput:
    """data: a numpy array, float32: [hidden], or [T, hidden] with pooling_type ALL."""

    data: Any


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float] = field(repr=False)

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """probs: a classifier's score of each label."""

    probs: list[float] = field(repr=False)

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The score of two texts: what a cross-encoder gives them, or the cosine of their embeddings, -1 to 1."""

    score: float


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[Result]):
    """The result of a pooling request. prompt_token_ids: the computed tokens, after any truncation."""

    request_id: str
    outputs: Result
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The embedding of a text."""


@dataclass(frozen=True, slots=True)
class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The classes of a text."""


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The score of a pair. prompt_token_ids: the tokens of both texts, the second after the first."""
