"""Request parameters: the map of a message as plain values, and the deadlines that clients put into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rsrv.core.errors import InvalidRequest

ParameterValue = bool | int | float | str

TIMEOUT_NS_PARAM = "reactant_timeout_ns"
"""Nanoseconds that the caller still has (int64). Relative, so that clocks need not agree."""

NS_PER_UNIT = {TIMEOUT_NS_PARAM: 1, "rsrv_timeout_ns": 1, "timeout": 1000}
"""The parameters that bound a request's time, and nanoseconds per unit of each."""

INT64_MAX = 2**63 - 1
_INT64_MIN = -(2**63)
_UINT64_MAX = 2**64 - 1


def deadline_params(budget_ns: int) -> dict[str, ParameterValue]:
    """The parameters that pass `budget_ns` on; none when it is not positive."""
    return {TIMEOUT_NS_PARAM: min(budget_ns, INT64_MAX)} if budget_ns > 0 else {}


def read_parameters(source: Mapping[str, Any]) -> tuple[dict[str, ParameterValue], int]:
    """Plain values of a map of InferParameter messages, and the least time budget in it (ns; 0 = none).

    A parameter without a value counts as absent, and so does a budget that is not an int64 or not positive.
    """
    values: dict[str, ParameterValue] = {}
    budget_ns = 0
    for name, parameter in source.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            continue
        value = values[name] = getattr(parameter, kind)
        if name in NS_PER_UNIT and kind == "int64_param" and value > 0:
            value *= NS_PER_UNIT[name]
            budget_ns = min(budget_ns, value) if budget_ns else value
    return values, budget_ns


def write_parameters(values: Mapping[str, ParameterValue], target: Any) -> None:
    """Fill a map of InferParameter messages. Raises InvalidRequest for a value that no kind of parameter holds."""
    for name, value in values.items():
        if isinstance(value, bool):
            target[name].bool_param = value
        elif isinstance(value, int) and _INT64_MIN <= value <= INT64_MAX:
            target[name].int64_param = value
        elif isinstance(value, int) and INT64_MAX < value <= _UINT64_MAX:
            target[name].uint64_param = value
        elif isinstance(value, float):
            target[name].double_param = value
        elif isinstance(value, str):
            target[name].string_param = value
        else:
            raise InvalidRequest(f"parameter {name!r} is {value!r}; wanted a bool, int of 64 bits, float or str")


def absolute_deadline_ns(budget_ns: int, now_ns: int) -> int:
    """`now_ns` plus a budget, held at int64 max; 0 for no budget."""
    return min(now_ns + budget_ns, INT64_MAX) if budget_ns > 0 else 0
