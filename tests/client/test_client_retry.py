"""The policy, the loop with its steps taken by hand and a clock that only the test moves, and obstinate servers."""

import asyncio
import dataclasses
import gc
import itertools
import math
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.client_stub import StubServer

from rsrv.client.budget import Budget
from rsrv.client.channels import ChannelOptions
from rsrv.client.connection import Connection
from rsrv.client.failures import answered_by_server
from rsrv.client.retry import RetryBudget, RetryPolicy, with_retries
from rsrv.client.steps import Call, Pause, arun, run
from rsrv.core import errors
from rsrv.core.errors import Code, RsrvError, UsageError
from rsrv.protos import inference


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def failed(code, reason="", text="went wrong"):
    return RsrvError(text, code=code, reason=reason)


class Script:
    """An attempt that takes the next of `times` and ends as the next of `ends` says; the last ones stay."""

    def __init__(self, clock, budget, ends, times=(0.01,)):
        self.clock, self.budget = clock, budget
        self.ends, self.times = list(ends), list(times)
        self.left = []  # what each attempt found of the budget

    def __call__(self):
        self.left.append(self.budget.remaining())
        yield Pause(0.0)
        seconds = self.times.pop(0) if len(self.times) > 1 else self.times[0]
        self.clock.now += seconds if self.left[-1] is None else min(seconds, self.left[-1])
        end = self.ends.pop(0) if len(self.ends) > 1 else self.ends[0]
        if isinstance(end, Exception):
            raise end
        return end


def play(policy, script, tokens=None, draw=lambda: 1.0):
    """Take the steps; returns the waits between attempts and the result or the error."""
    waits = []
    tokens = RetryBudget(policy, script.clock) if tokens is None else tokens
    steps = with_retries(policy, tokens, script.budget, script, draw=draw)
    try:
        step = next(steps)
        for _ in range(1000):
            if step.seconds:
                waits.append(step.seconds)
                script.clock.now += step.seconds
            step = steps.send(None)
    except StopIteration as end:
        return waits, end.value
    except Exception as error:
        return waits, error
    raise AssertionError("the loop does not end")


def script(ends, deadline=10.0, **options):
    clock = Clock()
    return Script(clock, Budget(deadline, clock=clock), ends, **options)


# --- what is tried again -------------------------------------------------------------------------------------------

PASSING = ["queue_full", "shed", "held_full", "preparing", "admission_closed", "stopping", "no_workers"]
FINAL = ["device_oom", "failed", "not_resident", "device_lost", "shm_limit", "message_too_large", "capacity", "new_one"]


@pytest.mark.parametrize("code", [Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE])
def test_a_reason_that_passes_is_tried_again_and_any_other_is_final(code):
    policy = RetryPolicy()
    assert [policy.retries(failed(code, reason)) for reason in PASSING] == [True] * len(PASSING)
    assert [policy.retries(failed(code, reason)) for reason in FINAL] == [False] * len(FINAL)
    assert policy.retries(failed(code))


@pytest.mark.parametrize("code", sorted(set(Code) - {Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE}))
def test_no_other_status_is_tried_again_whatever_its_reason(code):
    assert not any(RetryPolicy().retries(failed(code, reason)) for reason in ["", "shed", "unreachable", *PASSING])


def test_a_lost_connection_is_tried_again_and_an_impossible_one_is_not():
    assert RetryPolicy().retries(errors.ServerUnreachable("no answer from h:1: Socket closed"))
    assert RetryPolicy().retries(failed(Code.UNAVAILABLE, "unreachable", "worker h:1: Socket closed"))
    assert not RetryPolicy().retries(errors.TlsFailed("no TLS connection to h:1"))


def test_without_retry_unavailable_only_an_overload_is_tried_again():
    policy = RetryPolicy(retry_unavailable=False)
    assert not policy.retries(errors.ServerUnreachable("no answer"))
    assert not policy.retries(errors.ModelPreparing("soon"))
    assert policy.retries(errors.QueueFull("full"))


@pytest.mark.parametrize("code", [Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE])
@pytest.mark.parametrize("side", ["CLIENT: Sent", "CLIENT: Received", "SERVER: Received"])
def test_a_message_that_can_never_pass_is_not_tried_again(code, side):
    assert not RetryPolicy().retries(failed(code, text=f"{side} message larger than max (33554445 vs. 4194304)"))


def test_a_forgotten_region_is_left_to_recovery_under_any_status():
    for code in (Code.FAILED_PRECONDITION, Code.UNAVAILABLE):
        error = errors.UnregisteredRegion("r")
        error.code = code
        assert not RetryPolicy().retries(error)


def test_errors_of_this_process_are_not_tried_again():
    for error in (
        errors.PoolAcquireTimeout(1, 0.5),
        errors.DeadlineExceeded("late"),
        errors.RegionLimit("/dev/shm is full"),
        errors.ShmUnrecoverable("no"),
        UsageError("no"),
    ):
        assert not RetryPolicy().retries(error)


