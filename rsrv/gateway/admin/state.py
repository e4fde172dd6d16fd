"""`StateFile`: what operators changed while the gateway ran, kept over a restart. One gateway writes one file."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import logging
import os
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from rsrv.bundle.files import sync_directory
from rsrv.core.config.gateway import ModelRoutingConfig, WorkerAddress, WorkerName
from rsrv.core.config.sections import Name, Section
from rsrv.core.errors import ConfigError, InvalidRequest
from rsrv.gateway.plain_files import read_plain
from rsrv.gateway.scheduling.knobs import Knobs, ModelOverride
from rsrv.gateway.workers.fleet import Endpoint

log = logging.getLogger(__name__)

# Versions of the file. 1 (2026): the policy fields, model overrides and workers that differ from the configuration.
VERSION = 1

MAX_BYTES = 64 << 20
"""What is larger was not written by a gateway."""


class SavedWorker(Section):
    """A worker that was added over the control API; without a name it is called by its address."""

    worker: WorkerAddress
    metrics: WorkerAddress | None = None
    name: WorkerName | None = None


class SavedState(Section):
    """The content of the file: only what differs from the configuration, which may change beneath it.

    A model whose configured override was taken away is there with an override that sets nothing.
    """

    version: int = VERSION
    policy: dict[Name, Any] = Field(default_factory=dict)
    models: dict[Name, ModelRoutingConfig] = Field(default_factory=dict)
    added: list[SavedWorker] = Field(default_factory=list)
    drained: list[WorkerAddress] = Field(default_factory=list)


class StateFile:
    """Reads the file when made, and writes it anew, as a whole, at each change. Thread safe.

    A file that is not there holds nothing; one that is damaged raises ConfigError, which names it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._generation = -1
        self._owned: int | None = None
        self._saved = _read(self.path)

    def own(self) -> None:
        """Keep other gateways from the file until `disown`, and remove what one that was killed left half written.

        Raises ConfigError when another one has it: what one writes the other would lose. Where nothing can be written
        there is a warning.
        """
        try:
            fd = os.open(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            why = f"{self.path.parent} cannot be written: {error.strerror}"
            log.warning("state_file %s: %s; what operators change is lost at a restart", self.path, why)
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(
                f"state_file {self.path}: another gateway uses it", hint="give each gateway a file of its own"
            ) from None
        except OSError as error:  # a file system without locks
            os.close(fd)
            log.debug("state_file %s: cannot be locked here: %s", self.path, error.strerror)
            return
        self._owned = fd
        for left in self.path.parent.glob(f".{glob.escape(self.path.name)}.*.partial"):
            with contextlib.suppress(OSError):
                left.unlink()

    def disown(self) -> None:
        """Let others have the file. Idempotent."""
        fd, self._owned = self._owned, None
        if fd is not None:
            os.close(fd)

    def restore(self, configured: Knobs) -> Knobs:
        """The configured knobs with what was changed on top; generation 0 when that is nothing.

        Raises ConfigError when a value is not accepted (any more).
        """
        saved = self._saved
        try:
            knobs = configured.changed(**saved.policy) if saved.policy else configured
            for model, routing in saved.models.items():
                knobs = knobs.with_override(model, ModelOverride.from_config(routing))
        except InvalidRequest as error:
            raise ConfigError(f"state_file {self.path}: {error.message}", hint=_WAY_OUT) from None
        return knobs

    def save_knobs(self, knobs: Knobs, configured: Knobs) -> bool:
        """Keep what differs between the two. Whether it is on disk; why not is in the log.

        Calls may come in any order: the highest generation stays.
        """
        policy = {name: value for name, value in knobs.policy().items() if value != getattr(configured, name)}
        models = {
            name: knobs.override(name).to_config()
            for name in sorted({*knobs.models, *configured.models})
            if knobs.override(name) != configured.override(name)
        }
        with self._lock:
            if knobs.generation < self._generation:
                return True
            if not self._write(self._saved.model_copy(update={"policy": policy, "models": models})):
                return False
            self._generation = knobs.generation
            return True

    @property
    def added(self) -> tuple[Endpoint, ...]:
        """The workers that were added over the control API, in that order."""
        return tuple(Endpoint(w.worker, w.name or "", w.metrics, "control") for w in self._saved.added)

    @property
    def drained(self) -> tuple[str, ...]:
        """The addresses of workers that were drained, sorted; some may be unknown by now."""
        return tuple(self._saved.drained)

    def save_workers(self, added: Iterable[Endpoint], drained: Iterable[str]) -> bool:
        """Keep the workers that were added over the control API, and those that are drained. Whether it is on disk."""
        workers = [
            SavedWorker(worker=one.url, metrics=one.metrics, name=one.name if one.name != one.url else None)
            for one in added
        ]
        update = {"added": workers, "drained": sorted(set(drained))}
        with self._lock:
            return self._write(self._saved.model_copy(update=update))

    def _write(self, state: SavedState) -> bool:
        if state == self._saved and self.path.exists():
            return True
        try:
            _replace(self.path, state.model_dump(exclude_defaults=True) | {"version": VERSION})
        except OSError as error:
            log.warning("state_file %s: not written, what changed is lost at a restart: %s", self.path, error)
            return False
        self._saved = state
        return True


_WAY_OUT = "repair it, or remove it to start with the configuration alone"


def _read(path: Path) -> SavedState:
    where = f"state_file {path}"
    try:
        data = read_plain(path, MAX_BYTES + 1)
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise ConfigError(f"{where}: {path.parent} is not an existing directory") from None
        return SavedState()
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{where}: has more than {MAX_BYTES} bytes, so that no gateway wrote it", hint=_WAY_OUT)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is not JSON: {error}", hint=_WAY_OUT) from None
    version = content.get("version") if isinstance(content, Mapping) else None
    if type(version) is not int or version < 1:
        raise ConfigError(f"{where}: has no version; wanted an object with version: {VERSION}", hint=_WAY_OUT)
    if version > VERSION:
        raise ConfigError(
            f"{where}: was written in version {version}; this gateway reads versions up to {VERSION}",
            hint="start the gateway that wrote it, or remove it to start with the configuration alone",
        )
    try:
        return SavedState.model_validate(content)
    except ValidationError as error:
        entry = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in entry["loc"])
        raise ConfigError(f"{where}: {key}: {entry['msg']}", hint=_WAY_OUT) from None


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    # mkstemp makes files of mode 0600: addresses of workers are nobody else's business.
    fd, staged = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(staged)
        raise
    sync_directory(path.parent)
