"""Rounds over workers that are servers of this process: ready, hung, gone, restarted, joined."""

import threading
from contextlib import ExitStack

import pytest
from support.gateway_discovery import Scene, answers_of, let_all_answer
from support.gateway_site import wait_until
from support.mock_worker import MockModel, MockWorker
from support.stub_worker import index_of

from rsrv.core.errors import Code
from rsrv.gateway.discovery.membership import Membership
from rsrv.gateway.methods import INDEX, STATUS
from rsrv.gateway.workers.outcome import Outcome

HANGS = 0.3
"""Deadline of a question that a worker does not answer."""


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def test_a_round_finds_who_is_ready_what_is_served_and_what_it_cost(stack):
    first = stack.enter_context(
        MockWorker({"both": MockModel(compute=2.5, rows=7), "coming": MockModel("UNAVAILABLE", "preparing")})
    )
    second = stack.enter_context(MockWorker(["both", "only1"], incarnation="other", discipline="fair"))
    scene = Scene(stack)
    workers = scene.join(first.url, second.url)
    assert scene.prober.round() is False
    assert [worker.ready for worker in workers] == [True, True]
    assert [(worker.incarnation, worker.discipline) for worker in workers] == [("first", "fifo"), ("other", "fair")]
    assert scene.router.table.urls("both") == tuple(sorted([first.url, second.url]))
    assert scene.router.table.urls("only1") == (second.url,)
    assert scene.router.table.not_ready("coming").reason == "preparing"
    [(ready, poll)] = scene.mode.ticks
    assert ready == sorted([first.url, second.url])
    assert poll.polled == tuple(ready)
    assert poll.workers[first.url].models["both"].compute == 2.5
    assert scene.prober.rounds == 1


def test_a_mode_without_need_gets_an_empty_poll_although_workers_are_polled(stack):
    mock = stack.enter_context(MockWorker())
    scene = Scene(stack)
    scene.mode.needs_poll = False
    scene.join(mock.url)
    scene.prober.round()
    assert [(ready, poll.polled) for ready, poll in scene.mode.ticks] == [([mock.url], ())]
    assert scene.prober.poll.polled == (mock.url,)
    assert scene.fleet.get(mock.url).incarnation == "first"


def test_a_server_that_has_no_control_service_is_routed_to(stack):
    mock = stack.enter_context(MockWorker())
    mock.fail("ModelControlStatus", Code.UNIMPLEMENTED)
    scene = Scene(stack)
    scene.join(mock.url)
    scene.prober.round()
    assert scene.router.table.urls("m") == (mock.url,)
    assert scene.ready() == [mock.url]
    assert scene.mode.ticks == []


def test_a_worker_that_is_not_ready_is_routed_to_for_what_it_serves(stack):
    mock = stack.enter_context(MockWorker({"up": MockModel(), "down": MockModel("UNAVAILABLE", "compile: no")}))
    mock.live_ready = False
    scene = Scene(stack)
    scene.join(mock.url)
    scene.prober.round()
    assert scene.router.table.urls("up") == (mock.url,)
    assert scene.router.table.not_ready("down").reason == "failed"
    assert (scene.ready(), mock.count("ModelControlStatus"), scene.mode.ticks) == ([], 0, [])
    mock.live_ready = True
    scene.prober.round()
    assert scene.ready() == [mock.url]
    assert scene.returned == [mock.url, mock.url]


def test_a_worker_that_is_gone_loses_its_routes_and_gets_them_back(stack):
    mock = stack.enter_context(MockWorker())
    scene = Scene(stack)
    [worker] = scene.join(mock.url)
    scene.prober.round()
    mock.close()
    _rounds(scene, lambda: not worker.ready)
    assert scene.router.table.urls("m") == ()
    assert scene.router.table.not_ready("m").text == f"worker {mock.url} does not answer"
    mock.restart()
    _rounds(scene, lambda: worker.ready)
    assert scene.router.table.urls("m") == (mock.url,)
    assert scene.returned == [mock.url, mock.url]
    assert worker.incarnation == "second"


def test_a_worker_that_started_anew_between_two_rounds_is_told_again(stack):
    mock = stack.enter_context(MockWorker())
    scene = Scene(stack)
    [worker] = scene.join(mock.url)
    scene.prober.round()
    mock.incarnation = "second"
    scene.held = []
    scene.prober.round()
    assert scene.returned == [mock.url, mock.url]
    assert not worker.ready
    assert scene.router.table.urls("m") == (mock.url,), "the last one to be asked is asked when there is nobody else"
    scene.held[0]()
    assert worker.ready
    scene.prober.round()
    assert len(scene.returned) == 2


