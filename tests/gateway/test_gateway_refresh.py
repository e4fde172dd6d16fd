"""The routing table between the rounds: single flight, freshness, deadlines."""

import threading
import time

import pytest
from support.stub_worker import StubWorker, index_of

from rsrv.core.errors import Code
from rsrv.gateway.discovery.refresh import Refresher
from rsrv.gateway.routing.table import RoutingTable
from rsrv.gateway.timers import Timers
from rsrv.gateway.workers.fleet import Endpoint, Fleet

FAR = 1 << 62


class TableHolder:
    """What of a router is needed here."""

    def __init__(self):
        self.table = RoutingTable()
        self.installed = 0

    def install(self, table):
        self.table = table
        self.installed += 1


class Scene:
    def __init__(self, timers, urls=("w:1", "w:2")):
        self.now = 100.0
        self.router = TableHolder()
        self.fleet = Fleet(StubWorker.connect)
        self.workers = [self.fleet.add(Endpoint(url)) for url in urls]
        self.refresher = Refresher(self.fleet, self.router, timers, clock=lambda: self.now)
        for worker in self.workers:
            self.refresher.admit(worker)

    def asked(self):
        return [len(worker.probes) for worker in self.workers]

    def answer(self, *bodies):
        for worker, body in zip(self.workers, bodies, strict=True):
            worker.probes[-1].answer(body)


@pytest.fixture
def timers():
    timers = Timers()
    yield timers
    timers.close()


def test_a_refresh_installs_what_all_workers_list(timers):
    scene, done = Scene(timers), []
    scene.refresher.refresh(FAR, lambda: done.append(1))
    assert scene.asked() == [1, 1]
    scene.workers[0].probes[0].answer(index_of("a"))
    assert done == []
    scene.workers[1].probes[0].answer(index_of("a", b="preparing"))
    assert done == [1]
    assert scene.router.table.urls("a") == ("w:1", "w:2")
    assert scene.router.table.not_ready("b").reason == "preparing"


def test_requests_that_come_during_a_scan_share_it(timers):
    scene, done = Scene(timers), []
    for number in range(20):
        scene.refresher.refresh(FAR, lambda number=number: done.append(number))
    scene.refresher.request()
    assert scene.asked() == [1, 1]
    scene.answer(index_of("a"), index_of("a"))
    assert sorted(done) == list(range(20))


def test_a_table_younger_than_a_second_is_good_enough(timers):
    scene, done = Scene(timers), []
    scene.refresher.refresh(FAR, lambda: done.append(1))
    scene.answer(index_of("a"), index_of("a"))
    scene.now += 0.99
    scene.refresher.refresh(FAR, lambda: done.append(2))
    scene.refresher.request()
    assert (done, scene.asked()) == ([1, 2], [1, 1])
    scene.now += 0.02
    scene.refresher.refresh(FAR, lambda: done.append(3))
    assert (done, scene.asked()) == ([1, 2], [2, 2])
    scene.answer(index_of("a", "new"), index_of("a"))
    assert done == [1, 2, 3]
    assert scene.router.table.urls("new") == ("w:1",)


def test_a_scan_that_failed_still_counts_as_one(timers):
    scene, done = Scene(timers), []
    scene.refresher.refresh(FAR, lambda: done.append(1))
    for worker in scene.workers:
        worker.probes[0].fail(Code.UNAVAILABLE)
    scene.refresher.refresh(FAR, lambda: done.append(2))
    assert (done, scene.asked()) == ([1, 2], [1, 1])


def test_a_scan_without_answers_keeps_the_routes(timers):
    scene = Scene(timers)
    scene.refresher.request()
    scene.answer(index_of("a"), index_of("a"))
    for _ in range(9):
        scene.now += 2
        scene.refresher.request()
        for worker in scene.workers:
            worker.probes[-1].fail(Code.UNAVAILABLE)
    assert scene.router.table.urls("a") == ("w:1", "w:2")


def test_a_model_that_its_only_worker_unloaded_leaves_the_table(timers):
    scene = Scene(timers)
    scene.refresher.request()
    scene.answer(index_of("a"), index_of("a", "b"))
    scene.now += 2
    scene.refresher.request()
    scene.answer(index_of("a"), index_of("a"))
    assert scene.router.table.models == ("a",)
    assert not scene.router.table.knows("b")


def test_nobody_waits_beyond_the_deadline_of_the_request(timers):
    scene, done = Scene(timers), threading.Event()
    scene.refresher.refresh(time.monotonic_ns() + 10_000_000, done.set)
    assert done.wait(10)
    count = []
    scene.refresher.refresh(time.monotonic_ns() - 1, lambda: count.append(1))
    scene.answer(index_of("a"), index_of("a"))
    assert scene.router.table.urls("a") == ("w:1", "w:2")
    timers_idle = threading.Event()
    timers.after(0, timers_idle.set)
    assert timers_idle.wait(10)
    assert count == [1]


