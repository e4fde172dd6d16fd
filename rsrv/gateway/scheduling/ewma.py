"""Exponential averages whose clock is device time, so that an idle fleet keeps what it has learnt."""

from __future__ import annotations

import math

DEFAULT_HALFLIFE = 30.0


def ewma(old: float | None, x: float, dt: float, h: float) -> float:
    """`(1 - a) * old + a * x` with `a = 1 - 2**(-dt/h)`; `dt` and half-life `h` > 0 are device seconds of the fleet.

    Without an old value the first sample is taken as it is (spec gateway-node 2.2.2).
    """
    if old is None:
        return x
    alpha = 1.0 - math.exp2(-dt / h)
    return (1.0 - alpha) * old + alpha * x
