"""A bundle of a followed directory that somebody registers by hand: served once, and followed like any other."""

import shutil
import threading

import pytest
from support.bundles import write_affine

from rsrv.core.config import EndpointsConfig, RuntimeConfig, ServerConfig
from rsrv.core.errors import InvalidRequest
from rsrv.serve import serve
from rsrv.serve.admin.requests import EmptyRequest, RegisterRequest
from rsrv.serve.registry import ModelState
from rsrv.serve.repository.watcher import Watcher

WAIT = 60


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("RSRV_ALLOW_FAKE", "1")
    (tmp_path / "repo").mkdir()
    server = serve(
        ServerConfig(
            model_dirs=[str(tmp_path / "repo")],
            runtime=RuntimeConfig(backend="fake"),
            endpoints=EndpointsConfig(grpc_port=0, http_port=None),
            model_settle_seconds=0.1,
        ),
        blocking=False,
    )
    yield server
    server.stop()


def until(condition):
    event = threading.Event()
    for _ in range(6000):
        if condition():
            return
        event.wait(0.01)
    raise AssertionError("it did not become true within a minute")


@pytest.fixture
def looks(monkeypatch):
    """The watcher waits before each look while this is not set, so that it does not register a bundle before a test."""
    may, look = threading.Event(), Watcher._look

    def wait_and_look(*arguments):
        assert may.wait(WAIT)
        look(*arguments)

    monkeypatch.setattr(Watcher, "_look", wait_and_look)
    may.set()
    yield may
    may.set()


def poll(server):
    return [
        (change.name, change.action) for change in server.faces.administration.poll_repository(EmptyRequest()).changes
    ]


def test_it_is_not_loaded_a_second_time_and_edits_and_its_end_are_followed(server, looks, tmp_path):
    admin, registry = server.faces.administration, server.registry
    write_affine(tmp_path / "n", batch_sizes=(1,))
    looks.clear()
    shutil.move(tmp_path / "n", tmp_path / "repo" / "n")
    answer = admin.register_model(RegisterRequest(model="n", directory=str(tmp_path / "repo" / "n")))
    looks.set()
    server.live.registrations.prepare("n").result(WAIT)
    assert poll(server) == []
    assert registry.find("n").incarnation == answer.incarnation
    (tmp_path / "model.py").write_text("def postprocess(outputs): return outputs\n")
    (tmp_path / "model.py").rename(tmp_path / "repo" / "n" / "model.py")
    until(lambda: registry.find("n").incarnation > answer.incarnation)
    assert registry.find("n").state is ModelState.READY
    shutil.rmtree(tmp_path / "repo" / "n")
    until(lambda: registry.get("n") is None)


def test_one_that_could_not_be_registered_is_found_by_the_watcher(server, looks, tmp_path):
    write_affine(tmp_path / "n", batch_sizes=(1,))
    text = (tmp_path / "n" / "manifest.yaml").read_text()
    (tmp_path / "n" / "manifest.yaml").write_text("not: [a")
    looks.clear()
    shutil.move(tmp_path / "n", tmp_path / "repo" / "n")
    with pytest.raises(InvalidRequest):
        server.faces.administration.register_model(
            RegisterRequest(model="n", directory=str(tmp_path / "repo" / "n"), admission="drained")
        )
    looks.set()
    (tmp_path / "repo" / "n" / "manifest.yaml").write_text(text)
    until(lambda: (entry := server.registry.get("n")) is not None and entry.state is ModelState.READY)
    assert server.registry.find("n").source == "watcher"
