"""Flags shared by the commands: engine options and sampling fields, spelt as in vLLM.

Flags only: they become the same names in EngineConfig.from_options and SamplingParams, which check the values. A flag
that was not given is left out, so that every default stands in one place.
"""

import argparse
import re
from fractions import Fraction
from typing import Any

from penstock.config import DTYPES, KERNELS, KV_CACHE_DTYPES, LOAD_FORMATS, QUANTIZATIONS, EngineConfig, option_names

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?[bB])?")
POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
UNSET = argparse.SUPPRESS


def parse_size(text: str) -> int:
    """A number with an optional unit: 4096, 4k (1000s), 4K or 4KiB (1024s), 2GiB, 1.5GB (1000s).

    Raises:
        argparse.ArgumentTypeError: it is none of these.
    """
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; give a number with a unit, like 4096, 4k or 2GiB")
    number, unit, suffix = match.groups()
    decimal = unit.islower() if suffix is None else not suffix.startswith("i")
    size = Fraction(number) * (1000 if decimal else 1024) ** POWERS[unit.lower()]
    if size.denominator != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(size)


def parse_bias(text: str) -> tuple[int, float]:
    """Token id and bias from ID=BIAS. Raises argparse.ArgumentTypeError where it is something else."""
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=BIAS, like 42=-5") from None


def add_model(parser: argparse.ArgumentParser) -> None:
    help_text = "a Hugging Face directory, a hub name, or demo, the bundled model (default: demo)"
    parser.add_argument("model", nargs="?", default="demo", metavar="MODEL", help=help_text)


def add_engine_options(parser: argparse.ArgumentParser, *, seed: bool = True) -> None:
    """Every option of EngineConfig. `seed` says whether --seed is the engine's."""
    group = parser.add_argument_group("engine")
    add_imports(group)
    add_weight_options(group)
    help_text = "which version of the architecture computes it (default: auto)"
    group.add_argument("--model-impl", default=UNSET, metavar="{auto,...}", help=help_text)
    _add_choice(group, "--kv-cache-dtype", KV_CACHE_DTYPES, "type of the cached keys and values")
    help_text = "scales by channel for an int8 cache, a safetensors file (default: each token has its own)"
    group.add_argument("--kv-cache-scales", default=UNSET, metavar="FILE", help=help_text)
    _add_size(group, "--max-model-len", "longest prompt plus output, in tokens")
    _add_size(group, "--max-num-seqs", "most requests that run at once (default: 32)")
    _add_size(group, "--max-num-batched-tokens", "most tokens computed in one step")
    _add_size(group, "--block-size", "tokens in a cache block, a multiple of 16 (max-model-len: one block a request)")
    _add_size(group, "--kv-cache-memory-bytes", "memory for the cache, like 2GiB")
    action = argparse.BooleanOptionalAction
    help_text = "find computed prefixes again (default: on)"
    group.add_argument("--enable-prefix-caching", action=action, default=UNSET, help=help_text)
    _add_size(group, "--tensor-parallel-size", "processes that share each layer")
    _add_size(group, "--pipeline-parallel-size", "processes that share the layers")
    _add_size(group, "--lm-head-pieces", "products that the LM head is computed in (default: 1)")
    help_text = "pad the LM head to a multiple of N tokens (default: 1; Falcon's 65024 become 65536 with 1024)"
    _add_size(group, "--pad-vocab-multiple", help_text)
    help_text = "axis by weight, a YAML file (default: the parameter table's)"
    group.add_argument("--sharding-config", default=UNSET, metavar="FILE", help=help_text)
    _add_choice(group, "--kernels", KERNELS, "which backend carries out the arithmetic")
    if seed:
        group.add_argument("--seed", type=int, default=UNSET, metavar="N", help="of the engine (default: 0)")


def add_imports(group: Any) -> None:
    """A user's own files."""
    help_text = "a Python file that registers a model or a logits processor (repeatable)"
    group.add_argument("--import", action="append", default=UNSET, metavar="FILE", help=help_text)


