"""Read a placement from a YAML file; docs/planning.md has its fields. No torch."""

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from penstock import InvalidRequestError
from penstock.errors import check_choice, fail
from penstock.kernels.attention.items import ELEMENT_BYTES
from penstock_lab.planner.placement import RESIDENT, STREAMED, Placement
from penstock_lab.planner.yaml_file import MOST_BYTES, load, names_in, whole

FOLDER = Path(__file__).parent / "placements"
RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
OPERATIONS = ("attention", "mlp", "lm_head")
MOST_CHIPS = 2**12  # each has a line in the plan
MOST_TOKENS = 2**24
COUNTS = {
    "rows": 2**16,
    "context": MOST_TOKENS,
    "chips": MOST_CHIPS,
    "sram_per_chip": MOST_BYTES,
    "dram_per_chip": MOST_BYTES,
    "stream_buffer": MOST_BYTES,
    "checkpoint_bytes": MOST_BYTES,
}
MAY_LACK = ("stream_buffer", "checkpoint_bytes")


def load_placement(text: str) -> Placement:
    """Return the placement with a name or from a YAML file.

    Raises:
        InvalidRequestError: there is no such file, or one of its fields is unknown, missing or out of range.
    """
    known = names_in(FOLDER)
    path = FOLDER / f"{text}.yaml" if text in known else Path(text)
    return load("placement", text, path, read_placement, f"names are {', '.join(known)}")


def read_placement(found: Any) -> Placement:
    """Return the placement that a mapping describes. Raise InvalidRequestError if it is invalid."""
    if not isinstance(found, Mapping):
        raise InvalidRequestError("the file must be a mapping")
    values = dict(found)
    given = {name: values.pop(name, None) for name in OPERATIONS}
    chips = {name: _operation(name, value) for name, value in given.items() if value is not None}
    overrides = values.pop("overrides", None) or []
    if not isinstance(overrides, list) or not all(map(_is_override, overrides)):
        raise InvalidRequestError("overrides must be a list of {pattern, chips}, the pattern a text like layers.3.*")
    own = {item.name for item in fields(Placement)} - {"chips_of", "overrides", "head_pad"}
    if unknown := [str(name) for name in values if name not in own]:
        raise InvalidRequestError(f"unknown field {', '.join(unknown)}; known are {', '.join(sorted(own))}")
    if missing := [name for name in ("attention", "mlp") if name not in chips]:
        raise InvalidRequestError(f"{', '.join(missing)} must be given, like {{chips: 0-15}}")
    for name, high in COUNTS.items():
        if values.get(name) is not None:
            values[name] = whole(name, values[name], 0 if name in MAY_LACK else 1, high)
        elif name not in MAY_LACK:
            raise InvalidRequestError(f"{name} must be given")
    check_choice("weights", values.get("weights", STREAMED), (STREAMED, RESIDENT))
    check_choice("cache_type", values.setdefault("cache_type", "bfloat16"), tuple(ELEMENT_BYTES))
    return Placement(
        **values,
        chips_of={name: numbers for name, (numbers, _) in chips.items()},
        head_pad=chips["lm_head"][1] if "lm_head" in chips else 0,
        overrides=tuple((item["pattern"], _chips("overrides", item["chips"])) for item in overrides),
    )


def _operation(name: str, found: Any) -> tuple[tuple[int, ...], int]:
    """Return the chips of an operation, and the padding of the head."""
    allowed = {"chips", "pad"} if name == "lm_head" else {"chips"}
    if not isinstance(found, Mapping) or not set(found) <= allowed:
        raise fail(name, found, f"a mapping of {', '.join(sorted(allowed))}")
    pad = whole("lm_head.pad", found["pad"], 0, MOST_TOKENS) if found.get("pad") is not None else 0
    return _chips(name, found.get("chips")), pad


def _is_override(found: Any) -> bool:
    return isinstance(found, Mapping) and set(found) == {"pattern", "chips"} and isinstance(found["pattern"], str)


def _chips(name: str, found: Any) -> tuple[int, ...]:
    """Return the chip numbers in a text such as 0-15 or 3,5-7."""
    numbers: set[int] = set()
    for word in str(found).split(","):
        match = RANGE.fullmatch(word.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < MOST_CHIPS:
            raise fail(f"{name}.chips", found, f"chips like 0-15 or 3,5-7, each below {MOST_CHIPS}")
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))
