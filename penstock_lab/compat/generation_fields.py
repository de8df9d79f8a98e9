"""Convert the fields of Transformers' GenerationConfig to fields of SamplingParams."""

from collections.abc import Mapping
from typing import Any

from penstock import InvalidRequestError, ModelLoadError
from penstock.errors import fail
from penstock.interface.plugins import PROCESSORS as REGISTERED
from penstock.spec.config_reader import ConfigReader, same
from penstock.spec.generation_config import HARMLESS, OF_A_CALL, REFUSED, not_neutral, read_sampling


def sampling_of(fields: Mapping[str, Any], num_prompt_tokens: int) -> dict[str, Any]:
    """Return fields of a GenerationConfig as fields of SamplingParams.

    Raises:
        InvalidRequestError: a field would change the answer and is not supported.
    """
    read = ConfigReader(fields, "generation_config")
    try:
        sampling = _read(read, fields, num_prompt_tokens)
        refused = read_refused(read)
    except ModelLoadError as error:
        raise InvalidRequestError(str(error), param="generation_config") from None
    if refused:
        reasons = "; ".join(f"{name}: not supported ({reason})" for name, reason in refused.items())
        raise InvalidRequestError(f"generation_config: {reasons}", param=next(iter(refused)))
    return sampling


def _read(read: ConfigReader, fields: Mapping[str, Any], num_prompt_tokens: int) -> dict[str, Any]:
    sampling = read_sampling(read)
    if sampling.get("temperature") is None and read.boolean("do_sample", False):
        sampling["temperature"] = 1.0
    if read.has("max_length") and "max_tokens" not in sampling:
        longest = read.integer("max_length", 1, 2**31 - 1)
        if longest <= num_prompt_tokens:
            raise fail("max_length", longest, f"more than the {num_prompt_tokens} tokens of the prompt")
        sampling["max_tokens"] = longest - num_prompt_tokens
    ends = read.raw("eos_token_id")
    if ends is not None:  # these ids replace the model's own end tokens
        sampling |= {"stop_token_ids": ends if isinstance(ends, list) else [ends], "ignore_eos": True}
    read.raw("bos_token_id")
    processors = {name: fields[name] for name in fields if name in REGISTERED and read.has(name)}
    if processors:
        sampling["logits_processors"] = processors
    return sampling


def read_refused(read: ConfigReader) -> dict[str, str]:
    """Return each unread key of a call's config that asks for something, and why it is refused. Must be called last."""
    found = {key: REFUSED.get(key, {"why": "unknown parameter"})["why"] for key in not_neutral(read, HARMLESS)}
    for key, neutral in OF_A_CALL.items():
        value = read.raw(key)
        if value is not None and not any(same(value, item) for item in neutral):
            found[key] = "it would have no effect here"
    return found


def fields_of(generation_config: Any) -> dict[str, Any]:
    """Return the fields of Transformers' GenerationConfig, or of a mapping."""
    to_dict = getattr(generation_config, "to_dict", None)
    values = to_dict() if callable(to_dict) else generation_config
    if not isinstance(values, Mapping):
        raise fail("generation_config", generation_config, "a GenerationConfig of Transformers, or a mapping")
    return dict(values)
