"""Matching: which tensors of a checkpoint hold each parameter, and in which of its layouts. No torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.errors import ModelLoadError, hint, listed
from penstock.spec.param_table import Layout, Parameter, ParamTable
from penstock.weights.safetensors import TensorEntry

# Form of a whole checkpoint -> a function that returns the layout of each parameter.
FORMS: dict[str, Callable[[Parameter], Layout]] = {
    "transformers": lambda parameter: parameter.layouts[0],
    # One tensor per parameter, under the table's name, in the layout that this name stands for.
    "merged": lambda parameter: next(item for item in parameter.layouts if list(item.sources) == [parameter.name]),
    # As many tensors as the table has names for: one per piece and per expert.
    "separate": lambda parameter: max(parameter.layouts, key=lambda item: (item.index is None, len(item.sources))),
}


@dataclass(frozen=True, slots=True)
class Match:
    """How a checkpoint holds the parameters of a table."""

    layouts: dict[str, Layout]  # by parameter name; a tied parameter is listed only if it is also stored
    stored: dict[str, str]  # the table's name of a tensor -> the checkpoint's, which may lack the prefix
    ignored: tuple[str, ...]  # tensors that hold no values of the model, by the checkpoint's names


def match(entries: Mapping[str, TensorEntry], parameters: Mapping[str, Parameter], table: ParamTable) -> Match:
    """Find every parameter, in the first of its layouts that is complete in the checkpoint.

    Raises:
        ModelLoadError: a tensor is missing, has another shape, or belongs to no parameter.
    """
    known = {name for item in parameters.values() for layout in item.layouts for name in layout.sources}
    stored = {_full_name(name, entries, known, table): name for name in entries}
    nearest = {name: _nearest(item, stored) for name, item in parameters.items()}
    layouts = {name: layout for name, layout in nearest.items() if layout.sources.keys() <= stored.keys()}
    required = [layout for name, layout in nearest.items() if parameters[name].tied_to is None]
    missing = dict.fromkeys(source for layout in required for source in layout.sources if source not in stored)
    used = {source for layout in nearest.values() for source in layout.sources}
    rest = [stored_name for name, stored_name in stored.items() if name not in used]
    _check_names(list(missing), [name for name in rest if not table.ignores(name)])
    _check_shapes(layouts, stored, entries)
    return Match(layouts, stored, tuple(rest))


def _full_name(name: str, entries: Mapping[str, TensorEntry], known: set[str], table: ParamTable) -> str:
    """Return a checkpoint's name, with the table's prefix added if the name is known only with it."""
    full = table.prefix + name
    return full if name not in known and full in known and full not in entries else name


def _nearest(parameter: Parameter, stored: Mapping[str, str]) -> Layout:
    """Return the first layout with all its tensors stored, otherwise the one with the largest share stored."""
    return max(
        parameter.layouts, key=lambda layout: sum(name in stored for name in layout.sources) / len(layout.sources)
    )


def _check_names(missing: list[str], unused: list[str]) -> None:
    problems = []
    if missing:
        problems.append(f"missing: {listed(missing)}{hint(missing[0], unused)}")
    if unused:
        problems.append(f"unknown: {listed(unused)}")
    if problems:
        raise ModelLoadError(f"the checkpoint does not match the architecture; tensors {'; '.join(problems)}")


def _check_shapes(layouts: Mapping[str, Layout], stored: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> None:
    for layout in layouts.values():
        for name, shape in layout.sources.items():
            entry = entries[stored[name]]
            if entry.shape != shape:
                raise ModelLoadError(
                    f"{entry.file.name}: {stored[name]} has the shape {list(entry.shape)}; config.json requires "
                    f"{list(shape)}"
                )