def add_weight_options(group: Any) -> None:
    """What weights become when they are loaded, and the cores for it."""
    _add_choice(group, "--dtype", DTYPES, "type of weights and products")
    _add_choice(group, "--quantization", QUANTIZATIONS[1:], "how weights are stored and multiplied")
    group.add_argument("--quantization-group-size", type=int, default=UNSET, metavar="N", help="32, 64 or 128")
    _add_choice(group, "--load-format", LOAD_FORMATS, "dummy: random weights, only config.json is needed")
    help_text = "cores that compute (default: all, or 1 for a small model)"
    group.add_argument("--threads", type=int, default=UNSET, metavar="N", help=help_text)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """The fields of SamplingParams that make sense on a command line; --seed is the request's."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=256, metavar="N", help="most tokens generated (default: 256)")
    group.add_argument("--min-tokens", type=int, default=UNSET, metavar="N", help="no end before this many")
    for name, help_text in (
        ("--temperature", "0 is greedy"),
        ("--top-p", "keep the most likely tokens up to this probability"),
        ("--min-p", "keep tokens at least this likely relative to the best"),
        ("--presence-penalty", "for tokens generated before"),
        ("--frequency-penalty", "for each time a token was generated before"),
        ("--repetition-penalty", "for tokens seen in prompt or output"),
    ):
        group.add_argument(name, type=float, default=UNSET, metavar="X", help=help_text)
    group.add_argument("--top-k", type=int, default=UNSET, metavar="N", help="keep so many most likely tokens")
    group.add_argument("--n", type=int, default=UNSET, metavar="N", help="choices made from each prompt")
    group.add_argument("--seed", type=int, default=UNSET, metavar="N", help="of the request: repeats the answer")
    group.add_argument(
        "--stop", action="append", default=UNSET, metavar="TEXT", help="end before this text (repeatable)"
    )
    group.add_argument("--stop-token-ids", type=int, nargs="+", default=UNSET, metavar="ID", help="tokens that end")
    group.add_argument("--logprobs", type=int, default=UNSET, metavar="N", help="report log-probabilities (--json)")
    group.add_argument("--prompt-logprobs", type=int, default=UNSET, metavar="N", help="the same for the prompt")
    help_text = "add BIAS to a token's logit, like 42=-5 (repeatable)"
    group.add_argument(
        "--logit-bias", type=parse_bias, action="append", default=UNSET, metavar="ID=BIAS", help=help_text
    )
    group.add_argument("--bad-words", action="append", default=UNSET, metavar="WORD", help="never said (repeatable)")
    group.add_argument("--ignore-eos", action="store_true", default=UNSET, help="go on after the end token")
    group.add_argument("--include-stop-str-in-output", action="store_true", default=UNSET, help="keep the stop string")


FLAGS = {"imports": "import"}  # where an option has another name as a flag
SAMPLING_NAMES = """
    max_tokens min_tokens temperature top_p min_p presence_penalty frequency_penalty repetition_penalty top_k n seed
    stop stop_token_ids logprobs prompt_logprobs logit_bias bad_words ignore_eos include_stop_str_in_output
"""


def engine_options(args: argparse.Namespace, *, seed: bool = True) -> dict[str, Any]:
    """What EngineConfig.from_options takes, of the flags that were given; checked here, before torch is imported."""
    names = [name for name in option_names() if seed or name != "seed"]
    flags = {name: FLAGS.get(name, name) for name in names}
    options = {name: getattr(args, flag) for name, flag in flags.items() if hasattr(args, flag)}
    EngineConfig.from_options(**options)
    return options


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """What SamplingParams takes, of the flags that were given."""
    found = {name: getattr(args, name) for name in SAMPLING_NAMES.split() if hasattr(args, name)}
    if "logit_bias" in found:
        found["logit_bias"] = dict(found["logit_bias"])
    return found


def _add_choice(group: Any, name: str, choices: tuple[Any, ...], help_text: str) -> None:
    allowed = "{" + ",".join(str(choice) for choice in choices) + "}"
    group.add_argument(name, default=UNSET, metavar=allowed, help=help_text)


def _add_size(group: Any, name: str, help_text: str) -> None:
    group.add_argument(name, type=parse_size, default=UNSET, metavar="N", help=help_text)
