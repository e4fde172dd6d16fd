"""Who belongs to the fleet: sources, operators, drains."""

import threading

import pytest
from support.stub_worker import StubWorker

from rsrv.core.config.gateway import MAX_WORKERS, GatewayConfig
from rsrv.core.errors import ConfigError, InvalidRequest, NameTaken, UnknownWorker, WrongState
from rsrv.gateway.discovery.membership import Change, Configured, Membership, plan, sources_of, union
from rsrv.gateway.workers.fleet import Endpoint, Fleet


class ManualTimers:
    """Timers whose functions run when the test says so."""

    def __init__(self):
        self.due = []

    def after(self, seconds, fn):
        self.due.append(fn)

    def run(self):
        due, self.due = self.due, []
        for fn in due:
            fn()


def endpoint(url, name="", metrics=None, source="file"):
    return Endpoint(url, name or url, metrics, source)


class Scene:
    def __init__(self, *lists, **options):
        self.kept = []
        self.timers = ManualTimers()
        self.fleet = Fleet(StubWorker.connect)
        sources = [Configured(endpoints) for endpoints in lists]
        self.membership = Membership(self.fleet, self.timers, sources, keep=self._keep, **options)
        self.membership.start()

    def _keep(self, added, drained):
        self.kept.append(([one.url for one in added], list(drained)))
        return True

    @property
    def members(self):
        return [worker.url + ("*" if worker.draining else "") for worker in self.fleet.workers]


def test_of_a_worker_that_two_sources_list_the_first_entry_counts():
    first, second = endpoint("a:1", "one", "a:9"), endpoint("a:1", "other")
    assert union([(first,), (second, endpoint("b:1"))]) == {"a:1": first, "b:1": endpoint("b:1")}


def test_a_plan_has_who_joins_who_leaves_and_who_stays():
    listed = {"a:1": endpoint("a:1"), "b:1": endpoint("b:1")}
    assert plan(listed, ["b:1", "c:1"]) == ((endpoint("a:1"),), ("c:1",), (endpoint("b:1"),))


def test_the_fleet_starts_with_what_all_sources_list_in_their_order():
    scene = Scene([endpoint("b:1")], [endpoint("a:1"), endpoint("b:1")])
    assert scene.members == ["b:1", "a:1"]


def test_the_sources_of_a_configuration(tmp_path):
    path = tmp_path / "more.yaml"
    path.write_text("[c:3]")
    config = GatewayConfig.model_validate(
        {
            "endpoints": ["a:1", "b:1"],
            "metrics_endpoints": ["a:9"],
            "worker_names": ["one"],
            "membership": {"file": str(path), "dns": "workers.example:1", "dns_seconds": 3},
        }
    )
    config_source, file_source, dns_source = sources_of(config)
    assert config_source.look() == (Endpoint("a:1", "one", "a:9", "config"), Endpoint("b:1", "b:1", None, "config"))
    assert file_source.look() == (Endpoint("c:3", "c:3", None, "file"),)
    assert (config_source.seconds, file_source.seconds, dns_source.seconds) == (0.0, 1.0, 3.0)
    path.unlink()
    with pytest.raises(ConfigError):
        sources_of(config)


def test_a_worker_that_is_newly_listed_joins_and_one_that_is_not_any_more_is_drained_then_removed():
    scene = Scene([endpoint("a:1"), endpoint("b:1")])
    leaving = scene.fleet.get("a:1")
    leaving.inflight = 1
    scene.membership.listed(0, (endpoint("b:1"), endpoint("c:1")))
    assert scene.members == ["a:1*", "b:1", "c:1"]
    for _ in range(3):
        scene.timers.run()
    assert scene.members == ["a:1*", "b:1", "c:1"]
    leaving.inflight = 0
    scene.timers.run()
    assert scene.members == ["a:1*", "b:1", "c:1"]
    scene.timers.run()
    assert scene.members == ["b:1", "c:1"]
    assert leaving.closed
    assert scene.timers.due == []


def test_the_drain_of_a_worker_that_left_has_an_end():
    scene = Scene([endpoint("a:1")], drain_seconds=0.0)
    scene.fleet.get("a:1").inflight = 7
    scene.membership.listed(0, ())
    scene.timers.run()
    assert scene.members == []


def test_a_worker_that_is_listed_again_while_it_leaves_stays():
    scene = Scene([endpoint("a:1")])
    scene.membership.listed(0, ())
    assert scene.members == ["a:1*"]
    scene.membership.listed(0, (endpoint("a:1", metrics="a:9"),))
    assert scene.members == ["a:1"]
    for _ in range(4):
        scene.timers.run()
    assert scene.members == ["a:1"]
    assert scene.fleet.get("a:1").metrics == "a:9"


