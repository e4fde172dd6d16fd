"""One connection to a server: raw-bytes calls over a shared channel, whose failures are `RsrvError`."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from rsrv.client import channels
from rsrv.client.channels import ChannelOptions
from rsrv.client.failures import from_rpc_error
from rsrv.client.interruption import mend
from rsrv.core.errors import InvalidResponse, UsageError

log = logging.getLogger(__name__)

SERVICE = "/inference.GRPCInferenceService/"
Metadata = Sequence[tuple[str, str | bytes]]
_METADATA_NAME = re.compile("[0-9a-z_.-]+")
_METADATA_TEXT = re.compile("[ -~]*")

MAX_TIMEOUT_SECONDS = 86_400.0
"""The longest that a call may wait, a day. Far above it a deadline overflows, and the call ends at once."""


def bearer(token: str) -> Metadata:
    """The metadata that carries a bearer token. Raises UsageError for what can be none."""
    if not token or any(not "!" <= letter <= "~" for letter in token):
        raise UsageError("the token is empty, or not one line of printable ASCII without spaces")
    return (("authorization", f"Bearer {token}"),)


def checked_metadata(metadata: Metadata | Mapping[str, str | bytes]) -> tuple[tuple[str, str | bytes], ...]:
    """`metadata` in pairs. Raises UsageError for what gRPC could not send, which it says without the name."""
    pairs = tuple(metadata.items() if isinstance(metadata, Mapping) else metadata)
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, (str, bytes)) or len(pair) != 2:
            raise UsageError(f"metadata has {pair!r}; wanted (name, value)")
        name, value = pair
        if not isinstance(name, str) or not _METADATA_NAME.fullmatch(name):
            raise UsageError(
                f"metadata is named {name!r}", hint="lower-case letters, digits, '-', '_' and '.' make a name"
            )
        if name.startswith("grpc-"):
            raise UsageError(f"metadata is named {name!r}; names that begin with grpc- are gRPC's own")
        binary = name.endswith("-bin")
        if not isinstance(value, bytes if binary else str | bytes):
            wanted = "bytes" if binary else "text"
            raise UsageError(f"metadata {name!r} has a value of type {type(value).__name__}; wanted {wanted}")
        if not binary and not _METADATA_TEXT.fullmatch(value if isinstance(value, str) else value.decode("latin-1")):
            raise UsageError(f"the value of metadata {name!r} is not printable ASCII")
    return pairs


def message_of(kind: Any, body: bytes) -> Any:
    """The answer `body` as a message of the class `kind`. Raises InvalidResponse."""
    from google.protobuf.message import DecodeError

    try:
        return kind.FromString(body)
    except DecodeError:
        name = kind.DESCRIPTOR.full_name
        raise InvalidResponse(
            f"the server's answer of {len(body)} bytes is no {name}", hint="is this the gRPC port of rsrv?"
        ) from None


class Connection:
    """Calls to one service of a server. Thread safe; usable again in a forked child, which dials for itself.

    `service` is what stands before a method's name in its path. A channel of the caller's is used as it is and never
    closed.
    """

    def __init__(
        self,
        options: ChannelOptions,
        metadata: Metadata = (),
        channel: grpc.Channel | None = None,
        service: str = SERVICE,
    ) -> None:
        self.target = options.target
        self._service = service
        self._options = options
        self._metadata = checked_metadata(metadata)
        self._own = channel is None
        self._lock = threading.Lock()
        self._methods: dict[str, grpc.UnaryUnaryMultiCallable[bytes, bytes]] = {}
        self._closed = False
        self._pid = os.getpid()
        self._channel = channels.acquire(options) if channel is None else channel

    def call(self, method: str, body: bytes, timeout: float | None) -> bytes:
        """Call `method` of the service with a serialized message; returns the serialized answer."""
        try:
            return self._method(method)(body, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.target) from None
        except ValueError as error:  # grpcio's word for a channel that was closed meanwhile
            if self._closed:
                raise _closed(self.target) from None
            raise error
        except BaseException:  # Ctrl-C
            mend(self._channel)
            raise

    async def acall(self, method: str, body: bytes, timeout: float | None) -> bytes:
        """Like `call`, for an event loop. Cancelling it cancels the call."""
        import asyncio

        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def settle() -> None:
            if not ended.done():
                ended.set_result(None)

        def tell(_: grpc.Future[bytes]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(settle)

        try:
            call = self._method(method).future(body, timeout=timeout, metadata=self._metadata)
            call.add_done_callback(tell)
            try:
                await ended
            except asyncio.CancelledError:
                call.cancel()  # type: ignore[no-untyped-call]  # in the stubs
                raise
            return call.result()
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.target) from None
        except (grpc.FutureCancelledError, ValueError) as error:  # its channel was closed meanwhile
            if self._closed:
                raise _closed(self.target) from None
            raise error
        except GeneratorExit:  # collected, in the midst of anything
            raise
        except BaseException:
            mend(self._channel)
            raise

    def stream(self, method: str, body: bytes, timeout: float | None = None) -> Iterator[bytes]:
        """Call `method`, which answers with many messages; the call ends when the iterator is closed.

        Raises DeadlineExceeded after `timeout` seconds; None = no limit. A server that is not there is an error at the
        first message.
        """
        try:
            with self._lock:
                self._require_usable()
                open_stream = self._channel.unary_stream(self._service + method, None, None)
                call = open_stream(body, metadata=self._metadata, timeout=timeout)
            try:
                yield from call
            finally:
                call.cancel()  # type: ignore[no-untyped-call]  # in the stubs
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.target) from None
        except GeneratorExit:  # nobody wants more, or it is collected, in the midst of anything
            raise
        except BaseException:
            mend(self._channel)
            raise

    def tell(self, method: str, body: bytes, timeout: float, *, wait: bool) -> bool:
        """Like `call` for a message whose failure does not matter; without `wait` it returns at once.

        Whether there was an answer within `timeout`, or nobody waited for one.
        """
        try:
            call = self._method(method).future(body, timeout=timeout, metadata=self._metadata)
            call.add_done_callback(_log_failure)  # also keeps the call alive: grpcio cancels one that is dropped
            if wait:
                # Not without a limit: should grpcio's thread be stuck, timeouts are never noticed.
                call.result(timeout + 1)
        except grpc.FutureTimeoutError:
            log.debug("target=%s method=%s event=not_delivered", self.target, method)
            return False
        except (grpc.RpcError, grpc.FutureCancelledError, ValueError, UsageError) as error:
            log.debug("target=%s method=%s event=not_delivered %s", self.target, method, error)
            return not (isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED)
        except BaseException:
            if wait:  # else the collector may have called, in the midst of anything
                mend(self._channel)
            raise
        return True

    def close(self) -> None:
        """Let go of the channel. Idempotent; calls in flight end when no other handle uses the channel."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._methods.clear()
        if self._own and self._pid == os.getpid():
            channels.release(self._options)

    def _method(self, method: str) -> grpc.UnaryUnaryMultiCallable[bytes, bytes]:
        known = self._methods.get(method)
        if known is not None and self._pid == os.getpid():
            return known
        with self._lock:
            self._require_usable()
            return self._methods.setdefault(method, self._channel.unary_unary(self._service + method, None, None))

    def _require_usable(self) -> None:
        """Under the lock: raise when closed, and dial anew in a forked child."""
        if self._closed:
            raise _closed(self.target)
        if self._pid != os.getpid():
            self._methods.clear()
            if self._own:
                self._channel = channels.acquire(self._options)
            self._pid = os.getpid()


