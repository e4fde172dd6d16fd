"""The life of a request over a real scheduler and a scripted device, without a transport."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from sched_support import Weights
from support.calls import FakeCall

from rsrv.bundle.manifest import parse_manifest
from rsrv.core.errors import BundleError, Code, HookRejected, ServerStopping
from rsrv.core.tensors import OutputTarget
from rsrv.core.wire import RequestedOutput, decode_response, encode_request, join
from rsrv.runtime.fake import FakeDevice
from rsrv.runtime.hooks import Hooks
from rsrv.serve import observe
from rsrv.serve.admission import Admission
from rsrv.serve.counters import ServerCounters
from rsrv.serve.hook_pool import HookPool
from rsrv.serve.inference import Inference
from rsrv.serve.loading import prepare_checks
from rsrv.serve.registry import Registry
from rsrv.serve.scheduler import Policy, Scheduler, ServableModel
from rsrv.stablehlo.signature import ProgramSignature, tensor_type

TARGET = OutputTarget("region", 0, 8)
TENSOR = {"dtype": "f32", "shape": "nc", "dims": {"c": 2}}


class World:
    """One server's parts. The model ``m`` doubles ``x: f32[n,2]``, compiled for 1 and 4 rows."""

    def __init__(
        self,
        *,
        limit=64,
        hooks=None,
        hook_timeout=None,
        max_lost=4,
        program=lambda x: x * 2,
        sizes=(1, 4),
        policy=Policy(),  # noqa: B008
    ):
        self.device = FakeDevice()
        self.scheduler = Scheduler(self.device, policy)
        self.pool = HookPool(2)
        self.registry = Registry()
        self.registry.announce({"m": Path("m"), "late": Path("late")})
        self.counters = ServerCounters()
        self.admission = Admission(limit)
        self.lost = []
        self.inference = Inference(
            registry=self.registry,
            scheduler=self.scheduler,
            hook_pool=self.pool,
            counters=self.counters,
            admission=self.admission,
            regions=None,
            max_lost=max_lost,
            on_hooks_lost=lambda name, incarnation, lost: self.lost.append((name, lost)),
        )
        manifest = parse_manifest(
            {
                "format_version": "3.0",
                "executable_inputs": [{"name": "x", **TENSOR}],
                "executable_outputs": [{"name": "y", **TENSOR}],
                "batching": {"compiled_batch_sizes": list(sizes)},
            },
            name="m",
            has_hooks=hooks is not None,
        )
        shapes = {n: tensor_type("f32", (n, 2)) for n in sizes}
        programs = {n: self.device.program(program, ProgramSignature((s,), (s,))) for n, s in shapes.items()}
        model = ServableModel("m", 1, manifest, {(): programs}, Weights())
        self.scheduler.add(model)
        self.registry.set_ready(
            "m", prepare_checks(model, hooks or Hooks(), hook_timeout, split_oversize=policy.split_oversize)
        )
        self.scheduler.start()

    def close(self):
        self.pool.close()
        self.scheduler.stop()

    def ask(self, x=((1, 2),), model="m", **kw):
        return self.send(body(x, model, **kw))

    def send(self, request, **kw):
        return FakeCall(request, **kw).serve(self.inference.handle)

    def start(self, x=((1, 2),), **kw):
        """A call on a thread of its own; `.join()` gives the answered call."""
        call = FakeCall(body(x), **kw)
        thread = threading.Thread(target=call.serve, args=(self.inference.handle,))
        thread.start()
        call.join = thread.join
        return call


def body(x=((1, 2),), model="m", **kw):
    return join(encode_request(model, [("x", np.asarray(x, np.float32))], **kw))


@pytest.fixture
def world():
    worlds = []

    def make(**kw):
        worlds.append(World(**kw))
        return worlds[-1]

    yield make
    for one in worlds:
        one.close()


def y(call):
    assert call.error is None, call.error
    return decode_response(call.message).array("y")


def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_request_is_answered_with_its_rows_its_id_and_its_name(world):
    call = world().ask([[1, 2], [3, 4], [5, 6]], id="abc")
    np.testing.assert_array_equal(y(call), np.float32([[2, 4], [6, 8], [10, 12]]), strict=True)
    answer = decode_response(call.message)
    assert (answer.model_name, answer.id) == ("m", "abc")
    assert call.ends == 1


def test_requests_that_wait_are_merged_and_each_gets_its_own_rows(world):
    gate, seen = threading.Event(), []

    def program(x):
        seen.append(len(x))
        gate.wait(30)
        return x * 2

    w = world(program=program)
    first = w.start([[9, 9]])
    until(lambda: seen)
    others = [w.start([[i, i]]) for i in range(8)]
    until(lambda: sum(w.scheduler.depth(w.registry.prepared("m").model)) == 9)
    gate.set()
    for call in (first, *others):
        call.join()
    assert [y(call)[0, 0] for call in others] == [2 * i for i in range(8)]
    assert len(seen) < 9


