"""The event log as a stream of gRPC messages, no faster than its reader takes them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from rsrv.protos import admin as pb

if TYPE_CHECKING:
    from rsrv.rpc.call import Call
    from rsrv.serve.admin.events import Event, EventLog
    from rsrv.serve.admin.requests import WatchRequest

BATCH = 64
"""Messages that are given to the transport before it has said that it wants more."""
GAP = "gap"
"""Type of the message that says that events before its `seq` are lost."""


class Watch:
    """One reader. All but the wake-up runs on the thread of its call."""

    def __init__(self, call: Call, log: EventLog, request: WatchRequest) -> None:
        self._call = call
        self._unsent: deque[bytes] = deque()
        self._sending = False
        self._woken = False
        self._subscription = log.subscribe(self._wake, from_seq=request.from_seq, model=request.model)

    def start(self) -> None:
        """Send what is there, and from now on what comes."""
        self._call.on_end(self._subscription.close)
        self._call.on_writable(self._go_on)
        self._push()

    def _wake(self) -> None:
        """On the thread that noted an event."""
        if not self._woken:
            self._woken = True
            self._call.defer(self._push)

    def _go_on(self) -> None:
        self._sending = False
        self._push()

    def _push(self) -> None:
        self._woken = False
        if self._sending:
            return
        if not self._unsent:
            self._take()
        for _ in range(min(BATCH, len(self._unsent))):
            self._sending = True
            self._call.send([self._unsent.popleft()])

    def _take(self) -> None:
        first, events = self._subscription.take()
        if first is not None:
            lost = pb.Event(seq=first, type=GAP, detail=f"events before {first} are not kept any more")
            self._unsent.append(lost.SerializeToString())
        self._unsent.extend(_message(event).SerializeToString() for event in events)


def _message(event: Event) -> pb.Event:
    return pb.Event(
        seq=event.seq,
        time=event.time,
        model=event.model,
        incarnation=event.incarnation,
        type=event.type,
        to=event.new,
        detail=event.detail,
        **{"from": event.old},
    )
