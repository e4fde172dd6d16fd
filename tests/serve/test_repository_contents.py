"""Hashes: whether a file that seems to have changed really has, and that nothing is hashed twice."""

import os
import threading

import pytest
from repository_support import WAIT_SECONDS, Site, write_bundle

from rsrv.serve.repository import contents as contents_module
from rsrv.serve.repository.contents import PART_BYTES, Contents
from rsrv.serve.repository.snapshot import scan

LARGE = bytes(3 * PART_BYTES + 5)


@pytest.fixture
def hashed(monkeypatch):
    """The sizes of the parts that were hashed, in their order."""
    sizes, sha256 = [], contents_module.hashlib.sha256

    def count(data):
        sizes.append(len(data))
        return sha256(data)

    monkeypatch.setattr(contents_module.hashlib, "sha256", count)
    return sizes


@pytest.fixture
def contents():
    started = Contents()
    started.start()
    yield started
    started.stop()


def learnt(contents, found):
    """Wait until all of `found` is hashed."""
    contents.learn(found)
    pause = threading.Event()
    for _ in range(100 * WAIT_SECONDS):
        if contents.knows(found):
            return found
        pause.wait(0.01)
    raise AssertionError("not hashed")


def look(repo):
    return scan([repo])["a"]


def touch(file):
    status = os.stat(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))


def test_a_touched_file_is_the_same_and_one_with_other_bytes_differs(tmp_path, contents):
    write_bundle(tmp_path / "a", weights=b"12345")
    served = learnt(contents, look(tmp_path))
    touch(tmp_path / "a" / "weights.safetensors")
    assert contents.differ(served, look(tmp_path)) is False
    (tmp_path / "a" / "weights.safetensors").write_bytes(b"12346")
    assert contents.differ(served, look(tmp_path)) is True


def test_a_file_whose_mtime_went_back_is_looked_into(tmp_path, contents):
    file = write_bundle(tmp_path / "a", weights=b"12345") / "weights.safetensors"
    served = learnt(contents, look(tmp_path))
    file.write_bytes(b"54321")
    os.utime(file, ns=(0, 0))
    assert contents.differ(served, look(tmp_path)) is True


def test_another_size_or_another_set_of_files_differs_without_reading(tmp_path, contents, hashed):
    directory = write_bundle(tmp_path / "a")
    served = learnt(contents, look(tmp_path))
    hashed.clear()
    (directory / "weights.safetensors").write_bytes(b"longer than before")
    assert contents.differ(served, look(tmp_path)) is True
    (directory / "vocab.txt").write_bytes(b"")
    assert contents.differ(served, look(tmp_path)) is True
    assert hashed == []


def test_of_a_large_file_one_part_is_read_before_it_is_told_that_it_differs(tmp_path, contents, hashed):
    directory = write_bundle(tmp_path / "a", weights=LARGE)
    served = learnt(contents, look(tmp_path))
    hashed.clear()
    (directory / "weights.safetensors").write_bytes(b"x" + LARGE[1:])
    assert contents.differ(served, look(tmp_path)) is True
    assert hashed == [PART_BYTES]


@pytest.mark.parametrize("last", [b"\0", b"x"], ids=["touched", "changed at the end"])
def test_what_takes_long_to_tell_is_told_on_the_other_thread(tmp_path, contents, last):
    directory = write_bundle(tmp_path / "a", weights=LARGE)
    served = learnt(contents, look(tmp_path))
    (directory / "weights.safetensors").write_bytes(LARGE[:-1] + last)
    now, told, done = look(tmp_path), [], threading.Event()
    assert contents.differ(served, now) is None
    contents.compare(served, now, lambda differs: (told.append(differs), done.set()))
    assert done.wait(WAIT_SECONDS)
    assert told == [last == b"x"]