def test_a_worker_that_joins_is_routed_to_when_it_may_proceed(stack):
    mock = stack.enter_context(MockWorker())
    scene = Scene(stack)
    scene.held = []
    [worker] = scene.join(mock.url)
    scene.prober.round()
    scene.prober.round()
    assert scene.returned == [mock.url], "nobody is told twice"
    assert (worker.ready, scene.router.table.urls("m")) == (False, ())
    scene.held[0]()
    assert (worker.ready, scene.router.table.urls("m")) == (True, (mock.url,))
    scene.held[0]()


def test_a_worker_that_is_gone_again_does_not_proceed(stack):
    mock = stack.enter_context(MockWorker())
    scene = Scene(stack)
    scene.held = []
    scene.join(mock.url)
    scene.prober.round()
    mock.close()
    scene.prober.round()
    scene.held[0]()
    assert (scene.ready(), scene.router.table.urls("m")) == ([], ())


def test_nobody_stays_out_because_nothing_was_said(stack):
    mock = stack.enter_context(MockWorker())
    scene = Scene(stack, return_seconds=0.05)
    scene.held = []
    scene.join(mock.url)
    admitted = threading.Event()
    scene.fleet.on_change.append(lambda: admitted.set() if scene.ready() else None)
    scene.prober.round()
    assert admitted.wait(10)
    assert scene.router.table.urls("m") == (mock.url,)


def test_a_failure_of_what_is_told_lets_the_worker_in(stack, caplog):
    mock = stack.enter_context(MockWorker())
    scene = Scene(stack)

    def fails(worker, proceed):
        raise RuntimeError("boom")

    scene.prober._on_returned = fails
    scene.join(mock.url)
    scene.prober.round()
    assert scene.ready() == [mock.url]
    assert "boom" in caplog.text


def given_up_soon(monkeypatch, worker, method):
    """This question to this worker has a short deadline; the others have time, on a machine that is busy, too."""
    probe = worker.probe

    def soon(path, body, *, timeout, done):
        return probe(path, body, timeout=HANGS if path.endswith(method) else timeout, done=done)

    monkeypatch.setattr(worker, "probe", soon)


def test_a_worker_that_hangs_is_connected_anew_and_keeps_its_routes(stack, monkeypatch):
    hung, fine = stack.enter_context(MockWorker()), stack.enter_context(MockWorker())
    scene = Scene(stack)
    worker, _ = scene.join(hung.url, fine.url)
    scene.prober.round()
    hung.hang("ServerReady")
    given_up_soon(monkeypatch, worker, "ServerReady")
    rebuilt = []
    worker.rebuild = lambda: rebuilt.append(1)
    scene.prober.round()
    assert (rebuilt, worker.ready, scene.ready()) == ([1], False, [fine.url])
    assert scene.router.table.urls("m") == tuple(sorted([hung.url, fine.url]))
    assert scene.mode.ticks[-1][0] == [fine.url]
    hung.resume("ServerReady")
    monkeypatch.undo()
    scene.prober.round()
    assert worker.ready


@pytest.mark.parametrize("method", ["RepositoryIndex", "ModelControlStatus"])
def test_a_worker_that_hangs_in_a_later_question_is_connected_anew_too(stack, monkeypatch, method):
    mock = stack.enter_context(MockWorker())
    scene = Scene(stack)
    [worker] = scene.join(mock.url)
    scene.prober.round()
    mock.hang(method)
    given_up_soon(monkeypatch, worker, method)
    rebuilt = []
    worker.rebuild = lambda: rebuilt.append(1)
    scene.prober.round()
    assert (rebuilt, scene.ready(), scene.router.table.urls("m")) == ([1], [mock.url], (mock.url,))
    mock.resume(method)


def test_garbage_from_a_worker_ends_no_round(stack, caplog):
    mock, fine = stack.enter_context(MockWorker()), stack.enter_context(MockWorker())
    scene = Scene(stack)
    scene.join(mock.url, fine.url)
    for method in ("ServerReady", "RepositoryIndex", "ModelControlStatus"):
        mock.answer(method, b"\xff\xff\xff")
    scene.prober.round()
    assert scene.ready() == [fine.url]
    assert scene.router.table.urls("m") == (fine.url,)
    mock.succeed("ServerReady")
    scene.prober.round()
    scene.prober.round()
    assert scene.ready() == [mock.url, fine.url]
    assert scene.prober.poll.polled == (fine.url,)
    assert caplog.text.count("ModelControlStatus") == 1


