"""Flags shared by the commands: engine options and sampling parameters, with vLLM's names.

A flag sets the field of the same name in EngineConfig or SamplingParams, which check the values. Flags that were not
given are left out, so that every default is stated only once.
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import Field, fields
from fractions import Fraction
from typing import TYPE_CHECKING, Any, get_origin

from penstock.cli.terminal import LOGGER, saying
from penstock.config import PARTS, EngineConfig, option_names
from penstock.errors import LOG_LEVELS, Interval, shown
from penstock.interface.sampling_params import TYPES, SamplingParams
from penstock.interface.structured_outputs import StructuredOutputsParams
from penstock.weights.hub import find_local

if TYPE_CHECKING:
    from penstock.client.llm import LLM

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?[bB])?")
POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
UNSET = argparse.SUPPRESS
MAX_SCHEMA = 2**23  # bytes of a file
DEFAULT_MAX_TOKENS = 256
FLAGS = {  # field -> name of its flag, where they differ
    "structured_outputs": "json_schema_file",
    "drain_timeout_s": "drain_timeout",
    "request_timeout_s": "request_timeout",
    "served_model_names": "served_model_name",
    "allowed_hosts": "allowed_host",
    "allowed_origins": "allowed_origin",
    "imports": "import",
}


def parse_size(text: str) -> int:
    """Parse a number with an optional unit: 4096, 4k (1000s), 4K or 4KiB (1024s), 2.1GiB, 1.5GB (1000s).

    A fraction of a byte is dropped.

    Raises:
        argparse.ArgumentTypeError: the text does not have this form.
    """
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more; write it like 4096, 4k or 2GiB")
    number, unit, suffix = match.groups()
    decimal = unit.islower() if suffix is None else not suffix.startswith("i")
    size = Fraction(number) * (1000 if decimal else 1024) ** POWERS[unit.lower()]
    if not unit and size.denominator != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(size)


def parse_bias(text: str) -> tuple[int, float]:
    """Parse token id and bias from a text like 42=-5.

    Raises:
        argparse.ArgumentTypeError: the text is not ID=BIAS.
    """
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=BIAS, like 42=-5") from None


def read_schema(file: str) -> StructuredOutputsParams:
    """Read a file with a JSON schema into StructuredOutputsParams.

    Raises:
        argparse.ArgumentTypeError: the file cannot be read, or holds no JSON schema.
    """
    try:
        with open(file, "rb") as opened:
            data = opened.read(MAX_SCHEMA + 1)  # a device or a pipe may have no end
        if len(data) > MAX_SCHEMA:
            raise ValueError(f"it has more than {MAX_SCHEMA >> 20} MiB")
        return StructuredOutputsParams(json=data.decode())
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, a null byte in the name, or an InvalidRequestError
        raise argparse.ArgumentTypeError(f"{shown(file)} is not a JSON schema: {error}") from None


def parse_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raise argparse.ArgumentTypeError if the text is not one."""
    found = _parse_json(text)
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a JSON object")
    return found


def parse_list(text: str) -> list[Any]:
    """Parse a JSON array. Raise argparse.ArgumentTypeError if the text is not one."""
    found = _parse_json(text)
    if not isinstance(found, list):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a JSON array")
    return found


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not JSON: {error}") from None


def parse_early_stopping(text: str) -> bool | str:
    """Parse true or false, and leave any other text unchanged, for SamplingParams to check."""
    return {"true": True, "false": False}.get(text.lower(), text)


INTEGER, NUMBER = {"type": int, "metavar": "N"}, {"type": float, "metavar": "X"}
KINDS: dict[Any, dict[str, Any]] = {  # type of a field of SamplingParams -> arguments of add_argument
    int: INTEGER,
    int | None: INTEGER,
    float: NUMBER,
    float | None: NUMBER,
    str | Sequence[str] | None: {"action": "append", "metavar": "TEXT"},
    Sequence[int] | None: {"type": int, "nargs": "+", "metavar": "ID"},
}
SPELLINGS: dict[str, dict[str, Any]] = {  # fields whose flags are spelt in a way that their types do not say
    "bad_words": {"action": "append", "metavar": "WORD"},
    "bad_words_ids": {"type": parse_list, "metavar": "JSON"},
    "early_stopping": {"type": parse_early_stopping, "metavar": "{true,false,never}"},
    "exponential_decay_length_penalty": {"type": float, "nargs": 2, "metavar": ("N", "FACTOR")},
    "forced_bos_token_id": {"type": int, "metavar": "ID"},
    "forced_eos_token_id": {"type": int, "nargs": "+", "metavar": "ID"},
    "logit_bias": {"type": parse_bias, "action": "append", "metavar": "ID=BIAS"},
    "lora_modules": {"nargs": "+", "metavar": "NAME=PATH"},
    "logits_processors": {"type": parse_object, "metavar": "JSON"},
    "max_tokens": INTEGER,
    "sequence_bias": {"type": parse_list, "metavar": "JSON"},
    "structured_outputs": {"type": read_schema, "metavar": "FILE", "dest": "structured_outputs"},
}


