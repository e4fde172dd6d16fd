"""Host copies in shared memory: who makes a region, who attaches, who removes it, and when a copy is private instead.

Locks belong to open files, not to processes, so two stores of this process are two workers to each other.
"""

import errno
import logging
import os
import stat
import threading
import time

import numpy as np
import pytest
from store_support import TENSORS, acquired, assert_right, region, regions, written
from support.weight_files import Filler, source

from rsrv.bundle.safetensors import write_weights
from rsrv.core.errors import ServerStopping, WeightsError
from rsrv.serve.residency import janitor
from rsrv.serve.residency import shared_store as module
from rsrv.serve.residency.regions import RegionHeader, RegionLock, digest_of
from rsrv.serve.residency.shared_store import SharedWeightStore, patience_seconds

WAIT_SECONDS = 60


def header_of(path):
    with open(path, "rb") as opened:
        return RegionHeader.read(opened.fileno())


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def leave_behind(shm, file, name="m", **changes):
    """A region and its lock file as a crash leaves them: nobody holds them. The path of the region."""
    before = regions(shm)
    copy, _ = acquired(shm, file, name)
    [new] = set(regions(shm)) - set(before)
    path = shm / new
    data = bytearray(path.read_bytes())
    copy.release()
    for offset, value in changes.get("bytes_at", {}).items():
        data[offset : offset + len(value)] = value
    path.write_bytes(data[: changes.get("length")])
    path.chmod(changes.get("mode", 0o440))
    RegionLock(path.with_name(path.name + ".lock"), 0o660).close()
    return path


# --- attaching and releasing --------------------------------------------------------------------------------------


def test_the_second_worker_attaches_without_filling(shm, file):
    first, filled = acquired(shm, file)
    second, filled_again = acquired(shm, file)
    assert (filled, filled_again) == (1, 0)
    assert first.shared
    assert second.shared
    assert first.nbytes == second.nbytes == sum(value.nbytes for value in TENSORS.values())
    for copy in (first, second):
        assert_right(copy)
    assert len(regions(shm)) == 1
    first.release()
    assert_right(second)
    second.release()


def test_a_region_says_what_it_is(shm, file):
    before = time.time_ns()
    copy, _ = acquired(shm, file, "net")
    header = header_of(region(shm))
    assert header.ready
    assert header.digest == digest_of(region(shm).name)
    assert (header.nbytes, header.n_tensors, header.model) == (region(shm).stat().st_size, 4, b"net")
    assert before <= header.created_ns <= time.time_ns()
    copy.release()


def test_the_last_holder_removes_the_region_and_its_lock_file(shm, file):
    first, second = acquired(shm, file)[0], acquired(shm, file)[0]
    path = region(shm)
    first.release()
    assert path.exists()
    second.release()
    second.release()
    assert [*shm.iterdir()] == []
    third, _ = acquired(shm, file)
    assert region(shm) == path
    third.release()
    assert [*shm.iterdir()] == []


def test_permissions_are_exactly_the_wanted_ones_whatever_the_umask_is(shm, file):
    before = os.umask(0o077)
    try:
        copy, _ = acquired(shm, file, mode=0o664)
    finally:
        os.umask(before)
    # Who may write the region could truncate it, and that ends everybody that has it mapped.
    assert mode_of(region(shm)) == 0o444
    assert mode_of(region(shm).with_name(region(shm).name + ".lock")) == 0o664
    copy.release()


def test_a_region_can_be_written_by_nobody_from_its_first_moment_on(shm, file):
    seen = []
    copy, _ = acquired(shm, file, before=lambda: seen.append(mode_of(region(shm))))
    assert seen == [0o440]
    copy.release()


def test_a_region_stays_read_only_while_workers_of_its_user_come_and_go(shm, file):
    copies = [acquired(shm, file)[0] for _ in range(3)]
    for copy in copies[:2]:
        copy.release()
        assert mode_of(region(shm)) == 0o440
    assert_right(copies[2])
    copies[2].release()
    assert regions(shm) == []


