"""Settings and end of the client in this process: `client_init` and `client_shutdown`, both optional."""

from __future__ import annotations

import math
from types import TracebackType

from rsrv.client.transport import endpoints, pools
from rsrv.client.transport.pools import DEFAULT_SLOTS
from rsrv.client.transport.reprobe import DEFAULT_INTERVAL
from rsrv.core.errors import UsageError


class ClientSettings:
    """What `client_init` returns: as a context manager it shuts the client down at the end of the block."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        client_shutdown()


def client_init(
    *,
    pool_bytes: int | None = None,
    n_slots: int = DEFAULT_SLOTS,
    shm_reprobe_interval: float = DEFAULT_INTERVAL,
) -> ClientSettings:
    """Set up the pools of this process, which all handles share. Not needed for the defaults.

    Pools that exist are closed, and what was learned about servers is forgotten; open handles go on with new ones.

    Args:
        pool_bytes: size of the pool in shared memory, and of the one inside the process for requests that go inline,
            each made when it is first needed. None for 256 MiB, but no more than half of what is free in /dev/shm.
        n_slots: into how many slots each is cut: requests in flight at a time, or fewer where one needs several.
        shm_reprobe_interval: seconds between attempts to use shared memory again with a server for which it was given
            up after errors; 0 or less for never.

    Raises UsageError for sizes that make no pool.
    """
    if math.isnan(shm_reprobe_interval):
        raise UsageError("shm_reprobe_interval=nan is not a number of seconds")
    pools.configure(pool_bytes, n_slots)
    endpoints.of_this_process.reset(shm_reprobe_interval)
    return ClientSettings()


def client_shutdown() -> None:
    """Unregister and unlink all shared memory of the client and close all connections, in about 5 s at most.

    Open handles are closed with it; new ones work. Idempotent, and done at the end of the process anyway.
    """
    endpoints.close()
