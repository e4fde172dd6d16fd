"""A real server under the hands of an operator, over gRPC (spec worker 11.12): each required behaviour once."""

import contextlib
import json
import threading

import numpy as np
import pytest
from support.bundles import N, write_model
from support.server import ServerProcess

from rsrv.client import Admin
from rsrv.core.errors import (
    ExpectedMismatch,
    HeldFull,
    IncarnationChanged,
    InvalidRequest,
    NameTaken,
    UnknownModel,
    WaitTimeout,
    WrongState,
)

triton = pytest.importorskip("tritonclient.grpc")
from tritonclient.utils import InferenceServerException  # noqa: E402

WAIT = 60
ROW = ((N, 4), np.float32)
X = np.arange(4, dtype=np.float32).reshape(1, 4)
HOOKS = """
import os
import time

def preprocess(inputs):
    open({entered!r}, "a").write(".")
    while os.path.exists({closed!r}):
        time.sleep(0.01)
    return inputs
"""


def write(directory, factor, *, program=lambda x, w: (x * w,), hooks=None):
    weights = {"w": np.full(4, factor, np.float32)}
    return write_model(directory, program, {"x": ROW}, {"y": ROW}, weights=weights, batch_sizes=(1, 2), hooks=hooks)


class Operated:
    """A server, its administration, and clients that hold on request."""

    def __init__(self, repo, server, admin):
        self.repo, self.server, self.admin = repo, server, admin

    def infer(self, name, *, hold=None):
        with triton.InferenceServerClient(self.server.url) as client:
            tensor = triton.InferInput("x", [1, 4], "FP32")
            tensor.set_data_from_numpy(X)
            options = {} if hold is None else {"parameters": {"rsrv_hold": hold}}
            return client.infer(name, [tensor], client_timeout=WAIT, **options).as_numpy("y")[0].tolist()

    def later(self, name, *, hold=None):
        """A request on a thread: joins to (answer, error)."""
        found = []

        def run():
            try:
                found.append((self.infer(name, hold=hold), None))
            except InferenceServerException as error:
                found.append((None, error))

        thread = threading.Thread(target=run)
        thread.start()

        def outcome():
            thread.join(WAIT)
            assert found, "the request was not answered"
            return found[0]

        return outcome

    def status(self, name):
        (row,) = self.admin.status(name)["models"]
        return row

    def until(self, condition):
        for _ in range(WAIT * 50):
            if condition():
                return
            threading.Event().wait(0.02)
        raise AssertionError("the condition did not come true")


@pytest.fixture(scope="module")
def operated(tmp_path_factory):
    repo = tmp_path_factory.mktemp("repo")
    write(repo / "net", 2.0)
    env = {
        "RSRV_WORKER_RUNTIME_DEVICE_MEMORY_BYTES": str(64 << 20),
        "RSRV_WORKER_MODEL_SETTLE_SECONDS": "0.2",
        "RSRV_WORKER_MODEL_POLL_SECONDS": "0.2",
        "RSRV_WORKER_ENDPOINTS_MAX_CONCURRENT_REQUESTS": "8",
        "RSRV_WORKER_ADMISSION_HELD_REQUESTS": "3",
        "RSRV_WORKER_ADMIN_ALLOW_EXTERNAL_DIRS": "1",
    }
    with ServerProcess(repo, env=env) as server, Admin(server.url) as admin:
        server.wait_ready()
        yield Operated(repo, server, admin)
        assert server.stop() == 0


@pytest.fixture
def external(tmp_path):
    """Bundles beside the repository, which the watcher does not see."""
    (tmp_path / "external").mkdir()
    return tmp_path / "external"


@pytest.fixture
def slow(operated, external):
    """A model whose requests stay in a hook while the file `closed` is there."""
    closed, entered = external / "closed", external / "entered"
    hooks = HOOKS.format(entered=str(entered), closed=str(closed))
    operated.admin.register("slow", str(write(external / "slow", 3.0, hooks=hooks)))
    operated.admin.wait("slow", "ready", timeout=WAIT)
    closed.touch()

    def inside(count):
        operated.until(lambda: entered.exists() and len(entered.read_text()) >= count)

    yield closed, inside
    closed.unlink(missing_ok=True)
    with contextlib.suppress(UnknownModel):
        operated.admin.unregister("slow", mode="abort")
    operated.admin.wait("slow", "gone", timeout=WAIT)


def remove(operated, name):
    operated.admin.unregister(name)
    assert operated.admin.wait(name, "gone", timeout=WAIT).registration == "gone"


