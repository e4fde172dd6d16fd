"""`EndpointsFile`: the workers that a YAML file lists, as it is at any time. A file that gets bad changes nothing."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from rsrv.core.config.addresses import parse_host_port, parse_worker_name
from rsrv.core.config.gateway import MAX_WORKERS
from rsrv.core.errors import ConfigError
from rsrv.core.yamlio import MAX_BYTES, YamlError, load_yaml
from rsrv.gateway.plain_files import read_plain
from rsrv.gateway.workers.fleet import Endpoint

LOOK_SECONDS = 1.0

_KEYS = ("endpoint", "metrics", "name")

log = logging.getLogger(__name__)


def parse_endpoints(text: str | bytes, what: str) -> tuple[Endpoint, ...]:
    """The workers of a list of ``host:port`` and of mappings with `endpoint`, `metrics` and `name`, or of a mapping
    whose `endpoints` is such a list. An address that is there twice counts once.

    Raises ConfigError, in which `what` names the text. An empty text is an error, because a file that is being written
    anew is empty for a moment; `[]` is a list of no workers.
    """
    try:
        content = load_yaml(text, what=what)
    except YamlError as error:
        raise ConfigError(error.message) from None
    if isinstance(content, dict):
        _refuse_unknown(content, ("endpoints",), what)
        content = content.get("endpoints")
    if not isinstance(content, list):
        raise ConfigError(f"{what}: wanted a list of workers, or endpoints: with such a list; got {_kind(content)}")
    if len(content) > MAX_WORKERS:
        raise ConfigError(f"{what}: {len(content)} workers; wanted at most {MAX_WORKERS}")
    found: dict[str, Endpoint] = {}
    names: dict[str, str] = {}
    for place, entry in enumerate(content):
        endpoint = _endpoint(entry, f"{what}: endpoints[{place}]")
        if endpoint.url in found:
            continue
        other = names.setdefault(endpoint.name, endpoint.url)
        if other != endpoint.url:
            raise ConfigError(f"{what}: {other} and {endpoint.url} both have the name {endpoint.name!r}")
        found[endpoint.url] = endpoint
    return tuple(found.values())


def _endpoint(entry: Any, what: str) -> Endpoint:
    if not isinstance(entry, dict):
        entry = {"endpoint": entry}
    _refuse_unknown(entry, _KEYS, what)
    url = _address(entry.get("endpoint"), f"{what}: endpoint")
    metrics = entry.get("metrics")
    if metrics is not None:
        metrics = _address(metrics, f"{what}: metrics")
    name = entry.get("name")
    if name is None:
        name = url
    if not isinstance(name, str):
        raise ConfigError(f"{what}: name: {name!r} is not accepted; wanted a text")
    try:
        return Endpoint(url, url if name == url else parse_worker_name(name), metrics, "file")
    except ValueError as error:
        raise ConfigError(f"{what}: name: {error}") from None


def _address(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{what}: {value!r} is not accepted; wanted host:port")
    try:
        return str(parse_host_port(value))
    except ValueError as error:
        raise ConfigError(f"{what}: {error}") from None


def _refuse_unknown(mapping: dict[Any, Any], known: tuple[str, ...], what: str) -> None:
    for key in mapping:
        if key not in known and not str(key).startswith("x-"):
            raise ConfigError(f"{what}: the key {key!r} is unknown; wanted {', '.join(known)}")


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


class EndpointsFile:
    """A source of members. Reads the file when made, and raises ConfigError when that cannot be done; later on it warns
    once for each state of the file that it does not take.

    A file that was replaced is taken at once. One that was written in place is taken at the second look at which it is
    the same: half of it may be there at the first.
    """

    name = "file"
    seconds = LOOK_SECONDS

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._what = f"membership.file {self._path}"
        self._changing: tuple[int, ...] | None = None
        try:
            self._seen: tuple[int, ...] | None = self._state()
            self._endpoints = parse_endpoints(self._read(), self._what)
        except OSError as error:
            raise ConfigError(f"{self._what}: cannot be read: {error.strerror}") from None

    def look(self) -> tuple[Endpoint, ...]:
        """The workers that the file lists, or listed when it was last good."""
        try:
            state = self._state()
        except OSError as error:
            if self._seen is not None:
                log.warning("%s: cannot be looked at, the workers stay as they are: %s", self._what, error.strerror)
            self._seen = None
            return self._endpoints
        if state == self._seen:
            return self._endpoints
        in_place = self._seen is not None and state[0] == self._seen[0]
        if in_place and state != self._changing:
            self._changing = state
            return self._endpoints
        self._seen = state
        try:
            self._endpoints = parse_endpoints(self._read(), self._what)
            log.info("%s: %d workers", self._what, len(self._endpoints))
        except OSError as error:
            log.warning("%s: cannot be read, the workers stay as they are: %s", self._what, error.strerror)
        except ConfigError as error:
            log.warning("%s; the workers stay as they are", error.message)
        return self._endpoints

    def _state(self) -> tuple[int, ...]:
        status = os.stat(self._path)
        return (status.st_ino, status.st_dev, status.st_mtime_ns, status.st_size)

    def _read(self) -> bytes:
        return read_plain(self._path, MAX_BYTES + 1)
