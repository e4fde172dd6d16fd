"""One process for the goldens of all bundles that a file of tests exports: to start one takes seconds of the processor.

That a process is replaced when a job has ended it, and is otherwise good for many bundles, is proven in tests/audit.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest

from rsrv import audit
from rsrv.audit import gate, golden
from rsrv.audit.process import RUN_SECONDS, AuditProcess
from rsrv.runtime.compile_process import CompileProcess


class LastingProcess(AuditProcess):
    """Its process is started on a thread of its own: one ends with the thread that started it, as of an export."""

    def __init__(self) -> None:
        super().__init__(backend="cpu")
        self._starter = ThreadPoolExecutor(1)

    def _start(self) -> CompileProcess:
        return self._starter.submit(super()._start).result()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._starter.shutdown()


@pytest.fixture(scope="module")
def audit_process_of_the_file() -> Iterator[AuditProcess]:
    with LastingProcess() as process:
        yield process


@pytest.fixture(autouse=True)
def one_audit_process(audit_process_of_the_file: AuditProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever would start a process for one bundle is given that of the file, unless it is to be a special one."""

    def process(*, backend: str = "auto", timeout_seconds: float = RUN_SECONDS, **more: Any) -> Any:
        if backend in ("auto", "cpu") and timeout_seconds == RUN_SECONDS and not more:
            return nullcontext(audit_process_of_the_file)
        return AuditProcess(backend=backend, timeout_seconds=timeout_seconds, **more)

    for module in (audit, gate, golden):
        monkeypatch.setattr(module, "AuditProcess", process)