class Handle:
    """What the handles of a server have in common: options by keyword (see `KServeModel`), one connection, a context.

    `timeout` bounds each call, in seconds; its default, and which service is called, is the subclass's.
    """

    _service = SERVICE
    _default_timeout = 10.0
    _max_timeout = math.inf

    def __init__(
        self,
        url: str,
        *,
        timeout: float | None = None,
        secure: bool | None = None,
        root_certificates: bytes | None = None,
        client_key: bytes | None = None,
        client_cert: bytes | None = None,
        metadata: Metadata = (),
        channel: grpc.Channel | None = None,
    ) -> None:
        self._timeout = self._default_timeout if timeout is None else timeout
        if self._max_timeout < math.inf and not 0 < self._timeout <= self._max_timeout:
            raise UsageError(
                f"timeout is {timeout:g} seconds; wanted a number above 0, at most {self._max_timeout:g} (a day)"
            )
        options = ChannelOptions.build(
            url,
            secure=secure,
            root_certificates=root_certificates,
            client_key=client_key,
            client_cert=client_cert,
        )
        self._connection = Connection(options, metadata, channel, self._service)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()


def _log_failure(call: grpc.Future[bytes]) -> None:
    if call.cancelled() or call.exception() is not None:
        log.debug("event=not_delivered %s", call)


def _closed(target: str) -> UsageError:
    return UsageError(f"this handle to {target} is closed")
