"""The question whether a server sees the shared memory of this process."""

from __future__ import annotations

import os

from rsrv.client.connection import Connection
from rsrv.client.server import ask
from rsrv.client.windows import create_region
from rsrv.core.errors import Unimplemented

_NONCE_BYTES = 16


def sees_our_memory(connection: Connection, timeout: float) -> bool | None:
    """Whether the server can open an object that is made for this question and holds a secret; None = it has no probe.

    Errors are raised: a server that does not answer must not be taken for one without shared memory. Raises
    OutOfSharedMemory when this machine has no room for the object.
    """
    nonce = os.urandom(_NONCE_BYTES)
    probe = create_region("probe", _NONCE_BYTES)
    try:
        probe.view[:_NONCE_BYTES] = nonce
        return bool(ask(connection, "IsSameIPCNamespace", timeout, name=probe.name, nonce=nonce).same)
    except Unimplemented:
        return None
    finally:
        probe.close()