# --- the policy ----------------------------------------------------------------------------------------------------


def test_waits_double_up_to_the_longest_and_jitter_takes_a_share_of_them():
    policy = RetryPolicy(max_backoff=5.0)
    assert [policy.wait(attempt, 1.0) for attempt in (1, 2, 3, 4, 50)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert [policy.wait(attempt, 0.25) for attempt in (1, 2, 3, 4)] == [0.25, 0.5, 1.0, 1.25]
    plain = dataclasses.replace(policy, jitter=False, initial_backoff=0.5, factor=3)
    assert [plain.wait(attempt, 0.25) for attempt in (1, 2, 3, 4)] == [0.5, 1.5, 4.5, 5.0]


@settings(deadline=None)
@given(
    st.integers(1, 5000),
    st.floats(0.0, 1.0),
    st.builds(
        RetryPolicy,
        initial_backoff=st.floats(0.0, 1e6),
        factor=st.floats(1.0, 1e6),
        max_backoff=st.floats(0.0) | st.just(math.inf),
        jitter=st.booleans(),
    ),
)
def test_a_wait_is_a_number_between_zero_and_the_longest(attempt, draw, policy):
    wait = policy.wait(attempt, draw)
    assert 0.0 <= wait <= policy.max_backoff
    assert not policy.jitter or wait <= policy.wait(attempt, 1.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("enabled", 1),
        ("initial_backoff", -0.1),
        ("initial_backoff", math.inf),
        ("initial_backoff", "1"),
        ("factor", 0.5),
        ("factor", math.nan),
        ("max_backoff", -1),
        ("max_backoff", math.nan),
        ("min_budget", -1),
        ("min_budget", True),
        ("jitter", None),
        ("retry_unavailable", "no"),
        ("budget_ratio", -0.2),
        ("budget_per_second", math.inf),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_by_field_and_value(field, value):
    with pytest.raises(UsageError) as caught:
        RetryPolicy(**{field: value})
    assert f"{field}={value!r}" in caught.value.message


# --- the loop ------------------------------------------------------------------------------------------------------


def test_a_success_after_failures_is_returned():
    tries = script([errors.QueueFull("full"), errors.ServerUnreachable("gone"), "answer"])
    assert play(RetryPolicy(), tries) == ([1.0, 2.0], "answer")
    assert len(tries.left) == 3


def test_each_attempt_gets_what_is_left_of_the_one_budget():
    tries = script([errors.Shed("shed")], times=[0.5])
    waits, error = play(RetryPolicy(initial_backoff=0.5), tries)
    assert waits == [0.5, 1.0, 2.0, 4.0]
    assert tries.left == pytest.approx([10.0, 9.0, 7.5, 5.0, 0.5])
    assert isinstance(error, errors.Shed)
    assert error.__notes__ == [
        "5 attempts were made: 0 s of the 10 s deadline were left, too little to wait 8 s; "
        "the one before ended with shed"
    ]


@pytest.mark.parametrize(("deadline", "policy"), [(None, RetryPolicy()), (0, RetryPolicy()), (9, RetryPolicy(False))])
def test_without_a_deadline_or_when_switched_off_there_is_one_attempt(deadline, policy):
    tries = script([errors.QueueFull("full")], deadline=deadline)
    waits, error = play(policy, tries)
    assert waits == []
    assert tries.left == [deadline or None]
    (note,) = error.__notes__
    assert note.startswith("1 attempt was made: ")
    assert ("retries are off" if deadline else "without a deadline") in note


def test_a_deadline_shorter_than_the_first_wait_leaves_one_attempt():
    tries = script([errors.QueueFull("full")], deadline=0.5)
    waits, error = play(RetryPolicy(jitter=False), tries)
    assert waits == []
    assert error.__notes__ == ["1 attempt was made: 0.49 s of the 0.5 s deadline were left, too little to wait 1 s"]


def test_the_smallest_budget_must_remain_after_the_wait():
    policy = RetryPolicy(initial_backoff=1.0, min_budget=0.25, jitter=False)
    assert play(policy, script([errors.Shed("shed"), "answer"], deadline=1.25, times=[0.0]))[0] == []
    assert play(policy, script([errors.Shed("shed"), "answer"], deadline=1.26, times=[0.0])) == ([1.0], "answer")


def test_a_final_error_is_raised_as_it_is_and_after_others_with_a_note_about_them():
    first = errors.InvalidRequest("wrong")
    assert play(RetryPolicy(), script([first])) == ([], first)
    assert not hasattr(first, "__notes__")
    late = errors.DeadlineExceeded("late")
    waits, error = play(RetryPolicy(), script([errors.QueueFull("full"), late]))
    assert (waits, error) == ([1.0], late)
    assert late.__notes__ == ["2 attempts were made: this error does not pass; the one before ended with queue_full"]


def test_an_error_that_was_tried_again_is_not_kept_in_a_cycle():
    class Buffer:
        pass

    gone = []

    def attempt():
        buffer = Buffer()
        gone.append(weakref.ref(buffer))
        yield Pause(0.0)
        raise errors.QueueFull("full")

    clock = Clock()
    policy = RetryPolicy()
    gc.disable()
    try:
        steps = with_retries(policy, RetryBudget(policy, clock), Budget(9.0, clock=clock), attempt)
        assert next(steps).seconds == 0.0
        assert steps.send(None).seconds > 0
        assert gone[0]() is None
    finally:
        gc.enable()


def test_what_is_no_error_of_ours_passes_at_once():
    bug = ZeroDivisionError("in encode")
    assert play(RetryPolicy(), script([bug])) == ([], bug)


@settings(deadline=None)
@given(
    policy=st.builds(
        RetryPolicy,
        initial_backoff=st.floats(0.01, 3.0),
        factor=st.floats(1.0, 4.0),
        max_backoff=st.floats(0.01, 5.0) | st.just(math.inf),
        min_budget=st.floats(0.0, 1.0),
        jitter=st.booleans(),
        budget_per_second=st.floats(0.0, 3.0),
    ),
    deadline=st.floats(0.01, 60.0),
    times=st.lists(st.floats(0.001, 5.0), min_size=1, max_size=10),
    draws=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=10),
    succeeds_after=st.none() | st.integers(0, 6),
)
def test_whatever_happens_the_deadline_holds_and_budgets_shrink(policy, deadline, times, draws, succeeds_after):
    failures = [errors.QueueFull(f"full {i}") for i in range(300 if succeeds_after is None else succeeds_after)]
    tries = script([*failures, "answer"], deadline=deadline, times=times)
    start, drawn = tries.clock.now, itertools.cycle(draws)
    waits, end = play(policy, tries, draw=lambda: next(drawn))
    attempts = len(tries.left)
    assert attempts == len(waits) + 1
    assert tries.left[0] == pytest.approx(deadline)
    assert all(later < earlier for earlier, later in zip(tries.left, tries.left[1:], strict=False))
    assert all(left > policy.min_budget - 1e-9 for left in tries.left[1:])
    assert tries.clock.now - start <= deadline + 1e-9
    for number, wait in enumerate(waits):
        longest = min(policy.max_backoff, policy.initial_backoff * policy.factor**number)
        assert wait == pytest.approx(longest * (draws[number % len(draws)] if policy.jitter else 1.0))
    assert len(waits) <= policy.budget_per_second * 10 * (1 + deadline / 9) + 0.2
    if end == "answer":
        assert attempts == succeeds_after + 1
    else:
        assert end is failures[attempts - 1]
        assert len(end.__notes__) == 1


# --- the budget of all requests ------------------------------------------------------------------------------------


NONE = RetryPolicy(budget_ratio=0.0, budget_per_second=0)


def test_many_requests_to_a_server_in_trouble_are_not_sent_many_times():
    clock = Clock()
    policy = RetryPolicy(initial_backoff=0.001, factor=1.0, budget_ratio=0.2, budget_per_second=1.0)
    tokens = RetryBudget(policy, clock)
    sent = 0
    for _ in range(1000):
        tries = Script(clock, Budget(10.0, clock=clock), [errors.Shed("shed")], times=[0.0])
        _, error = play(policy, tries, tokens)
        sent += len(tries.left)
    assert sent == 1000 + 10 + 200
    assert error.__notes__[0].startswith("2 attempts were made: the retry budget of this handle is used up")
    _, error = play(policy, Script(clock, Budget(10.0, clock=clock), [errors.Shed("shed")]), RetryBudget(NONE, clock))
    assert error.__notes__ == ["1 attempt was made: the retry budget of this handle is used up"]
    clock.now += 20.0
    assert sum(tokens.take() for _ in range(100)) == 10


def test_a_handle_with_little_to_do_always_has_some_retries():
    tokens = RetryBudget(RetryPolicy(), Clock())
    assert sum(tokens.take() for _ in range(1000)) == 100


# --- real calls ----------------------------------------------------------------------------------------------------


def live(connection, budget):
    def attempt():
        answer = yield Call(connection, "ServerLive", b"", budget.remaining())
        return inference.ServerLiveResponse.FromString(answer).live

    return attempt


QUICK = RetryPolicy(initial_backoff=0.01, factor=1.0, budget_per_second=2.0)


def test_a_server_that_sheds_for_ever_is_asked_as_often_as_the_budget_allows(server, connection):
    server.refuse["ServerLive"] = (grpc.StatusCode.RESOURCE_EXHAUSTED, "try later", "shed")
    budget = Budget(60.0)
    with pytest.raises(errors.Shed) as caught:
        run(with_retries(QUICK, RetryBudget(QUICK), budget, live(connection, budget)))
    assert server.calls == ["ServerLive"] * 21
    (note,) = caught.value.__notes__
    assert note.startswith("21 attempts were made: the retry budget")


def test_a_server_that_says_unavailable_without_a_reason_is_asked_again_until_it_answers(server, connection):
    server.refuse["ServerLive"] = (grpc.StatusCode.UNAVAILABLE, "not yet", "")
    budget = Budget(60.0)

    def draw():
        if len(server.calls) == 3:
            server.refuse.clear()
        return 0.0

    assert run(with_retries(QUICK, RetryBudget(QUICK), budget, live(connection, budget), draw=draw))
    assert server.calls == ["ServerLive"] * 4


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "device_lost", errors.DeviceLost),
        (grpc.StatusCode.UNAVAILABLE, "a_reason_of_later", RsrvError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "device_oom", errors.DeviceOutOfMemory),
        (grpc.StatusCode.FAILED_PRECONDITION, "shm_register", errors.RegistrationFailed),
        (grpc.StatusCode.INTERNAL, "", RsrvError),
    ],
)
def test_a_final_answer_keeps_its_reason_and_is_not_asked_for_again(server, connection, code, reason, kind):
    server.refuse["ServerLive"] = (code, "no", reason)
    budget = Budget(60.0)
    with pytest.raises(RsrvError) as caught:
        run(with_retries(QUICK, RetryBudget(QUICK), budget, live(connection, budget)))
    assert (type(caught.value), caught.value.code.name, caught.value.reason) == (kind, code.name, reason)
    assert answered_by_server(caught.value) is (reason != "")  # else these may be the transport's own words
    assert server.calls == ["ServerLive"]


