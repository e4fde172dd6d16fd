"""A `Call` without a transport: `serve` plays the engine's thread until the call is answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue

from rsrv.core.errors import Code, RsrvError


class FakeCall:
    """Answers end up in `message` and `error`; `wait` sees a call that another thread ends."""

    def __init__(self, body: bytes = b"", *, path: str = "", deadline_ns: int = 0) -> None:
        self.path = path
        self.body = body
        self.metadata: Mapping[str, str] = {}
        self.deadline_ns = deadline_ns
        self.peer = "test"
        self.cancelled = False
        self.message: bytes | None = None
        self.trailers: dict[str, str] = {}
        self.error: BaseException | None = None
        self.ended = False
        self.ends = 0
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._on_cancel: list[Callable[[], None]] = []
        self._on_end: list[Callable[[], None]] = []

    def serve(self, handler: Callable[[FakeCall], None], seconds: float = 30) -> FakeCall:
        """What an engine's thread does for a call, from the handler to the answer."""
        try:
            handler(self)
        except BaseException as error:
            self.fail(error)
        until = time.monotonic() + seconds
        while not self.ended and not self.cancelled:
            work = self._work.get(timeout=max(0.0, until - time.monotonic()))
            if work is not None:
                try:
                    work()
                except BaseException as error:
                    self.fail(error)
        for fn in self._on_end:
            fn()
        return self

    @property
    def code(self) -> Code:
        if self.error is None:
            return Code.OK
        return self.error.code if isinstance(self.error, RsrvError) else Code.INTERNAL

    @property
    def reason(self) -> str | None:
        return getattr(self.error, "reason", None)

    def cancel(self) -> None:
        """The client goes away."""
        self.cancelled = True
        for fn in self._on_cancel:
            fn()
        self._work.put(None)

    # --- the protocol ---------------------------------------------------------------------------------------------

    def send(self, buffers) -> None:
        self.message = b"".join(buffers)

    def finish(self, trailers: Mapping[str, str] = {}) -> None:
        self.trailers = dict(trailers)
        self._end()

    def fail(self, error: BaseException) -> None:
        if not self.ended:
            self.error = error
        self._end()

    def on_cancel(self, fn: Callable[[], None]) -> None:
        self._on_cancel.append(fn)
        if self.cancelled:
            fn()

    def on_end(self, fn: Callable[[], None]) -> None:
        self._on_end.append(fn)

    def defer(self, fn: Callable[[], None]) -> bool:
        if self.ended or self.cancelled:
            return False
        self._work.put(fn)
        return True

    def _end(self) -> None:
        self.ends += 1
        self.ended = True
        self._work.put(None)
