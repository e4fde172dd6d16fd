"""Deadlines that pass when the other side has the call, and not on the way to it, however slow the machine is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

SECONDS = (0.2, 2.0, 20.0)


def overdue(ask: Callable[[float], T], arrived: Callable[[], bool]) -> T:
    """What `ask` returns, which waits until the deadline of its call, given in seconds, has passed.

    A call that has not `arrived` by then shows nothing, and is made again with a later deadline.
    """
    for seconds in SECONDS:
        outcome = ask(seconds)
        if arrived():
            return outcome
    raise AssertionError(f"no call arrived within {SECONDS[-1]:g} s")
