"""The fields that request bodies share with LogitsParams, under the same names. All of them may be null."""

from typing import Any

import msgspec


class LogitsFields(msgspec.Struct, kw_only=True, frozen=True):
    """Transformers' logits processors and llama.cpp's samplers. SamplingParams checks the values."""

    no_repeat_ngram_size: int | None = None
    suppress_tokens: list[int] | None = None
    begin_suppress_tokens: list[int] | None = None
    bad_words_ids: list[list[int]] | None = None
    sequence_bias: list[Any] | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | list[int] | None = None
    min_length: int | None = None
    min_new_tokens: int | None = None
    exponential_decay_length_penalty: list[float] | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    top_h: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: str | list[str] | None = None
    dry_sequence_breaker_ids: list[list[int]] | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
