"""A server that forgot a region, because it restarted or was told to: register it again and send again, once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from rsrv.client.budget import SETUP_SECONDS, Budget
from rsrv.client.steps import Aside, Steps
from rsrv.client.transport.endpoint import Endpoint
from rsrv.core.errors import Code, DeadlineExceeded, RsrvError, ShmUnrecoverable, UnregisteredRegion
from rsrv.core.shm.owned import OwnedRegion

log = logging.getLogger(__name__)

T = TypeVar("T")

_ROUNDS = 5
"""Sends of one request at most. Two are the rule; a server that keeps dying may need more."""


def with_recovery(
    endpoint: Endpoint,
    region: OwnedRegion,
    budget: Budget,
    send: Callable[[], Steps[T]],
    lost: Callable[[], int] = lambda: 0,
) -> Steps[T]:
    """`send()`, and when the server does not know `region` any more, register it and `send()` again.

    `lost` tells how many attempts of `send` had no answer so far: a server that was away in between has forgotten the
    region once more. Raises what `send` raises, and ShmUnrecoverable when the registration fails or does not help.
    Everything counts against `budget`.
    """
    renewed = False
    for _ in range(_ROUNDS):
        seen, before = endpoint.generation(region), lost()
        try:
            return (yield from send())
        except RsrvError as error:
            if not is_stale(error, region):
                raise
            failure = error
        if (renewed and lost() == before) or endpoint.latched:
            break
        renewed = yield from _renew(endpoint, region, seen, budget)
    raise _unrecoverable(endpoint, f"it does not keep {region.name!r}, which was registered", failure)


def is_stale(error: RsrvError, region: OwnedRegion) -> bool:
    """Whether `error` says that the server does not hold `region`."""
    if isinstance(error, UnregisteredRegion):
        return True
    if error.reason:
        return error.code is Code.NOT_FOUND and region.name in error.message  # Triton's form; the name is random
    return error.code is Code.FAILED_PRECONDITION


def _renew(endpoint: Endpoint, region: OwnedRegion, seen: int, budget: Budget) -> Steps[bool]:
    """Register `region`; False when somebody else did, or when the server is away and only sending can tell more."""
    endpoint.require_open()
    timeout = budget.at_most(SETUP_SECONDS)
    try:
        renewed: bool = yield Aside(lambda: endpoint.renew(region, seen, timeout))
    except ShmUnrecoverable:
        raise
    except DeadlineExceeded as error:
        budget.remaining()
        raise _unrecoverable(
            endpoint, f"it took more than {timeout:.3g} s to register {region.name!r}", error
        ) from None
    except RsrvError as error:
        if error.code is Code.UNAVAILABLE:  # the attempts of the request wait for its return, as their policy says
            log.debug("target=%s event=not_registered %s", endpoint.target, error)
            return False
        raise _unrecoverable(endpoint, f"it refuses to register {region.name!r} again", error) from None
    if renewed:
        log.info("target=%s event=registered_again region=%s", endpoint.target, region.name)
    return renewed


def _unrecoverable(endpoint: Endpoint, what: str, cause: RsrvError) -> ShmUnrecoverable:
    error = ShmUnrecoverable(
        f"shared memory with {endpoint.target} is lost: {what}: {cause}",
        hint='shared_memory="auto" sends tensors inline in this case',
    )
    error.__cause__ = cause
    return error
