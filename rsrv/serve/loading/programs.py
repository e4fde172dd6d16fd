"""Where the executables of a server come from: from another model with the same program, the cache, or the compiler."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

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
    """An executable, and what its compilation said (`compiled` has no blob any more)."""

    executable: Executable
    compiled: Compiled
    origin: Origin


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
        self._turns: defaultdict[Identity, threading.Lock] = defaultdict(threading.Lock)
        self._shared: WeakValueDictionary[Identity, Executable] = WeakValueDictionary()
        self._compiled: dict[Identity, Compiled] = {}

    def is_cached(self, job: ProgramJob) -> bool:
        """Whether `job` can probably be done without the compiler; nothing is read."""
        if job.identity in self._shared:
            return True
        return self._cache is not None and self._cache.has(self._key(job))

    def find(self, job: ProgramJob) -> Found:
        """Read the report of a program, from the cache or by having it parsed. Raises ProgramError."""
        if job.identity in self._shared:
            return Found(self._compiled[job.identity].report)
        cached = None if self._cache is None else self._cache.load(self._key(job))
        if cached is not None:
            return Found(cached.report, cached)
        self._require_running()
        return Found(self._pool.inspect(job.program, batch=job.policy.batch))

    def load(self, job: ProgramJob, found: Found) -> Loaded:
        """Make the executable of `job`. Raises ProgramError, DeviceError."""
        with self._lock:
            turn = self._turns[job.identity]
        with turn:
            loaded = self._load(job, found)
            self._compiled[job.identity] = loaded.compiled  # first: whoever finds the other finds this
            self._shared[job.identity] = loaded.executable
        fresh = loaded.origin == "compiled"
        self._progress.done(loaded.origin, loaded.compiled.compile_seconds if fresh else 0.0)
        return loaded

    def _load(self, job: ProgramJob, found: Found) -> Loaded:
        shared = self._shared.get(job.identity)
        if shared is not None:
            return Loaded(shared, self._compiled[job.identity], "shared")
        if found.cached is not None:
            try:
                return self._on_device(job, found.cached, "cache")
            except DeviceError as error:
                assert self._cache is not None
                self._cache.reject(self._key(job), error.message)
        self._require_running()
        log.info("compiling model name=%s batch_key=%d", job.model, job.batch_key)
        compiled = self._pool.compile(job.program, self._options, job.policy)
        if self._cache is not None:
            self._cache.store(self._key(job), compiled, label=str(job))
        return self._on_device(job, compiled, "compiled")

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
