"""Where the executables of a server come from: from another model with the same program, the cache, or the compiler."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakValueDictionary

from rsrv.core.errors import DeviceError
from rsrv.runtime.compiled import Compiled
from rsrv.runtime.device import CompileOptions
from rsrv.serve.loading.progress import LoadProgress, Origin
from rsrv.stablehlo.policy import Policy, apply

if TYPE_CHECKING:
    from rsrv.runtime.cache import ExecutableCache
    from rsrv.runtime.compile_pool import CompilePool
    from rsrv.runtime.device import Device, Executable
    from rsrv.stablehlo.signature import ProgramReport

log = logging.getLogger(__name__)

Identity = tuple[bytes, Policy]


@dataclass(frozen=True, slots=True)
class ProgramJob:
    """One program of a model that is to become an executable, for one batch size.

    Attributes:
        model, variant, batch_key: which program of which model.
        program: its bytes, compared with their digest.
        policy: what is done to it before it is compiled.
        identity: the same for equal programs that are treated alike.
    """

    model: str
    variant: tuple[int, ...]
    batch_key: int
    program: bytes
    policy: Policy
    identity: Identity

    @classmethod
    def of(
        cls,
        model: str,
        variant: tuple[int, ...],
        batch_key: int,
        program: bytes,
        policy: Policy = Policy(),  # noqa: B008
    ) -> ProgramJob:
        return cls(model, variant, batch_key, program, policy, (hashlib.sha256(program).digest(), policy))

    def __str__(self) -> str:
        sizes = f" {'x'.join(map(str, self.variant))}" if self.variant else ""
        return f"{self.model}{sizes} batch {self.batch_key}" if self.batch_key else f"{self.model}{sizes}"


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of a program before it is loaded: its report, and what the cache has of it."""

    report: ProgramReport
    cached: Compiled | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """An executable, and what its compilation said (`compiled` has no blob any more).

    `seconds` is how long the compilation took where it was done now: in the compiler, and on the way there and back.
    """

    executable: Executable
    compiled: Compiled
    origin: Origin
    seconds: float = 0.0


class ProgramSource:
    """Thread safe; one of the methods below may wait for minutes.

    A program that several models share is compiled once, and they share its executable.

    Args:
        device: what executables are loaded on.
        pool: where programs that nobody has vouched for are parsed and compiled.
        cache: None when nothing is kept.
        options: of every compilation.
        progress: told of every program that is ready.
        require_running: raises when the server is stopping; asked before each compilation.
    """

    def __init__(
        self,
        *,
        device: Device,
        pool: CompilePool,
        cache: ExecutableCache | None = None,
        options: CompileOptions = CompileOptions(),  # noqa: B008
        progress: LoadProgress | None = None,
        require_running: Callable[[], None] = lambda: None,
    ) -> None:
        self._device = device
        self._pool = pool
        self._cache = cache
        self._options = options
        self._progress = progress or LoadProgress()
        self._require_running = require_running
        self._lock = threading.Lock()
        # Nothing is kept of a program that no model has any more: a server may see many versions of one.
        self._turns: WeakValueDictionary[Identity, threading.Lock] = WeakValueDictionary()
        self._shared: WeakValueDictionary[Identity, Executable] = WeakValueDictionary()
        self._compiled: WeakKeyDictionary[Executable, Compiled] = WeakKeyDictionary()

    def is_cached(self, job: ProgramJob) -> bool:
        """Whether `job` can probably be done without the compiler; nothing is read."""
        if job.identity in self._shared:
            return True
        return self._cache is not None and self._cache.has(self._key(job))

    def digests(self, executables: Iterable[Executable]) -> list[str]:
        """The sha256 of the program that each was made of (hexadecimal); "" for one that did not come from here."""
        made = {id(ref()): ref.key[0].hex() for ref in self._shared.valuerefs()}
        return [made.get(id(executable), "") for executable in executables]

    def find(self, job: ProgramJob) -> Found:
        """Read the report of a program, from the cache or by having it parsed. Raises ProgramError."""
        shared = self._shared.get(job.identity)
        if shared is not None:
            return Found(self._compiled[shared].report)
        cached = None if self._cache is None else self._cache.load(self._key(job))
        if cached is not None:
            return Found(cached.report, cached)
        self._require_running()
        return Found(self._pool.inspect(job.program, batch=job.policy.batch))

    def load(self, job: ProgramJob, found: Found) -> Loaded:
        """Make the executable of `job`. Raises ProgramError, DeviceError."""
        with self._lock:
            turn = self._turns.setdefault(job.identity, threading.Lock())
        with turn:
            loaded = self._load(job, found)
            self._compiled[loaded.executable] = loaded.compiled  # first: whoever finds the other finds this
            self._shared[job.identity] = loaded.executable
        self._progress.done(loaded.origin, loaded.seconds)
        return loaded

    def _load(self, job: ProgramJob, found: Found) -> Loaded:
        shared = self._shared.get(job.identity)
        if shared is not None:
            return Loaded(shared, self._compiled[shared], "shared")
        if found.cached is not None:
            try:
                return self._on_device(job, found.cached, "cache")
            except DeviceError as error:
                assert self._cache is not None
                self._cache.reject(self._key(job), error.message)
        self._require_running()
        log.info("compiling model name=%s batch_key=%d", job.model, job.batch_key)
        began = time.monotonic()
        compiled = self._pool.compile(job.program, self._options, job.policy)
        seconds = time.monotonic() - began
        if self._cache is not None:
            self._cache.store(self._key(job), compiled, label=str(job))
        return replace(self._on_device(job, compiled, "compiled"), seconds=seconds)

    def _on_device(self, job: ProgramJob, compiled: Compiled, origin: Origin) -> Loaded:
        kept = replace(compiled, blob=None)
        if compiled.blob is None:
            # It cannot be serialised, but it has compiled once in a process that could die of it, and did not.
            rewritten = apply(job.program, job.policy).program
            return Loaded(self._device.compile(rewritten, self._options), kept, "compiled")
        report = compiled.report
        executable = self._device.load(
            compiled.blob,
            report.signature,
            scratch_bytes=compiled.scratch_bytes,
            custom_calls=report.custom_calls,
        )
        return Loaded(executable, kept, origin)

    def _key(self, job: ProgramJob) -> str:
        assert self._cache is not None
        return self._cache.key(job.identity[0].hex(), job.policy, self._options)
