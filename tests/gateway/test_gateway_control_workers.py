"""The workers of a gateway over the control plane, in every mode."""

import threading
from types import SimpleNamespace

import pytest
from support.gateway_control import ControlledGateway

from rsrv.core.errors import InvalidRequest, NameTaken, UnknownWorker, WrongState
from rsrv.gateway.scheduling.simple import RoundRobin
from rsrv.protos import control as pb

PREFIX = "/reactant_control.GatewayControlService/"


@pytest.fixture
def gateway():
    with ControlledGateway(mode=RoundRobin()) as running:
        yield running


@pytest.fixture
def workers(gateway):
    return gateway.workers


def listed(workers):
    return list(workers.list_workers(pb.ListWorkersRequest()).workers)


def test_workers_are_listed_as_they_joined_with_what_they_do(gateway, workers):
    worker = gateway.fleet.get("w1:1")
    worker.inflight, worker.waiting, worker.incarnation, worker.discipline = 3, 2, "b7", "fifo"
    gateway.fleet.probed("w0:1", False)
    assert listed(workers) == [
        pb.FleetWorker(worker="w0:1", name="a0", metrics="h0:2", source="config", models=1),
        pb.FleetWorker(
            worker="w1:1",
            name="a1",
            metrics="h1:2",
            source="config",
            ready=True,
            inflight=3,
            waiting=2,
            incarnation="b7",
            discipline="fifo",
            models=1,
        ),
    ]


def test_a_worker_joins_and_leaves(gateway, workers):
    answer = workers.add(pb.AddWorkerRequest(worker="10.0.0.7:8001", metrics="10.0.0.7:8002", name="c0"))
    assert answer.worker == pb.FleetWorker(worker="10.0.0.7:8001", name="c0", metrics="10.0.0.7:8002", source="control")
    assert [row.name for row in listed(workers)] == ["a0", "a1", "c0"]
    joined = gateway.fleet.get("10.0.0.7:8001")
    assert workers.remove(pb.RemoveWorkerRequest(worker="c0")).worker.name == "c0"
    assert [row.name for row in listed(workers)] == ["a0", "a1"]
    assert joined.closed


def test_without_a_name_a_worker_is_called_by_its_address(workers):
    assert workers.add(pb.AddWorkerRequest(worker="h:1")).worker.name == "h:1"


@pytest.mark.parametrize(
    ("request_fields", "error", "named"),
    [
        ({"worker": "w0:1", "name": "other"}, NameTaken, "w0:1"),
        ({"worker": "w9:1", "name": "a0"}, NameTaken, "a0"),
        ({"worker": "nonsense"}, InvalidRequest, "worker: 'nonsense'"),
        ({"worker": ""}, InvalidRequest, "worker"),
        ({"worker": "w9:0"}, InvalidRequest, "port"),
        ({"worker": "w9:1", "metrics": "nonsense"}, InvalidRequest, "metrics: 'nonsense'"),
    ],
)
def test_what_cannot_join_is_refused_by_name(workers, request_fields, error, named):
    with pytest.raises(error, match=named):
        workers.add(pb.AddWorkerRequest(**request_fields))
    assert len(listed(workers)) == 2


def test_a_drained_worker_stays_and_comes_back(workers):
    answer = workers.drain(pb.DrainWorkerRequest(worker="a1"))
    assert (answer.worker.worker, answer.worker.draining) == ("w1:1", True)
    assert [row.draining for row in listed(workers)] == [False, True]
    assert not workers.undrain(pb.UndrainWorkerRequest(worker="w1:1")).worker.draining


def test_a_drain_with_a_deadline_ends_in_removal(gateway, workers):
    removed = threading.Event()
    gateway.fleet.on_change.append(lambda: len(gateway.fleet.workers) == 1 and removed.set())
    gateway.fleet.get("w1:1").inflight = 1
    workers.drain(pb.DrainWorkerRequest(worker="w1:1", deadline_seconds=0.01))
    assert removed.wait(30)
    assert [row.name for row in listed(workers)] == ["a0"]


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_deadline_that_is_none_is_refused(workers, seconds):
    with pytest.raises(InvalidRequest, match="deadline_seconds is"):
        workers.drain(pb.DrainWorkerRequest(worker="a0", deadline_seconds=seconds))
    assert not any(row.draining for row in listed(workers))


@pytest.mark.parametrize("method", ["remove", "drain", "undrain"])
def test_a_worker_that_is_not_there_is_named_with_those_that_are(workers, method):
    request = SimpleNamespace(worker="a9", deadline_seconds=0.0)
    with pytest.raises(UnknownWorker, match=r"no worker 'a9'; it has a0, a1"):
        getattr(workers, method)(request)


def test_a_closed_gate_refuses_changes_and_still_lists():
    with ControlledGateway(control=None, host="10.0.0.5") as gateway:
        routes = gateway.routes()
        for name in ("AddWorker", "RemoveWorker", "DrainWorker", "UndrainWorker"):
            with pytest.raises(WrongState, match="listens on more than a loopback address"):
                routes[PREFIX + name].handler(SimpleNamespace(path=PREFIX + name, body=b""))
        assert len(listed(gateway.workers)) == 2


def test_what_is_kept_over_a_restart_is_told(gateway, workers):
    assert not workers.drain(pb.DrainWorkerRequest(worker="a0")).persisted
    kept = []
    with ControlledGateway(
        keep_workers=lambda added, drained: kept.append((list(added), list(drained))) or True
    ) as one:
        assert one.workers.drain(pb.DrainWorkerRequest(worker="a0")).persisted
        assert kept == [([], ["w0:1"])]


def test_every_method_of_the_service_has_a_route(gateway):
    from rsrv import protos

    service = protos.services()["reactant_control.GatewayControlService"]
    assert set(gateway.routes()) == {PREFIX + method.name for method in service.methods}
