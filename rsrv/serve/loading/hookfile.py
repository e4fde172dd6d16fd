"""A bundle's `model.py` at load: refused where hooks are not allowed, run where nobody has to wait for it for ever."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rsrv.bundle.files import read_regular
from rsrv.bundle.hookfile import MAX_HOOK_BYTES, inspect_hooks
from rsrv.core.errors import BundleError, HookError
from rsrv.runtime.hooks import Hooks, load_hooks
from rsrv.serve.hook_processes.process import HookFile
from rsrv.serve.hook_processes.processes import HookProcesses, import_failed
from rsrv.serve.loading.steps import Steps

if TYPE_CHECKING:
    from rsrv.bundle.directory import Bundle
    from rsrv.core.config.sections import HooksConfig

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1
_LONG_SECONDS = 10.0
"""An import that takes longer is told of: it may hang, and what it keeps from being prepared looks as if it did."""


def check_hooks(bundle: Bundle, *, allow: bool) -> None:
    """What can be said about hooks without running them. Raises BundleError."""
    if bundle.hooks_path is None:
        return
    if not allow:
        raise BundleError(
            f"{bundle.hooks_path}: the bundle has hooks, and hooks are not allowed (hooks.allow: false)",
            rule="B-71",
            file=bundle.hooks_path.name,
            hint="serve without --no-hooks if you trust this file",
        )
    for problem in inspect_hooks(bundle.hooks_path).problems(meta=bundle.manifest.is_meta):
        raise problem


class HookLoader:
    """Runs hook files, in this process or in processes of their own, and owns the latter. Thread safe.

    Args:
        processes: how many processes a model has whose manifest does not say it.
        on_failed: told of an incarnation that lost too many processes.
        on_importing: told of a name and an incarnation whose import takes long, and when that began on the monotonic
            clock; once more, with None, at its end.
    """

    def __init__(
        self,
        config: HooksConfig,
        *,
        processes: int,
        on_failed: Callable[[int, HookError], None],
        on_importing: Callable[[str, int, float | None], None] = lambda name, incarnation, since: None,
    ) -> None:
        self._config = config
        self._count = processes
        self._on_failed = on_failed
        self._on_importing = on_importing
        self._lock = threading.Lock()
        self._processes: dict[int, HookProcesses] = {}
        self._lost_before = 0

    @property
    def processes_lost(self) -> int:
        """How many hook processes were lost since the server started."""
        with self._lock:
            return self._lost_before + sum(processes.lost for processes in self._processes.values())

    def load(self, bundle: Bundle, incarnation: int, steps: Steps) -> tuple[Hooks, HookProcesses | None]:
        """The hooks of `bundle`, and the processes that they run in. Raises BundleError, HookError, ServerStopping."""
        if bundle.hooks_path is None:
            return Hooks(), None
        seconds = self._config.import_timeout_seconds
        with self._observed(bundle.name, incarnation, steps) as look:
            if bundle.manifest.hooks.mode == "thread":
                return run_hook_file(bundle.hooks_path, bundle.name, incarnation, look, seconds), None
            processes = self._make(bundle, bundle.hooks_path, incarnation)
            with self._lock:
                self._processes[incarnation] = processes
            return processes.start(look), processes

    @contextmanager
    def _observed(self, name: str, incarnation: int, steps: Steps) -> Iterator[Callable[[], None]]:
        """What an import calls now and then: it ends one that nobody wants any more, and tells of one that is long."""
        began, told = time.monotonic(), False

        def look() -> None:
            nonlocal told
            steps.require_running()
            if told or time.monotonic() - began < _LONG_SECONDS:
                return
            told = True
            limit = self._config.import_timeout_seconds
            log.warning("hooks are still being imported name=%s seconds=%g limit=%g", name, _LONG_SECONDS, limit)
            self._on_importing(name, incarnation, began)

        try:
            yield look
        finally:
            if told:
                self._on_importing(name, incarnation, None)

    def drop(self, incarnation: int) -> None:
        """End the processes of one load of a model, if it has any."""
        with self._lock:
            processes = self._processes.pop(incarnation, None)
            self._lost_before += processes.lost if processes is not None else 0
        if processes is not None:
            processes.close()

    def close(self) -> None:
        """End all processes."""
        for incarnation in list(self._processes):
            self.drop(incarnation)

    def _make(self, bundle: Bundle, path: Path, incarnation: int) -> HookProcesses:
        name, spec, config = bundle.name, bundle.manifest.hooks, self._config
        source = read_regular(path, max_bytes=MAX_HOOK_BYTES, error=BundleError, rule="B-71")
        return HookProcesses(
            HookFile(path, source, name, incarnation),
            count=spec.processes or self._count,
            import_seconds=config.import_timeout_seconds,
            call_seconds=spec.timeout_seconds or config.timeout_seconds,
            max_lost=config.max_lost,
            on_failed=lambda error: self._on_failed(incarnation, error),
        )


def run_hook_file(path: Path, name: str, incarnation: int, look: Callable[[], None], seconds: float) -> Hooks:
    """Run ``model.py`` on a daemon thread of its own, which is left behind when that takes longer than `seconds`
    (BundleError), or when `look`, called now and then, raises.

    Nobody knows what user code waits for, and threads that it starts must not keep the process alive either.
    """
    outcome: Future[Hooks] = Future()

    def run() -> None:
        try:
            outcome.set_result(load_hooks(path, name=name, incarnation=incarnation))
        except BaseException as error:
            outcome.set_exception(error)

    until = time.monotonic() + seconds
    threading.Thread(target=run, name=f"rsrv-import {name}", daemon=True).start()
    while not wait([outcome], min(_LOOK_SECONDS, max(0.0, until - time.monotonic()))).done:
        look()
        if time.monotonic() >= until:
            raise import_failed(path, f"took longer than {seconds:g} s")
    return outcome.result()
