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
from typing import TYPE_CHECKING, Any

from penstock.cli.terminal import LOGGER, saying
from penstock.config import PARTS, EngineConfig, option_names
from penstock.errors import LOG_LEVELS, shown
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.structured_outputs import StructuredOutputsParams
from penstock.weights.hub import find_local

if TYPE_CHECKING:
    from penstock.client.llm import LLM

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?[bB])?")
POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
UNSET = argparse.SUPPRESS
MAX_SCHEMA = 2**23  # bytes of a file
FLAGS = {  # field -> name of its flag, where they differ
    "structured_outputs": "json_schema_file",
    "drain_timeout_s": "drain_timeout",
    "request_timeout_s": "request_timeout",
    "served_model_names": "served_model_name",
    "imports": "import",
}
WEIGHT_OPTIONS = (
    "dtype", "quantization", "quantization_group_size", "load_format", "threads", "tensor_parallel_size",
    "attention_parallel_size", "mlp_parallel_size", "expert_parallel_size",
)  # fmt: skip


def parse_size(text: str) -> int:
    """Return the number in a text with an optional unit: 4096, 4k (1000s), 4K or 4KiB (1024s), 2.1GiB, 1.5GB (1000s).

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
    """Return token id and bias from a text like 42=-5.

    Raises:
        argparse.ArgumentTypeError: the text is not ID=BIAS.
    """
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=BIAS, like 42=-5") from None


def read_schema(file: str) -> StructuredOutputsParams:
    """Return StructuredOutputsParams with the JSON schema in a file.

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
    """Return the JSON object in a text. Raise argparse.ArgumentTypeError if the text is not a JSON object."""
    found = _parse_json(text)
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a JSON object")
    return found


def parse_list(text: str) -> list[Any]:
    """Return the JSON array in a text. Raise argparse.ArgumentTypeError if the text is not a JSON array."""
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
    """Return true or false as a bool, and any other text unchanged, for SamplingParams to check."""
    return {"true": True, "false": False}.get(text.lower(), text)


