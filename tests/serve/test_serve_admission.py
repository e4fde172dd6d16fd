"""Places: of requests that are handled, of those that wait for a model, and of admin calls that wait."""

import threading
import time
from types import SimpleNamespace

import pytest

from rsrv.core.errors import HeldFull, ServerStopping, Shed
from rsrv.serve.admission import Admission
from rsrv.serve.gate import Accepted


class Request:
    def __init__(self, target="m"):
        self.target = target
        self.expired = threading.Event()

    def expire(self):
        self.expired.set()


def test_a_request_that_waits_takes_no_place_of_those_that_are_handled():
    admission = Admission(1, held_limit=2)
    first, second = Request(), Request()
    admission.enter(first)
    with pytest.raises(Shed, match="1 requests are being handled already"):
        admission.enter(second)
    assert admission.hold(first, 0)
    assert (admission.in_flight, admission.held, admission.shed) == (0, 1, 1)
    admission.enter(second)
    assert admission.in_flight == 1


def test_those_that_wait_go_on_in_the_order_of_their_arrival_beyond_the_cap():
    admission = Admission(2, held_limit=8)
    requests = [Request("a"), Request("b"), Request("a"), Request("a")]
    for request in requests:
        admission.enter(request)
        assert admission.hold(request, 0)
    admission.enter(Request())
    admission.enter(Request())
    assert admission.release("a") == [requests[0], requests[2], requests[3]]
    assert (admission.in_flight, admission.held) == (5, 1)
    assert admission.waits_for("b")
    assert not admission.waits_for("a")


def test_admin_calls_that_wait_share_the_places_and_give_them_back():
    admission = Admission(4, held_limit=2)
    request, other = Request(), Request()
    admission.enter(request)
    admission.enter(other)
    admission.hold(request, 0)
    with admission.place("a call"), pytest.raises(HeldFull, match=r"cannot wait: 2 .* at most 2 may"):
        admission.hold(other, 0)
    assert admission.in_flight == 1  # the refused one is still being handled
    assert admission.hold(other, 0)
    with pytest.raises(HeldFull), admission.place("an event stream"):
        pass


def test_a_request_leaves_once_wherever_it_is():
    admission = Admission(4, held_limit=2)
    request = Request()
    assert not admission.leave(request)
    admission.enter(request)
    admission.hold(request, 0)
    assert admission.leave(request)
    assert not admission.leave(request)
    assert not admission.hold(request, 0)
    assert admission.release("m") == []


def test_the_deadline_of_one_that_waits_is_looked_after_and_one_that_went_on_is_left_alone(monkeypatch):
    now = 10**9
    monkeypatch.setattr("rsrv.serve.admission.time", SimpleNamespace(monotonic_ns=lambda: now))
    admission = Admission(8, held_limit=8)
    late, gone, patient = Request(), Request("other"), Request("third")
    for request in (late, gone, patient):
        admission.enter(request)
    admission.hold(patient, now + 10**18)
    admission.hold(gone, now + 10**7)
    admission.release("other")
    admission.hold(late, now + 2 * 10**7)
    now += 2 * 10**7
    assert late.expired.wait(30)
    assert not gone.expired.is_set()
    assert not patient.expired.is_set()
    admission.close()


def test_many_waits_with_far_deadlines_do_not_keep_their_requests_alive():
    admission = Admission(8, held_limit=8)
    for _ in range(1000):
        request = Request()
        admission.enter(request)
        admission.hold(request, time.monotonic_ns() + 10**18)
        admission.leave(request)
    assert len(admission._due) < 50
    admission.close()


def test_nothing_enters_or_waits_once_it_is_closed():
    admission = Admission(8, held_limit=8)
    request = Request()
    admission.enter(request)
    admission.close()
    with pytest.raises(ServerStopping):
        admission.hold(request, 0)
    with pytest.raises(ServerStopping):
        admission.enter(Request())
    assert not admission.wait_idle(time.monotonic())
    admission.leave(request)
    assert admission.wait_idle(time.monotonic() + 30)


def test_those_that_wait_follow_a_model_that_is_renamed():
    admission = Admission(8, held_limit=8)
    request = Request("old")
    admission.enter(request)
    admission.hold(request, 0)
    admission.rename("old", "new")
    assert admission.release("old") == []
    assert admission.release("new") == [request]


def test_a_closed_incarnation_tells_once_that_the_last_request_left():
    accepted, idle = Accepted(), []
    accepted.on_idle = lambda: idle.append(len(accepted))
    assert accepted.enter("a")
    assert accepted.enter("b")
    accepted.leave("a")
    assert idle == []
    accepted.close()
    assert not accepted.enter("c")
    assert (idle, accepted.requests()) == ([], ["b"])
    accepted.leave("b")
    accepted.leave("b")
    assert idle == [0]
    accepted.open()
    assert accepted.enter("c")
    accepted.leave("c")
    assert idle == [0]
    accepted.close()
    assert idle == [0, 0]