def test_registered_drained_reads_the_manifest_only_and_an_undrain_answers_what_was_held(operated, external):
    directory = write(external / "cold", 7.0)
    aside = external / "aside"
    aside.mkdir()
    for path in directory.iterdir():
        if path.name != "manifest.yaml":
            path.rename(aside / path.name)
    found = operated.admin.register("cold", str(directory), admission="drained")
    assert (found.registration, found.admission) == ("registered", "drained")
    assert operated.status("cold")["state"] == "registered"
    for path in aside.iterdir():
        path.rename(directory / path.name)
    answer = operated.later("cold", hold=True)
    operated.until(lambda: operated.admin.status()["server"]["held_requests"] == 1)
    assert operated.admin.undrain("cold").registration in ("preparing", "ready")
    assert answer() == ([0, 7, 14, 21], None)
    remove(operated, "cold")


def test_a_drain_ends_when_what_was_accepted_is_answered(operated, slow):
    closed, inside = slow
    answers = [operated.later("slow") for _ in range(2)]
    inside(2)
    found = operated.admin.drain("slow")
    assert (found.admission, found.accepted) == ("draining", 2)
    with pytest.raises(InferenceServerException) as refused:
        operated.infer("slow", hold=False)
    assert refused.value.status() == "StatusCode.UNAVAILABLE"
    assert operated.admin.drain("slow", wait=0.05).admission == "draining"
    closed.unlink()
    assert operated.admin.wait("slow", "drained", timeout=WAIT).accepted == 0
    assert [answer() for answer in answers] == [([0, 3, 6, 9], None)] * 2
    assert operated.admin.undrain("slow").admission == "open"
    assert operated.infer("slow") == [0, 3, 6, 9]


def test_what_the_state_of_a_model_does_not_allow_is_refused(operated):
    admin = operated.admin
    with pytest.raises(WrongState) as open_gate:
        admin.activate("net")
    assert open_gate.value.reason == "not_drained"
    with pytest.raises(NameTaken):
        admin.register("net", str(operated.repo / "net"))
    with pytest.raises(WrongState) as healthy:
        admin.retry("net")
    assert healthy.value.reason == "not_failed"
    admin.drain("net", wait=WAIT)
    admin.pin("net")
    with pytest.raises(WrongState) as pinned:
        admin.deactivate("net")
    assert pinned.value.reason == "pinned"
    admin.unpin("net")
    admin.deactivate("net")
    admin.wait("net", "idle", timeout=WAIT)
    assert operated.status("net")["residency"]["state"] == "cold"
    admin.activate("net")
    assert admin.wait("net", "idle", timeout=WAIT).error == ""
    assert operated.status("net")["residency"]["state"] == "resident"
    admin.undrain("net")
    assert operated.infer("net") == [0, 2, 4, 6]
    with pytest.raises(IncarnationChanged):
        admin.drain("net", if_incarnation=operated.status("net")["incarnation"] + 1)
    with pytest.raises(InvalidRequest):
        admin.register("other", "/nowhere/other")


def test_a_removal_may_be_made_an_abort_and_a_name_is_taken_until_it_ends(operated, slow):
    closed, inside = slow
    answer = operated.later("slow")
    inside(1)
    assert operated.admin.unregister("slow").registration == "retiring"
    with pytest.raises(NameTaken):
        operated.admin.register("slow", operated.status("slow")["directory"])
    with pytest.raises(WaitTimeout):
        operated.admin.wait("slow", "gone", timeout=0.05)
    operated.admin.unregister("slow", mode="abort")
    closed.unlink()
    assert operated.admin.wait("slow", "gone", timeout=WAIT).registration == "gone"
    _, error = answer()
    assert error.status() == "StatusCode.NOT_FOUND"


def test_a_model_that_was_removed_stays_away_until_its_files_change(operated, external):
    directory = write(operated.repo / "away", 4.0)
    operated.until(lambda: any(row["name"] == "away" for row in operated.admin.status()["models"]))
    operated.admin.wait("away", "ready", timeout=WAIT)
    remove(operated, "away")
    for _ in range(3):
        operated.admin.poll()
    with pytest.raises(UnknownModel):
        operated.status("away")
    assert [row["name"] for row in operated.admin.status()["tombstones"]] == ["away"]
    newer = write(external / "away", 5.0)
    directory.rename(external / "older")
    newer.rename(directory)
    operated.until(lambda: any(row["name"] == "away" for row in operated.admin.status()["models"]))
    operated.admin.wait("away", "ready", timeout=WAIT)
    assert operated.infer("away") == [0, 5, 10, 15]
    operated.until(lambda: operated.admin.status()["tombstones"] == [])  # noted after the load has ended
    directory.rename(external / "away")
    operated.until(lambda: not any(row["name"] == "away" for row in operated.admin.status()["models"]))