def test_why_a_worker_gives_no_answer_is_said_once(stack, caplog):
    scene = Scene(stack, stubs=True)
    [worker] = scene.join("typo:1")
    refused = Outcome(Code.UNAVAILABLE, text="DNS resolution failed for typo:1")
    worker.on_probe = lambda probe: probe.done(refused)
    scene.prober.round()
    worker.on_probe = lambda probe: probe.fail(Code.DEADLINE_EXCEEDED)
    scene.prober.round()
    assert caplog.text.count("does not say that it is ready") == 1
    assert "worker=typo:1 does not say that it is ready: UNAVAILABLE DNS resolution failed" in caplog.text
    worker.on_probe = answers_of(index_of("m"))
    scene.prober.round()
    worker.on_probe = lambda probe: probe.fail(Code.UNAVAILABLE, "gateway_loop")
    scene.prober.round()
    assert caplog.text.count("does not say that it is ready: UNAVAILABLE gateway_loop") == 1
    assert scene.prober._told.keys() == {"typo:1"}
    scene.fleet.remove("typo:1")
    scene.prober.round()
    assert scene.prober._told == {}


def test_addresses_of_one_server_are_told_of_once(stack, caplog):
    mock = stack.enter_context(MockWorker())
    scene = Scene(stack)
    port = mock.url.rpartition(":")[2]
    scene.join(mock.url, f"localhost:{port}")
    wait_until(lambda: scene.prober.round() or len(scene.prober.poll.workers) == 2)
    scene.prober.round()
    assert caplog.text.count(f"listed under several addresses: {mock.url}, localhost:{port}") == 1


def test_what_was_said_about_workers_that_have_left_is_forgotten(stack):
    scene = Scene(stack, stubs=True)
    for number in range(3):
        [passing] = scene.join(f"passing-{number}:1")
        answer = answers_of(b"\xff\xff\xff")
        passing.on_probe = lambda probe, answer=answer: probe.answer(b"\xff") if probe.path == STATUS else answer(probe)
        scene.prober.round()
        assert scene.prober._garbled == scene.refresher._garbled == {passing.url}
        scene.fleet.remove(passing.url)
    scene.prober.round()
    assert scene.prober._garbled == scene.refresher._garbled == set()


def test_a_worker_that_leaves_during_a_round_is_not_told_to_the_mode(stack):
    scene = Scene(stack, stubs=True)
    let_all_answer(scene.fleet)
    scene.join("a:1", "b:1")
    lock, ready = scene.router.lock, []
    scene.mode.tick = lambda urls, poll, now: ready.append((list(urls), list(poll.workers)))

    class Late:
        """Between the round's last look and the mode's turn."""

        def __enter__(self):
            scene.fleet.remove("b:1")
            lock.acquire()

        def __exit__(self, *_):
            lock.release()

    scene.router.lock = Late()
    scene.prober.round()
    assert ready == [(["a:1"], ["a:1"])]


def test_a_hung_worker_does_not_keep_another_one_from_joining(stack, monkeypatch):
    monkeypatch.setattr("rsrv.gateway.discovery.prober.PATIENCE_SECONDS", 0.02)
    scene = Scene(stack, stubs=True)
    hung, fine = scene.join("hung:1", "fine:1")
    fine.on_probe = answers_of(index_of("m"))
    joined = threading.Event()
    scene.fleet.on_change.append(lambda: joined.set() if fine.ready else None)
    thread = threading.Thread(target=scene.prober.round)
    thread.start()
    try:
        assert joined.wait(10)
        assert thread.is_alive()
        hung.probes[0].fail(Code.DEADLINE_EXCEEDED)
    finally:
        scene.prober._stopping.set()
        thread.join(10)
    assert not thread.is_alive()


def test_the_watchdog_ends_a_question_that_keeps_no_deadline(stack):
    scene = Scene(stack, stubs=True, probe_seconds=0.05)
    [worker] = scene.join("stuck:1")
    scene.prober.round()
    assert worker.rebuilt == 1
    wait_until(lambda: worker.probes[0].cancelled)  # by the timers' thread, after the round went on


def test_a_round_in_which_every_worker_hung_long_enough_ends_the_prober(stack):
    ended = threading.Event()
    scene = Scene(stack, stubs=True, interval_seconds=0.01, wedge_exit_rounds=3, on_wedged=ended.set)
    [worker] = scene.join("w:1")
    worker.on_probe = answers_of(index_of("m"))
    scene.prober.round()
    worker.on_probe = lambda probe: probe.fail(Code.DEADLINE_EXCEEDED)
    worker.inflight = 1
    for _ in range(4):
        assert scene.prober.round() is False
    worker.inflight = 0
    scene.prober.start()
    assert ended.wait(10)
    assert worker.rebuilt == 5


def test_the_mode_s_failure_and_its_notes_are_logged(stack, caplog):
    scene = Scene(stack, stubs=True)
    [worker] = scene.join("w:1")
    worker.on_probe = answers_of(index_of("m"))
    scene.mode.notes = [(30, "worker w:1 is oversubscribed")]
    scene.mode.error = RuntimeError("boom")
    scene.prober.round()
    assert "the scheduling mode fake failed in its tick" in caplog.text
    scene.mode.error = None
    scene.prober.round()
    assert "worker w:1 is oversubscribed" in caplog.text
    assert scene.mode.notes == []


