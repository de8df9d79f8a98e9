"""Forms of a whole checkpoint: in which of its layouts each parameter is written. No torch."""

from collections.abc import Callable

from penstock.spec.param_table import Layout, Parameter

ChooseLayout = Callable[[Parameter], Layout]


def as_transformers(parameter: Parameter) -> Layout:
    """Under Transformers' names, as Transformers holds it."""
    return parameter.layouts[0]


def as_merged(parameter: Parameter) -> Layout:
    """One tensor a parameter, under the table's name; where that name means another layout, in that one."""
    return next(layout for layout in parameter.layouts if list(layout.sources) == [parameter.name])


def as_separate(parameter: Parameter) -> Layout:
    """As many tensors as the table has names for: one a piece, and one an expert."""
    return max(parameter.layouts, key=lambda layout: (layout.index is None, len(layout.sources)))


FORMS: dict[str, ChooseLayout] = {
    "transformers": as_transformers,
    "merged": as_merged,
    "separate": as_separate,
}
