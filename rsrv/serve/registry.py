"""Which models a server knows and in which state each is. What a state is made of is the loader's work.

Entries are immutable and the map of them is replaced, never mutated: the request path reads it without a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rsrv.core.errors import ModelFailed, ModelPreparing, RsrvError, UnknownModel

if TYPE_CHECKING:
    from rsrv.bundle.manifest import Manifest
    from rsrv.runtime.hooks import Hooks
    from rsrv.serve.hook_processes.processes import HookProcesses
    from rsrv.serve.scheduler.model import ServableModel
    from rsrv.serve.validate import OutputCheck, RowCheck, TensorCheck

ReadyWhen = Literal["all", "any"] | Sequence[str]


class ModelState(Enum):
    PREPARING = "preparing"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a model is failed: the phase of its preparation, the type of the error, and its text."""

    phase: str
    type: str
    message: str


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """What serving a request of a prepared model needs.

    Attributes:
        inputs: checks the client's inputs.
        executable_inputs: checks what `preprocess` returns; None without a `preprocess`.
        rows: finds rows and variant of the executable inputs.
        outputs: checks requested outputs.
        client_outputs: checks what `postprocess` returns; None without a `postprocess`.
        hook_timeout: seconds that one hook call may take, None = no limit.
        numerics: what was done about the arithmetic of its programs, in one line.
        processes: where the hooks run; None = on the threads of the server's hook pool.
    """

    model: ServableModel
    hooks: Hooks
    inputs: TensorCheck
    executable_inputs: TensorCheck | None
    rows: RowCheck
    outputs: OutputCheck
    client_outputs: TensorCheck | None
    hook_timeout: float | None
    numerics: str = ""
    processes: HookProcesses | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One registered name.

    Attributes:
        manifest: known as soon as it was parsed, also when a later step failed.
        modified: files that differ from the manifest's digests and were accepted nevertheless.
    """

    name: str
    path: Path
    state: ModelState = ModelState.PREPARING
    incarnation: int = 0
    manifest: Manifest | None = None
    prepared: Prepared | None = None
    failure: Failure | None = None
    modified: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """Why the model does not answer, for people; "" when it does."""
        if self.failure is not None:
            return f"{self.failure.phase}: {self.failure.message}"
        return "" if self.state is ModelState.READY else self.state.value

    def unavailable(self) -> RsrvError:
        """What a request for a model that is not ready is answered."""
        if self.failure is not None:
            return ModelFailed(f"model {self.name!r} failed ({self.reason})")
        return ModelPreparing(f"model {self.name!r} is being prepared")


@dataclass(frozen=True, slots=True)
class Progress:
    """How many of the registered models are where."""

    total: int
    prepared: int
    failed: int


class Registry:
    """The registered models. `on_change` is called after every change, on the thread that made it."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._lock = threading.Lock()
        self._entries: Mapping[str, Entry] = {}
        self._scanned = False
        self._incarnations = 0
        self.on_change = on_change

    def announce(self, bundles: Mapping[str, Path]) -> None:
        """Register the bundles that the directory scan found; from now on other names are unknown."""
        with self._lock:
            self._entries = {name: Entry(name, path) for name, path in sorted(bundles.items())}
            self._scanned = True
        self.on_change()

    @property
    def scanned(self) -> bool:
        return self._scanned

    def entries(self) -> list[Entry]:
        """All entries, sorted by name."""
        return list(self._entries.values())

    def get(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def find(self, name: str) -> Entry:
        """The entry of `name`. Raises UnknownModel, or ModelPreparing while the names are not known yet."""
        entry = self._entries.get(name)
        if entry is not None:
            return entry
        if not self._scanned:
            raise ModelPreparing(f"model {name!r} is not known yet: the server is starting")
        raise UnknownModel(f"unknown model: {name!r}")

    def prepared(self, name: str) -> Prepared:
        """What serves `name`. Raises UnknownModel, ModelPreparing or ModelFailed."""
        entry = self._entries.get(name)
        if entry is None:
            entry = self.find(name)
        if entry.prepared is None:
            raise entry.unavailable()
        return entry.prepared

    def next_incarnation(self) -> int:
        """A number that no load of this process had before."""
        with self._lock:
            self._incarnations += 1
            return self._incarnations

    def set_manifest(self, name: str, manifest: Manifest) -> None:
        self._update(name, manifest=manifest)

    def set_modified(self, name: str, files: Sequence[str]) -> None:
        self._update(name, modified=tuple(files))

    def set_ready(self, name: str, prepared: Prepared) -> None:
        self._update(
            name,
            state=ModelState.READY,
            prepared=prepared,
            incarnation=prepared.model.incarnation,
            manifest=prepared.model.manifest,
            failure=None,
        )

    def set_failed(self, name: str, phase: str, error: BaseException) -> None:
        message = error.message if isinstance(error, RsrvError) else f"{type(error).__name__}: {error}"
        failure = Failure(phase, type(error).__name__, message)
        self._update(name, state=ModelState.FAILED, prepared=None, failure=failure)

    def progress(self) -> Progress:
        entries = self.entries()
        return Progress(
            total=len(entries),
            prepared=sum(entry.state is ModelState.READY for entry in entries),
            failed=sum(entry.state is ModelState.FAILED for entry in entries),
        )

    def waiting_for(self, ready_when: ReadyWhen) -> str:
        """Why the rule `ready_when` does not hold, for people; "" when it does."""
        entries = self.entries()
        if not self._scanned:
            return "the model directories are not read yet"
        if not entries:
            return "no model is registered"
        if ready_when == "any":
            return "" if any(entry.state is ModelState.READY for entry in entries) else "no model is ready"
        if ready_when == "all":
            # A meta model needs no preparation of its own and does not hold the server back.
            wanted = [entry for entry in entries if entry.manifest is None or not entry.manifest.is_meta]
            if not wanted:
                return "no model is ready"
            names = [entry.name for entry in wanted]
        else:
            names = list(ready_when)
        late = []
        for name in names:
            entry = self._entries.get(name)
            if entry is None:
                late.append(f"{name} (not registered)")
            elif entry.state is not ModelState.READY:
                late.append(f"{name} ({entry.state.value})")
        return f"not ready: {', '.join(late)}" if late else ""

    def _update(self, name: str, **changes: object) -> None:
        with self._lock:
            entries = dict(self._entries)
            entries[name] = replace(entries[name], **changes)  # type: ignore[arg-type]
            self._entries = entries
        self.on_change()