def test_a_draining_worker_is_probed_and_out_of_the_table_and_of_the_tick(stack):
    scene = Scene(stack, stubs=True)
    for worker in scene.join("w:1", "w:2"):
        worker.on_probe = answers_of(index_of("m"))
    scene.fleet.drain("w:1")
    scene.prober.round()
    assert scene.fleet.get("w:1").ready
    assert scene.router.table.urls("m") == ("w:2",)
    assert scene.mode.ticks[-1][0] == ["w:2"]
    assert scene.mode.ticks[-1][1].polled == ("w:2",)


def test_a_change_of_members_and_wake_start_a_round_but_a_change_of_readiness_does_not(stack):
    scene = Scene(stack, stubs=True, interval_seconds=3600)
    ticked = threading.Semaphore(0)
    scene.mode.tick = lambda ready, poll, now: ticked.release()
    let_all_answer(scene.fleet)
    scene.join("w:1")
    scene.prober.start()
    assert ticked.acquire(timeout=10)
    scene.join("w:2")
    assert ticked.acquire(timeout=10)
    wait_until(lambda: len(scene.fleet.ready) == 2)
    scene.prober.wake()
    assert ticked.acquire(timeout=10)
    rounds = scene.prober.rounds
    scene.fleet.probed("w:2", False)
    assert not ticked.acquire(timeout=0.1)
    assert scene.prober.rounds - rounds <= 1


def test_a_worker_that_an_operator_adds_gets_requests_within_a_round(stack):
    scene = Scene(stack, interval_seconds=3600)
    membership = Membership(scene.fleet, scene.timers, [])
    routed = threading.Event()
    install = scene.router.install

    def installed(table):
        install(table)
        if table.urls("m"):
            routed.set()

    scene.router.install = installed
    scene.prober.start()
    mock = stack.enter_context(MockWorker())
    wait_until(lambda: scene.prober.rounds == 1)
    membership.add(mock.url)
    assert routed.wait(10)
    assert scene.prober.rounds <= 2
    membership.remove(mock.url)
    assert scene.router.table.urls("m") == ()


def test_another_worker_at_the_same_address_is_not_taken_for_the_one_that_was_asked(stack):
    scene = Scene(stack, stubs=True)
    [old] = scene.join("w:1")
    answers = answers_of(index_of("m"))

    def swapped(probe):
        if probe.path == INDEX:
            scene.fleet.remove("w:1")
            scene.join("w:1")
        answers(probe)

    old.on_probe = swapped
    scene.prober.round()
    assert scene.fleet.get("w:1") is not old
    assert (scene.ready(), scene.router.table.urls("m")) == ([], ())


def test_a_lost_call_starts_a_round_unless_one_has_just_ended(stack):
    scene = Scene(stack, stubs=True)
    now = [100.0]
    scene.prober._clock = lambda: now[0]
    [worker] = scene.join("w:1")
    scene.prober._woken.clear()
    scene.prober._ended = 99.5
    worker.ready = True
    scene.prober.suspect("w:1")
    assert not scene.prober._woken.is_set()
    now[0] = 100.5
    scene.prober.suspect("gone:1")
    worker.ready = False
    scene.prober.suspect("w:1")
    assert not scene.prober._woken.is_set()
    worker.ready = True
    scene.prober.suspect("w:1")
    assert scene.prober._woken.is_set()


def test_stop_ends_a_round_that_waits_for_a_hung_worker(stack):
    scene = Scene(stack, stubs=True)
    [worker] = scene.join("w:1")
    asked = threading.Event()
    worker.on_probe = lambda probe: asked.set()
    scene.prober.start()
    assert asked.wait(10)
    scene.prober.stop()
    assert not scene.prober._thread.is_alive()
    assert (worker.rebuilt, scene.prober.rounds) == (0, 0)


def test_a_round_that_fails_is_logged_and_the_next_one_comes(stack, caplog):
    scene = Scene(stack, stubs=True, interval_seconds=0.01)
    again = threading.Event()
    calls = []

    def bad_round():
        calls.append(1)
        if len(calls) == 2:
            again.set()
        raise RuntimeError("boom")

    scene.prober.round = bad_round
    scene.prober.start()
    assert again.wait(10)
    scene.prober.stop()
    assert "a round of the prober failed" in caplog.text


def _rounds(scene, condition):
    """Rounds until something is seen: a connection that broke, or is there again, takes a moment to be noticed."""
    wait_until(lambda: (scene.prober.round(), condition())[1])
