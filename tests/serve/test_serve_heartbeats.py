"""What embedders are told of models that come, change and go while a server runs, whoever asked for it."""

import threading

import pytest
from support.bundles import write_affine

from rsrv.core.config import EndpointsConfig, RuntimeConfig, ServerConfig
from rsrv.serve import observe, serve


class Events:
    """The heartbeats in their order; `expect` waits for the next ones."""

    def __init__(self):
        self._seen = []
        self._changed = threading.Condition()

    def __call__(self, event, detail):
        with self._changed:
            self._seen.append((event, detail if isinstance(detail, str) else None))
            self._changed.notify_all()

    def expect(self, *events):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._seen) >= len(events), 60), self._seen
            taken, self._seen = self._seen[: len(events)], self._seen[len(events) :]
        assert taken == list(events)


@pytest.fixture
def repo(tmp_path):
    write_affine(tmp_path / "repo" / "net")
    return tmp_path / "repo"


@pytest.fixture
def events(monkeypatch):
    monkeypatch.setenv("RSRV_ALLOW_FAKE", "1")
    events = observe.register_heartbeat(Events())
    yield events
    observe.unregister_heartbeat(events)


@pytest.fixture
def server(repo, events):
    server = serve(config(repo), blocking=False)
    events.expect(("up", None))
    yield server
    server.stop()
    events.expect(("down", None))


def config(repo, **sections):
    return ServerConfig(
        **{
            "model_dirs": [str(repo)],
            "model_control_mode": "static",
            "runtime": RuntimeConfig(backend="fake"),
            "endpoints": EndpointsConfig(grpc_port=0, http_port=None),
            **sections,
        }
    )


def test_load_and_unload_follow_a_registration_through_its_life(repo, server, events):
    write_affine(repo / "late")
    registrations = server.live.registrations
    registrations.register("late", repo / "late")
    events.expect(("load", "late"))
    registrations.reload("late").result(timeout=60)
    events.expect(("load", "late"))
    (repo / "late").rename(repo / "later")
    registrations.rename("late", "later", repo / "later")
    events.expect(("unload", "late"), ("load", "later"))
    registrations.unregister("later")
    registrations.wait("later", "gone", 60)
    events.expect(("unload", "later"))


def test_a_registration_that_only_reads_the_manifest_loads_nothing_until_its_gate_opens(repo, server, events):
    write_affine(repo / "late")
    registrations = server.live.registrations
    registrations.register("late", repo / "late", admission="drained")
    registrations.undrain("late")
    events.expect(("load", "late"))


def test_a_load_and_a_reload_that_fail_tell_nothing(repo, server, events):
    write_affine(repo / "broken")
    (repo / "broken" / "model.b4.mlir").write_bytes(b"nonsense")
    registrations = server.live.registrations
    registrations.register("broken", repo / "broken")
    assert registrations.wait("broken", "ready", 60).failure is not None
    (repo / "net" / "model.b4.mlir").write_bytes(b"nonsense")
    assert registrations.reload("net").exception(timeout=60) is not None
    registrations.unregister("net")
    registrations.wait("net", "gone", 60)
    events.expect(("unload", "net"))


def test_what_the_watcher_does_is_told_as_what_an_operator_does(repo, tmp_path, events):
    made = write_affine(tmp_path / "made" / "late")
    times = {"model_poll_seconds": 0.05, "model_settle_seconds": 0.05}
    server = serve(config(repo, model_control_mode="dynamic", **times), blocking=False)
    try:
        events.expect(("up", None))
        made.rename(repo / "late")
        events.expect(("load", "late"))
        (repo / "late").rename(repo / "later")
        events.expect(("unload", "late"), ("load", "later"))
        (repo / "later").rename(tmp_path / "away")
        events.expect(("unload", "later"))
    finally:
        server.stop()


def test_a_heartbeat_that_raises_stops_no_load(repo, server, events):
    @observe.register_heartbeat
    def broken(event, detail):
        raise RuntimeError("no")

    try:
        write_affine(repo / "late")
        server.live.registrations.register("late", repo / "late")
        events.expect(("load", "late"))
        assert server.live.registrations.wait("late", "ready", 60).serves
    finally:
        observe.unregister_heartbeat(broken)


def test_a_guard_runs_before_every_bring_up_and_unregistered_it_does_not(repo, events):
    asked = []
    guard = observe.register_serve_guard(asked.append)
    settings = config(repo)
    try:
        for _ in range(2):
            serve(settings, blocking=False).stop()
            events.expect(("up", None), ("down", None))
    finally:
        observe.unregister_serve_guard(guard)
    assert asked == [settings, settings]
    serve(settings, blocking=False).stop()
    assert len(asked) == 2


def test_guards_run_in_their_order_and_the_first_that_refuses_is_the_last_that_is_asked(repo, events):
    asked = []

    class Refused(Exception):
        pass

    @observe.register_serve_guard
    def first(config):
        asked.append("first")
        raise Refused

    second = observe.register_serve_guard(lambda config: asked.append("second"))
    try:
        with pytest.raises(Refused):
            serve(config(repo), blocking=False)
    finally:
        observe.unregister_serve_guard(first)
        observe.unregister_serve_guard(second)
    assert asked == ["first"]
