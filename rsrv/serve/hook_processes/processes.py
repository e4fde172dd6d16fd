"""The hook processes of one model: as many as it asked for, replaced when they are lost, and ended with the model."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from rsrv.core.errors import BundleError, HookError, HookRejected, ModelFailed, RsrvError, ServerStopping
from rsrv.runtime.hooks import Arrays, Hooks
from rsrv.serve.hook_pool import HookPool
from rsrv.serve.hook_processes.process import HookFile, HookProcess, ProcessLost

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1


class HookProcesses:
    """Start it, run `call` on the threads of `pool`, and `close` it.

    Args:
        file: whose hooks they run.
        count: how many processes there are, and calls at a time.
        import_seconds: wall time that a process may take until it has imported ``model.py``.
        call_seconds: wall time that one call may take, None = no limit.
        max_lost: processes that may be lost; with the last one (the first one, for 0) the processes are closed and
            `on_failed` is told why.

    Attributes:
        pool: one thread per process. It also answers requests whose deadline passes; that does not end the process.
        lost: how many processes died, hung or had to be ended so far.
    """

    def __init__(
        self,
        file: HookFile,
        *,
        count: int,
        import_seconds: float,
        call_seconds: float | None,
        max_lost: int,
        on_failed: Callable[[HookError], None],
    ) -> None:
        self.count = count
        self.pool = HookPool(count, name=f"rsrv-hook-{file.name}")
        self.lost = 0
        self._file = file
        self._import_seconds = import_seconds
        self._call_seconds = call_seconds
        self._max_lost = max_lost
        self._on_failed = on_failed
        self._lock = threading.Lock()
        # Apart, so that a call that ends does not wake the starter.
        self._freed, self._missing = threading.Condition(self._lock), threading.Condition(self._lock)
        self._idle: list[HookProcess | Exception] = []
        self._busy: set[HookProcess] = set()
        self._wanted = count
        self._end: RsrvError | None = None
        # A process ends with the thread that started it, so one thread that lives as long as all this starts them.
        self._starter = threading.Thread(target=self._start_processes, name="rsrv-hook-starter", daemon=True)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that exist now."""
        with self._lock:
            idle = [item for item in self._idle if isinstance(item, HookProcess)]
            return tuple(process.pid for process in (*idle, *self._busy))

    def start(self, require_running: Callable[[], None] = lambda: None) -> Hooks:
        """Start the processes and wait until each has imported ``model.py``; returns its hooks, which are `call`s.

        `require_running` is called now and then, and may raise. Raises BundleError when the import fails, ends its
        process or takes too long, HookError when a process cannot be started. Close it also then.
        """
        deadline = time.monotonic() + self._import_seconds
        self._starter.start()
        taken: list[HookProcess] = []
        roles: tuple[str, ...] = ()
        try:
            for _ in range(self.count):
                taken.append(process := self._take())
                try:
                    while not process.ready(min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic()))):
                        require_running()
                        if time.monotonic() >= deadline:
                            raise import_failed(self._file.path, f"took longer than {self._import_seconds:g} s")
                except ProcessLost as lost:
                    raise self._end or import_failed(self._file.path, str(lost)) from None
                roles = process.roles or ()
        finally:
            for process in taken:
                self._give_back(process)
        return Hooks(**{role: partial(self.call, role) for role in roles})

    def call(self, role: str, arrays: Mapping[str, np.ndarray]) -> Arrays:
        """Run the hook `role` in a process that is free. For the threads of `pool`; blocks.

        Raises HookRejected and HookError as the hook's own, HookError when it did not return in time or its process
        ended, ServerStopping or ModelFailed when there are no processes any more.
        """
        what = f"hook {role} of model {self._file.name!r}"
        process = self._take()
        try:
            self._require_ready(process)
            result = process.call(role, arrays, self._call_seconds)
        except ProcessLost as lost:
            end = self._end  # when it is there already, it is the reason
            self._replace(process, f"{what} {lost}")
            raise end or HookError(f"{what} {lost}") from None
        except BundleError as error:
            self._replace(process, f"a new process could not import it: {error.message}")
            raise HookError(f"{what} could not run: its file cannot be imported any more") from None
        except (HookRejected, HookError):
            self._give_back(process)
            raise
        except BaseException:
            self._replace(process, None)  # who knows what it still has to say
            raise
        self._give_back(process)
        return result

    def close(self, end: RsrvError | None = None) -> None:
        """End the processes; calls that run or wait raise `end`, ServerStopping by default."""
        with self._lock:
            self._end = self._end or end or ServerStopping("the server is stopping")
            idle, self._idle = self._idle, []
            for process in self._busy:
                process.kill()  # its caller closes it
            self._freed.notify_all()
            self._missing.notify_all()
        self.pool.close(error=self._end)
        if self._starter.ident is not None:
            self._starter.join()
        with self._lock:
            idle += self._idle
            self._idle = []
        for item in idle:
            if isinstance(item, HookProcess):
                item.close()

    def _require_ready(self, process: HookProcess) -> None:
        """One that replaces another may still be importing."""
        if not process.ready(self._import_seconds):
            raise ProcessLost(f"could not run: importing its file took longer than {self._import_seconds:g} s")

    def _take(self) -> HookProcess:
        with self._lock:
            while True:
                self._freed.wait_for(lambda: self._end or self._idle)
                if self._end is not None:
                    raise self._end
                item = self._idle.pop()
                if isinstance(item, HookProcess) and item.alive:
                    self._busy.add(item)
                    return item
                self._wanted += 1
                self._missing.notify()
                if isinstance(item, Exception):
                    raise HookError(f"a hook process of model {self._file.name!r} cannot be started: {item}") from item
                item.close()
                self._count_lost("it ended while it had nothing to do", item.pid)

    def _give_back(self, process: HookProcess) -> None:
        with self._lock:
            self._busy.discard(process)
            if self._end is None:
                self._idle.append(process)
                self._freed.notify()
                return
        process.close()

    def _replace(self, process: HookProcess, why: str | None) -> None:
        process.close()
        with self._lock:
            self._busy.discard(process)
            self._wanted += 1
            self._missing.notify()
            if why is not None:
                self._count_lost(why, process.pid)

    def _count_lost(self, why: str, pid: int) -> None:
        """Under the lock."""
        if self._end is not None:
            return
        self.lost += 1
        log.error("hook process lost model=%s pid=%d lost=%d why=%s", self._file.name, pid, self.lost, why)
        if self.lost < max(self._max_lost, 1):
            return
        lost = f"{self.lost} hook processes were lost" if self.lost > 1 else "a hook process was lost"
        error = HookError(f"{lost} (hooks.max_lost: {self._max_lost}); at last: {why}")
        self._end = ModelFailed(f"model {self._file.name!r} failed (hooks: {error.message})")
        # Elsewhere, because this thread is one of those that are waited for.
        threading.Thread(target=self._fail, args=(error,), name="rsrv-hook-end", daemon=True).start()

    def _fail(self, error: HookError) -> None:
        try:
            self._on_failed(error)
        finally:
            self.close()

    def _start_processes(self) -> None:
        while True:
            with self._lock:
                self._missing.wait_for(lambda: self._end or self._wanted)
                if self._end is not None:
                    return
                self._wanted -= 1
            item: HookProcess | Exception
            try:
                item = HookProcess(self._file)
            except Exception as error:
                item = error  # whoever waits for a process is told
            with self._lock:
                self._idle.append(item)
                self._freed.notify()


def import_failed(path: Path, problem: str) -> BundleError:
    """What a load ends with when the import of `path` neither returned nor raised."""
    return BundleError(
        f"{path}: importing it {problem}",
        rule="B-71",
        file=path.name,
        hint="hooks.import_timeout_seconds says how long it may take",
    )