@pytest.mark.parametrize(
    ("request_", "code", "reason", "text"),
    [
        (b"\xff\xff", Code.INVALID_ARGUMENT, "invalid", "malformed ModelInferRequest"),
        (body(model=""), Code.INVALID_ARGUMENT, "invalid", "model_name is empty"),
        (body(model="nobody"), Code.NOT_FOUND, "unknown_model", "unknown model: 'nobody'"),
        (body(model="late"), Code.UNAVAILABLE, "preparing", "'late' is being prepared"),
        (body(x=[[1, 2, 3]]), Code.INVALID_ARGUMENT, "invalid", "extent 3 at axis 1, wanted 2"),
        (body(x=np.zeros((5, 2))), Code.INVALID_ARGUMENT, "invalid", "at most 4"),
        (body(x=np.zeros((0, 2))), Code.INVALID_ARGUMENT, "invalid", "has 0 rows"),
        (body(outputs=["z"]), Code.INVALID_ARGUMENT, "invalid", "no output 'z'"),
        (body(outputs=["y", "y"]), Code.INVALID_ARGUMENT, "invalid", "requested twice"),
        (body(outputs=[RequestedOutput("y", TARGET)]), Code.INVALID_ARGUMENT, "invalid", "shared memory"),
        (body(parameters={"sequence_id": 1}), Code.INVALID_ARGUMENT, "invalid", "sequence_id"),
        (body(parameters={"rsrv_timeout_ns": 1}), Code.DEADLINE_EXCEEDED, "deadline", "deadline"),
    ],
)  # fmt: skip
def test_a_bad_request_is_refused_before_it_is_queued(world, request_, code, reason, text):
    w = world()
    call = w.send(request_)
    assert (call.code, call.reason) == (code, reason)
    assert text in str(call.error)
    assert w.admission.in_flight == 0
    assert w.scheduler.stats()["m"].requests_served == 0


def test_a_version_other_than_1_is_not_found(world):
    from rsrv.protos import inference as pb

    message = pb.ModelInferRequest.FromString(body())
    message.model_version = "1"
    w = world()
    assert w.send(message.SerializeToString()).code is Code.OK
    message.model_version = "2"
    assert w.send(message.SerializeToString()).code is Code.NOT_FOUND


def test_the_transports_deadline_counts_too(world):
    assert world().send(body(), deadline_ns=time.monotonic_ns() - 1).code is Code.DEADLINE_EXCEEDED


def test_a_failed_model_answers_with_the_text_of_its_failure(world):
    w = world()
    w.registry.set_failed("m", "compile", BundleError("model.mlir: no such op"))
    call = w.ask()
    assert (call.code, call.reason) == (Code.UNAVAILABLE, "failed")
    assert "compile: model.mlir: no such op" in str(call.error)


def test_past_the_cap_calls_are_shed_at_once_and_afterwards_admitted_again(world):
    gate = threading.Event()
    w = world(limit=2, program=lambda x: (gate.wait(30), x)[1])
    inside = [w.start(), w.start()]
    until(lambda: w.admission.in_flight == 2)
    shed = w.ask()
    assert (shed.code, shed.reason) == (Code.RESOURCE_EXHAUSTED, "shed")
    assert w.admission.shed == 1
    gate.set()
    for call in inside:
        call.join()
        assert call.code is Code.OK
    assert w.ask().code is Code.OK


def test_a_cancelled_request_leaves_at_once_and_is_never_run(world):
    gate, seen = threading.Event(), []

    def program(x):
        seen.append(float(x[0, 0]))
        gate.wait(30)
        return x

    w = world(program=program, sizes=(1,))
    first = w.start([[1, 1]])
    until(lambda: seen == [1])
    staged, waiting = w.start([[2, 2]]), w.start([[3, 3]])
    until(lambda: w.admission.in_flight == 3)
    waiting.cancel()
    waiting.join()
    assert w.admission.in_flight == 2
    gate.set()
    for call in (first, staged):
        call.join()
    assert w.ask([[4, 4]]).code is Code.OK
    assert seen == [1, 2, 4]
    assert waiting.ends == 0
    assert w.counters.snapshot("m").statuses == {"OK": 3, "CANCELLED": 1}


def test_a_call_cancelled_before_it_was_handled_does_not_count_as_open(world):
    w = world()
    call = FakeCall(body())
    call.cancelled = True
    call.serve(w.inference.handle)
    until(lambda: w.admission.in_flight == 0)
    assert w.counters.snapshot("m").statuses == {"CANCELLED": 1}


