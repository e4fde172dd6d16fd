"""ModelInfer: from the bytes of a request to the bytes of its answer, over hooks and scheduler, without ever blocking.

Parsing, checks and encoding run on the engine's thread for the call, hooks on the hook pool; the dispatch thread, which
delivers results, only hands them over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rsrv.core.errors import (
    Cancelled,
    Code,
    DeadlineExceeded,
    HookError,
    InvalidRequest,
    ModelFailed,
    RsrvError,
    ServerStopping,
    Shed,
)
from rsrv.core.shm.tensor import RegionTensor, Tensor
from rsrv.core.wire import RequestMessage, encode_response, parse_request
from rsrv.runtime.hooks import Arrays, call_hook
from rsrv.serve import observe
from rsrv.serve.hook_pool import HookPool, Job

if TYPE_CHECKING:
    from rsrv.core.shm import RegionRegistry
    from rsrv.core.tensors import OutputTarget
    from rsrv.rpc.call import Call
    from rsrv.serve.counters import RequestCounters, ServerCounters
    from rsrv.serve.registry import Prepared, Registry
    from rsrv.serve.scheduler import Result, Scheduler, Ticket

log = logging.getLogger(__name__)

TIMING_PARAM = "rsrv_timing"
"""Request parameter: true asks for the times of the request in the parameters of its answer."""


_NOTHING: Mapping[str, Any] = {}


class Admission:
    """The ModelInfer calls being handled: at most `limit`, none any more once closed. Thread safe."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.shed = 0
        self._closed = False
        self._open: set[_Request] = set()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)

    @property
    def in_flight(self) -> int:
        return len(self._open)

    def enter(self, request: _Request) -> None:
        """Raises Shed past the limit, ServerStopping when closed."""
        with self._lock:
            if self._closed:
                raise ServerStopping("the server is stopping and takes no new requests")
            if len(self._open) >= self.limit:
                self.shed += 1
                raise Shed(f"{self.limit} requests are being handled already (endpoints.max_concurrent_requests)")
            self._open.add(request)

    def leave(self, request: _Request) -> bool:
        """True the first time; afterwards, and for a request that never entered, False."""
        with self._lock:
            if request not in self._open:
                return False
            self._open.remove(request)
            if self._closed and not self._open:
                self._idle.notify_all()
            return True

    def close(self) -> None:
        with self._lock:
            self._closed = True

    def wait_idle(self, until: float) -> bool:
        """Wait until no request is open, at most until the monotonic time `until`; True when none is."""
        with self._lock:
            while self._open:
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._idle.wait(left)
            return True

    def requests(self) -> list[_Request]:
        with self._lock:
            return list(self._open)


