"""When a request is sent again: the policy, its budget, and the loop of steps around an attempt."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

from rsrv.client.budget import Budget
from rsrv.client.failures import TOO_LARGE
from rsrv.client.notes import Detail
from rsrv.client.steps import Pause, Steps
from rsrv.core.errors import Code, RsrvError, ServerUnreachable, UnregisteredRegion, UsageError
from rsrv.core.retries import AttemptBudget

T = TypeVar("T")

_PASSING = frozenset(
    {"queue_full", "shed", "held_full", "preparing", "admission_closed", "stopping", "no_workers"},
)
"""Reasons that pass by themselves. Any other is final; for a replica of the model a gateway looks."""
_WINDOW_SECONDS = 10.0
"""Over which the retry budget is counted."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Which failures are tried again, after how long a wait, and how often at most. Raises UsageError for bad values.

    Attributes:
        enabled: False makes one attempt, with the whole deadline.
        initial_backoff: seconds before the second attempt, at most when `jitter` is on.
        factor: by which the wait grows with each attempt.
        max_backoff: seconds of the longest wait.
        min_budget: seconds that must be left after the wait; with less there is no further attempt.
        jitter: wait a random time between 0 and the backoff, so that many clients do not come back at once.
        retry_unavailable: also try again when the server is not reached or not ready, not only when it is overloaded.
        budget_ratio: further attempts in the last 10 s as a share of the requests in that time, at most …
        budget_per_second: … beside so many a second, whatever the traffic. Both count all requests of one handle.
    """

    enabled: bool = True
    initial_backoff: float = 1.0
    factor: float = 2.0
    max_backoff: float = math.inf
    min_budget: float = 0.05
    jitter: bool = True
    retry_unavailable: bool = True
    budget_ratio: float = 0.2
    budget_per_second: float = 10.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                if not isinstance(value, bool):
                    raise UsageError(f"RetryPolicy({field.name}={value!r}): wanted True or False")
                continue
            least, wanted = (
                (1.0, "a number of at least 1") if field.name == "factor" else (0.0, "a number of at least 0")
            )
            endless = field.name == "max_backoff"
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not value >= least or (math.isinf(value) and not endless):
                raise UsageError(f"RetryPolicy({field.name}={value!r}): wanted {wanted}{'' if endless else ', finite'}")

    def retries(self, error: RsrvError) -> bool:
        """Whether a request that ended with `error` may be sent again."""
        if error.code is not Code.RESOURCE_EXHAUSTED and not (
            error.code is Code.UNAVAILABLE and self.retry_unavailable
        ):
            return False
        if isinstance(error, UnregisteredRegion):
            return False  # the recovery of shared memory sends it again
        if error.reason not in ("", ServerUnreachable.reason):
            return error.reason in _PASSING
        return TOO_LARGE not in error.message

    def wait(self, attempt: int, draw: float) -> float:
        """Seconds to wait after attempt number `attempt`, which starts at 1; `draw` is a random number in [0, 1]."""
        try:
            backoff = min(self.max_backoff, self.initial_backoff * float(self.factor) ** (attempt - 1))
        except OverflowError:
            backoff = self.max_backoff if self.initial_backoff else 0.0
        if not self.jitter:
            return backoff
        return backoff * draw if draw else 0.0  # an endless backoff times 0 would be no number


class RetryBudget(AttemptBudget):
    """Further attempts of a handle in the last 10 s, by its policy. Thread safe."""

    def __init__(self, policy: RetryPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(
            ratio=policy.budget_ratio,
            minimum=policy.budget_per_second * _WINDOW_SECONDS,
            window_seconds=_WINDOW_SECONDS,
            clock=clock,
        )


def with_retries(
    policy: RetryPolicy,
    tokens: AttemptBudget,
    budget: Budget,
    attempt: Callable[[], Steps[T]],
    *,
    draw: Callable[[], float] | None = None,
) -> Steps[T]:
    """The result of `attempt`, made again while its failure may pass, `tokens` allow it and `budget` has time for it.

    Without a deadline, or with a policy that is not enabled, there is exactly one attempt. Raises the error of the
    last attempt, with a note of how many there were and why there is no further one. `draw` gives random numbers in
    [0, 1] for the jitter, by default those of `random`.
    """
    tokens.request()
    made = 0
    before = ""  # not the error itself: its traceback would keep this frame and its callers' buffers
    while True:
        made += 1
        try:
            return (yield from attempt())
        except RsrvError as error:
            wait = policy.wait(made, _random(draw))
            why = _end(policy, tokens, budget, error, wait)
            if why is not None:
                if before or policy.retries(error):
                    error.add_note(Detail(_note(made, why, before)))
                raise
            before = error.reason or error.code.name.lower()
        yield Pause(wait)


def _end(policy: RetryPolicy, tokens: AttemptBudget, budget: Budget, error: RsrvError, wait: float) -> str | None:
    """Why there is no attempt after `error` and `wait` seconds; None when there is one, which is then counted."""
    if not policy.retries(error):
        return "this error does not pass"
    if not policy.enabled:
        return "retries are off"
    left = budget.left
    if left is None:
        return "without a deadline there is one attempt"
    if wait >= left - policy.min_budget:
        return f"{max(left, 0.0):.3g} s of the {budget.seconds:g} s deadline were left, too little to wait {wait:.3g} s"
    if not tokens.take():
        return "the retry budget of this handle is used up"
    return None


def _note(made: int, why: str, before: str) -> str:
    attempts = "1 attempt was made" if made == 1 else f"{made} attempts were made"
    return f"{attempts}: {why}" + (f"; the one before ended with {before}" if before else "")


def _random(draw: Callable[[], float] | None) -> float:
    if draw is not None:
        return draw()
    import random  # late: it takes longer to import than this package

    return random.random()