def test_a_region_that_is_still_looked_at_stays_locked(shm, file):
    copy, _ = acquired(shm, file)
    array = copy.arrays[1]
    with pytest.raises(BufferError):
        copy.release()
    assert not RegionLock(region(shm).with_name(region(shm).name + ".lock"), 0o660).exclude()
    np.testing.assert_array_equal(array, TENSORS["w"])
    del array
    copy.release()
    assert regions(shm) == []


def test_a_file_without_bytes_needs_no_region(shm, tmp_path):
    write_weights(tmp_path / "none", [("empty", np.zeros((0, 3), np.int8))])
    copy, _ = acquired(shm, source(tmp_path / "none"))
    assert [array.shape for array in copy.arrays] == [(0, 3)]
    assert not copy.shared
    copy.release()
    assert list(shm.iterdir()) == []


# --- what crashes leave -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"bytes_at": {4: bytes(4)}},
        {"bytes_at": {0: b"RSV2"}},
        {"bytes_at": {8: bytes(8)}},
        {"bytes_at": {16: bytes(8)}},
        {"bytes_at": {24: bytes(4)}},
        {"length": 0},
        {"length": 300},
        {"mode": 0o666},
    ],
    ids=["not ready", "other magic", "other digest", "other size", "other count", "empty", "truncated", "writable"],
)
def test_a_region_that_cannot_be_used_is_made_anew_when_nobody_holds_it(shm, file, changes):
    path = leave_behind(shm, file, **changes)
    inode = path.stat().st_ino
    with open(path, "rb"):  # keeps the inode from being used again
        copy, filled = acquired(shm, file)
        assert filled == 1
        assert copy.shared
        assert path.stat().st_ino != inode
        assert mode_of(path) == 0o440
        assert header_of(path).ready
        assert_right(copy)
        copy.release()


def test_a_complete_region_of_a_crashed_holder_is_used_again(shm, file):
    leave_behind(shm, file)
    copy, filled = acquired(shm, file)
    assert filled == 0
    assert_right(copy)
    copy.release()


def test_an_unusable_region_that_others_hold_is_left_to_them(shm, file, caplog):
    path = leave_behind(shm, file, mode=0o666)
    theirs = SharedWeightStore(0o666, shm).acquire("m", file, Filler(file))
    copy, filled = acquired(shm, file)
    assert (copy.shared, filled) == (False, 1)
    assert "has mode 666, wanted 660" in caplog.text
    assert_right(copy)
    copy.release()
    assert path.exists()
    theirs.release()


def test_old_versions_of_a_model_that_nobody_holds_are_swept(shm, tmp_path, file):
    renamed = {64: b"a-b".ljust(192, b"\0")}
    old = leave_behind(shm, written(tmp_path / "old", scale=2), "1", bytes_at=renamed)
    unready = leave_behind(shm, written(tmp_path / "unready", scale=3), "2", bytes_at={4: bytes(4), **renamed})
    other = leave_behind(shm, written(tmp_path / "other", scale=4), "a_b")
    in_use, _ = acquired(shm, written(tmp_path / "in use", scale=5), "a-b")
    assert not old.exists()
    assert not unready.exists()
    assert old.with_name(old.name + ".lock").exists()

    copy, _ = acquired(shm, file, "a-b")
    assert sorted(header_of(shm / name).model for name in regions(shm)) == [b"a-b", b"a-b", b"a_b"]
    assert_right(in_use, scale=5)
    in_use.release()
    copy.release()
    assert regions(shm) == [other.name]


def test_a_sweep_that_fails_does_not_matter(shm, tmp_path, file, monkeypatch):
    old = leave_behind(shm, written(tmp_path / "old", scale=2), "m")

    def refuse(path):
        raise PermissionError(errno.EPERM, "not yours")

    monkeypatch.setattr(janitor, "remove_region", refuse)
    copy, _ = acquired(shm, file)
    assert_right(copy)
    copy.release()
    assert regions(shm) == [old.name]