def test_programs_are_staged_selected_by_comparing_and_rolled_back_bit_for_bit(operated, external):
    admin = operated.admin
    before = operated.infer("net")
    loads = operated.status("net")["residency"]["loads"]
    candidate = write(external / "net", 9.0, program=lambda x, w: (x * w + x,))
    made = admin.stage("net", str(candidate), label="plus one")
    assert (made.id, made.phase, made.label) == (2, "ready", "plus one")
    with pytest.raises(ExpectedMismatch) as stale:
        admin.select("net", 2, expected=2)
    assert stale.value.selected == 1
    assert admin.programs("net").selected == 1
    chosen = admin.select("net", 2, expected=1)
    assert (chosen.selected, chosen.previous) == (2, 1)
    assert operated.infer("net") == [0, 3, 6, 9]  # the same weights, other programs
    with pytest.raises(WrongState) as in_use:
        admin.remove("net", 2)
    assert in_use.value.reason == "selected"
    admin.select("net", 1, expected=2)
    assert operated.infer("net") == before
    assert operated.status("net")["residency"]["loads"] == loads
    assert [program.id for program in admin.remove("net", 2).programs] == [1]
    five = ((N, 5), np.float32)
    wide = write_model(external / "wide", lambda x: (x,), {"x": five}, {"y": five}, batch_sizes=(1, 2))
    with pytest.raises(InvalidRequest):
        admin.stage("net", str(wide))


def test_held_requests_are_bounded_and_end_when_their_model_is_removed(operated, external):
    directory = write(external / "gated", 6.0)
    operated.admin.register("gated", str(directory), admission="drained")
    held = [operated.later("gated", hold=True) for _ in range(3)]
    operated.until(lambda: operated.admin.status()["server"]["held_requests"] == 3)
    with pytest.raises(InferenceServerException) as full:
        operated.infer("gated", hold=True)
    assert full.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
    with pytest.raises(HeldFull):
        operated.admin.wait("gated", "ready", timeout=1)
    assert operated.infer("net") == [0, 2, 4, 6]
    operated.admin.unregister("gated")
    for outcome in held:
        _, error = outcome()
        assert error.status() == "StatusCode.NOT_FOUND"
        assert "removed" in error.message() or "removing" in error.message()
    operated.admin.wait("gated", "gone", timeout=WAIT)


def test_idle_weights_are_given_back_but_for_pinned_ones_and_come_back_without_compiling(operated, external):
    admin = operated.admin
    admin.register("kept", str(write(external / "kept", 8.0)), pinned=True)
    admin.wait("kept", "ready", timeout=WAIT)
    assert operated.infer("kept") == [0, 8, 16, 24]
    operated.infer("net")
    compiled = admin.status()["server"]["programs"]["compiled"]
    admin.reclaim(parameter_idle_ms=50)
    operated.until(lambda: operated.status("net")["residency"]["state"] == "cold")
    admin.reclaim(parameter_idle_ms=0)
    assert operated.status("kept")["residency"]["state"] == "resident"
    assert operated.infer("net") == [0, 2, 4, 6]
    assert admin.status()["server"]["programs"]["compiled"] == compiled
    admin.trim()
    assert operated.status("net")["residency"]["state"] == "cold"
    assert operated.status("kept")["residency"]["state"] == "resident"
    remove(operated, "kept")


def test_the_events_tell_the_life_of_a_model_in_order(operated, external):
    directory = write(external / "told", 2.0)
    with contextlib.closing(operated.admin.events(from_seq=1, model="told")) as events:
        operated.admin.register("told", str(directory))
        operated.admin.wait("told", "ready", timeout=WAIT)
        operated.admin.drain("told", wait=WAIT)
        operated.admin.unregister("told")
        operated.admin.wait("told", "gone", timeout=WAIT)
        steps = []
        while not steps or steps[-1][2] != "gone":
            event = next(events)
            steps.append((event.type, event.old, event.new))
    assert steps[:2] == [("registration", "", "preparing"), ("registration", "preparing", "ready")]
    gates = [step[1:] for step in steps if step[0] == "admission"]
    assert gates[:2] == [("open", "draining"), ("draining", "drained")]


def test_the_command_line_operates_the_server(operated, capsys, external):
    from rsrv.cli.main import main

    url = ["--url", operated.server.url]
    directory = str(write(external / "typed", 2.0))
    assert main(["ctl", "register", "typed", directory, "--wait", "60", *url]) == 0
    assert main(["ctl", "drain", "typed", "--wait", "60", *url]) == 0
    assert main(["ctl", "unregister", "typed", "--wait", "60", *url]) == 0
    capsys.readouterr()
    assert main(["ctl", "models", "--json", *url]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["net"]
