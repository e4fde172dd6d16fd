"""The table that the modules of this package fill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

OWN: dict[Any, Callable[..., Any]] = {}
KEPT: set[Any] = set()

aten: Any = torch.ops.aten


def lowering(*operators: Any, keep: bool = False) -> Callable[[Function], Function]:
    """Register the decorated function for `operators`; with `keep` they are not decomposed before."""

    def register(function: Function) -> Function:
        for operator in operators:
            OWN[operator] = function
            if keep:
                KEPT.add(operator)
        return function

    return register