INTEGER, NUMBER, SWITCH = {"type": int, "metavar": "N"}, {"type": float, "metavar": "X"}, {"action": "store_true"}
IDS: dict[str, Any] = {"type": int, "nargs": "+", "metavar": "ID"}
DECAY: dict[str, Any] = {"type": float, "nargs": 2, "metavar": ("N", "FACTOR")}
LIST: dict[str, Any] = {"type": parse_list, "metavar": "JSON"}
BOOLEAN: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
SAMPLING: tuple[tuple[str, dict[str, Any], str], ...] = (  # field of SamplingParams, kind of flag, help text
    ("max_tokens", {**INTEGER, "default": 256}, "maximum number of tokens to generate (default: 256)"),
    ("min_tokens", INTEGER, "generate at least this many tokens before an end token or a stop string counts"),
    ("temperature", NUMBER, "0 is greedy"),
    ("top_p", NUMBER, "keep the most likely tokens up to this total probability"),
    ("top_k", INTEGER, "keep this many of the most likely tokens"),
    ("min_p", NUMBER, "keep tokens that are at least this likely relative to the most likely one"),
    ("presence_penalty", NUMBER, "subtracted from the logits of tokens that were generated before"),
    ("frequency_penalty", NUMBER, "subtracted from a token's logit for each time that it was generated before"),
    ("repetition_penalty", NUMBER, "divides the logits of tokens in the prompt or output"),
    ("n", INTEGER, "number of answers for each prompt"),
    ("seed", INTEGER, "seed of the request; the same seed repeats the answer"),
    ("stop", {"action": "append", "metavar": "TEXT"}, "stop before this text (repeatable)"),
    ("stop_token_ids", IDS, "tokens that end the text"),
    ("logprobs", INTEGER, "report the log-probabilities of N tokens per position (needs --json)"),
    ("prompt_logprobs", INTEGER, "the same for the tokens of the prompt"),
    (
        "logit_bias",
        {"type": parse_bias, "action": "append", "metavar": "ID=BIAS"},
        "added to the logit of a token, like 42=-5 (repeatable)",
    ),
    ("bad_words", {"action": "append", "metavar": "WORD"}, "a word that is never generated (repeatable)"),
    ("typical_p", NUMBER, "keep the tokens whose surprise is nearest to the entropy, up to this total probability"),
    ("top_h", NUMBER, "keep the most likely tokens up to this share of the entropy"),
    ("epsilon_cutoff", NUMBER, "drop tokens less likely than this"),
    ("eta_cutoff", NUMBER, "the same, but with a lower limit if the entropy is high"),
    ("no_repeat_ngram_size", INTEGER, "no sequence of N tokens occurs twice"),
    ("min_length", INTEGER, "no end token before prompt and answer together have N tokens"),
    ("suppress_tokens", IDS, "tokens that are never chosen"),
    ("xtc_probability", NUMBER, "probability of dropping all likely tokens except the least likely of them (XTC)"),
    ("xtc_threshold", NUMBER, "tokens that are at least this likely count as likely for XTC"),
    ("dry_multiplier", NUMBER, "penalty for a token that continues a repetition (DRY); 0: off"),
    ("dry_base", NUMBER, "factor of the penalty for each further token of the repetition"),
    ("dry_allowed_length", INTEGER, "longest repetition that has no penalty, in tokens"),
    ("dry_penalty_last_n", INTEGER, "how many of the last tokens are searched for repetitions; -1: all"),
    ("dry_sequence_breakers", {"action": "append", "metavar": "TEXT"}, "text that ends a repetition (repeatable)"),
    ("mirostat", INTEGER, "1 or 2: keep the surprise of the tokens near --mirostat-tau"),
    ("mirostat_tau", NUMBER, "target surprise of the tokens, in bits"),
    ("mirostat_eta", NUMBER, "learning rate of mirostat"),
    ("begin_suppress_tokens", IDS, "tokens that are never chosen as the first token"),
    ("forced_bos_token_id", {"type": int, "metavar": "ID"}, "the second token of a text whose prompt is one token"),
    ("forced_eos_token_id", IDS, "the last token of a text that reaches --max-tokens"),
    ("min_new_tokens", INTEGER, "no end token before the answer has N tokens"),
    (
        "exponential_decay_length_penalty",
        DECAY,
        "after N tokens, FACTOR makes end tokens more likely with each further token",
    ),
    ("bad_words_ids", LIST, 'sequences of token ids that are never generated, like "[[5, 6], [7]]"'),
    ("sequence_bias", LIST, 'added to the logit of a token that completes a sequence, like "[[[5, 6], -2.5]]"'),
    (
        "logits_processors",
        {"type": parse_object, "metavar": "JSON"},
        "names of functions that --import registers, with arguments",
    ),
    ("use_beam_search", SWITCH, "search for the -n most likely answers with as many beams"),
    ("length_penalty", NUMBER, "of a beam search: values above 0 prefer long answers"),
    ("early_stopping", {"type": parse_early_stopping, "metavar": "{true,false,never}"}, "when a beam search ends"),
    ("skip_special_tokens", BOOLEAN, "leave special tokens out of the text"),
    ("spaces_between_special_tokens", BOOLEAN, "put spaces between special tokens"),
    ("ignore_eos", SWITCH, "continue after the end token"),
    ("include_stop_str_in_output", SWITCH, "keep the stop string in the text"),
    (
        "structured_outputs",
        {"type": read_schema, "metavar": "FILE", "dest": "structured_outputs"},
        "the answer is JSON that the schema in FILE allows",
    ),
)


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
        if namespace.model not in (DEFAULT_MODEL, values):
            parser.error(f"--model: {namespace.model} and {values} are two models; give one")
        namespace.model = values


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the argument MODEL, and --model, which many scripts for vLLM have."""
    parser.set_defaults(model=DEFAULT_MODEL)
    help_text = f"a Hugging Face directory, a hub name, or demo, the bundled model (default: {DEFAULT_MODEL})"
    parser.add_argument("model", action=_Model, nargs="?", default=UNSET, metavar="MODEL", help=help_text)
    parser.add_argument("--model", action=_Model, default=UNSET, metavar="MODEL", help="the same as the argument MODEL")


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
            is_open = item.default is None or item.default is True  # then the help text explains the default
            help_text = item.metadata["help"] + ("" if is_open else f" (default: {item.default})")
            group.add_argument(flag_of(item.name), default=UNSET, help=help_text, **_flag_kind(item))


def _flag_kind(item: Field[Any]) -> dict[str, Any]:
    """Return the arguments of add_argument for the values that an option allows."""
    allowed = item.metadata["allowed"]
    if allowed is bool:
        return {"action": argparse.BooleanOptionalAction}
    if allowed is str:
        return {"metavar": "FILE" if item.default is None else "NAME"}
    if allowed is float:
        return NUMBER
    if allowed is dict:
        return {"type": parse_object, "metavar": "JSON"}
    if isinstance(allowed, range):
        return {"type": int if allowed.start < 0 else parse_size, "metavar": "N"}
    choices = [choice for choice in allowed if choice is not None]
    return {"type": type(choices[0]), "metavar": "{" + ",".join(map(str, choices)) + "}"}


def add_generation_options(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and the sampling and engine flags of a command that generates in process. --seed is the request's."""
    add_model(parser)
    group = parser.add_argument_group("sampling")
    for name, kind, help_text in SAMPLING:
        group.add_argument(flag_of(name), help=help_text, **{"default": UNSET, **kind})
    add_engine_options(parser, [name for name in option_names() if name != "seed"])
    add_log_level(parser, "notes on standard error: info has the choices made and the speed; above it, errors only")


def flag_of(name: str) -> str:
    """Return the flag of a field: "max_num_seqs" -> "--max-num-seqs"."""
    return "--" + FLAGS.get(name, name).replace("_", "-")


def engine_options(args: argparse.Namespace, *, seed: bool = True) -> dict[str, Any]:
    """Return the given flags as options for EngineConfig.from_options, checked before torch is imported.

    `seed` says whether --seed is the engine's seed.
    """
    flags = {name: FLAGS.get(name, name) for name in option_names() if seed or name != "seed"}
    options = {name: getattr(args, flag) for name, flag in flags.items() if hasattr(args, flag)}
    EngineConfig.from_options(**options)
    return options


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given flags as fields of SamplingParams, checked before the model is loaded."""
    found = {name: getattr(args, name) for name, _, _ in SAMPLING if hasattr(args, name)}
    if "logit_bias" in found:
        found["logit_bias"] = dict(found["logit_bias"])
    SamplingParams(**found)
    return found


def load_llm(args: argparse.Namespace) -> "LLM":
    """Load the model of a command that generates in process; wrong flags are refused before torch is imported."""
    sampling_options(args)
    options = engine_options(args, seed=False)
    find_local(args.model)
    LOGGER.setLevel(args.log_level.upper())
    with saying(f"penstock: loading {args.model} ..."):
        from penstock.client.llm import LLM

        return LLM(**options)