def test_a_worker_that_still_has_a_source_stays_when_another_drops_it():
    scene = Scene([endpoint("a:1")], [endpoint("a:1")])
    scene.membership.listed(0, ())
    assert scene.members == ["a:1"]


def test_a_name_that_is_taken_does_not_keep_a_worker_out(caplog):
    scene = Scene([endpoint("a:1", "one")], [endpoint("b:1", "one")])
    assert [worker.name for worker in scene.fleet.workers] == ["one", "b:1"]
    assert "b:1 is called by its address" in caplog.text
    scene.membership.listed(1, ())
    assert not scene.membership._renamed


def test_workers_that_join_together_are_told_of_as_one_change():
    scene, changes = Scene([endpoint("a:1")]), []
    scene.fleet.on_change.append(lambda: changes.append(len(scene.fleet.workers)))
    scene.membership.listed(0, tuple(endpoint(f"a:{port}") for port in range(1, 101)))
    assert changes == [100]


def test_a_gateway_has_so_many_workers_and_no_more(caplog):
    full = [endpoint(f"a:{port}") for port in range(1, MAX_WORKERS + 1)]
    scene = Scene(full, [endpoint("b:1")])
    assert len(scene.members) == MAX_WORKERS
    assert "b:1 cannot join" in caplog.text
    with pytest.raises(WrongState, match=f"has {MAX_WORKERS} workers") as caught:
        scene.membership.add("c:1")
    assert caught.value.reason == "full"
    scene.membership.remove("a:1")
    assert scene.membership.add("c:1").worker.url == "c:1"


def test_an_error_names_some_of_many_workers():
    scene = Scene([endpoint(f"a:{port}") for port in range(1, 101)])
    with pytest.raises(UnknownWorker) as caught:
        scene.membership.drain("x" * 10_000)
    assert "a:10 and 90 more" in caught.value.message
    assert len(caught.value.message) < 300


# --- operators ------------------------------------------------------------------------------------------------------


def test_an_added_worker_joins_and_is_kept():
    scene = Scene([endpoint("a:1")])
    change = scene.membership.add(" b:1 ", "b:9", "two")
    worker = scene.fleet.get("b:1")
    assert change == Change(worker, True)
    assert (worker.name, worker.metrics, worker.source) == ("two", "b:9", "control")
    assert scene.kept == [(["b:1"], [])]
    scene.membership.listed(0, (endpoint("c:1"),))
    assert scene.members == ["a:1*", "b:1", "c:1"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("b",), InvalidRequest),
        (("b:1", "nowhere"), InvalidRequest),
        (("a:1",), NameTaken),
        (("b:1", "", "a:1"), NameTaken),
        (("b\0:1",), InvalidRequest),
        (("b:1", "", "a\nb"), InvalidRequest),
        (("b:1", "", "n" * 129), InvalidRequest),
    ],
)
def test_what_cannot_be_added_changes_nothing(arguments, error):
    scene = Scene([endpoint("a:1")])
    with pytest.raises(error):
        scene.membership.add(*arguments)
    assert (scene.members, scene.kept) == (["a:1"], [])


def test_a_removed_worker_stays_out_although_a_source_lists_it():
    scene = Scene([endpoint("a:1", "one"), endpoint("b:1")])
    removed = scene.membership.remove("one").worker
    assert (scene.members, removed.closed) == (["b:1"], True)
    scene.membership.listed(0, (endpoint("a:1"), endpoint("b:1"), endpoint("c:1")))
    assert scene.members == ["b:1", "c:1"]


def test_a_removed_worker_comes_back_when_it_is_added_or_listed_anew():
    scene = Scene([endpoint("a:1"), endpoint("b:1")])
    scene.membership.remove("a:1")
    scene.membership.add("a:1")
    assert scene.members == ["b:1", "a:1"]
    scene.membership.remove("b:1")
    scene.membership.listed(0, (endpoint("a:1"),))
    scene.membership.listed(0, (endpoint("a:1"), endpoint("b:1")))
    assert scene.members == ["a:1", "b:1"]


def test_a_drained_worker_stays_drained_and_is_kept_so():
    scene = Scene([endpoint("a:1", "one"), endpoint("b:1")])
    scene.membership.drain("one")
    for _ in range(4):
        scene.timers.run()
    assert scene.members == ["a:1*", "b:1"]
    scene.membership.listed(0, (endpoint("a:1", "one"), endpoint("b:1"), endpoint("c:1")))
    assert scene.members == ["a:1*", "b:1", "c:1"]
    scene.membership.undrain("one")
    assert scene.members == ["a:1", "b:1", "c:1"]
    assert scene.kept == [([], ["a:1"]), ([], [])]


