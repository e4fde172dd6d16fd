"""A worker that tests script: a grpcio server of this process with both services of a worker, on a port of its own.

It computes nothing: ModelInfer answers with the first input. Whatever it answers can be replaced, failed, slowed, hung.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
from support.ports import held_port

from rsrv.core.errors import Code
from rsrv.protos import control as cp
from rsrv.protos import inference as pb

INFERENCE = "inference.GRPCInferenceService"
CONTROL = "reactant_control.ControlService"

_STATUS = {status.value[0]: status for status in grpc.StatusCode}
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)


@dataclass
class MockModel:
    """A row of the index and of ModelControlStatus; `batch_axis` as on the wire, from 1. Served rows are counted."""

    state: str = "READY"
    reason: str = ""
    compute: float = 0.0
    requests: int = 0
    rows: int = 0
    weight_nbytes: int = 0
    max_batch: int = 0
    batch_input: str = ""
    batch_axis: int = 0
    seconds_per_row: float = 0.0


@dataclass(frozen=True)
class Seen:
    """One call as it came in; `remaining` are the seconds left until its deadline, None without one."""

    body: bytes
    metadata: Mapping[str, str]
    remaining: float | None


@dataclass
class _Script:
    """What is special about a method; `failures` holds (code, text, reason, model or None, times left or None)."""

    failures: list[list] = field(default_factory=list)
    answer: Callable[[bytes], bytes] | None = None
    delay: float = 0.0
    open: threading.Event | None = None


class _Refused(Exception):
    def __init__(self, code: Code, text: str, reason: str) -> None:
        super().__init__(text)
        self.code, self.text, self.reason = code, text, reason


class MockWorker:
    """A context manager. Methods are named without their service (``ModelInfer``).

    Attributes:
        models: name → `MockModel`; change them at will.
        live_ready: what ServerReady says.
        incarnation, discipline, budget: what ModelControlStatus says.
        regions: registered shared memory, name → the bytes of the request. Emptied by `restart`.
        trailers: sent with each answer of ModelInfer.
        cancelled: hung or slow calls that the caller gave up, by method.
        entered: released once for each call that has come in; `entered.acquire(timeout=…)` waits for the next.
    """

    def __init__(
        self,
        models: Iterable[str] | Mapping[str, MockModel] = ("m",),
        *,
        port: int = 0,
        incarnation: str = "first",
        discipline: str = "fifo",
        budget: int = 0,
        threads: int = 32,
    ) -> None:
        self.models = dict(models) if isinstance(models, Mapping) else {name: MockModel() for name in models}
        self.live_ready = True
        self.incarnation, self.discipline, self.budget = incarnation, discipline, budget
        self.regions: dict[str, bytes] = {}
        self.trailers: dict[str, str] = {}
        self.cancelled: dict[str, int] = {}
        self.entered = threading.Semaphore(0)
        self._scripts: dict[str, _Script] = {}
        self._seen: dict[str, list[Seen]] = {}
        self._lock = threading.Lock()
        self._threads = threads
        self._held = held_port(port)  # it stays ours while the worker is away
        weakref.finalize(self, self._held.close)
        self.port = self._held.getsockname()[1]
        self._start()

    def __enter__(self) -> MockWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.port}"

    # --- what happened ---------------------------------------------------------------------------------------------

    def seen(self, method: str) -> list[Seen]:
        """The calls of a method in order of coming, also those that were failed, or hang."""
        with self._lock:
            return list(self._seen.get(method, ()))

    def count(self, method: str) -> int:
        return len(self.seen(method))

    # --- the script ------------------------------------------------------------------------------------------------

    def fail(
        self,
        method: str,
        code: Code,
        text: str = "scripted",
        *,
        reason: str = "",
        model: str | None = None,
        times: int | None = None,
    ) -> None:
        """Answer calls (the next `times`; of ModelInfer only those for `model`) with a status."""
        with self._lock:
            self._script(method).failures.append([code, text, reason, model, times])

    def succeed(self, method: str) -> None:
        """Take back what `fail`, `answer` and `delay` said."""
        with self._lock:
            script = self._script(method)
            script.failures, script.answer, script.delay = [], None, 0.0

    def answer(self, method: str, body: bytes | Callable[[bytes], bytes]) -> None:
        """Answer with these bytes, whatever they are."""
        with self._lock:
            self._script(method).answer = body if callable(body) else lambda _: body

    def delay(self, method: str, seconds: float) -> None:
        with self._lock:
            self._script(method).delay = seconds

    def hang(self, method: str) -> None:
        """Answer no call before `resume`; calls that the caller gives up are counted in `cancelled`."""
        with self._lock:
            self._script(method).open = threading.Event()

    def resume(self, method: str) -> None:
        with self._lock:
            script = self._script(method)
            event, script.open = script.open, None
        if event is not None:
            event.set()

    def close(self) -> None:
        """Refuse connections from now on; calls that are open end."""
        for method in list(self._scripts):
            self.resume(method)
        self._server.stop(0).wait()
        self._pool.shutdown()

    def restart(self, incarnation: str = "second") -> None:
        """Serve again on the same port, as another process would: nothing is registered. `close` first, or not."""
        self.close()
        self.incarnation, self.regions = incarnation, {}
        self._start()

    # --- the server ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._pool = ThreadPoolExecutor(self._threads)
        self._server = grpc.server(self._pool, options=_OPTIONS)
        for service, methods in ((INFERENCE, _INFERENCE), (CONTROL, _CONTROL)):
            handlers = {name: grpc.unary_unary_rpc_method_handler(self._handler(name, fn)) for name, fn in methods}
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        assert self._server.add_insecure_port(self.url) == self.port
        self._server.start()

    def _script(self, method: str) -> _Script:
        return self._scripts.setdefault(method, _Script())

    def _handler(self, method: str, fn: Callable[[MockWorker, bytes], bytes]) -> Callable:
        def handle(body: bytes, context: grpc.ServicerContext) -> bytes:
            with self._lock:
                metadata = dict(context.invocation_metadata())
                self._seen.setdefault(method, []).append(Seen(body, metadata, _remaining(context)))
                script = self._script(method)
                opened = script.open
            self.entered.release()
            if opened is not None or script.delay:
                self._pause(method, context, opened or threading.Event(), script.delay if opened is None else None)
            try:
                with self._lock:
                    self._refuse(script, method, body)
                    answer = fn(self, body) if script.answer is None else script.answer(body)
            except _Refused as refused:
                if refused.reason:
                    context.set_trailing_metadata((("rsrv-reason", refused.reason),))
                context.abort(_STATUS[int(refused.code)], refused.text)
            if method == "ModelInfer" and self.trailers:
                context.set_trailing_metadata(tuple(self.trailers.items()))
            return answer

        return handle

    def _pause(self, method: str, context: grpc.ServicerContext, event: threading.Event, seconds: float | None) -> None:
        gone = threading.Event()  # of this call alone: `event` opens the way for all that hang
        if not context.add_callback(gone.set):
            gone.set()
        until = None if seconds is None else time.monotonic() + seconds
        while not (event.is_set() or gone.is_set() or (until is not None and time.monotonic() >= until)):
            gone.wait(0.005)
        if not context.is_active():
            with self._lock:
                self.cancelled[method] = self.cancelled.get(method, 0) + 1

    def _refuse(self, script: _Script, method: str, body: bytes) -> None:
        for failure in script.failures:
            code, text, reason, model, times = failure
            if times == 0:
                continue
            if model is not None and pb.ModelInferRequest.FromString(body).model_name != model:
                continue
            if times is not None:
                failure[4] = times - 1
            raise _Refused(code, text, reason)

    # --- the methods, under the lock -------------------------------------------------------------------------------

    def _index(self, body: bytes) -> bytes:
        ready_only = pb.RepositoryIndexRequest.FromString(body).ready
        answer = pb.RepositoryIndexResponse()
        for name, model in sorted(self.models.items()):
            if model.state == "READY" or not ready_only:
                answer.models.add(name=name, state=model.state, reason=model.reason)
        return answer.SerializeToString()

    def _status(self, _: bytes) -> bytes:
        answer = cp.ModelControlStatusResponse(
            discipline=self.discipline, weight_cache_max_bytes=self.budget, incarnation=self.incarnation
        )
        for name, model in sorted(self.models.items()):
            answer.models.add(
                name=name,
                weight_nbytes=model.weight_nbytes,
                total_compute_seconds=model.compute,
                requests_served=model.requests,
                rows_served=model.rows,
                max_batch_size=model.max_batch,
                batch_input_name=model.batch_input,
                batch_axis=model.batch_axis,
            )
        return answer.SerializeToString()

    def _infer(self, body: bytes) -> bytes:
        request = pb.ModelInferRequest.FromString(body)
        model = self.models.get(request.model_name)
        if model is None:
            raise _Refused(Code.NOT_FOUND, f"unknown model: {request.model_name!r}", "unknown_model")
        if model.state != "READY":
            raise _Refused(Code.UNAVAILABLE, f"model {request.model_name!r}: {model.reason}", "preparing")
        for tensor in [*request.inputs, *request.outputs]:
            region = tensor.parameters["shared_memory_region"].string_param if tensor.parameters else ""
            if region and region not in self.regions:
                raise _Refused(Code.FAILED_PRECONDITION, f"unregistered shared memory region {region!r}", _UNREGISTERED)
        answer = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
        rows = 1
        if request.inputs:
            first = request.inputs[0]
            rows = first.shape[0] if first.shape else 1
            answer.outputs.add(name="out", datatype=first.datatype, shape=first.shape)
            answer.raw_output_contents.extend(request.raw_input_contents[:1])
        model.requests += 1
        model.rows += rows
        model.compute += rows * model.seconds_per_row
        return answer.SerializeToString()

    def _register(self, body: bytes) -> bytes:
        self.regions[pb.SystemSharedMemoryRegisterRequest.FromString(body).name] = body
        return b""

    def _unregister(self, body: bytes) -> bytes:
        name = pb.SystemSharedMemoryUnregisterRequest.FromString(body).name
        for region in [name] if name else list(self.regions):
            self.regions.pop(region, None)
        return b""

    def _compact(self, body: bytes) -> bytes:
        count = len(cp.CompactMemoryRequest.FromString(body).reload_models)
        return cp.CompactMemoryResponse(reloaded_models=count).SerializeToString()


def _remaining(context: grpc.ServicerContext) -> float | None:
    seconds = context.time_remaining()
    return None if seconds is None or seconds > 1e8 else seconds


_UNREGISTERED = "shm_unregistered"
_INFERENCE: tuple[tuple[str, Callable[[MockWorker, bytes], bytes]], ...] = (
    ("ServerLive", lambda mock, _: pb.ServerLiveResponse(live=True).SerializeToString()),
    ("ServerReady", lambda mock, _: pb.ServerReadyResponse(ready=mock.live_ready).SerializeToString()),
    ("ServerMetadata", lambda mock, _: pb.ServerMetadataResponse(name="mock", version="1").SerializeToString()),
    ("ModelReady", lambda mock, _: pb.ModelReadyResponse(ready=True).SerializeToString()),
    ("ModelMetadata", lambda mock, _: pb.ModelMetadataResponse(platform="mock").SerializeToString()),
    ("ModelConfig", lambda mock, _: pb.ModelConfigResponse().SerializeToString()),
    ("ModelStatistics", lambda mock, _: pb.ModelStatisticsResponse().SerializeToString()),
    ("RepositoryIndex", MockWorker._index),
    ("ModelInfer", MockWorker._infer),
    ("SystemSharedMemoryRegister", MockWorker._register),
    ("SystemSharedMemoryUnregister", MockWorker._unregister),
    ("IsSameIPCNamespace", lambda mock, _: pb.IsSameIPCNamespaceResponse(same=True).SerializeToString()),
)
_CONTROL: tuple[tuple[str, Callable[[MockWorker, bytes], bytes]], ...] = (
    ("ModelControlStatus", MockWorker._status),
    ("CompactMemory", MockWorker._compact),
)
