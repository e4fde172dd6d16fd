"""What is removed from shared memory: weights that nobody holds and regions of dead clients, and nothing else."""

import os
import subprocess
import sys

import numpy as np
import pytest
from support.weight_files import Filler, source

from rsrv.bundle.safetensors import write_weights
from rsrv.serve.residency import janitor
from rsrv.serve.residency.janitor import sweep_clients, sweep_unheld
from rsrv.serve.residency.regions import RegionLock
from rsrv.serve.residency.shared_store import SharedWeightStore


def acquired(shm, name, value=1):
    path = shm.parent / name
    write_weights(path, [("w", np.full(100, value, np.float32))])
    file = source(path)
    return SharedWeightStore(0o660, shm).acquire(name, file, Filler(file))


def left(shm, name, value=1):
    """A complete region that nobody holds, and its lock file. Its name."""
    before = set(os.listdir(shm))
    copy = acquired(shm, name, value)
    [path] = [shm / new for new in set(os.listdir(shm)) - before if not new.endswith(".lock")]
    data = path.read_bytes()
    copy.release()
    path.write_bytes(data)
    RegionLock(path.with_name(f"{path.name}.lock"), 0o660).close()
    return path.name


@pytest.fixture
def dead_pid():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait(60)
    return process.pid


def test_weights_that_nobody_holds_go_with_their_locks_and_others_stay(shm):
    held = acquired(shm, "held")
    kept = sorted(os.listdir(shm))
    names = sorted([left(shm, "one", 2), left(shm, "two", 3)])
    findings = {found.name: found for found in sweep_unheld(shm)}
    assert sorted(findings) == sorted([*names, kept[0]])
    assert [(findings[name].outcome, findings[name].nbytes) for name in names] == [("removed", 656)] * 2
    assert {findings[name].owner for name in names} == {"one", "two"}
    assert (findings[kept[0]].outcome, findings[kept[0]].owner) == ("held", "held")
    assert sorted(os.listdir(shm)) == kept
    np.testing.assert_array_equal(held.arrays[0], np.ones(100, np.float32))
    held.release()


@pytest.mark.parametrize("data", [b"", b"RSV1", bytes(4096)])
def test_a_remnant_without_a_header_goes_too(shm, data):
    (shm / "rsrvw-0000000000000abc").write_bytes(data)
    [found] = sweep_unheld(shm)
    assert (found.owner, found.nbytes, found.outcome) == ("", len(data), "removed")
    assert os.listdir(shm) == []


def test_a_region_that_somebody_creates_at_this_moment_stays(shm):
    (shm / "rsrvw-0000000000000abc").write_bytes(b"")
    with RegionLock.of(shm, 0xABC, 0o660) as lock:
        assert lock.exclude()
        assert [found.outcome for found in sweep_unheld(shm)] == ["held"]
    assert len(os.listdir(shm)) == 2


def test_lock_files_without_a_region_go_without_a_word(shm):
    (shm / left(shm, "m")).unlink()
    assert len(os.listdir(shm)) == 1
    assert sweep_unheld(shm) == []
    assert os.listdir(shm) == []


def test_a_dry_run_finds_the_same_and_changes_nothing(shm, dead_pid):
    name = left(shm, "m")
    (shm / f"{name}.lock").unlink()
    client = f"rsrv-client-{dead_pid}-0123456789abcdef"
    (shm / client).write_bytes(b"x")
    assert [found.outcome for found in sweep_unheld(shm, dry_run=True)] == ["removed"]
    assert [found.outcome for found in sweep_clients(shm, dry_run=True)] == ["removed"]
    assert sorted(os.listdir(shm)) == sorted([name, client])


def test_other_objects_are_none_of_its_business(shm, tmp_path, dead_pid):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("rsrvw-abc", "rsw-0000000000000abc", f"rsrv-client-{dead_pid}-short", "psm_123", "other.lock"):
        (shm / name).write_bytes(b"x")
    (shm / "rsrvw-0000000000000001").symlink_to(victim)
    (shm / "rsrvw-0000000000000002").mkdir()
    (shm / f"rsrv-client-{dead_pid}-0123456789abcdef").symlink_to(victim)
    before = sorted(os.listdir(shm))
    assert sweep_unheld(shm) == sweep_clients(shm) == []
    assert sorted(os.listdir(shm)) == before
    assert victim.read_text() == "precious"


def test_regions_of_clients_go_when_their_process_is_gone(shm, dead_pid):
    dead, live = (f"rsrv-client-{pid}-0123456789abcdef" for pid in (dead_pid, os.getpid()))
    for name in (dead, live):
        (shm / name).write_bytes(bytes(10))
    found = {finding.name: (finding.owner, finding.nbytes, finding.outcome) for finding in sweep_clients(shm)}
    assert found == {dead: (str(dead_pid), 10, "removed"), live: (str(os.getpid()), 10, "held")}
    assert os.listdir(shm) == [live]


def test_what_cannot_be_removed_is_reported_and_the_rest_goes_on(shm, monkeypatch):
    names = sorted([left(shm, "one", 2), left(shm, "two", 3)])
    remove = janitor.remove_region

    def refuse_first(path):
        if path.name == names[0]:
            raise PermissionError(1, "Operation not permitted")
        remove(path)

    monkeypatch.setattr(janitor, "remove_region", refuse_first)
    failed, removed = sweep_unheld(shm)
    assert (failed.name, failed.outcome, failed.problem) == (names[0], "failed", "Operation not permitted")
    assert (removed.name, removed.outcome) == (names[1], "removed")


def test_a_directory_that_is_not_there_has_nothing_in_it(tmp_path):
    assert sweep_unheld(tmp_path / "none") == sweep_clients(tmp_path / "none") == []