DEFAULT_MODEL = "demo"


class _Model(argparse.Action):
    """Stores the model, which may be an argument or the value of --model."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, "given_model", values)  # in words before; namespace.model may come from a file
        if "=" in before and "=" in values and before != values:  # NAME=PATH of several models
            values = f"{before},{values}"
        elif before not in (DEFAULT_MODEL, values):
            parser.error(f"--model: {before} and {values} are two models; give one")
        namespace.model = namespace.given_model = values
        getattr(namespace, "sources", {}).pop("model", None)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the argument MODEL, and --model, which many scripts for vLLM have."""
    parser.set_defaults(model=DEFAULT_MODEL)
    help_text = (
        f"a Hugging Face directory, a GGUF file, a hub name, or demo, the bundled model (default: {DEFAULT_MODEL})"
    )
    parser.add_argument("model", action=_Model, nargs="?", default=UNSET, metavar="MODEL", help=help_text)
    parser.add_argument("--model", action=_Model, default=UNSET, metavar="MODEL", help="the same as the argument MODEL")
    help_text = "the GGUF file of a directory or repository that has several: MODEL:NAME says the same"
    parser.add_argument("--quantization-file", default=UNSET, metavar="NAME", help=help_text)


def add_log_level(parser: argparse.ArgumentParser | argparse._ArgumentGroup, help_text: str) -> None:
    """Add --log-level, whose values may be in upper case."""
    choices: dict[str, Any] = {"type": str.lower, "choices": LOG_LEVELS, "metavar": "{" + ",".join(LOG_LEVELS) + "}"}
    parser.add_argument("--log-level", default="info", help=f"{help_text} (default: info)", **choices)


def add_imports(parser: argparse.ArgumentParser) -> None:
    """Add --import, which loads the user's own files."""
    help_text = "a Python file that registers a model or a logits processor (repeatable)"
    parser.add_argument("--import", action="append", default=UNSET, metavar="FILE", help=help_text)


def add_engine_options(
    parser: argparse.ArgumentParser, names: Sequence[str] | None = None, title: str = "engine"
) -> None:
    """Add --import, and a group of flags for the fields of EngineConfig's parts: for `names`, or for all of them."""
    add_imports(parser)
    group = parser.add_argument_group(title)
    for item in (item for part in PARTS.values() for item in fields(part)):
        if names is None or item.name in names:
            is_open = item.default in (None, True, ())  # then the help text explains the default
            help_text = item.metadata["help"] + ("" if is_open else f" (default: {item.default})")
            group.add_argument(flag_of(item.name), default=UNSET, help=help_text, **_flag_kind(item))


def _flag_kind(item: Field[Any]) -> dict[str, Any]:
    """Choose the arguments of add_argument for the values that an option allows."""
    allowed = item.metadata["allowed"]
    if allowed is bool:
        return {"action": argparse.BooleanOptionalAction}
    if allowed is str:
        return {"metavar": "FILE" if item.default is None else "NAME"}
    if item.name in SPELLINGS:
        return SPELLINGS[item.name]
    if isinstance(allowed, Interval):
        return NUMBER
    if allowed is dict:
        return {"type": parse_object, "metavar": "JSON"}
    if isinstance(allowed, range):
        if words := item.metadata.get("words", ()):
            return {
                "type": lambda text: text if text in words else parse_size(text),
                "metavar": "|".join(("N", *words)),
            }
        return {"type": int if allowed.start < 0 else parse_size, "metavar": "N"}
    choices = [choice for choice in allowed if choice is not None]
    return {"type": type(choices[0]), "metavar": "{" + ",".join(map(str, choices)) + "}"}


