"""``rsrv shm gc``: what it removes, and how it says so."""

import json
import os
import subprocess
import sys

import pytest

from rsrv.cli.main import main
from rsrv.serve.residency import janitor
from rsrv.serve.residency.regions import RegionHeader, RegionLock

ORPHAN, HELD = "rsrvw-0000000000000001", "rsrvw-0000000000000002"


@pytest.fixture
def shm(tmp_path):
    """Weights that nobody holds, weights in use, and the region of a client that is gone."""
    for digest, name, model in ((1, ORPHAN, b"gone"), (2, HELD, b"serving")):
        header = RegionHeader(True, digest, 2048, 1, 0, model).pack()
        (tmp_path / name).write_bytes(header.ljust(2048, b"\0"))
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait(60)
    (tmp_path / f"rsrv-client-{process.pid}-0123456789abcdef").write_bytes(bytes(1024))
    with RegionLock.of(tmp_path, 2, 0o660) as lock:
        assert lock.share()
        yield tmp_path


def test_gc_removes_what_nobody_uses_and_says_what_became_of_everything(shm, capsys):
    assert main(["shm", "gc", str(shm)]) == 0
    title, _, orphan, held, client = capsys.readouterr().out.splitlines()
    assert title == f"{shm}: 2 of 3 objects removed, 3.0 KiB"
    assert orphan.split() == [ORPHAN, "model", "gone", "2.0", "KiB", "removed"]
    assert held.split() == [HELD, "model", "serving", "2.0", "KiB", "in", "use"]
    assert client.split()[1] == "client"
    assert sorted(os.listdir(shm)) == [HELD, f"{HELD}.lock"]


def test_a_dry_run_leaves_everything(shm, capsys):
    before = sorted(os.listdir(shm))
    assert main(["shm", "gc", str(shm), "--dry-run"]) == 0
    assert "2 of 3 objects would be removed" in capsys.readouterr().out
    assert sorted(os.listdir(shm)) == before


def test_as_json_it_has_whole_numbers(shm, capsys):
    assert main(["shm", "gc", str(shm), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["removed"], report["bytes"], report["dry_run"]) == (2, 3072, False)
    assert report["objects"][0] == {
        "name": ORPHAN,
        "kind": "weights",
        "owner": "gone",
        "bytes": 2048,
        "outcome": "removed",
        "problem": None,
    }


def test_what_cannot_be_removed_makes_it_fail(shm, capsys, monkeypatch):
    def refuse(path):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(janitor, "remove_region", refuse)
    assert main(["shm", "gc", str(shm)]) == 1
    assert "failed: Operation not permitted" in capsys.readouterr().out


def test_a_directory_that_is_not_there_is_wrong_usage(tmp_path, capsys):
    assert main(["shm", "gc", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_where_nothing_is_left_it_says_so(tmp_path, capsys):
    assert main(["shm", "gc", str(tmp_path)]) == 0
    assert "0 of 0 objects removed" in capsys.readouterr().out
