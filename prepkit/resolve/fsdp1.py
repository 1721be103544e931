"""What each flat parameter of FSDP1 holds. Sums on config and facts that rules and planner share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping

from prepkit.facts import ModelFacts, ParamFact


def flat_params(
    unit_of: Mapping[str, str], ignored: Container[str], model: ModelFacts
) -> dict[str, tuple[ParamFact, ...]]:
    """Path of every FSDP1 unit that holds a parameter to its parameters, in the order in which torch flattens them.

    ``unit_of``: parameter name to the path of its unit. ``ignored``: names of parameters that no unit takes.
    """
    units: dict[str, list[ParamFact]] = defaultdict(list)
    for param in model.params:
        if param.name not in ignored:
            units[unit_of[param.name]].append(param)
    return {path: tuple(params) for path, params in units.items()}
