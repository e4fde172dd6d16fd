"""Which weights files share a region of shared memory: those with the same bytes, and no others, alike as they look."""

import dataclasses
import os
import time

import pytest
from store_support import acquired, assert_right, regions, written
from support.weight_files import source

from rsrv.serve.residency.shared_store import SharedWeightStore


def test_a_new_version_of_the_file_never_uses_the_region_of_the_old_one(shm, tmp_path, file):
    old, _ = acquired(shm, file)
    new, filled = acquired(shm, written(tmp_path / "w.safetensors", scale=2))
    assert filled == 1
    assert len(regions(shm)) == 2
    assert_right(old)
    assert_right(new, scale=2)
    old.release()
    assert len(regions(shm)) == 1
    new.release()


def test_files_of_other_bytes_that_look_alike_on_two_file_systems_do_not_share(shm, tmp_path, file):
    other = written(tmp_path / "other", scale=2)
    other.token = file.token  # as after `cp -a`, and even changed in the same nanosecond
    mine, theirs = acquired(shm, file), acquired(shm, other)
    assert (mine[1], theirs[1]) == (1, 1)
    assert_right(mine[0])
    assert_right(theirs[0], scale=2)
    mine[0].release()
    theirs[0].release()


def test_files_that_declare_no_digests_are_told_apart_by_the_time_of_their_last_change(shm, tmp_path, file):
    other = written(tmp_path / "other", scale=2)
    for number, each in enumerate((file, other), 1):
        each.header = dataclasses.replace(each.header, tensor_digests={})
        each.token = dataclasses.replace(file.token, ctime_ns=number)
    mine, theirs = acquired(shm, file), acquired(shm, other)
    assert (mine[1], theirs[1]) == (1, 1)
    assert_right(mine[0])
    assert_right(theirs[0], scale=2)
    mine[0].release()
    theirs[0].release()


def test_a_file_rewritten_in_place_with_its_old_mtime_does_not_get_the_old_region(shm, file):
    before = os.stat(file.path)
    old, _ = acquired(shm, source(file.path, ctime_ns=before.st_ctime_ns))
    begin = file.header.data_offset
    data = (file.path.read_bytes()[begin:], written(file.path.with_name("other"), scale=2).path.read_bytes()[begin:])
    with open(file.path, "r+b") as opened:  # the header stays, and with it the digests that it declares
        opened.seek(begin)
        opened.write(data[1])
    os.utime(file.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = os.stat(file.path)
    rewritten = source(file.path, ctime_ns=after.st_ctime_ns)
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    assert rewritten.header == file.header
    assert data[0] != data[1]
    new, filled = acquired(shm, rewritten)
    assert filled == 1
    assert_right(old)
    assert_right(new, scale=2)
    old.release()
    new.release()


def test_models_with_one_file_share_its_region_and_a_renamed_model_keeps_it(shm, file):
    store = SharedWeightStore(0o660, shm)
    old, _ = acquired(shm, file, "old name")
    renamed = store.acquire("new name", file, lambda views: pytest.fail("the region is there"))
    old.release()
    assert_right(renamed)
    renamed.release()
    assert regions(shm) == []


def test_a_file_of_this_moment_is_shared_a_moment_later(shm, tmp_path, file):
    file = source(file.path, ctime_ns=time.time_ns())
    asked = []
    copy, _ = acquired(shm, file, before=lambda: asked.append(file.token.is_settled(time.time_ns())))
    assert copy.shared
    assert asked == [True]
    copy.release()


def test_a_file_of_the_future_is_not_shared(shm, file, caplog):
    copy, _ = acquired(shm, source(file.path, ctime_ns=time.time_ns() + 10**12))
    assert not copy.shared
    assert "changed in the future" in caplog.text
    copy.release()
    assert regions(shm) == []
