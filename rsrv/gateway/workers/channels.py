"""The channels to one worker: bytes in, bytes out, with a future for each call. Nothing here waits."""

from __future__ import annotations

import base64
import logging
import re
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from rsrv.core.errors import FAILOVER_METADATA_KEY, Code
from rsrv.gateway.methods import INFER
from rsrv.gateway.workers.hops import GATEWAY_KEY, Hops, Metadata
from rsrv.gateway.workers.outcome import Outcome

log = logging.getLogger(__name__)

_WINDOW_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """Limits of the calls to workers, in bytes per message, and whose calls they are."""

    max_send_bytes: int
    max_recv_bytes: int
    hops: Hops = field(default_factory=Hops)
    """The mark of the gateway."""

    def open(self, target: str) -> grpc.Channel:
        """A channel with a connection of its own."""
        options: list[tuple[str, Any]] = [
            # Channels with the same target and options share their connection otherwise, and a stuck one would come
            # back when its channel is built anew.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_send_message_length", self.max_send_bytes),
            ("grpc.max_receive_message_length", self.max_recv_bytes),
            # A worker that is back should be tried soon: by default a channel waits for up to two minutes.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 2000),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
            # A machine that vanished, without a word from its system.
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 20_000),
        ]
        return grpc.insecure_channel(target, options)


class Stubs:
    """One channel and its methods by path. Thread safe."""

    def __init__(self, settings: ChannelSettings, target: str) -> None:
        self._channel = settings.open(target)
        self._hops = settings.hops
        self._methods: dict[str, grpc.UnaryUnaryMultiCallable[bytes, bytes]] = {}

    def start(
        self, path: str, body: bytes, timeout: float, metadata: Metadata, *, wait: bool = False
    ) -> grpc.Future[bytes]:
        """Send `body`; with `wait` also when there is no connection yet, as soon as there is one.

        `metadata` of ModelInfer says itself which gateways the call has passed. Raises ValueError when the channel was
        closed meanwhile, or when no thread can be started for its callbacks.
        """
        method = self._methods.get(path)
        if method is None:
            method = self._methods.setdefault(path, self._channel.unary_unary(path, None, None))
        if path != INFER:
            metadata = self._hops.signed(metadata)
        try:
            future: grpc.Future[bytes] = method.future(body, timeout=timeout, metadata=metadata, wait_for_ready=wait)
        except RuntimeError as error:
            log.error("a call could not be started path=%s %s", path, error)
            raise ValueError(str(error)) from error
        return future

    def watch(self, path: str, body: bytes) -> Any:
        """The answers of a server stream: an iterator that can be cancelled. Raises ValueError when closed."""
        return self._channel.unary_stream(path, None, None)(body, metadata=self._hops.own)

    def close(self) -> None:
        """Returns at once and may be called from a call's own callback; calls that are open end as cancelled.

        grpcio's close waits for the thread that runs callbacks, so it cannot be called there.
        """
        threading.Thread(target=self._channel.close, name="rsrv-gateway-close", daemon=True).start()


def outcome_of(future: Any, seconds: float) -> Outcome:
    """How a call that is over has ended."""
    code = Code(future.code().value[0])
    trailers = trailers_of(future.trailing_metadata())
    if code is Code.OK:
        return Outcome(code, future.result(), trailers=trailers, seconds=seconds)
    text = future.details() or ""
    return Outcome(code, text=text, trailers=trailers, seconds=seconds, unsure=_is_unsure(code, text))


def _is_unsure(code: Code, text: str) -> bool:
    """Whether the connection was given up because nothing came back on it: the worker may be paused, and go on."""
    if code is not Code.UNAVAILABLE or "failed to connect" in text:
        return False
    return "timeout" in text.lower() or "timed out" in text.lower()


def trailers_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> Mapping[str, str]:
    """The trailing metadata that is handed on: what is text, but not what belongs to gRPC itself, nor what gRPC would
    refuse to send or the client to take."""
    if not metadata:
        return _NONE
    found: dict[str, str] = {}
    left = MAX_TRAILER_BYTES
    for key, value in metadata:
        if _may_be_sent(key, value) and not key.startswith("grpc-"):
            left -= len(key) + len(value) + _ENTRY_BYTES
            if left >= 0:
                found[key] = str(value)
    return found


_NONE: Mapping[str, str] = {}
MAX_TRAILER_BYTES = 3072
"""Clients refuse metadata of more than 8 KiB, of which the text of a status may take 4."""
_ENTRY_BYTES = 32
"""What HTTP/2 adds for each entry when it measures metadata."""
_KEY = re.compile("[0-9a-z_.-]+")

_FORWARDED = ("traceparent", "tracestate", "baggage")
_OURS = (GATEWAY_KEY, FAILOVER_METADATA_KEY)
"""What a gateway says itself."""


def _may_be_sent(key: str, value: str | bytes) -> bool:
    """Whether it is text that gRPC can send. It refuses a whole call for one bad entry, as an error of the callee."""
    return isinstance(value, str) and value.isascii() and value.isprintable() and _KEY.fullmatch(key) is not None


def forwarded(metadata: Mapping[str, str], more: Metadata) -> Metadata:
    """Of a client's metadata what workers get to see (spec gateway-node 1.5.4), and `more`."""
    found: list[tuple[str, str | bytes]] = []
    for key, value in metadata.items():
        if key in _FORWARDED or (key.startswith("x-") and key not in _OURS):
            if not _may_be_sent(key, value):
                continue
            if not key.endswith("-bin"):
                found.append((key, value))
                continue
            for each in value.split(","):  # `Call.metadata` has the values of binary keys as base64
                with suppress(ValueError):
                    found.append((key, base64.b64decode(each)))
    return (*found, *more)