class Inference:
    """The handler of ModelInfer.

    Args:
        on_hooks_lost: called with a model's name when its hooks hung too often; the model is to be failed.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        scheduler: Scheduler,
        hook_pool: HookPool,
        counters: ServerCounters,
        admission: Admission,
        regions: RegionRegistry | None,
        max_lost: int,
        on_hooks_lost: Callable[[str, int], None],
    ) -> None:
        self.registry = registry
        self.scheduler = scheduler
        self.hook_pool = hook_pool
        self.counters = counters
        self.admission = admission
        self.regions = regions
        self._max_lost = max_lost
        self._on_hooks_lost = on_hooks_lost
        self._lost: dict[tuple[str, int], int] = {}
        self._given_up: set[tuple[str, int]] = set()
        self._lost_lock = threading.Lock()

    def handle(self, call: Call) -> None:
        request = _Request(self, call, time.monotonic_ns())
        try:
            self.admission.enter(request)
        except RsrvError as error:
            request.refuse(error)
            return
        try:
            request.start()
        except BaseException as error:
            request.fail(error)

    def reject_all(self, error: RsrvError) -> None:
        """Fail every request that is still open."""
        for request in self.admission.requests():
            request.fail(error)

    def hook_lost(self, prepared: Prepared) -> None:
        """A hook of this incarnation hung and its thread was written off."""
        key = prepared.model.name, prepared.model.incarnation
        with self._lost_lock:
            lost = self._lost[key] = self._lost.get(key, 0) + 1
        if lost == max(self._max_lost, 1):
            self._given_up.add(key)
            self._on_hooks_lost(prepared.model.name, lost)

    def require_hooks(self, prepared: Prepared) -> None:
        """Raises ModelFailed when the hooks of this incarnation hung too often: a request that was accepted before must
        not cost a thread any more."""
        if self._given_up and (prepared.model.name, prepared.model.incarnation) in self._given_up:
            raise ModelFailed(f"model {prepared.model.name!r} failed: too many of its hooks did not return in time")


class _Request:
    """One ModelInfer call. `fail` and `_answer` may race (cancel, stop, result): the first one decides."""

    __slots__ = (
        "call",
        "cancelled",
        "counters",
        "deadline_ns",
        "id",
        "model_name",
        "names",
        "prepared",
        "result",
        "rows",
        "server",
        "stages_ns",
        "started_ns",
        "targets",
        "ticket",
        "timing",
    )

    def __init__(self, server: Inference, call: Call, started_ns: int) -> None:
        self.server = server
        self.call = call
        self.started_ns = started_ns
        self.model_name = ""
        self.counters: RequestCounters | None = None
        self.ticket: Ticket | None = None
        self.cancelled = False
        # decode, preprocess, postprocess; -1 = there was no such stage.
        self.stages_ns = [-1, -1, -1]

    # --- on the engine's thread -----------------------------------------------------------------------------------

    def start(self) -> None:
        server, call = self.server, self.call
        message = parse_request(call.body)
        name = self.model_name = message.model_name
        if not name:
            raise InvalidRequest("model_name is empty")
        prepared = self.prepared = server.registry.prepared(name)
        self.counters = server.counters.model(name)
        message.check_version()
        tensors = message.unread_tensors(server.regions)
        self.deadline_ns = _earliest(message.deadline_ns(self.started_ns), call.deadline_ns)
        inputs = prepared.inputs.tensors(tensors)
        self._keep_outputs(message, prepared)
        decoded_ns = time.monotonic_ns()
        self.stages_ns[0] = decoded_ns - self.started_ns
        if self.deadline_ns and decoded_ns >= self.deadline_ns:
            raise DeadlineExceeded("the deadline had passed when the request arrived")
        call.on_cancel(self._on_cancel)
        if self.cancelled:
            return
        if prepared.hooks.preprocess is None:
            self._submit(inputs)
        else:
            # An overloaded worker does not pay for preparing what it will refuse.
            self.server.scheduler.admit(prepared.model, self.deadline_ns)
            self._run_hook("preprocess", read_all(inputs), self._preprocessed)

    def _keep_outputs(self, message: RequestMessage, prepared: Prepared) -> None:
        self.id = message.id
        self.timing = bool(message.parameters) and message.parameters.get(TIMING_PARAM) is True
        self.targets: Mapping[str, OutputTarget] = _NOTHING
        if message.outputs:
            self.names: Sequence[str] = prepared.outputs.names_of([output.name for output in message.outputs])
            self.targets = message.output_targets
            if self.targets:
                if self.server.regions is None:
                    raise InvalidRequest("shared memory is disabled on this server (shm.enabled)")
                for target in self.targets.values():
                    self.server.regions.check(target.region, target.offset, target.byte_size)
        else:
            self.names = prepared.outputs.names

    def _encode(self) -> None:
        """The last step: encode the outputs and send them."""
        result = self.result
        outputs = result.outputs
        if outputs is None:
            raise RuntimeError("a result without outputs")
        begin_ns = time.monotonic_ns()
        buffers = encode_response(
            self.model_name,
            self.id,
            [(name, outputs[name]) for name in self.names],
            targets=self.targets,
            regions=self.server.regions,
            parameters=_times(result) if self.timing else _NOTHING,
        )
        # Left and counted before the answer is on its way: who has the answer may send the next request, or ask for
        # the counters.
        if not self.server.admission.leave(self):
            return
        now_ns = time.monotonic_ns()
        if self.counters is not None:
            decode, preprocess, postprocess = self.stages_ns
            upload, download = result.upload_ns, result.download_ns
            run = result.compute_ns - upload - download
            self.counters.succeeded(
                now_ns - self.started_ns,
                self.rows,
                (decode, preprocess, result.queue_ns, upload, run, download or -1, postprocess, now_ns - begin_ns),
            )
        self._tell()
        try:
            self.call.send(buffers)
            self.call.finish()
        except BaseException as error:
            self.call.fail(error)

    # --- between preprocess and postprocess -----------------------------------------------------------------------

    def _submit(self, inputs: Mapping[str, Tensor]) -> None:
        prepared = self.prepared
        rows, variant = prepared.rows.plan(inputs)
        self.rows = rows
        if self.targets:
            prepared.outputs.windows(self.targets, rows)
        ticket = self.ticket = self.server.scheduler.submit(
            prepared.model, inputs, rows, variant, self.deadline_ns, self._delivered
        )
        if self.cancelled:
            ticket.cancel()

    def _delivered(self, result: Result) -> None:
        """On the dispatch thread: hand over and return."""
        self.result = result
        if result.error is not None:
            self.call.defer(self._fail_with_result)
        elif self.prepared.hooks.postprocess is None:
            self.call.defer(self._encode_or_fail)
        else:
            assert result.outputs is not None
            try:
                self._run_hook("postprocess", result.outputs, self._postprocessed)
            except BaseException as error:
                self.fail(error)

    def _fail_with_result(self) -> None:
        error = self.result.error
        assert error is not None
        self.fail(error)

    def _encode_or_fail(self) -> None:
        try:
            if not self.cancelled:
                self._encode()
        except BaseException as error:
            self.fail(error)

    # --- hooks ----------------------------------------------------------------------------------------------------

    def _run_hook(self, role: str, arrays: Arrays, then: Callable[[Arrays, int], None]) -> None:
        prepared, server = self.prepared, self.server
        hook, processes = getattr(prepared.hooks, role), prepared.processes

        def run() -> tuple[Arrays, int]:
            if self.cancelled:
                raise Cancelled("the caller cancelled the request")
            begin_ns = time.monotonic_ns()
            if processes is not None:
                result = hook(arrays)
            else:
                server.require_hooks(prepared)
                result = call_hook(hook, arrays, model=self.model_name, role=role)
            return result, time.monotonic_ns() - begin_ns

        def done(value: Any, error: BaseException | None) -> None:
            try:
                if error is not None:
                    raise error
                then(*value)
            except BaseException as raised:
                self.fail(raised)

        pool = server.hook_pool if processes is None else processes.pool
        pool.submit(
            Job(
                run,
                done,
                what=f"hook {role} of model {self.model_name!r}",
                timeout=prepared.hook_timeout if processes is None else None,  # it is the process that is ended
                deadline_ns=self.deadline_ns,
                lost=lambda: server.hook_lost(prepared),
            )
        )

    def _preprocessed(self, inputs: Arrays, spent_ns: int) -> None:
        self.stages_ns[1] = spent_ns
        check = self.prepared.executable_inputs
        if check is not None:
            _check_hook(check.arrays, inputs, "preprocess")
        self._submit(inputs)

    def _postprocessed(self, outputs: Arrays, spent_ns: int) -> None:
        self.stages_ns[2] = spent_ns
        check = self.prepared.client_outputs
        if check is not None:
            _check_hook(check.arrays, outputs, "postprocess")
        self.result.outputs = outputs
        self.call.defer(self._encode_or_fail)

    # --- ends that are not answers --------------------------------------------------------------------------------

    def refuse(self, error: RsrvError) -> None:
        """End a call that was never admitted; its body is not looked at, so no model is known."""
        self.server.counters.unknown.failed(time.monotonic_ns() - self.started_ns, error.code.name)
        self.call.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the call with an error, unless it has ended. Any thread."""
        if not self.server.admission.leave(self):
            return
        if self.ticket is not None:
            self.ticket.cancel()
        self._count_failure(error.code if isinstance(error, RsrvError) else Code.INTERNAL)
        self.call.fail(error)

    def _on_cancel(self) -> None:
        """The client is gone, or its deadline passed: nobody waits for an answer."""
        self.cancelled = True
        ticket = self.ticket
        if ticket is not None:
            ticket.cancel()
        if self.server.admission.leave(self):
            late = self.deadline_ns and time.monotonic_ns() >= self.deadline_ns
            self._count_failure(Code.DEADLINE_EXCEEDED if late else Code.CANCELLED)

    def _count_failure(self, code: Code) -> None:
        counters = self.counters
        if counters is None:
            known = self.server.registry.get(self.model_name) is not None
            counters = self.server.counters.model(self.model_name) if known else self.server.counters.unknown
        counters.failed(time.monotonic_ns() - self.started_ns, code.name)
        self._tell()

    def _tell(self) -> None:
        """Have heartbeats told of the request once its answer is with the transport."""
        if observe.anybody_listens():
            self.call.on_end(lambda: observe.beat("request", self.model_name))


def _times(result: Result) -> dict[str, bool | int | float | str]:
    return {"rsrv_queue_ns": result.queue_ns, "rsrv_compute_ns": result.compute_ns, "rsrv_batch": result.batch_key}


def read_all(inputs: Mapping[str, Tensor]) -> Arrays:
    """The inputs as arrays, for user code."""
    return {name: tensor.read() if isinstance(tensor, RegionTensor) else tensor for name, tensor in inputs.items()}


def _earliest(a: int, b: int) -> int:
    """The earlier of two absolute deadlines, where 0 means none."""
    return min(a, b) if a and b else a or b


def _check_hook(check: Callable[[Mapping[str, np.ndarray]], None], arrays: Arrays, role: str) -> None:
    """What a hook returned is the hook's fault, not the client's."""
    try:
        check(arrays)
    except InvalidRequest as error:
        raise HookError(f"hook {role} returned what its model does not take: {error.message}") from error