# --- no room, no permission ---------------------------------------------------------------------------------------


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def little_room(directory):
    space = list(STATVFS(directory))
    space[4] = 0  # f_bavail
    return os.statvfs_result(space)


STATVFS = os.statvfs


@pytest.mark.parametrize(("function", "replacement"), [("posix_fallocate", full), ("statvfs", little_room)])
def test_without_room_the_copy_is_private_and_that_is_said_once(shm, file, monkeypatch, caplog, function, replacement):
    monkeypatch.setattr(module.os, function, replacement)
    store = SharedWeightStore(0o660, shm)
    assert store.sharing
    copies = [store.acquire(name, file, Filler(file)) for name in ("one", "two")]
    for copy in copies:
        assert not copy.shared
        assert_right(copy)
        copy.release()
    assert not store.sharing
    assert regions(shm) == []
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "model=one" in record.getMessage()
    assert str(shm) in record.getMessage()


def test_a_file_system_without_a_limit_has_room(shm, file, monkeypatch):
    monkeypatch.setattr(module.os, "statvfs", lambda _: os.statvfs_result((4096, 4096, *[0] * 8)))
    copy, _ = acquired(shm, file)
    assert copy.shared
    copy.release()


def test_room_that_ends_during_the_fill_leaves_no_remnant(shm, file):
    fill = Filler(file, error=OSError(errno.ENOSPC, "no space"))
    with pytest.raises(OSError, match="no space"):  # asked again for the private copy, it fails there, too
        SharedWeightStore(0o660, shm).acquire("m", file, fill)
    assert fill.calls == 2
    assert regions(shm) == []


@pytest.mark.parametrize("error", [WeightsError("changed on disk"), OSError(errno.EIO, "bad disk")])
def test_a_fill_that_fails_raises_its_error_and_leaves_no_region_and_no_lock(shm, file, error):
    with pytest.raises(type(error), match=r"changed on disk|bad disk"):
        acquired(shm, file, error=error)
    assert regions(shm) == []
    copy, filled = acquired(shm, file)
    assert (copy.shared, filled) == (True, 1)
    copy.release()


def test_a_fill_that_keeps_a_view_leaves_no_region(shm, file):
    kept = []
    with pytest.raises(BufferError):
        SharedWeightStore(0o660, shm).acquire("m", file, lambda views: kept.append(np.frombuffer(views[1], np.uint8)))
    assert regions(shm) == []


def test_without_the_directory_the_copy_is_private(shm, file, caplog):
    copy, _ = acquired(shm / "none", file)
    assert not copy.shared
    assert "No such file or directory" in caplog.text
    copy.release()


@pytest.mark.parametrize("suffix", ["", ".lock"])
@pytest.mark.parametrize("kind", ["link", "directory", "fifo"])
def test_what_is_no_regular_file_is_neither_used_nor_followed(shm, tmp_path, file, caplog, suffix, kind):
    path = leave_behind(shm, file)
    path = path.with_name(path.name + suffix)
    path.unlink()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    {"link": lambda: path.symlink_to(victim), "directory": path.mkdir, "fifo": lambda: os.mkfifo(path)}[kind]()
    copy, _ = acquired(shm, file)
    assert not copy.shared
    assert_right(copy)
    copy.release()
    assert len(caplog.records) == 1
    assert victim.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("suffix", ["", ".lock"])
def test_objects_of_strangers_are_not_trusted(shm, file, suffix):
    path = leave_behind(shm, file)
    os.chown(path.with_name(path.name + suffix), 12345, 12345)
    copy, filled = acquired(shm, file)
    assert filled == 1  # a region of theirs is made anew, with a lock of theirs nothing is shared
    assert copy.shared is (suffix == "")
    copy.release()
    if suffix:
        os.chown(path.with_name(path.name + suffix), 12345, os.getegid())
        copy, filled = acquired(shm, file)
        assert copy.shared  # the mode lets this group write
        copy.release()