def test_an_event_loop_waits_without_a_thread_and_can_be_cancelled_in_a_wait(server, connection):
    server.refuse["ServerLive"] = (grpc.StatusCode.UNAVAILABLE, "soon", "preparing")
    policy = RetryPolicy(initial_backoff=50.0, jitter=False)
    ended = []

    async def ask():
        budget = Budget(60.0)
        try:
            await arun(with_retries(policy, RetryBudget(policy), budget, live(connection, budget)))
        finally:
            ended.append(threading.current_thread())

    async def main():
        task = asyncio.create_task(ask())
        async with asyncio.timeout(30):
            while not server.calls:
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ended == [threading.main_thread()]
    assert server.calls == ["ServerLive"]


class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(lambda body, context: body * 10)


@pytest.fixture
def narrow():
    """A server that takes messages of up to 1000 bytes and answers with ten times as many."""
    pool = ThreadPoolExecutor(2)
    server = grpc.server(pool, options=[("grpc.max_receive_message_length", 1000), ("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()
    pool.shutdown()


@pytest.mark.parametrize(
    ("size", "limits"),
    [
        (2000, {}),
        (900, {"max_send_message_length": 800}),
        (900, {"max_receive_message_length": 8000}),
    ],
)
def test_a_message_over_a_limit_of_either_side_fails_once_and_says_what_to_do(narrow, size, limits):
    connection = Connection(ChannelOptions.build(narrow, **limits))
    budget = Budget(60.0)
    attempts = []

    def attempt():
        attempts.append(size)
        return (yield Call(connection, "Echo", b"x" * size, budget.remaining()))

    with pytest.raises(RsrvError, match="larger than max") as caught:
        run(with_retries(QUICK, RetryBudget(QUICK), budget, attempt))
    connection.close()
    assert caught.value.code is Code.RESOURCE_EXHAUSTED
    assert "fewer rows" in caught.value.hint
    assert attempts == [size]


def test_messages_within_raised_limits_pass(narrow):
    connection = Connection(ChannelOptions.build(narrow, max_send_message_length=900, max_receive_message_length=9000))
    assert connection.call("Echo", b"x" * 900, 10.0) == b"x" * 9000
    connection.close()


def test_a_server_that_comes_back_is_found_again(tmp_path):
    address = f"unix:{tmp_path}/socket"  # not a port, which somebody else may take meanwhile
    StubServer(address).__enter__().stop()
    connection = Connection(ChannelOptions.build(address))
    again = []
    budget = Budget(60.0)

    def draw():
        if not again:
            again.append(StubServer(address).__enter__())
        return 0.0

    policy = RetryPolicy(initial_backoff=0.2, factor=1.0, jitter=False)
    try:
        assert run(with_retries(policy, RetryBudget(policy), budget, live(connection, budget), draw=draw))
    finally:
        connection.close()
        for running in again:
            running.stop()
    assert set(again[0].calls) == {"ServerLive"}
