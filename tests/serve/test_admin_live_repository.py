"""Removals and drains over HTTP where models follow their directories, and requests are under way (11.12)."""

import threading

import pytest
from support.bundles import write_affine
from test_admin_live import WAIT, Live, until

SLOW = """
import threading
entered, gate = threading.Semaphore(0), threading.Event()

def preprocess(inputs):
    entered.release()
    gate.wait(60)
    return inputs
"""


@pytest.fixture
def live(tmp_path, monkeypatch):
    monkeypatch.setenv("RSRV_ALLOW_FAKE", "1")
    (tmp_path / "repo").mkdir()
    write_affine(tmp_path / "repo" / "net", batch_sizes=(1,), hooks=SLOW)
    live = Live(tmp_path / "repo", model_control_mode="dynamic", model_poll_seconds=3600.0, model_settle_seconds=0.1)
    yield live
    for entry in live.server.registry.entries():
        if entry.prepared is not None:
            entry.prepared.hooks.preprocess.__globals__["gate"].set()
    live.close()


def hook(live):
    return live.server.registry.prepared("net").hooks.preprocess.__globals__


def test_a_drain_with_two_requests_in_flight_is_draining_until_both_are_done(live):
    calls = [threading.Thread(target=live.infer, args=("net",)) for _ in range(2)]
    for call in calls:
        call.start()
    for _ in calls:
        assert hook(live)["entered"].acquire(timeout=WAIT)
    answer = live.done("models/drain", model="net")
    assert (answer["admission"], sum(answer["accepted"].values())) == ("draining", 2)
    assert live.done("models/drain", model="net", wait_ms=50)["admission"] == "draining"
    hook(live)["gate"].set()
    assert live.done("models/drain", model="net", wait_ms=WAIT * 1000)["admission"] == "drained"
    for call in calls:
        call.join(WAIT)


def test_a_tombstone_survives_a_poll_and_ends_when_a_file_changes(live):
    hook(live)["gate"].set()
    live.done("models/unregister", model="net")
    live.call("GET", f"/v1/models/wait?model=net&until=gone&timeout_ms={WAIT * 1000}")
    for _ in range(2):
        assert live.done("repository/poll") == {"changes": []}
    assert live.status("net") == 404
    status, body = live.get("status")
    assert (status, [one["name"] for one in body["tombstones"]]) == (200, ["net"])
    (live.root / "net" / ".model.py").write_text(SLOW + "\n# edited\n")
    (live.root / "net" / ".model.py").rename(live.root / "net" / "model.py")
    changes = []

    def is_back():  # the watcher, which heard of the write, may look at the same time as we
        changes.extend((change["name"], change["action"]) for change in live.done("repository/poll")["changes"])
        return live.status("net") != 404

    until(is_back)
    assert changes in ([("net", "load")], [])
    live.wait("net", "ready")
    until(lambda: live.get("status")[1]["tombstones"] == [])  # the watcher hears of the end of the load a moment later
    hook(live)["gate"].set()
    assert live.infer("net").array("y").tolist() == [[3.0, 3.0, 3.0]]


def test_a_tombstone_ends_when_the_model_is_registered_by_name(live):
    live.done("models/unregister", model="net")
    live.call("GET", f"/v1/models/wait?model=net&until=gone&timeout_ms={WAIT * 1000}")
    live.done("models/register", model="net", directory=str(live.root / "net"))
    live.wait("net", "ready")
    assert live.get("status")[1]["tombstones"] == []
    assert live.done("repository/poll") == {"changes": []}
