"""A persistent pool of processes that parse and compile programs which nobody has vouched for.

A program can abort, crash or never leave the compiler; here it takes a process with it that can be spared. The process
is replaced and the program refused.
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import Any

from rsrv.core.errors import CompileProcessError, ProgramError, ServerStopping
from rsrv.runtime.compile_process import ChildLost, ChildSettings, CompileProcess
from rsrv.runtime.compiled import Compiled
from rsrv.runtime.device import CompileOptions
from rsrv.runtime.frames import Frame
from rsrv.stablehlo.policy import Policy
from rsrv.stablehlo.signature import ProgramReport

logger = logging.getLogger(__name__)

_ATTEMPTS = 3


class CompilePool:
    """Blocking and thread safe: a caller waits until a process is free. Use it as a context manager, or `close` it.

    Create it before any gRPC object. The processes start at once and import jaxlib by themselves, when they are awake.

    Args:
        workers: number of processes.
        timeout_seconds: wall time that one program may take.
        memory_bytes: private memory that one program may add to its process; None = no limit.
        platform: ``cpu``, ``cuda``, or ``fake``: programs are parsed only, and `Compiled.blob` is the program itself.
        cpu_threads: ``NPROC`` of the processes; has to be that of the server, since it changes the code.
        parse_only: only `inspect` will be called; the processes create no device client.
        ordinal: which device to compile for (CUDA).
        awake: let the processes import what they need at once, else at `wake` or when there is a job.
    """

    def __init__(
        self,
        *,
        workers: int = 1,
        timeout_seconds: float = 600.0,
        memory_bytes: int | None = None,
        platform: str = "cpu",
        cpu_threads: int | None = None,
        parse_only: bool = False,
        ordinal: int = 0,
        awake: bool = True,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers is {workers}, wanted at least 1")
        if platform not in ("cpu", "cuda", "fake"):
            raise ValueError(f"platform is {platform!r}, wanted cpu, cuda or fake")
        self._timeout = timeout_seconds
        self._memory_bytes = memory_bytes
        self._can_compile = not parse_only
        self._settings = ChildSettings(
            platform=platform,
            ordinal=ordinal,
            parse_only=parse_only or platform == "fake",
            memory_bytes=memory_bytes,
            cpu_threads=cpu_threads,
        )
        self._changed = threading.Condition()
        self._idle: list[CompileProcess | Exception] = []
        self._busy: set[CompileProcess] = set()
        self._wanted = workers
        self._awake = awake
        self._closed = False
        # A process ends with the thread that started it, so one thread that lives as long as the pool starts them all.
        self._starter = threading.Thread(target=self._start_processes, name="compile-pool", daemon=True)
        self._starter.start()
        with self._changed:
            self._changed.wait_for(lambda: len(self._idle) == workers)
            failure = next((item for item in self._idle if isinstance(item, Exception)), None)
        if failure is not None:
            self.close()
            raise CompileProcessError(f"a compile process cannot be started: {failure}") from failure

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that exist now."""
        with self._changed:
            idle = [item for item in self._idle if isinstance(item, CompileProcess)]
            return tuple(child.pid for child in (*idle, *self._busy))

    def inspect(self, program: bytes, *, batch: int | None = None) -> ProgramReport:
        """Parse `program`, specialised to `batch` when that is given. Raises ProgramError, also when parsing it ended
        the process or took too long or too much."""
        answer, _ = self._run("reading", {"job": "inspect", "batch": batch}, program)
        return ProgramReport.from_json(answer["report"])

    def compile(
        self,
        program: bytes,
        options: CompileOptions = CompileOptions(),  # noqa: B008
        policy: Policy = Policy(),  # noqa: B008
    ) -> Compiled:
        """Parse `program`, rewrite it as `policy` says and compile it. Raises ProgramError, also when that ended the
        process or took too long or too much memory."""
        if not self._can_compile:
            raise RuntimeError("this CompilePool was made with parse_only=True")
        job = {"job": "compile", "options": options.to_json(), "policy": policy.to_json()}
        return Compiled.from_json(*self._run("compiling", job, program))

    def wake(self) -> None:
        """There will be jobs: let the processes that wait for their first one prepare themselves."""
        with self._changed:
            self._awake = True
            for item in self._idle:
                if isinstance(item, CompileProcess):
                    item.wake()

    def close(self) -> None:
        """End the processes. Calls that are waiting raise ServerStopping."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            for child in self._busy:
                child.kill()  # its caller closes it
            self._changed.notify_all()
        self._starter.join()
        with self._changed:
            idle += self._idle
            self._idle = []
        for item in idle:
            if isinstance(item, CompileProcess):
                item.close()

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, doing: str, message: dict[str, Any], program: bytes) -> Frame:
        for attempt in range(1, _ATTEMPTS + 1):
            child = self._take()
            try:
                answer = child.request(message, program, timeout=self._timeout)
            except ChildLost as lost:
                self._replace(child)
                if self._closed:
                    raise ServerStopping("the compile pool was closed") from None
                logger.warning("compile_process_lost pid=%d while=%s why=%s", child.pid, doing, lost)
                if lost.accepted:
                    raise self._refuse(doing, lost) from None
                if attempt == _ATTEMPTS or lost.why == "deadline":
                    raise CompileProcessError(
                        f"a compile process was lost before it took its job (attempt {attempt}): "
                        f"{lost.ending}{lost.last_words}",
                        hint="`rsrv env` shows whether jaxlib is installed and works",
                    ) from None
            except BaseException:
                self._replace(child)  # it is in the middle of something that nobody waits for any more
                raise
            else:
                self._give_back(child)
                return self._unwrap(answer)
        raise AssertionError("unreachable")

    def _unwrap(self, answer: Frame) -> Frame:
        error = answer[0].get("error")
        if error is not None:
            raise ProgramError(error["message"], rule=error["rule"], hint=error["hint"])
        return answer

    def _refuse(self, doing: str, lost: ChildLost) -> ProgramError:
        if lost.why == "deadline":
            return ProgramError(
                f"{doing} the program took longer than {self._timeout:g} s{lost.last_words}",
                hint="raise runtime.compile_timeout_seconds if the program only needs more time",
            )
        if lost.why == "memory":
            return ProgramError(
                f"{doing} the program took more than {self._memory_bytes} bytes of memory{lost.last_words}",
                hint="raise runtime.compile_memory_bytes if the program only needs more memory",
            )
        return ProgramError(f"{doing} the program ended its process: {lost.ending}{lost.last_words}")

    def _take(self) -> CompileProcess:
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._closed or self._idle)
                if self._closed:
                    raise ServerStopping("the compile pool is closed")
                item = self._idle.pop()
                if isinstance(item, CompileProcess) and item.alive:
                    self._busy.add(item)
                    return item
                self._wanted += 1
                self._changed.notify_all()
                if isinstance(item, Exception):
                    raise CompileProcessError(f"a compile process cannot be started: {item}") from item
                logger.warning("compile_process_lost pid=%d while=idle", item.pid)
                item.close()

    def _give_back(self, child: CompileProcess) -> None:
        with self._changed:
            self._busy.discard(child)
            if not self._closed:
                self._idle.append(child)
                self._changed.notify_all()
                return
        child.close()

    def _replace(self, child: CompileProcess) -> None:
        with self._changed:
            self._busy.discard(child)
            self._wanted += 1
            self._changed.notify_all()
        child.close()

    def _start_processes(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._wanted)
                if self._closed:
                    return
                self._wanted -= 1
            item: CompileProcess | Exception
            try:
                item = CompileProcess(self._settings, awake=self._awake)
            except Exception as error:
                item = error  # whoever waits for a process is told
            with self._changed:
                self._idle.append(item)
                self._changed.notify_all()