def test_an_empty_fleet_is_scanned_at_once(timers):
    scene, done = Scene(timers, urls=()), []
    scene.refresher.refresh(FAR, lambda: done.append(1))
    assert done == [1]


def test_a_worker_that_hung_in_the_last_round_is_not_waited_for(timers):
    scene, done = Scene(timers), []
    scene.refresher.end_round({"w:1": "silent", "w:2": "ready"}, frozenset())
    scene.refresher.refresh(FAR, lambda: done.append(1))
    assert scene.asked() == [0, 1]
    scene.workers[1].probes[0].answer(index_of("a"))
    assert done == [1]


def test_garbage_from_one_worker_changes_nothing_of_the_others_and_warns_once(timers, caplog):
    scene = Scene(timers)
    scene.refresher.request()
    scene.answer(index_of("a"), index_of("b"))
    for _ in range(2):
        scene.now += 2
        scene.refresher.request()
        scene.answer(index_of("a", "c"), b"\xff\xff\xff")
    assert scene.router.table.models == ("a", "b", "c")
    assert sum("RepositoryIndex" in record.getMessage() for record in caplog.records) == 1


def test_what_follows_a_refresh_may_fail_without_harm_to_the_others(timers, caplog):
    scene, done = Scene(timers), []

    def bad():
        raise RuntimeError("boom")

    scene.refresher.refresh(FAR, bad)
    scene.refresher.refresh(FAR, lambda: done.append(1))
    scene.answer(index_of("a"), index_of("a"))
    assert done == [1]
    assert "boom" in caplog.text


def test_a_worker_is_routed_to_only_after_it_was_admitted(timers):
    scene = Scene(timers)
    joined = scene.fleet.add(Endpoint("w:3"))
    scene.refresher.heard({"w:3": _ok(index_of("new"))})
    assert scene.router.table.urls("new") == ()
    assert scene.router.table.not_ready("new").reason == "preparing"
    scene.refresher.admit(joined)
    assert scene.router.table.urls("new") == ("w:3",)
    scene.refresher.bar(joined)
    assert scene.router.table.urls("new") == ()


def test_a_drained_worker_and_one_that_left_are_out_of_the_table(timers):
    scene = Scene(timers)
    scene.refresher.heard({"w:1": _ok(index_of("a", "b")), "w:2": _ok(index_of("a", "c"))})
    scene.fleet.drain("w:1")
    scene.refresher.members_changed()
    assert scene.router.table.urls("a") == ("w:2",)
    assert scene.router.table.not_ready("b").text == "worker w:1 takes no requests now"
    scene.fleet.remove("w:2")
    scene.refresher.members_changed()
    assert not scene.router.table.knows("c")
    scene.fleet.undrain("w:1")
    scene.refresher.members_changed()
    assert scene.router.table.urls("a") == ("w:1",)


def test_another_worker_at_the_address_of_one_that_left_is_not_admitted_by_that(timers):
    scene = Scene(timers)
    scene.refresher.heard({"w:1": _ok(index_of("a"))})
    scene.fleet.remove("w:1")
    other = scene.fleet.add(Endpoint("w:1"))
    scene.refresher.members_changed()
    assert not scene.refresher.admits(other)
    assert scene.router.table.urls("a") == ()


def test_a_worker_that_joined_during_a_round_is_not_forgotten_at_its_end(timers):
    scene = Scene(timers)
    scene.refresher.admit(scene.fleet.add(Endpoint("w:3")))
    scene.refresher.heard({"w:3": _ok(index_of("new"))})
    scene.refresher.end_round({"w:1": "ready", "w:2": "ready"}, frozenset())
    assert scene.router.table.urls("new") == ("w:3",)


def test_pickers_never_see_a_table_in_between_while_tables_are_swapped(timers):
    scene = Scene(timers)
    scene.refresher.heard({"w:1": _ok(index_of("a")), "w:2": _ok(index_of("a"))})
    wrong, stop = [], threading.Event()

    def look():
        while not stop.is_set():
            urls = scene.router.table.pick("a")
            if sorted(urls) not in (["w:1"], ["w:1", "w:2"]):
                wrong.append(urls)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(200):
        scene.refresher.heard({"w:1": _ok(index_of("a")), "w:2": _ok(index_of("a") if number % 2 else b"")})
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


def _ok(body):
    from rsrv.gateway.workers.outcome import Outcome

    return Outcome(Code.OK, body)