def test_times_are_told_on_request(world):
    call = world().ask([[1, 2], [3, 4]], parameters={"rsrv_timing": True})
    parameters = decode_response(call.message).parameters
    assert parameters["rsrv_batch"] == 4
    assert parameters["rsrv_compute_ns"] > 0
    assert parameters["rsrv_queue_ns"] >= 0
    assert decode_response(world().ask().message).parameters == {}


def test_an_error_of_the_device_reaches_the_caller_and_its_text_is_counted_as_internal(world):
    def broken(x):
        raise ValueError("no")

    w = world(program=broken)
    call = w.ask()
    assert (call.code, call.reason) == (Code.INTERNAL, "device")
    assert w.counters.snapshot("m").statuses == {"INTERNAL": 1}


def test_the_heartbeat_tells_of_every_request_also_of_a_failed_one(world):
    seen = []
    f = observe.register_heartbeat(lambda event, detail: seen.append((event, detail)))
    try:
        w = world()
        w.ask()
        w.ask(x=[[1, 2, 3]])
        w.ask(model="nobody")
    finally:
        observe.unregister_heartbeat(f)
    assert seen == [("request", "m"), ("request", "m"), ("request", "nobody")]


def test_counters_are_those_of_the_calls(world):
    w = world()
    w.ask([[1, 2], [3, 4]])
    w.ask([[1, 2, 3]])
    w.ask(model="nobody")
    seen = w.counters.snapshot("m")
    assert seen.statuses == {"OK": 1, "INVALID_ARGUMENT": 1}
    assert seen.rows == 2
    assert w.counters.unknown.snapshot().statuses == {"NOT_FOUND": 1}


# --- hooks --------------------------------------------------------------------------------------------------------


def test_hooks_run_around_the_device_with_the_rows_of_their_own_request(world):
    hooks = Hooks(lambda i: {"x": i["x"] + 1}, lambda o: {"y": o["y"] * 10})
    w = world(hooks=hooks)
    calls = [w.start([[i, i]]) for i in range(1, 5)]
    for call in calls:
        call.join()
    assert [y(call)[0, 0] for call in calls] == [40, 60, 80, 100]
    stages = w.counters.snapshot("m").stages
    # The device's memory is the host's, so nothing is downloaded.
    assert {s: sum(h.counts) for s, h in stages.items()} == {**dict.fromkeys(stages, 4), "download": 0}


def test_a_request_is_not_queued_before_its_preprocess_has_returned(world):
    gate, inside = threading.Event(), threading.Event()

    def preprocess(inputs):
        inside.set()
        gate.wait(30)
        return inputs

    w = world(hooks=Hooks(preprocess))
    call = w.start()
    assert inside.wait(30)
    assert w.device.launched == []
    gate.set()
    call.join()
    assert call.code is Code.OK


def test_nothing_is_prepared_that_the_queue_would_refuse(world):
    gate, inside, prepared = threading.Event(), threading.Event(), []

    def program(x):
        inside.set()
        gate.wait(30)
        return x * 2

    w = world(
        hooks=Hooks(lambda i: prepared.append(1) or i), program=program, sizes=(1,), policy=Policy(max_queue_depth=1)
    )
    calls = [w.start()]
    assert inside.wait(30)
    calls.append(w.start())
    until(lambda: len(prepared) == 2)
    # The second is staged behind the first, which leaves room for one more.
    until(lambda: w.scheduler.stats()["m"].in_flight == 2)
    calls.append(w.start())
    until(lambda: w.scheduler.stats()["m"].queue_depth == 1)
    refused = w.ask()
    assert (refused.code, refused.error.reason) == (Code.RESOURCE_EXHAUSTED, "queue_full")
    assert len(prepared) == 3
    gate.set()
    for call in calls:
        call.join()
        assert call.code is Code.OK


def test_a_request_with_more_rows_than_any_program_takes_is_run_in_pieces_when_that_is_allowed(world):
    x = np.arange(18, dtype=np.float32).reshape(9, 2)
    refused = world().ask(x)
    assert (refused.code, refused.error.reason) == (Code.INVALID_ARGUMENT, "invalid")
    assert np.array_equal(y(world(policy=Policy(split_oversize=True)).ask(x)), x * 2)


def test_hooks_of_different_requests_overlap(world):
    both = threading.Barrier(2, timeout=30)
    w = world(hooks=Hooks(lambda i: (both.wait(), i)[1]))
    for call in [w.start(), w.start()]:
        call.join()
        assert call.code is Code.OK


def test_a_hook_may_change_the_number_of_rows(world):
    hooks = Hooks(lambda i: {"x": np.repeat(i["x"], 2, axis=0)}, lambda o: {"y": o["y"][::2]})
    np.testing.assert_array_equal(y(world(hooks=hooks).ask([[1, 2], [3, 4]])), [[2, 4], [6, 8]])


