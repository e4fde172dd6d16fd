"""Explicit mode of a whole server: an operator moves weights over the control service, and requests follow."""

import numpy as np
import pytest
from support.bundles import N, write_affine, write_model

from rsrv.client import Control, KServeModel, Server
from rsrv.client.status import fetch_status
from rsrv.core.config import EndpointsConfig, RuntimeConfig, ServerConfig
from rsrv.core.errors import DeviceOutOfMemory, NotResident, UnknownModel
from rsrv.core.status import WorkerStatus
from rsrv.serve import serve

X = {"x": np.ones((2, 3), np.float32)}
ARENA = 1 << 20


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("RSRV_ALLOW_FAKE", "1")
    for name in ("a", "b"):
        write_affine(tmp_path / name)
    tensor = ((N, 3), np.float32)
    weights = {"w": np.ones(ARENA // 2, np.float32)}
    write_model(tmp_path / "huge", lambda x, w: (x * w[:3],), {"x": tensor}, {"y": tensor}, weights=weights)
    server = serve(
        ServerConfig(
            model_dirs=[str(tmp_path)],
            model_control_mode="explicit",
            runtime=RuntimeConfig(backend="fake", device_memory_bytes=ARENA),
            endpoints=EndpointsConfig(grpc_port=0, http_port=0),
        ),
        blocking=False,
    )
    yield server
    server.stop()


@pytest.fixture
def control(server):
    with Control(f"127.0.0.1:{server.grpc_port}") as control:
        yield control


@pytest.fixture
def model(server):
    with KServeModel(f"127.0.0.1:{server.grpc_port}", "a", shared_memory="off") as model:
        yield model


def states(server):
    with Server(f"127.0.0.1:{server.grpc_port}") as asked:
        return {entry.name: (entry.state, entry.reason) for entry in asked.models()}


def status(server):
    found = WorkerStatus.model_validate(fetch_status(f"127.0.0.1:{server.http_port}"))
    return found, {model.name: model.residency for model in found.models}


def test_requests_are_refused_until_an_operator_brings_the_weights(server, control, model):
    assert states(server) == dict.fromkeys(("a", "b", "huge"), ("UNAVAILABLE", "not resident"))
    with pytest.raises(NotResident, match="model 'a' are not on the device"):
        model.infer(X)
    assert control.set_residency("a", "device") == "device"
    assert states(server)["a"] == ("READY", "")
    assert model.infer(X)["y"].shape == (2, 3)
    assert control.set_residency("a", "unpinned") == "unpinned"
    assert states(server)["a"] == ("UNAVAILABLE", "not resident")
    with pytest.raises(NotResident):
        model.infer(X)


def test_the_control_status_and_the_status_document_agree_on_where_weights_are(server, control):
    control.set_residency("a", "device")
    rows = {row.name: row for row in control.status().models}
    found, residency = status(server)
    assert found.server.residency_mode == control.status().residency_mode == "externally_managed"
    assert [(rows[name].floor, rows[name].device_resident) for name in ("a", "b")] == [
        ("device", True),
        ("unpinned", False),
    ]
    assert [(residency[name].floor, residency[name].state) for name in ("a", "b")] == [
        ("device", "resident"),
        ("unpinned", "cold"),
    ]
    budget = found.devices[0].budget
    assert budget.pinned_bytes == rows["a"].weight_nbytes
    assert budget.budget_bytes == control.status().weight_cache_max_bytes


def test_pinning_more_than_fits_is_refused_and_changes_nothing(server, control):
    before = status(server)[0].devices[0].budget
    with pytest.raises(DeviceOutOfMemory):
        control.set_residency("huge", "device")
    after, residency = status(server)
    assert residency["huge"].floor == "unpinned"
    assert after.devices[0].budget.pinned_bytes == before.pinned_bytes
    assert states(server)["huge"] == ("UNAVAILABLE", "not resident")
    with pytest.raises(UnknownModel):
        control.set_residency("nobody", "device")


def test_compaction_leaves_pinned_weights_and_loads_nothing_when_an_operator_manages_them(server, control, model):
    control.set_residency("a", "device")
    done = control.compact(["a", "b"])
    assert (done.reloaded, done.resident_bytes) == (0, 0)
    assert model.infer(X)["y"].shape == (2, 3)
    assert status(server)[0].devices[0].budget.compactions == 1
