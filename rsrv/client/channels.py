"""Channels to servers: one per target and TLS configuration, shared by all handles of this process and counted."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from rsrv.client.interruption import mend
from rsrv.client.url import parse_url
from rsrv.core.errors import UsageError

_MAX_MESSAGE_BYTES = 512 << 20
_LARGEST_LIMIT = 2**31 - 1
_PEM = {
    "root_certificates": b"CERTIFICATE-----",
    "client_key": b"PRIVATE KEY-----",
    "client_cert": b"CERTIFICATE-----",
}
_SEND_VARIABLES = ("RSRV_CLIENT_GRPC_MAX_SEND_MSG_BYTES", "REACTANT_CLIENT_GRPC_MAX_SEND_MSG_BYTES")
_RECEIVE_VARIABLES = ("RSRV_CLIENT_GRPC_MAX_RECV_MSG_BYTES", "REACTANT_CLIENT_GRPC_MAX_RECV_MSG_BYTES")


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """Everything that distinguishes one channel from another. Certificates and keys are PEM bytes."""

    target: str
    secure: bool
    local: bool
    root_certificates: bytes | None = field(default=None, repr=False)
    client_key: bytes | None = field(default=None, repr=False)
    client_cert: bytes | None = field(default=None, repr=False)
    max_send_bytes: int = _MAX_MESSAGE_BYTES
    max_receive_bytes: int = _MAX_MESSAGE_BYTES

    @classmethod
    def build(
        cls,
        url: str,
        *,
        secure: bool | None = None,
        root_certificates: bytes | None = None,
        client_key: bytes | None = None,
        client_cert: bytes | None = None,
        max_send_message_length: int | None = None,
        max_receive_message_length: int | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> ChannelOptions:
        """From what a caller wrote; a message limit that is not given comes from the environment."""
        address = parse_url(url)
        options = cls(
            address.target,
            address.secure if secure is None else secure,
            address.local,
            root_certificates,
            client_key,
            client_cert,
        )
        if not options.secure and any(given is not None for given in (root_certificates, client_key, client_cert)):
            raise UsageError(f"certificates were given, but {url!r} is not a TLS address", hint="write grpcs://…")
        if (client_key is None) != (client_cert is None):
            raise UsageError("client_key and client_cert must be given together")
        for name, kind in _PEM.items():
            _require_pem(name, getattr(options, name), kind)
        return replace(
            options,
            max_send_bytes=_limit("max_send_message_length", max_send_message_length, _SEND_VARIABLES, environ),
            max_receive_bytes=_limit(
                "max_receive_message_length", max_receive_message_length, _RECEIVE_VARIABLES, environ
            ),
        )

    def open(self) -> grpc.Channel:
        arguments: list[tuple[str, Any]] = [
            ("grpc.max_send_message_length", self.max_send_bytes),
            ("grpc.max_receive_message_length", self.max_receive_bytes),
            # A shared channel outlives a restart of its server: by default it would refuse calls for up to two
            # minutes after the server is back.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        if self.local:
            arguments.append(("grpc.enable_http_proxy", 0))
        if not self.secure:
            return grpc.insecure_channel(self.target, arguments)
        credentials = grpc.ssl_channel_credentials(self.root_certificates, self.client_key, self.client_cert)
        return grpc.secure_channel(self.target, credentials, arguments)


class _Pool:
    """Open channels and how many handles use each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: dict[ChannelOptions, tuple[grpc.Channel, int]] = {}

    def acquire(self, options: ChannelOptions) -> grpc.Channel:
        with self._lock:
            channel, users = self._channels.get(options) or (options.open(), 0)
            self._channels[options] = (channel, users + 1)
            return channel

    def release(self, options: ChannelOptions) -> None:
        with self._lock:
            if options not in self._channels:
                return
            channel, users = self._channels.pop(options)
            if users > 1:
                self._channels[options] = (channel, users - 1)
                return
        try:
            channel.close()
        except BaseException:  # Ctrl-C
            mend(channel)
            raise


_pool = _Pool()


def acquire(options: ChannelOptions) -> grpc.Channel:
    """The shared channel for `options`; pair with `release`."""
    return _pool.acquire(options)


def release(options: ChannelOptions) -> None:
    """Give a channel back; the last user closes it, which ends the calls in flight on it."""
    _pool.release(options)


def _forget_parent() -> None:
    """A forked child must neither use nor close its parent's connections: it starts with none."""
    global _pool, _parents
    _parents.append(_pool)
    _pool = _Pool()


_parents: list[_Pool] = []
"""Pools inherited through fork, kept alive unused: destroying a channel talks to threads that the child lacks."""

os.register_at_fork(after_in_child=_forget_parent)


def _limit(name: str, given: int | None, variables: Sequence[str], environ: Mapping[str, str]) -> int:
    if given is not None:
        return _require_limit(name, given, repr(given))
    for variable in variables:
        if text := environ.get(variable):
            try:
                value: Any = int(text)
            except ValueError:
                value = None
            return _require_limit(variable, value, repr(text))
    return _MAX_MESSAGE_BYTES


def _require_limit(name: str, value: Any, written: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name}={written} is not a whole number of bytes")
    if not 1 <= value <= _LARGEST_LIMIT:
        raise UsageError(
            f"{name}={written} is not in 1..{_LARGEST_LIMIT} bytes", hint="gRPC has no message above 2 GiB"
        )
    return value


def _require_pem(name: str, given: Any, kind: bytes) -> None:
    if given is None:
        return
    if not isinstance(given, bytes):
        raise UsageError(
            f"{name} is {type(given).__name__}; wanted the bytes of a PEM file", hint="Path(…).read_bytes()"
        )
    if kind not in given:  # never shown: it may be a key
        raise UsageError(f"{name} has {len(given)} bytes without a line -----BEGIN … {kind.decode()}; wanted PEM")
