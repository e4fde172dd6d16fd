"""One request: from its bytes to the bytes of its answer, over hooks and scheduler, without ever blocking.

Parsing, checks and encoding run on the engine's thread for the call, hooks on the hook pool; the dispatch thread, which
delivers results, only hands them over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rsrv.core.errors import (
    FAILOVER_METADATA_KEY,
    Cancelled,
    Code,
    DeadlineExceeded,
    HookError,
    InvalidRequest,
    RsrvError,
)
from rsrv.core.shm.tensor import RegionTensor, Tensor
from rsrv.core.wire import RequestMessage, encode_response, parse_request
from rsrv.runtime.hooks import Arrays, call_hook
from rsrv.serve import observe
from rsrv.serve.hook_pool import Job

if TYPE_CHECKING:
    from rsrv.core.tensors import OutputTarget
    from rsrv.rpc.call import Call
    from rsrv.serve.counters import RequestCounters
    from rsrv.serve.gate import Accepted
    from rsrv.serve.inference import Inference
    from rsrv.serve.registry import Prepared
    from rsrv.serve.scheduler import Result, Ticket

TIMING_PARAM = "rsrv_timing"
"""Request parameter: true asks for the times of the request in the parameters of its answer."""
HOLD_PARAM = "rsrv_hold"
"""Request parameter: whether the request waits where the model's gate is closed, or the model is not prepared yet."""

_NOTHING: Mapping[str, Any] = {}


