"""Host copies in shared memory between real processes: races, and processes that are killed at bad moments."""

import logging
import os
import signal
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from store_support import regions
from support.weight_files import Filler, holders, source

from rsrv.bundle.safetensors import write_weights
from rsrv.serve.residency.janitor import sweep_unheld
from rsrv.serve.residency.shared_store import SharedWeightStore

TENSORS = {"w": np.arange(1 << 16, dtype=np.float32), "b": np.full(33, 7, np.int32), "flag": np.ones(5, np.bool_)}
SUMS = [float(value.sum()) for value in TENSORS.values()]


@pytest.fixture
def path(tmp_path):
    write_weights(tmp_path / "w.safetensors", list(TENSORS.items()))
    return tmp_path / "w.safetensors"


def test_of_workers_that_race_one_fills_the_region_and_the_last_one_removes_it(shm, path):
    with holders(4, shm, path) as workers:
        for _ in range(3):
            for worker in workers:
                worker.tell("acquire", "m")
            answers = [worker.hear() for worker in workers]
            assert sorted(answer["filled"] for answer in answers) == [0, 0, 0, 1]
            assert all(answer["shared"] for answer in answers)
            assert [answer["sums"] for answer in answers] == [SUMS] * 4
            assert len(regions(shm)) == 1
            for worker in workers:
                worker.tell("release")
            assert [worker.hear() for worker in workers] == ["released"] * 4
            assert regions(shm) == []


def test_who_comes_while_the_region_is_created_waits_and_attaches(shm, path):
    with holders(2, shm, path) as (creator, other):
        assert creator.ask("acquire_slowly", "m") == "filling"
        other.tell("acquire", "m")
        creator.tell("go on")
        assert creator.hear() == {"filled": 1, "shared": True}
        assert other.hear() == {"filled": 0, "shared": True, "sums": SUMS}


def test_who_waits_for_a_creator_that_is_killed_creates_the_region(shm, path):
    with holders(2, shm, path) as (creator, other):
        assert creator.ask("acquire_slowly", "m") == "filling"
        other.tell("acquire", "m")
        creator.kill()
        assert other.hear() == {"filled": 1, "shared": True, "sums": SUMS}
        other.ask("release")
        assert regions(shm) == []


def test_who_waits_for_a_creator_that_is_stopped_soon_has_a_copy_of_its_own(shm, path, caplog):
    store, file = SharedWeightStore(0o660, shm, patience=lambda nbytes: 0.05), source(path)
    with holders(1, shm, path) as (creator,):
        assert creator.ask("acquire_slowly", "m") == "filling"
        os.kill(creator.pid, signal.SIGSTOP)
        copy = store.acquire("m", file, Filler(file))
        assert not copy.shared
        assert [float(array.sum()) for array in copy.arrays] == SUMS
        copy.release()
        [warning] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert "model=m " in warning
        assert "continue it or end it" in warning
        os.kill(creator.pid, signal.SIGCONT)
        creator.tell("go on")
        assert creator.hear() == {"filled": 1, "shared": True}
        copy = store.acquire("m", file, Filler(file))
        assert copy.shared
        copy.release()


def test_the_remnant_of_a_killed_creator_is_replaced(shm, path):
    with holders(2, shm, path) as (creator, other):
        assert creator.ask("acquire_slowly", "m") == "filling"
        creator.kill()
        assert len(regions(shm)) == 1
        assert other.ask("acquire", "m") == {"filled": 1, "shared": True, "sums": SUMS}
        other.ask("release")
        assert regions(shm) == []


def test_a_killed_holder_takes_nothing_from_the_others(shm, path):
    with holders(3, shm, path) as (first, second, third):
        assert first.ask("acquire", "m")["filled"] == 1
        assert second.ask("acquire", "m")["filled"] == 0
        first.kill()
        assert [found.outcome for found in sweep_unheld(shm)] == ["held"]
        assert third.ask("acquire", "m") == {"filled": 0, "shared": True, "sums": SUMS}
        assert [worker.ask("release") for worker in (second, third)] == ["released"] * 2
        assert regions(shm) == []


def test_what_only_killed_processes_held_is_found_by_the_next_worker_or_removed_by_the_janitor(shm, path):
    with holders(2, shm, path) as (first, second):
        first.ask("acquire", "m")
        first.kill()
        assert second.ask("acquire", "m")["filled"] == 0
        second.kill()
    [found] = sweep_unheld(shm)
    assert (found.outcome, found.owner) == ("removed", "m")
    assert list(shm.iterdir()) == []


def test_a_version_that_a_crash_left_goes_when_the_next_one_is_loaded(shm, path):
    with holders(2, shm, path) as (first, second):
        first.ask("acquire", "m")
        first.kill()
        [old] = regions(shm)
        write_weights(path, [(name, value + np.ones((), value.dtype)) for name, value in TENSORS.items()])
        assert second.ask("acquire", "m")["filled"] == 1
        assert len(regions(shm)) == 1
        assert regions(shm) != [old]


def test_a_size_limit_of_the_system_makes_the_copy_private_and_kills_nobody(shm, path):
    with holders(2, shm, path) as (limited, other):
        limited.ask("limit", 100_000)
        assert limited.ask("acquire", "m") == {"filled": 1, "shared": False, "sums": SUMS}
        assert regions(shm) == []
        assert other.ask("acquire", "m")["shared"]
        limited.ask("release")
        assert limited.ask("acquire", "m") == {"filled": 0, "shared": True, "sums": SUMS}


def test_workers_that_come_and_go_all_the_time_always_see_whole_weights(shm, path):
    with holders(3, shm, path) as workers:
        for worker in workers:
            worker.tell("churn", 60)
        swept = [found.outcome for _ in range(100) for found in sweep_unheld(shm)]
        answers = [worker.hear() for worker in workers]
    for answer in answers:
        assert (answer["wrong"], answer["private"], answer["sums"]) == (0, 0, SUMS)
    assert set(swept) <= {"held", "removed"}
    assert regions(shm) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_of_the_same_group_shares_the_region_and_gives_its_memory_back(path):
    with TemporaryDirectory() as name:
        shm, file = Path(name) / "shm", Path(name) / "w.safetensors"
        shm.mkdir()
        file.write_bytes(path.read_bytes())
        for entry, mode in ((shm, 0o1777), (file, 0o644), (shm.parent, 0o755)):
            entry.chmod(mode)
        with holders(2, shm, file) as (ours, theirs):
            theirs.ask("become", 12345)
            assert ours.ask("acquire", "m")["filled"] == 1
            assert theirs.ask("acquire", "m") == {"filled": 0, "shared": True, "sums": SUMS}
            [region] = regions(shm)
            assert (shm / region).stat().st_mode & 0o777 == 0o440
            ours.ask("release")
            assert (shm / region).stat().st_mode & 0o777 == 0o660  # handed over
            assert (shm / region).stat().st_size > sum(value.nbytes for value in TENSORS.values())
            theirs.ask("release")
            # The sticky bit keeps the name for its owner; the bytes are gone.
            assert (shm / region).stat().st_size == 0
            assert ours.ask("acquire", "m") == {"filled": 1, "shared": True, "sums": SUMS}
