"""The one answer to a client's call that several workers took part in: given once, and counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rsrv.core.errors import Code
from rsrv.gateway.workers.outcome import status_name
from rsrv.rpc.status import status_of

if TYPE_CHECKING:
    from rsrv.gateway.metrics.counters import GatewayCounters
    from rsrv.rpc.call import Call


class Answer:
    """Whoever is done with the call first answers it; what comes later is ignored. Thread safe.

    Such calls name no model in the counters: what a client makes up must not become a label.
    """

    def __init__(self, call: Call, counters: GatewayCounters) -> None:
        self.call = call
        self._counters = counters
        self._started = time.monotonic()

    def send(self, body: bytes, trailers: Mapping[str, str] = {}) -> None:
        """Answer with a serialized message."""
        self._count(Code.OK)
        self.call.send([body])
        self.call.finish(trailers)

    def message(self, message: Any) -> None:
        self.send(message.SerializeToString())

    def fail(self, error: BaseException) -> None:
        self._count(status_of(error).code)
        self.call.fail(error)

    def answered_by(self, fn: Callable[[], None]) -> None:
        """Run `fn`, which answers; an exception in it is the answer."""
        try:
            fn()
        except Exception as error:
            self.fail(error)

    def _count(self, code: Code) -> None:
        rpc = self.call.path.rpartition("/")[2]
        self._counters.finished(rpc, "", status_name(code), time.monotonic() - self._started)