def test_every_version_of_a_file_is_hashed_once(tmp_path, contents, hashed):
    directory = write_bundle(tmp_path / "a", weights=LARGE)
    served = learnt(contents, look(tmp_path))
    sizes = sorted(file.size for file in served.files.values() if file.size < PART_BYTES)
    assert sorted(hashed) == sorted([*sizes, PART_BYTES, PART_BYTES, PART_BYTES, 5])
    hashed.clear()
    learnt(contents, served)
    directory.rename(tmp_path / "b")
    (tmp_path / "b").rename(directory)
    learnt(contents, look(tmp_path))
    assert hashed == []


def test_a_version_that_was_found_to_be_the_same_is_not_hashed_again(tmp_path, contents, hashed):
    directory = write_bundle(tmp_path / "a", weights=LARGE)
    served = learnt(contents, look(tmp_path))
    touch(directory / "weights.safetensors")
    now, done = look(tmp_path), threading.Event()
    contents.compare(served, now, lambda differs: done.set())
    assert done.wait(WAIT_SECONDS)
    hashed.clear()
    learnt(contents, now)
    assert contents.differ(served, now) is False
    assert hashed == []


def test_what_was_never_hashed_differs(tmp_path):
    write_bundle(tmp_path / "a")
    served = look(tmp_path)
    touch(tmp_path / "a" / "manifest.yaml")
    assert Contents().differ(served, look(tmp_path)) is True


def test_a_file_that_changes_before_it_is_hashed_is_not_taken_for_what_is_served(tmp_path, contents):
    directory = write_bundle(tmp_path / "a", weights=b"served")
    served = look(tmp_path)
    (directory / "weights.safetensors").write_bytes(b"edited")
    contents.learn(served)
    learnt(contents, scan([write_bundle(tmp_path / "other" / "b", weights=bytes(100)).parent])["b"])
    assert contents.differ(served, look(tmp_path)) is True
    assert not contents.knows(served)


def test_a_file_that_vanishes_or_becomes_a_fifo_differs_and_nothing_blocks(tmp_path, contents):
    directory = write_bundle(tmp_path / "a", weights=b"12345")
    served = learnt(contents, look(tmp_path))
    file = directory / "weights.safetensors"
    touch(file)
    now = look(tmp_path)
    file.unlink()
    assert contents.differ(served, now) is True
    os.mkfifo(file)
    assert contents.differ(served, now) is True


def test_an_empty_file_is_a_file(tmp_path, contents):
    directory = write_bundle(tmp_path / "a", weights=b"")
    served = learnt(contents, look(tmp_path))
    touch(directory / "weights.safetensors")
    assert contents.differ(served, look(tmp_path)) is False


def test_digests_of_what_is_not_served_any_more_are_forgotten(tmp_path):
    write_bundle(tmp_path / "a")
    site = Site(tmp_path).seed()
    served = look(tmp_path)
    assert site.follower.contents.knows(served)
    (tmp_path / "a").rename(tmp_path / ".a")
    assert site.settle() == ["unload a"]
    site.look()
    assert not site.follower.contents.knows(served)


def test_the_thread_ends_in_the_middle_of_a_file(tmp_path, monkeypatch):
    write_bundle(tmp_path / "a", weights=LARGE)
    contents, began = Contents(), threading.Event()
    digest = contents_module.hashlib.sha256

    def slow(data):
        began.set()
        return digest(data)

    monkeypatch.setattr(contents_module.hashlib, "sha256", slow)
    contents.start()
    contents.learn(look(tmp_path))
    assert began.wait(WAIT_SECONDS)
    contents.stop()
    contents.stop()
    assert not any(thread.name.startswith("rsrv-watch") for thread in threading.enumerate())


def test_a_thread_that_gets_no_processor_holds_up_no_stop(monkeypatch):
    monkeypatch.setattr("rsrv.core.niceness._LEFT_BEHIND_SECONDS", 0.01)
    scheduled = threading.Event()
    monkeypatch.setattr(contents_module, "give_way", scheduled.wait)
    contents = Contents()
    contents.start()
    contents.stop()
    left = [thread for thread in threading.enumerate() if thread.name == "rsrv-watch-hash"]
    assert len(left) == 1
    scheduled.set()
    left[0].join(WAIT_SECONDS)
    assert not left[0].is_alive()