def test_a_drain_with_a_deadline_ends_in_removal():
    scene = Scene([endpoint("a:1"), endpoint("b:1")])
    scene.membership.add("c:1")
    scene.membership.drain("c:1", 60)
    assert scene.members == ["a:1", "b:1", "c:1*"]
    for _ in range(2):
        scene.timers.run()
    assert scene.members == ["a:1", "b:1"]
    assert scene.kept == [(["c:1"], []), ([], [])]
    scene.membership.listed(0, (endpoint("a:1"),))
    assert scene.members == ["a:1", "b:1*"]


def test_the_deadline_of_a_drain_holds_for_a_worker_that_is_never_idle():
    scene = Scene([endpoint("a:1")])
    scene.fleet.get("a:1").inflight = 1
    scene.membership.drain("a:1", 1e-9)
    scene.timers.run()
    assert scene.members == []


def test_undrain_takes_a_removal_back():
    scene = Scene([endpoint("a:1")])
    scene.membership.drain("a:1", 60)
    scene.membership.undrain("a:1")
    for _ in range(4):
        scene.timers.run()
    assert scene.members == ["a:1"]


def test_a_worker_that_no_source_lists_cannot_be_kept_by_undrain():
    scene = Scene([endpoint("a:1")])
    scene.membership.listed(0, ())
    with pytest.raises(WrongState, match="no source lists it any more"):
        scene.membership.undrain("a:1")
    scene.membership.add("a:1")
    assert scene.members == ["a:1"]
    for _ in range(4):
        scene.timers.run()
    assert scene.members == ["a:1"]


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), 1e9])
def test_a_deadline_must_be_a_time_that_comes(seconds):
    scene = Scene([endpoint("a:1")])
    with pytest.raises(InvalidRequest, match="deadline_seconds"):
        scene.membership.drain("a:1", seconds)
    assert scene.members == ["a:1"]


@pytest.mark.parametrize("method", ["remove", "drain", "undrain"])
def test_a_worker_that_nobody_knows_is_an_error(method):
    scene = Scene([endpoint("a:1")])
    with pytest.raises(UnknownWorker, match="it has a:1"):
        getattr(scene.membership, method)("x:1")


def test_what_operators_did_outlives_a_restart():
    scene = Scene([endpoint("a:1")], added=[endpoint("b:1", source="control")], drained=["a:1", "gone:1"])
    assert scene.members == ["a:1*", "b:1"]
    assert scene.fleet.get("b:1").source == "control"


def test_nothing_is_said_to_be_kept_where_nothing_is():
    fleet = Fleet(StubWorker.connect)
    membership = Membership(fleet, ManualTimers(), [])
    assert membership.add("a:1").persisted is False


# --- sources that change --------------------------------------------------------------------------------------------


class Changing:
    name, seconds = "file", 0.01

    def __init__(self, *lists):
        self._lists = list(lists)
        self.looks = threading.Semaphore(0)

    def look(self):
        found = self._lists.pop(0) if len(self._lists) > 1 else self._lists[0]
        self.looks.release()
        if isinstance(found, Exception):
            raise found
        return found


def test_a_source_is_asked_again_and_again_and_its_failure_ends_nothing(caplog):
    source = Changing((endpoint("a:1"),), RuntimeError("boom"), (endpoint("a:1"), endpoint("b:1")))
    fleet, joined = Fleet(StubWorker.connect), threading.Event()
    fleet.on_change.append(lambda: joined.set() if fleet.get("b:1") else None)
    membership = Membership(fleet, ManualTimers(), [source])
    membership.start()
    try:
        assert fleet.get("a:1") is not None
        assert joined.wait(10)
    finally:
        membership.stop()
    assert "boom" in caplog.text
    assert not [thread for thread in threading.enumerate() if "members" in thread.name]


def test_a_slow_disk_holds_up_no_timer():
    writing, written = threading.Event(), threading.Event()

    def keep(added, drained):
        writing.set()
        return written.wait(10)

    membership = Membership(Fleet(StubWorker.connect), ManualTimers(), [], keep=keep)
    membership.start()
    adding = threading.Thread(target=membership.add, args=("127.0.0.1:9",))
    adding.start()
    assert writing.wait(10)
    assert membership._lock.acquire(timeout=10)  # what the timers' thread takes
    membership._lock.release()
    written.set()
    adding.join()
    membership.stop()
