"""Placement: how the ranks of a model split it according to a sharding map. No torch.

The map gives every weight an axis, or none. These axes alone determine what each rank computes and what the ranks
exchange (cuts.py). Three kinds of parameters do not follow the map exactly:

- A weight whose depth one process sums in one piece cannot be cut along its depth without changing the order of the
  sum. It is cut along its rows instead, which gives every rank a share of the same size.
- Experts are split in both of their weights or in neither.
- Vectors are too small to be worth an exchange: a bias is split as its weight is, and every rank has the norms.
"""

from collections.abc import Mapping
from dataclasses import replace

from penstock.spec.cuts import depth_degree, is_beginning, is_looked_up, module_of
from penstock.spec.param_table import Parameter
from penstock.spec.shares import EXPERT, Degrees, Form, general

Hints = Mapping[str, bool]  # module of a branch, with * for numbers -> whether the features in it are split


def place(
    degrees: Degrees, axes: Mapping[str, int | None], hints: Hints, parameters: Mapping[str, Parameter]
) -> Degrees:
    """Return how ranks split a model according to a sharding map.

    Args:
        degrees: how they would split it by its table; the degree of attention is the largest that its heads allow.
        axes: the axis of each parameter (ShardingMap.resolve).
        hints: whether a branch is computed split or whole, for branches that do not follow their first weight.

    Raises:
        ValueError: a hint asks for a split of heads that the model does not allow.
    """
    forms: dict[str, Form] = {}
    attention, mlp, inner = 1, 1, 1
    for parameter in parameters.values():
        name = general(parameter.name)
        axis = axes[parameter.name]
        if axis is None and parameter.tied_to is not None:  # not in the map: as the parameter it is tied to
            axis = axes[parameter.tied_to]
        forms[name] = form = _form(parameter, axis, degrees.size)
        if EXPERT.search(parameter.name):
            inner = max(inner, 1 if form == "whole" else degrees.inner)
        elif is_beginning(parameter):
            module = module_of(parameter)
            if hints.get(module) and parameter.unit is not None and degrees.attention == 1:
                raise ValueError(f"{module}: 1 is not allowed; the heads of this model are not split: it must be -1")
            is_split = hints.get(module, form == "rows")
            attention = degrees.attention if is_split and parameter.unit is not None else attention
            mlp = degrees.mlp if is_split and parameter.unit is None else mlp
    return replace(degrees, attention=attention, mlp=mlp, inner=inner, forms=forms)


def _form(parameter: Parameter, axis: int | None, size: int) -> Form:
    if axis is None or len(parameter.shape) < 2:
        return "whole"
    if axis == 1 and is_looked_up(parameter):
        return "columns" if parameter.shape[1] >= size else "whole"
    if axis == 1 and parameter.leaves > 1 and depth_degree(parameter, size) > 1:
        return "depth"
    pieces = parameter.layouts[-1].pieces if parameter.unit is None else ()
    return "rows" if min(pieces or parameter.shape[:1]) >= size else "whole"