# --- waiting for others -------------------------------------------------------------------------------------------


@pytest.fixture
def creating(shm, file):
    """Somebody has the exclusive lock of the region."""
    copy, _ = acquired(shm, file)
    path = region(shm)
    copy.release()
    with RegionLock(path.with_name(path.name + ".lock"), 0o660) as lock:
        assert lock.exclude()
        yield lock


def test_a_creator_that_hangs_is_waited_for_once(shm, file, creating, caplog):
    ticks = iter(range(0, 100_000, 50))
    reads = []

    def clock():
        reads.append(None)
        return next(ticks)

    asked = []

    def patience(nbytes):
        asked.append(nbytes)
        return 120.0

    store = SharedWeightStore(0o660, shm, patience=patience, clock=clock)
    store.sharing = False  # something else was warned of before
    copy = store.acquire("m", file, Filler(file))
    assert not copy.shared
    assert_right(copy)
    assert len(reads) == 4  # at 0, 50, 100 and 150 seconds
    assert all(nbytes > copy.nbytes for nbytes in asked)
    copy.release()
    store.acquire("m", file, Filler(file)).release()
    assert len(reads) == 6
    [warning] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    for part in ("model=m ", "did not get done", "in 120 s", f"fuser -v {creating.path}", "shares again"):
        assert part in warning
    creating.close()
    copy = store.acquire("m", file, Filler(file))
    assert copy.shared
    copy.release()


def test_a_creator_may_take_a_few_seconds_and_the_time_of_a_slow_disk_up_to_two_minutes():
    assert patience_seconds(0) == 5
    assert patience_seconds(100_000_000) == 10
    assert patience_seconds(2_000_000_000) == 105
    assert patience_seconds(100_000_000_000) == 120


def test_closing_the_store_ends_the_waiting(shm, file, creating):
    store = SharedWeightStore(0o660, shm, patience=lambda nbytes: 10 * WAIT_SECONDS)
    errors = []

    def acquire():
        try:
            store.acquire("m", file, Filler(file))
        except ServerStopping as error:
            errors.append(error)

    thread = threading.Thread(target=acquire)
    thread.start()
    store.close()
    thread.join(WAIT_SECONDS)
    assert len(errors) == 1


def test_a_lock_file_that_was_removed_meanwhile_is_not_relied_on(shm, file, creating):
    creating.path.unlink()
    copy, filled = acquired(shm, file)
    assert (copy.shared, filled) == (True, 1)
    copy.release()
    assert regions(shm) == []


def test_a_region_that_vanishes_between_creation_and_attaching_is_made_again(shm, file, monkeypatch):
    create = SharedWeightStore._create
    vanished = []

    def create_and_vanish(self, wanted, fill):
        create(self, wanted, fill)
        if not vanished:
            vanished.append(wanted.path.unlink())

    monkeypatch.setattr(SharedWeightStore, "_create", create_and_vanish)
    copy, filled = acquired(shm, file)
    assert filled == 2
    assert copy.shared
    assert_right(copy)
    copy.release()
    assert regions(shm) == []


def test_the_memory_of_a_region_is_reserved_before_anything_is_written(shm, tmp_path):
    write_weights(tmp_path / "w", [("w", np.ones(1 << 20, np.float32))])
    file = source(tmp_path / "w")
    seen = []

    def fill(views):
        seen.append(os.stat(region(shm)).st_blocks * 512)
        views[0][:] = bytes(4 << 20)

    copy = SharedWeightStore(0o660, shm).acquire("m", file, fill)
    assert seen[0] >= 4 << 20
    copy.release()


def test_a_region_is_mapped_for_reading_only(shm, file):
    copy, _ = acquired(shm, file)
    address = copy.arrays[1].ctypes.data
    with open("/proc/self/maps") as maps:
        rights = [
            line.split()[1]
            for line in maps
            if int(line.split("-")[0], 16) <= address < int(line.split()[0].split("-")[1], 16)
        ]
    assert rights == ["r--s"]
    copy.release()
