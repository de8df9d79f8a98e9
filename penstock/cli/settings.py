"""Options from a file (--config FILE.yaml) and from the environment (PENSTOCK_*), for every flag of a command.

They become defaults of the command's parser. So a flag comes first, then the environment, then the file, and then the
default that the option's table states; names, types and checks are those of the flags.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from penstock.cli.options import UNSET, flag_of, parse_list, parse_object
from penstock.config import hint
from penstock.errors import ModelLoadError, shown
from penstock.spec.config_reader import read_text, read_yaml

PREFIX = "PENSTOCK_"
TRUTH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
Flags = dict[str, argparse.Action]  # by the name of the flag, like "max_num_seqs"


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add --config to a command with flags of its own, or to each of its kinds."""
    kinds = _kinds(parser)
    for one in [parser] if kinds is None else kinds.values():
        help_text = "YAML file of options, named like the flags; $PENSTOCK_FLAG replaces its values, and flags both"
        one.add_argument("--config", default=UNSET, metavar="FILE", help=help_text)


def settle(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """Make the values in the file and in the environment the defaults of the flags that `words` do not give.

    A wrong one ends the process with an error that says where it comes from.
    """
    if not {"-h", "--help"}.isdisjoint(words):
        return None
    kinds = _kinds(parser)
    if kinds is not None:
        chosen = next((kinds[word] for word in words if word in kinds), None)
        return None if chosen is None else settle(chosen, words)
    flags = _flags(parser)
    given = {word.partition("=")[0] for word in words[: words.index("--") if "--" in words else None]}
    found = _from_file(parser, flags, words) | _from_environment(flags)
    sources: dict[str, str] = {}  # for errors
    for name, (source, value) in found.items():
        action = flags[name]
        if given.isdisjoint(action.option_strings):
            action.default = _value(parser, action, source, value)
            action.required, sources[action.dest] = False, source
    parser.set_defaults(sources=sources)


def parse_table(parser: argparse.ArgumentParser, table: dict[str, Any], place: str) -> argparse.Namespace:
    """Parse a table of options, as a file has them. A wrong one ends the process with an error that begins with the
    place of the table."""
    flags = _flags(parser)
    for name, (source, value) in _named(parser, flags, table, f"{place}.").items():
        flags[name].default = _value(parser, flags[name], source, value)
    return parser.parse_args([])


def _kinds(parser: argparse.ArgumentParser) -> "dict[str, argparse.ArgumentParser] | None":
    """Find the parsers of a command's kinds (`bench serve`); None for a command without kinds."""
    actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next((action.choices for action in actions), None)


def _flags(parser: argparse.ArgumentParser) -> Flags:
    flags: Flags = {}
    for action in parser._actions:
        names = [option[2:].replace("-", "_") for option in action.option_strings if option.startswith("--")]
        if names and names[0] not in ("help", "config"):
            flags[names[0]] = action
    return flags


def _from_file(parser: argparse.ArgumentParser, flags: Flags, words: list[str]) -> dict[str, tuple[str, Any]]:
    places = [index for index, word in enumerate(words) if word.partition("=")[0] == "--config"]
    file = os.environ.get(f"{PREFIX}CONFIG")
    if places:
        rest = words[places[-1] :]
        file = rest[0].partition("=")[2] or (rest[1] if len(rest) > 1 else None)
    if not file:
        return {}
    try:
        found = read_yaml(read_text(Path(file)), str(file))
    except ModelLoadError as error:
        parser.error(f"--config: {error}")
    if not isinstance(found, dict):
        parser.error(f"--config: {file} must have lines like port: 8000")
    return _named(parser, flags, found, f"{file}: ")


def _named(
    parser: argparse.ArgumentParser, flags: Flags, found: dict[Any, Any], prefix: str
) -> dict[str, tuple[str, Any]]:
    """Find the flag of each option in a table, with its place and its value."""
    named = {str(key).replace("-", "_"): (f"{prefix}{key}", value) for key, value in found.items()}
    for name, (source, _) in named.items():
        if name not in flags:
            parser.error(f"{source}: there is no such option{_advice(name, flags)}")
    return named


def _from_environment(flags: Flags) -> dict[str, tuple[str, Any]]:
    """Find the variables of flags. One that looks like a misspelt flag is named on standard error."""
    found: dict[str, tuple[str, Any]] = {}
    for variable, text in os.environ.items():
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or not text:  # an empty variable counts as none
            continue
        if name in flags:
            found[name] = (variable, text)
        elif "did you mean" in (advice := _advice(name, flags)):
            print(f"penstock: the variable {variable} is not an option of this command{advice}", file=sys.stderr)
    return found


def _advice(name: str, flags: Flags) -> str:
    advice = hint(name, flags, flag_of)
    return f"; {advice}" if advice else ""


def _value(parser: argparse.ArgumentParser, action: argparse.Action, source: str, value: Any) -> Any:
    """Convert a value as the flag converts its own."""
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        truth = value if isinstance(value, bool) else TRUTH.get(str(value).lower())
        if truth is None:
            parser.error(f"{source}: {shown(value)} is not true or false")
        return truth if isinstance(action, argparse.BooleanOptionalAction) or truth else action.default
    is_repeated = isinstance(action, argparse._AppendAction)
    takes_several = is_repeated or action.nargs is not None
    if takes_several and isinstance(value, str) and value.startswith("["):
        value = parse_list(value)
    if isinstance(value, dict | list) and action.type in (parse_object, parse_list):
        try:
            value = json.dumps(value)
        except (TypeError, ValueError) as error:  # YAML has dates, and aliases of what they are in
            parser.error(f"{source}: {error}")
    texts = [_text(item) for item in value] if isinstance(value, list) and takes_several else [_text(value)]
    if isinstance(action.nargs, int) and len(texts) != action.nargs:
        parser.error(f"{source}: {shown(value)} is not a list of {action.nargs}")
    if None in texts:
        parser.error(f"{source}: {shown(value)} is not allowed; write a value as for {action.option_strings[0]}")
    try:
        if is_repeated and action.nargs is None:
            return [_typed(parser, action, [text]) for text in texts]
        return _typed(parser, action, texts)
    except argparse.ArgumentError as error:
        parser.error(f"{source}: {error.message}")


def _text(value: Any) -> str | None:
    """Write a value as on a command line; None for what no flag takes."""
    if isinstance(value, dict | list) or value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def _typed(parser: argparse.ArgumentParser, action: argparse.Action, texts: list[Any]) -> Any:
    return parser._get_values(action, texts)