def add_generation_options(parser: argparse.ArgumentParser, max_tokens: int | None = DEFAULT_MAX_TOKENS) -> None:
    """Add MODEL and the sampling and engine flags of a command that generates in process. --seed is the request's.

    max_tokens: how many tokens an answer has at most unless the user says so; None: all that the context has room for.
    """
    add_model(parser)
    add_sampling_options(parser.add_argument_group("sampling"), max_tokens)
    add_engine_options(parser, [name for name in option_names() if name != "seed"])
    add_log_level(parser, "notes on standard error: info has the choices made and the speed; above it, errors only")


def add_sampling_options(group: argparse._ActionsContainer, max_tokens: int | None) -> None:
    """Add the flags of SamplingParams."""
    for item in sampling_fields():
        kind = SPELLINGS.get(item.name) or KINDS.get(TYPES[item.name]) or _switch(item)
        if item.name == "max_tokens" and max_tokens is not None:
            kind = {**kind, "default": max_tokens}
        help_text = item.metadata["help"] + (f" (default: {kind['default']})" if "default" in kind else "")
        group.add_argument(flag_of(item.name), help=help_text, **{"default": UNSET, **kind})


def sampling_fields() -> list[Field[Any]]:
    """List the fields of SamplingParams that are flags."""
    return [item for item in fields(SamplingParams) if item.metadata["help"]]


def _switch(item: Field[Any]) -> dict[str, Any]:
    """Choose the arguments of add_argument for a field that is true or false: what is on can be turned off."""
    return {"action": argparse.BooleanOptionalAction if item.default else "store_true"}


def given_names(kind: type) -> list[str]:
    """List the fields of a dataclass of options that are flags."""
    return [item.name for item in fields(kind) if item.metadata.get("help")]


def add_fields(group: argparse._ArgumentGroup, kind: type, names: Sequence[str]) -> None:
    for item in fields(kind):
        if item.name in names:
            how: dict[str, Any] = {"metavar": item.metadata.get("metavar")}
            if item.metadata["allowed"] is bool:
                how = {"action": argparse.BooleanOptionalAction}
            elif isinstance(item.metadata["allowed"], Interval | range):
                how["type"] = float if isinstance(item.metadata["allowed"], Interval) else int
            elif how["metavar"] == "JSON":
                how["type"] = parse_object
            elif get_origin(item.type) is tuple or item.type == tuple[str, ...] | None:
                how["action"] = "append"
            flags = [flag_of(item.name), *item.metadata.get("aliases", ())]
            group.add_argument(*flags, default=UNSET, help=item.metadata["help"], **how)


def given_fields(args: argparse.Namespace, kind: type) -> dict[str, Any]:
    return given_flags(args, given_names(kind))


def given_flags(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    flags = {name: FLAGS.get(name, name) for name in names}
    return {name: getattr(args, flag) for name, flag in flags.items() if hasattr(args, flag)}


def flag_of(name: str) -> str:
    """Spell the flag of a field: "max_num_seqs" -> "--max-num-seqs"."""
    return "--" + FLAGS.get(name, name).replace("_", "-")


def engine_options(args: argparse.Namespace, *, seed: bool = True) -> dict[str, Any]:
    """Collect the given flags as options for EngineConfig.from_options, checked before torch is imported.

    `seed` says whether --seed is the engine's seed.
    """
    options = given_flags(args, [name for name in option_names() if seed or name != "seed"])
    EngineConfig.from_options(**options)
    return options


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Collect the given flags as fields of SamplingParams, checked before the model is loaded."""
    found = {item.name: getattr(args, item.name) for item in sampling_fields() if hasattr(args, item.name)}
    if "logit_bias" in found:
        found["logit_bias"] = dict(found["logit_bias"])
    SamplingParams(**found)
    return found


def load_llm(args: argparse.Namespace, **chosen: Any) -> "LLM":
    """Load the model of a command that generates in process; wrong flags are refused before torch is imported.

    chosen: engine options that were chosen for the user.
    """
    sampling_options(args)
    options = engine_options(args, seed=False) | chosen
    find_local(args.model)
    LOGGER.setLevel(args.log_level.upper())
    with saying(f"penstock: loading {args.model} ..."):
        from penstock.client.llm import LLM

        return LLM(**options)
