"""Matching: which tensors of a checkpoint hold which parameter, or why they do not fit. No torch, nothing is read."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import ModelLoadError
from penstock.spec.param_table import Layout, Parameter, ParamTable
from penstock.weights.safetensors import TensorEntry

MAX_LISTED = 8  # names that an error lists


@dataclass(frozen=True, slots=True)
class Match:
    """A checkpoint held against a table.

    Attributes:
        layouts: parameter -> how the checkpoint holds it. A tied one is there only where it is stored too.
        stored: the table's name of a tensor -> the checkpoint's, which may lack the prefix.
        ignored: tensors that carry nothing, by the checkpoint's names.
    """

    layouts: dict[str, Layout]
    stored: dict[str, str]
    ignored: tuple[str, ...]


def match(entries: Mapping[str, TensorEntry], parameters: Mapping[str, Parameter], table: ParamTable) -> Match:
    """Find every parameter, in the first of its layouts that is there as a whole.

    Raises:
        ModelLoadError: a tensor is missing, of another shape, or used by no parameter.
    """
    known = {name for item in parameters.values() for layout in item.layouts for name in layout.sources}
    stored = {_full_name(name, entries, known, table): name for name in entries}
    nearest = {name: _nearest(item, stored) for name, item in parameters.items()}
    layouts = {name: layout for name, layout in nearest.items() if layout.sources.keys() <= stored.keys()}
    missing = {
        source: None
        for name, layout in nearest.items()
        if name not in layouts and parameters[name].tied_to is None
        for source in layout.sources
        if source not in stored
    }
    meant = {source for layout in nearest.values() for source in layout.sources}
    rest = [stored_name for name, stored_name in stored.items() if name not in meant]
    unused = [name for name in rest if not table.ignores(name)]
    _check_names(list(missing), unused)
    _check_shapes(layouts, stored, entries)
    return Match(layouts, stored, tuple(name for name in rest if table.ignores(name)))


def _full_name(name: str, entries: Mapping[str, TensorEntry], known: set[str], table: ParamTable) -> str:
    """A checkpoint's name with the prefix of the table, where that makes it a known one."""
    full = table.prefix + name
    return full if name not in known and full in known and full not in entries else name


def _nearest(parameter: Parameter, stored: Mapping[str, str]) -> Layout:
    """The first layout whose tensors are all there; where none is, that of which most are."""
    return max(
        parameter.layouts, key=lambda layout: sum(name in stored for name in layout.sources) / len(layout.sources)
    )


def _check_names(missing: list[str], unused: list[str]) -> None:
    problems = []
    if missing:
        near = difflib.get_close_matches(missing[0], unused, n=1)
        hint = f" (is {near[0]} meant?)" if near else ""
        problems.append(f"missing: {listed(missing)}{hint}")
    if unused:
        problems.append(f"unknown: {listed(unused)}")
    if problems:
        raise ModelLoadError(f"the checkpoint does not fit the architecture; tensors {'; '.join(problems)}")


def _check_shapes(layouts: Mapping[str, Layout], stored: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> None:
    for layout in layouts.values():
        for name, shape in layout.sources.items():
            entry = entries[stored[name]]
            if entry.shape != shape:
                raise ModelLoadError(
                    f"{entry.file.name}: {stored[name]} has the shape {list(entry.shape)}; config.json makes it "
                    f"{list(shape)}"
                )


def listed(names: list[str]) -> str:
    """A list for an error: the first names, and how many more there are."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