class Request:
    """One ModelInfer call. `fail` and `_answer` may race (cancel, stop, result): the first one decides.

    Its incarnation of the model has it until it has ended and nothing works on it any more: neither a hook nor the
    scheduler.
    """

    __slots__ = (
        "accepted",
        "begun_ns",
        "busy",
        "call",
        "cancelled",
        "counters",
        "deadline_ns",
        "ended",
        "id",
        "message",
        "model_name",
        "names",
        "prepared",
        "result",
        "rows",
        "server",
        "stages_ns",
        "started_ns",
        "target",
        "targets",
        "ticket",
        "timing",
    )

    def __init__(self, server: Inference, call: Call, started_ns: int) -> None:
        self.server = server
        self.call = call
        self.started_ns = started_ns
        self.begun_ns = started_ns
        self.model_name = ""
        # The registered name; a model that is renamed while the request waits for it has another one then.
        self.target = ""
        self.accepted: Accepted[Request] | None = None
        self.busy = self.ended = False
        self.deadline_ns = 0
        self.counters: RequestCounters | None = None
        self.ticket: Ticket | None = None
        self.cancelled = False
        # decode, preprocess, postprocess; -1 = there was no such stage.
        self.stages_ns = [-1, -1, -1]

    # --- on the engine's thread -----------------------------------------------------------------------------------

    def start(self) -> None:
        message = self.message = parse_request(self.call.body)
        self.model_name = self.target = message.model_name
        if not self.target:
            raise InvalidRequest("model_name is empty")
        self._begin()

    def resume(self) -> None:
        """Go on after a wait for the model."""
        self.begun_ns = time.monotonic_ns()
        try:
            self._begin()
        except BaseException as error:
            self.fail(error)

    def _begin(self) -> None:
        server, call, message = self.server, self.call, self.message
        prepared = self._enter()
        if prepared is None:
            return
        self.prepared, self.accepted = prepared, prepared.accepted
        if self.ended:
            # Cancelled or late while it entered; whoever ended it did not know yet that it has to leave.
            self._forget()
            return
        self.counters = server.counters.model(self.target)
        message.check_version()
        tensors = message.unread_tensors(server.regions)
        self.deadline_ns = _earliest(message.deadline_ns(self.started_ns), call.deadline_ns)
        inputs = prepared.inputs.tensors(tensors)
        self._keep_outputs(message, prepared)
        decoded_ns = time.monotonic_ns()
        self.stages_ns[0] = decoded_ns - self.begun_ns
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

    def _enter(self) -> Prepared | None:
        """The incarnation that takes this request; None when it waits for one, or has ended. Raises UnknownModel,
        ModelPreparing, ModelFailed, AdmissionClosed, Removing or HeldFull."""
        registry = self.server.registry
        while True:
            entry = registry.find(self.target)
            prepared = entry.prepared
            if prepared is not None and prepared.accepted.enter(self):
                return prepared
            refusal = entry.refusal()
            if refusal is not None:
                break
            # The entry was exchanged for another between the two looks; the next one shows it.
        elsewhere = FAILOVER_METADATA_KEY in self.call.metadata
        if not self.server.may_wait(entry, self.message.parameters.get(HOLD_PARAM), elsewhere=elsewhere):
            raise refusal
        self.deadline_ns = _earliest(self.message.deadline_ns(self.started_ns), self.call.deadline_ns)
        if self.server.admission.hold(self, self.deadline_ns):
            self.call.on_cancel(self._on_cancel)
            self.server.look_again(self.target)
        return None

    def expire(self) -> None:
        self.fail(DeadlineExceeded(f"the deadline passed while the request waited for model {self.target!r}"))

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
        if not self._leave():
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
        self.busy = True
        try:
            ticket = self.ticket = self.server.scheduler.submit(
                prepared.model, inputs, rows, variant, self.deadline_ns, self._delivered
            )
        except BaseException:
            # Not only `busy`: whoever aborted it meanwhile left it to this.
            self._free()
            raise
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
                return
            except BaseException as error:
                self.fail(error)
        self._free()

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

    def _run_hook(self, role: str, arrays: Arrays, then: Callable[[Arrays, int], bool]) -> None:
        """Have a hook run; `then` is given what it returns and says whether somebody else works on the request now."""
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
                if then(*value):
                    return
            except BaseException as raised:
                self.fail(raised)
            self._free()

        pool = server.hook_pool if processes is None else processes.pool
        self.busy = True
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

    def _preprocessed(self, inputs: Arrays, spent_ns: int) -> bool:
        self.stages_ns[1] = spent_ns
        check = self.prepared.executable_inputs
        if check is not None:
            _check_hook(check.arrays, inputs, "preprocess")
        self._submit(inputs)
        return True

    def _postprocessed(self, outputs: Arrays, spent_ns: int) -> bool:
        self.stages_ns[2] = spent_ns
        check = self.prepared.client_outputs
        if check is not None:
            _check_hook(check.arrays, outputs, "postprocess")
        self.result.outputs = outputs
        self.call.defer(self._encode_or_fail)
        return False

    # --- the end ----------------------------------------------------------------------------------------------------

    def _leave(self) -> bool:
        """End the request; False when it has ended. Its model keeps it while something still works on it."""
        if not self.server.admission.leave(self):
            return False
        self.ended = True
        if not self.busy:
            self._forget()
        return True

    def _free(self) -> None:
        """The scheduler, or a hook, is done with the request. Either this or `_leave`, or both, see that it is over."""
        self.busy = False
        if self.ended:
            self._forget()

    def _forget(self) -> None:
        if self.accepted is not None:
            self.accepted.leave(self)

    # --- ends that are not answers --------------------------------------------------------------------------------

    def refuse(self, error: RsrvError) -> None:
        """End a call that was never admitted; its body is not looked at, so no model is known."""
        self.server.counters.unknown.failed(time.monotonic_ns() - self.started_ns, error.code.name)
        self.call.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the call with an error, unless it has ended. Any thread."""
        if not self._leave():
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
        if self._leave():
            late = self.deadline_ns and time.monotonic_ns() >= self.deadline_ns
            self._count_failure(Code.DEADLINE_EXCEEDED if late else Code.CANCELLED)

    def _count_failure(self, code: Code) -> None:
        counters = self.counters
        if counters is None:
            known = self.server.registry.get(self.target) is not None
            counters = self.server.counters.model(self.target) if known else self.server.counters.unknown
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
