"""Read a placement from a YAML file; docs/planning.md has its fields. No torch."""

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from penstock import validation as check
from penstock.errors import InvalidRequestError
from penstock.kernels.attention.layout import ELEMENT_BYTES
from penstock.planner.placement import RESIDENT, STREAMED, Placement

FOLDER = Path(__file__).parent / "placements"
RANGE = re.compile(r"(\d+)(?:-(\d+))?")
OPERATIONS = ("attention", "mlp", "lm_head")


def load_placement(text: str) -> Placement:
    """Return the placement of a name or of a YAML file.

    Raises:
        InvalidRequestError: there is none, or a field of it is unknown, missing or out of range.
    """
    known = sorted(path.stem for path in FOLDER.glob("*.yaml"))
    path = FOLDER / f"{text}.yaml" if text in known else Path(text)
    try:
        return read_placement(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = f"cannot be read: {check.one_line(error)}; names are {', '.join(known)}"
    except InvalidRequestError as error:
        reason = str(error)
    raise InvalidRequestError(f"placement: {text!r}: {reason}", param="placement")


def read_placement(found: Any) -> Placement:
    """Return the placement of a mapping. Raise InvalidRequestError if it is none."""
    if not isinstance(found, Mapping):
        raise InvalidRequestError("the file must be a mapping")
    values = dict(found)
    given = {name: values.pop(name, None) for name in OPERATIONS}
    chips = {name: _operation(name, value) for name, value in given.items() if value is not None}
    overrides = values.pop("overrides", None) or []
    if not isinstance(overrides, list) or not all(isinstance(item, Mapping) for item in overrides):
        raise InvalidRequestError("overrides must be a list of {pattern, chips}")
    own = {item.name for item in fields(Placement)} - {"chips_of", "overrides", "head_pad"}
    if unknown := [str(name) for name in values if name not in own]:
        raise InvalidRequestError(f"there is no {', '.join(unknown)}; fields are {', '.join(sorted(own))}")
    if missing := [name for name in ("attention", "mlp") if name not in chips]:
        raise InvalidRequestError(f"{', '.join(missing)} must be given, like {{chips: 0-15}}")
    for name in ("rows", "context", "chips", "sram_per_chip", "dram_per_chip", "stream_buffer", "checkpoint_bytes"):
        if values.get(name) is not None:
            values[name] = _whole(name, values[name])
        elif name not in ("stream_buffer", "checkpoint_bytes"):
            raise InvalidRequestError(f"{name} must be given")
    check.check_choice("weights", values.get("weights", STREAMED), (STREAMED, RESIDENT))
    check.check_choice("cache_type", values.setdefault("cache_type", "bfloat16"), tuple(ELEMENT_BYTES))
    return Placement(
        **values,
        chips_of={name: numbers for name, (numbers, _) in chips.items()},
        head_pad=chips["lm_head"][1] if "lm_head" in chips else 0,
        overrides=tuple((str(item.get("pattern", "")), _chips("overrides", item.get("chips"))) for item in overrides),
    )


def _operation(name: str, found: Any) -> tuple[tuple[int, ...], int]:
    """Return the chips of an operation, and the padding of the head."""
    allowed = {"chips", "pad"} if name == "lm_head" else {"chips"}
    if not isinstance(found, Mapping) or not set(found) <= allowed:
        raise check.fail(name, found, f"a mapping of {', '.join(sorted(allowed))}")
    pad = _whole("lm_head.pad", found["pad"], low=0) if found.get("pad") is not None else 0
    return _chips(name, found.get("chips")), pad


def _chips(name: str, found: Any) -> tuple[int, ...]:
    """Return the numbers in a text like 0-15 or 3,5-7."""
    numbers: list[int] = []
    for word in str(found).split(","):
        match = RANGE.fullmatch(word.strip())
        if match is None or int(match[2] or match[1]) - int(match[1]) not in range(2**16):
            raise check.fail(f"{name}.chips", found, "chips like 0-15 or 3,5-7")
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(dict.fromkeys(numbers))


def _whole(name: str, value: Any, low: int = 1) -> int:
    try:
        number = -1 if isinstance(value, bool) else int(float(value))
    except (TypeError, ValueError, OverflowError):
        number = -1
    if not low <= number <= 2**62:
        raise check.fail(name, value, f"a whole number from {low} on")
    return number
