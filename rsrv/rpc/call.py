"""`Call`: one RPC as handlers see it, whatever engine carries it. Nothing here knows gRPC's own libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

Buffer = bytes | bytearray | memoryview
"""A piece of a message. Anything with a contiguous buffer of bytes works."""


class Call(Protocol):
    """One RPC. A handler gets it, must not block, and ends it now or later with `finish` or `fail`.

    All methods may be called from any thread. A call ends once: by `finish`, by `fail`, or because the client went
    away, its deadline passed, or the engine stopped; what comes after is ignored. Each call has a thread of the engine
    for as long as it is open, which runs the handler and then the functions given to `defer`, one after the other.
    """

    @property
    def path(self) -> str:
        """Full method name, ``/inference.GRPCInferenceService/ModelInfer``."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """Request metadata; values of a repeated key are joined by ``,`` and those of ``-bin`` keys are base64."""

    @property
    def deadline_ns(self) -> int:
        """Absolute on ``time.monotonic_ns()``; 0 = the client set none."""

    @property
    def peer(self) -> str:
        """Address of the client, for logs."""

    @property
    def body(self) -> bytes:
        """The request message; empty for kinds whose requests come through `on_message`."""

    @property
    def cancelled(self) -> bool:
        """True once nobody waits for the answer: the client went away, its deadline passed, or the engine stopped."""

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send one message, the concatenation of `buffers`, which may be reused afterwards. Unary calls send one."""

    def finish(self, trailers: Mapping[str, str] = ...) -> None:
        """End the call with status OK, after everything that was sent."""

    def fail(self, error: BaseException) -> None:
        """End the call with the status of `error` (see `rsrv.rpc.status`), after everything that was sent."""

    def defer(self, fn: Callable[[], object]) -> bool:
        """Run `fn` on the call's own thread. An exception in it fails the call.

        False when the call has ended, and then `fn` does not run; true means that it runs, whatever happens meanwhile.
        """

    def on_cancel(self, fn: Callable[[], object]) -> None:
        """Run `fn` once when nobody waits for the answer any more, on the call's thread; at once when late."""

    def on_end(self, fn: Callable[[], object]) -> None:
        """Run `fn` once when the call has ended, however that was, and the reply has been handed to the transport."""

    def on_writable(self, fn: Callable[[], object]) -> None:
        """Run `fn` on the call's thread each time that all messages sent so far have been handed to the transport."""

    def on_message(self, fn: Callable[[bytes | None], object]) -> None:
        """Run `fn` on the call's thread for each request message, then with None. Set it in the handler."""


def reply(call: Call, message: Any) -> None:
    """Answer a unary call with a protobuf message."""
    call.send([message.SerializeToString()])
    call.finish()
