"""Hooks for embedders: heartbeats tell that the server is used, serve guards may refuse to start one.

Registrations belong to the process and survive the stop of a server.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

log = logging.getLogger(__name__)

Heartbeat = Callable[[str, Any], object]
ServeGuard = Callable[[Any], object]
_H = TypeVar("_H", bound=Heartbeat)
_G = TypeVar("_G", bound=ServeGuard)

_lock = threading.Lock()
# Replaced, never mutated: the request path reads the tuple without a lock.
_heartbeats: tuple[Heartbeat, ...] = ()
_guards: tuple[ServeGuard, ...] = ()
_complained: set[Heartbeat] = set()


def register_heartbeat(f: _H) -> _H:
    """Have ``f(event, detail)`` called, synchronously and in registration order; it must not block. Returns `f`.

    Events: ``"up"`` and ``"down"`` (detail: the ServerConfig), ``"request"`` (detail: the name of the model whose
    ModelInfer finished, also when it failed), ``"load"`` and ``"unload"`` (detail: the bundle's name). An exception of
    `f` is logged once and never reaches a request.
    """
    global _heartbeats
    with _lock:
        _heartbeats = (*_heartbeats, f)
    return f


def unregister_heartbeat(f: Heartbeat) -> None:
    """Undo `register_heartbeat`; unknown callbacks are ignored."""
    global _heartbeats
    with _lock:
        _heartbeats = tuple(other for other in _heartbeats if other is not f)
        _complained.discard(f)


def register_serve_guard(f: _G) -> _G:
    """Have ``f(config)`` called before every bring-up; what it raises reaches the caller of `serve`. Returns `f`."""
    global _guards
    with _lock:
        _guards = (*_guards, f)
    return f


def unregister_serve_guard(f: ServeGuard) -> None:
    """Undo `register_serve_guard`; unknown guards are ignored."""
    global _guards
    with _lock:
        _guards = tuple(other for other in _guards if other is not f)


def anybody_listens() -> bool:
    return bool(_heartbeats)


def beat(event: str, detail: Any) -> None:
    """Tell every heartbeat."""
    for f in _heartbeats:
        try:
            f(event, detail)
        except Exception:
            with _lock:
                first = f not in _complained
                _complained.add(f)
            if first:
                log.exception("heartbeat failed (logged once per callback) callback=%r event=%s", f, event)


def check_guards(config: Any) -> None:
    """Ask every guard; the exception of the first one that refuses propagates unchanged."""
    for guard in _guards:
        guard(config)
