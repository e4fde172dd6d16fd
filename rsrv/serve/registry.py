"""Which models a server knows and in which state each is. What a state is made of is the loader's work.

Entries are immutable and the map of them is replaced, never mutated: the request path reads it without a lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rsrv.core.errors import (
    AdmissionClosed,
    IncarnationChanged,
    ModelFailed,
    ModelPreparing,
    Removing,
    RsrvError,
    UnknownModel,
)
from rsrv.serve.gate import Accepted

if TYPE_CHECKING:
    from rsrv.bundle.manifest import Manifest
    from rsrv.runtime.hooks import Hooks
    from rsrv.serve.hook_processes.processes import HookProcesses
    from rsrv.serve.request import Request
    from rsrv.serve.residency.floors import Floor
    from rsrv.serve.scheduler.model import ServableModel
    from rsrv.serve.validate import OutputCheck, RowCheck, TensorCheck

ReadyWhen = Literal["all", "any"] | Sequence[str]


Source = Literal["startup", "watcher", "api"]
"""Who registered a model."""
Gate = Literal["open", "draining", "drained", "removing"]
"""Whether requests may enter; a gate that closes is draining until all that entered are done."""


class ModelState(Enum):
    """REGISTERED: the name and the manifest are known, nothing else was read. RELEASE_FAILED: it was to be removed, and
    its memory could not be freed."""

    REGISTERED = "registered"
    PREPARING = "preparing"
    READY = "ready"
    FAILED = "failed"
    RETIRING = "retiring"
    RELEASE_FAILED = "release_failed"


@dataclass(frozen=True, slots=True)
class Settings:
    """What a registration says beside the configuration of the server, and goes before it; None = it does not say."""

    residency: Floor | None = None
    weight: float | None = None
    max_batch_size: int | None = None
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a model is failed: the phase of its preparation, the type of the error, and its text."""

    phase: str
    type: str
    message: str

    @classmethod
    def of(cls, phase: str, error: BaseException) -> Failure:
        message = error.message if isinstance(error, RsrvError) else f"{type(error).__name__}: {error}"
        return cls(phase, type(error).__name__, message)

    def __str__(self) -> str:
        return f"{self.phase}: {self.message}"


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
        accepted: the requests that this incarnation has.
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
    accepted: Accepted[Request] = field(default_factory=Accepted)


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One registered name.

    Attributes:
        path: the directory of its bundle.
        incarnation: the number of the load that serves, or is under way; no other load of the process has it.
        manifest: known as soon as it was parsed, also when a later step failed.
        failure: why it does not serve.
        pending: why the last reload failed; the version before it serves.
        modified: files that differ from the manifest's digests and were accepted nevertheless.
        importing_since: when the import of its hooks began, on the monotonic clock, if that takes long.
        dropped: set when what is being prepared for this registration is not wanted any more.
    """

    name: str
    path: Path
    state: ModelState = ModelState.PREPARING
    source: Source = "startup"
    gate: Gate = "open"
    incarnation: int = 0
    manifest: Manifest | None = None
    prepared: Prepared | None = None
    failure: Failure | None = None
    pending: Failure | None = None
    modified: tuple[str, ...] = ()
    importing_since: float | None = None
    settings: Settings = Settings()
    dropped: threading.Event = field(default_factory=threading.Event)

    @property
    def accepted(self) -> int:
        """Requests that entered and are not done; of the incarnation that serves."""
        return 0 if self.prepared is None else len(self.prepared.accepted)

    @property
    def reason(self) -> str:
        """Why the model does not answer, for people; "" when it does."""
        if self.failure is not None:
            return str(self.failure)
        if self.state is ModelState.PREPARING and self.importing_since is not None:
            return f"preparing: its hooks are being imported for {time.monotonic() - self.importing_since:.0f} s"
        if self.state is not ModelState.READY:
            return str(self.state.value)
        return "" if self.gate == "open" else self.gate

    @property
    def serves(self) -> bool:
        """Whether requests may enter."""
        return self.prepared is not None and self.gate == "open"

    def refusal(self) -> RsrvError | None:
        """What a request that comes now is told; None when it may enter."""
        name = self.name
        if self.gate == "removing":
            return Removing(f"model {name!r} is being removed")
        if self.failure is not None:
            return ModelFailed(f"model {name!r} failed ({self.reason})")
        if self.gate != "open":
            return AdmissionClosed(
                f"model {name!r} takes no requests: its gate is {self.gate}", hint=f"rsrv ctl undrain {name}"
            )
        return self.unavailable() if self.prepared is None else None

    def unavailable(self) -> RsrvError:
        """What a call that needs a prepared model is told of one that is none."""
        if self.failure is not None:
            return ModelFailed(f"model {self.name!r} failed ({self.reason})")
        if self.state is ModelState.PREPARING:
            return ModelPreparing(f"model {self.name!r} is being prepared")
        return ModelPreparing(f"model {self.name!r} is {self.state.value}, and not prepared")


class Renamed(NamedTuple):
    """A model that gets another name: the one that it had, its entry then, and what changes besides."""

    old: str
    entry: Entry
    changes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Progress:
    """How many of the registered models are where."""

    total: int
    prepared: int
    failed: int


class Registry:
    """The registered models.

    Attributes:
        on_change: called after every change, on the thread that made it, with its name; "" when it is about all.
        changing: held by whoever changes entries together with gates, queues or weights.
    """

    def __init__(self, on_change: Callable[[str], None] = lambda name: None) -> None:
        self._lock = threading.Lock()
        self._entries: Mapping[str, Entry] = {}
        self._scanned = False
        self._incarnations = 0
        self.changing = threading.RLock()
        self.on_change = on_change

    def announce(self, bundles: Mapping[str, Path]) -> None:
        """Register the bundles that the directory scan found; from now on other names are unknown."""
        entries = {name: Entry(name, path, incarnation=self.next_incarnation()) for name, path in bundles.items()}
        with self._lock:
            self._entries = dict(sorted(entries.items()))
            self._scanned = True
        self.on_change("")

    @property
    def scanned(self) -> bool:
        return self._scanned

    def entries(self) -> list[Entry]:
        """All entries, sorted by name."""
        return list(self._entries.values())

    def get(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def find(self, name: str, if_incarnation: int = 0) -> Entry:
        """The entry of `name`. Raises UnknownModel, ModelPreparing while the names are not known yet, and
        IncarnationChanged when it has not the incarnation that is given (0 = whichever)."""
        entry = self._entries.get(name)
        if entry is not None:
            if if_incarnation not in (0, entry.incarnation):
                raise IncarnationChanged(
                    f"model {name!r} has incarnation {entry.incarnation} now; the call is for {if_incarnation}",
                    hint="somebody else loaded it again; look at its status and decide anew",
                )
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

    # --- changes --------------------------------------------------------------------------------------------------

    def add(self, entry: Entry) -> bool:
        """Register; False when the name is taken."""
        with self._lock:
            if entry.name in self._entries:
                return False
            self._entries = dict(sorted([*self._entries.items(), (entry.name, entry)]))
        self.on_change(entry.name)
        return True

    def remove(self, name: str) -> None:
        with self._lock:
            self._entries = {other: entry for other, entry in self._entries.items() if other != name}
        self.on_change(name)

    def rename_all(self, renamed: Mapping[str, Renamed]) -> None:
        """Give models other names, by the new ones; all in one step for those who look them up."""
        gone = {one.old for one in renamed.values()}
        with self._lock:
            entries = {name: entry for name, entry in self._entries.items() if name not in gone}
            for new, one in renamed.items():
                entries[new] = replace(self._entries[one.old], name=new, **one.changes)
            self._entries = dict(sorted(entries.items()))
        for name in sorted(gone | renamed.keys()):
            self.on_change(name)

    def change(self, name: str, *, of: int | None = None, **changes: Any) -> Entry | None:
        """Change attributes of an entry, and return it; None, and no change, when it is gone, or when it has not the
        incarnation `of` (None = whichever)."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or of not in (None, entry.incarnation):
                return None
            entry = replace(entry, **changes)
            self._entries = {**self._entries, name: entry}
        self.on_change(name)
        return entry

    def set_modified(self, name: str, files: Sequence[str], *, of: int | None = None) -> Entry | None:
        """These files differ from what the manifest says; `of` as in `change`."""
        return self.change(name, of=of, modified=tuple(files))

    def set_prepared(self, name: str, prepared: Prepared) -> None:
        """Another way to serve the same incarnation: other programs."""
        self.change(name, of=prepared.model.incarnation, prepared=prepared)

    def set_ready(self, name: str, prepared: Prepared, *, of: int | None = None) -> Entry | None:
        """`prepared` serves from now on; `of` as in `change`."""
        return self.change(
            name,
            of=of,
            state=ModelState.READY,
            prepared=prepared,
            incarnation=prepared.model.incarnation,
            manifest=prepared.model.manifest,
            failure=None,
            pending=None,
            modified=(),
        )

    def set_failed(self, name: str, phase: str, error: BaseException, *, of: int | None = None) -> Entry | None:
        """The model does not serve any more; `of` as in `change`."""
        failure = Failure.of(phase, error)
        return self.change(name, of=of, state=ModelState.FAILED, prepared=None, failure=failure)

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
            names = [entry.name for entry in entries if _is_awaited(entry)]
            if not names:
                return "" if any(entry.state is ModelState.READY for entry in entries) else "no model is ready"
        else:
            names = list(ready_when)
        late = []
        for name in names:
            entry = self._entries.get(name)
            if entry is None:
                late.append(f"{name} (not registered)")
            elif entry.state is not ModelState.READY:
                late.append(f"{name} ({entry.state.value if entry.failure is not None else entry.reason})")
        return f"not ready: {', '.join(late)}" if late else ""


def _is_awaited(entry: Entry) -> bool:
    """Whether the server is not ready before this model is.

    A meta model needs no preparation of its own. What comes later must not take a server that serves out of rotation.
    """
    if entry.source != "startup" or (entry.manifest is not None and entry.manifest.is_meta):
        return False
    return entry.state in (ModelState.PREPARING, ModelState.READY, ModelState.FAILED)
