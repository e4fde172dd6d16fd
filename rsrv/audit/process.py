"""A process in which an audit runs what a bundle brings along, programs and hooks; it may die, hang or print."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from rsrv.audit.parity import ParityReport, Tolerances
from rsrv.bundle.directory import Bundle
from rsrv.bundle.files import HOOKS
from rsrv.bundle.safetensors import write_weights
from rsrv.bundle.tensors import load_tensors
from rsrv.bundle.variants import VariantKey
from rsrv.core.errors import BundleError, CompileProcessError, ProgramError
from rsrv.runtime.compile_process import ChildLost, ChildSettings, CompileProcess

RUN_SECONDS = 600.0
"""Wall time that compiling one program and running its goldens may take, and that the import of hooks may take."""

_CHILD = "rsrv.audit.process_child"


class AuditProcess:
    """Runs one job at a time; a process that is lost with a job is replaced for the next. Use it as a context manager.

    Args:
        backend: the device to run programs on, as in ``runtime.backend``: ``auto``, ``cpu`` or ``cuda``.
        timeout_seconds: wall time for one job.
        memory_bytes: private memory that one job may add to the process; None = no limit.
    """

    def __init__(
        self, *, backend: str = "auto", timeout_seconds: float = RUN_SECONDS, memory_bytes: int | None = None
    ) -> None:
        self._backend = backend
        self._timeout = timeout_seconds
        self._memory_bytes = memory_bytes
        self._child: CompileProcess | None = None

    def import_hooks(self, bundle: Bundle) -> list[str]:
        """Execute the hook file of `bundle` as a server would; returns the hooks that it registers.

        Raises BundleError (B-71, B-72), also when that ended the process or took too long.
        """
        assert bundle.hooks_path is not None
        name = bundle.hooks_path.name
        message = {
            "job": "hooks",
            "path": str(bundle.hooks_path),
            "name": bundle.name,
            "meta": bundle.manifest.is_meta,
        }
        try:
            answer = self._request(message)
        except ChildLost as lost:
            raise BundleError(f"importing {name} {_fate(lost, self._timeout)}", rule="B-71", file=name) from None
        if (error := answer.get("error")) is not None:
            raise BundleError(error["message"], rule=error["rule"] or "B-71", file=name, hint=error["hint"])
        return list(answer["hooks"])

    def call_hook(self, bundle: Bundle, role: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What the hook `role`, ``preprocess`` or ``postprocess``, makes of `arrays`; without one, `arrays` themselves.

        Raises BundleError when it raises, returns something else than arrays, ends the process or takes too long.
        """
        with tempfile.TemporaryDirectory(prefix="rsrv-hook-") as directory:
            given, made = Path(directory, "given"), Path(directory, "made")
            write_weights(given, list(arrays.items()))
            message = {"job": "call", "bundle": str(bundle.path), "role": role, "given": str(given), "made": str(made)}
            try:
                answer = self._request(message)
            except ChildLost as lost:
                raise BundleError(f"the hook {role} {_fate(lost, self._timeout)}", rule="X-52", file=HOOKS) from None
            if (error := answer.get("error")) is not None:
                raise BundleError(error["message"], rule=error["rule"] or "X-52", file=HOOKS, hint=error["hint"])
            return load_tensors(made) if answer["called"] else dict(arrays)

    def replay(
        self,
        bundle: Bundle,
        file: str,
        variant: VariantKey,
        batch_key: int,
        goldens: Path,
        tolerances: Tolerances,
        *,
        hooks: bool = False,
    ) -> dict[int, ParityReport]:
        """Run the goldens in the file `goldens` through one program; index of each golden that it takes → comparison.

        The program is compiled there, whatever its digest says. With `hooks` the goldens are what clients send and get:
        ``preprocess`` runs before the rows are packed, ``postprocess`` on the rows of each golden (X-52). Raises
        ProgramError when the program cannot be compiled or run, also when that ended the process or took too long.
        """
        message = {
            "job": "replay",
            "bundle": str(bundle.path),
            "file": file,
            "variant": list(variant),
            "batch_key": batch_key,
            "goldens": str(goldens),
            "hooks": hooks,
            "tolerances": dict(tolerances) if isinstance(tolerances, Mapping) else tolerances,
        }
        try:
            answer = self._request(message)
        except ChildLost as lost:
            raise ProgramError(f"{file}: running it {_fate(lost, self._timeout)}", rule="X-58", file=file) from None
        if (error := answer.get("error")) is not None:
            raise ProgramError(f"{file}: {error['message']}", rule=error["rule"], file=file, hint=error["hint"])
        return {int(index): ParityReport.from_transport(rows) for index, rows in answer["reports"].items()}

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def __enter__(self) -> AuditProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer to one job. Raises ChildLost when the job is to blame, else CompileProcessError."""
        if self._child is not None and not self._child.alive:
            self.close()
        if self._child is None:
            self._child = self._start()
        try:
            return self._child.request(message, b"", timeout=self._timeout)[0]
        except BaseException as error:
            self.close()
            if isinstance(error, ChildLost) and not error.accepted:
                raise CompileProcessError(
                    f"the process that runs programs cannot be started: {error.ending}{error.last_words}",
                    hint="`rsrv env` shows whether jaxlib is installed and works",
                ) from None
            raise

    def _start(self) -> CompileProcess:
        settings = ChildSettings(
            platform=self._backend, ordinal=0, parse_only=False, memory_bytes=self._memory_bytes, cpu_threads=None
        )
        try:
            return CompileProcess(settings, _CHILD)
        except OSError as error:
            raise CompileProcessError(f"the process that runs programs cannot be started: {error}") from error


def _fate(lost: ChildLost, timeout: float) -> str:
    if lost.why == "deadline":
        return f"took longer than {timeout:g} s{lost.last_words}"
    if lost.why == "memory":
        return f"took too much memory: {lost.ending}{lost.last_words}"
    return f"ended its process: {lost.ending}{lost.last_words}"