@pytest.mark.parametrize(
    ("hooks", "code", "reason", "text"),
    [
        (Hooks(lambda i: 1 // 0), Code.INTERNAL, "hook_error", "preprocess of model 'm' raised ZeroDivisionError"),
        (Hooks(lambda i: [i]), Code.INTERNAL, "hook_error", "returned list"),
        (Hooks(lambda i: {}), Code.INTERNAL, "hook_error", "preprocess returned what its model does not take"),
        (Hooks(lambda i: {"x": i["x"][0]}), Code.INTERNAL, "hook_error", "rank 1"),
        (Hooks(lambda i: {"x": i["x"].astype(np.int8)}), Code.INTERNAL, "hook_error", "INT8"),
        (Hooks(lambda i: {"x": np.zeros((9, 2), np.float32)}), Code.INVALID_ARGUMENT, "invalid", "at most 4"),
        (Hooks(None, lambda o: {"z": o["y"]}), Code.INTERNAL, "hook_error", "postprocess returned .* no output 'z'"),
        (Hooks(None, lambda o: {}), Code.INTERNAL, "hook_error", "output 'y' of model 'm' is missing"),
        (Hooks(None, lambda o: None), Code.INTERNAL, "hook_error", "returned None"),
    ],
)
def test_a_hook_that_fails_fails_its_request_only(world, hooks, code, reason, text):
    w = world(hooks=hooks)
    call = w.ask()
    assert (call.code, call.reason) == (code, reason)
    with pytest.raises(type(call.error), match=text):
        raise call.error
    assert w.admission.in_flight == 0


def test_a_hook_may_refuse_the_data(world):
    def reject(inputs):
        raise HookRejected("no such word: 'xyzzy'")

    call = world(hooks=Hooks(reject)).ask()
    assert (call.code, call.reason, str(call.error)) == (
        Code.INVALID_ARGUMENT,
        "hook_rejected",
        "no such word: 'xyzzy'",
    )


def test_hooks_that_hang_fail_their_request_and_at_last_their_model(world):
    release = threading.Event()
    w = world(hooks=Hooks(lambda i: (release.wait(30), i)[1]), hook_timeout=0.02, max_lost=2)
    for expected in ([], [("m", 2)]):
        call = w.ask()
        assert (call.code, call.reason) == (Code.INTERNAL, "hook_error")
        assert "did not return within 0.02 s" in str(call.error)
        until(lambda expected=expected: w.lost == expected)
    assert w.device.launched == []
    release.set()
    assert w.pool.lost_threads == 2


def test_requests_that_wait_when_hooks_hung_too_often_cost_no_more_threads(world):
    release, ran = threading.Event(), []
    w = world(hooks=Hooks(lambda i: (ran.append(1), release.wait(30), i)[2]), hook_timeout=0.05, max_lost=2)
    calls = [w.start() for _ in range(12)]
    for call in calls:
        call.join()
    release.set()
    assert w.lost == [("m", 2)]
    # Those that were running when the second one was given up may be lost as well.
    assert 2 <= w.pool.lost_threads == len(ran) <= 4
    reasons = sorted(call.reason for call in calls)
    assert reasons == ["failed"] * (12 - len(ran)) + ["hook_error"] * len(ran)


def test_the_requests_deadline_bounds_a_hook_without_a_limit_of_its_own(world):
    release = threading.Event()
    w = world(hooks=Hooks(lambda i: (release.wait(30), i)[1]))
    call = w.ask(parameters={"rsrv_timeout_ns": 20_000_000})
    assert call.code is Code.DEADLINE_EXCEEDED
    assert w.lost == []
    release.set()


# --- the end ------------------------------------------------------------------------------------------------------


def test_once_closed_new_calls_are_refused_with_stopping_and_open_ones_finish(world):
    gate = threading.Event()
    w = world(program=lambda x: (gate.wait(30), x)[1])
    inside = w.start()
    until(lambda: w.admission.in_flight == 1)
    w.admission.close()
    refused = w.ask()
    assert (refused.code, refused.reason) == (Code.UNAVAILABLE, "stopping")
    assert not w.admission.wait_idle(time.monotonic())
    gate.set()
    assert w.admission.wait_idle(time.monotonic() + 30)
    inside.join()
    assert inside.code is Code.OK


def test_what_is_open_can_be_rejected_as_a_whole_even_in_a_hook_that_hangs(world):
    release = threading.Event()
    w = world(hooks=Hooks(lambda i: (release.wait(30), i)[1]))
    calls = [w.start() for _ in range(3)]
    until(lambda: w.admission.in_flight == 3)
    w.inference.reject_all(ServerStopping("the server is stopping"))
    for call in calls:
        call.join()
        assert (call.code, call.reason) == (Code.UNAVAILABLE, "stopping")
    assert w.admission.in_flight == 0
    release.set()
