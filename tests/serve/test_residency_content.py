"""A weights file that is touched, edited, truncated, moved or replaced while its model serves."""

import json
import os
import time
from functools import partial

import numpy as np
import pytest
from safetensors.numpy import save_file

from rsrv.bundle.safetensors import read_header, write_weights
from rsrv.core.errors import WeightsError
from rsrv.runtime.fake import FakeDevice
from rsrv.serve.residency import content
from rsrv.serve.residency.content import ContentToken, open_weights
from rsrv.serve.residency.host_pool import PooledWeightStore
from rsrv.serve.residency.reading import fill_views
from rsrv.serve.residency.store import PrivateWeightStore
from rsrv.serve.residency.tensors import TensorPool

OLD = {"w": np.arange(1 << 15, dtype=np.float32), "b": np.arange(7, dtype=np.float32)}
NEW = {name: array + 1 for name, array in OLD.items()}


def later():
    """Unix time at which all files here have been left alone for a while."""
    return time.time_ns() + 10**10


@pytest.fixture
def path(tmp_path):
    (tmp_path / "m").mkdir()
    path = tmp_path / "m" / "weights.safetensors"
    write_weights(path, list(OLD.items()))
    # Long ago, so that no change is hidden by the resolution of the clock.
    os.utime(path, ns=(10**18, 10**18))
    return path


@pytest.fixture(params=[False, True], ids=["read", "mapped"])
def pool(request):
    return TensorPool(FakeDevice(), map_weights=request.param)


def values(pool, file):
    weights = pool.load(file)
    try:
        return {
            name: np.array(buffer.array)
            for name, buffer in zip(file.header.argument_order, weights.buffers, strict=True)
        }
    finally:
        weights.free()
        assert pool.resident_bytes == pool.device.live_bytes == 0


def assert_old(pool, file):
    found = values(pool, file)
    for name, array in OLD.items():
        assert np.array_equal(found[name], array)


def rewrite(path, arrays, *, keep_times=False):
    """In place, as ``cp`` does; with `keep_times` as ``rsync --inplace -t`` does when it has bad luck."""
    status = path.stat()
    staged = path.with_name("staged")
    write_weights(staged, list(arrays.items()))
    data = staged.read_bytes()
    staged.unlink()
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()
    if keep_times:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_file_that_was_replaced_by_another_one_still_serves_the_old_version(path, pool):
    file = open_weights(path, clock=later)
    staged = path.with_name("staged")
    write_weights(staged, list(NEW.items()))
    os.replace(staged, path)
    assert_old(pool, file)
    assert_old(pool, file)
    assert np.array_equal(values(pool, open_weights(path))["w"], NEW["w"])


def test_a_file_whose_directory_was_renamed_or_removed_still_serves(path, pool):
    file = open_weights(path, clock=later)
    path.parent.rename(path.parent.with_name("m-old"))
    assert_old(pool, file)
    path.parent.with_name("m-old").joinpath(path.name).unlink()
    assert_old(pool, file)


def test_a_file_that_was_only_touched_still_serves(path, pool):
    file = open_weights(path, clock=later)
    before = file.token
    os.utime(path)
    assert_old(pool, file)
    assert file.token == ContentToken.of(path.stat()) != before
    path.chmod(0o600)
    assert_old(pool, file)
    os.link(path, path.with_name("backup"))
    assert_old(pool, file)


@pytest.mark.parametrize("keep_times", [False, True])
def test_a_file_that_was_rewritten_in_place_is_refused_until_it_is_opened_anew(path, pool, keep_times):
    file = open_weights(path, clock=later)
    resident = TensorPool(FakeDevice()).load(file)
    rewrite(path, NEW, keep_times=keep_times)
    for _ in range(2):
        with pytest.raises(WeightsError, match=r"weights\.safetensors changed on disk .* refused until"):
            pool.load(file)
        assert pool.resident_bytes == pool.device.live_bytes == 0
    # What was there before stays as it was, and the new version is what a reload finds.
    assert np.array_equal(resident.buffers[0].array, OLD["w"])
    resident.free()
    assert np.array_equal(values(pool, open_weights(path))["w"], NEW["w"])


def test_an_edit_of_a_few_bytes_is_found_although_size_and_header_stay(path, pool):
    file = open_weights(path, clock=later)
    with path.open("r+b") as written:
        written.seek(file.header.data_offset + 400)
        written.write(b"\xff\xff")
    os.utime(path, ns=(10**18, 10**18))
    with pytest.raises(WeightsError, match="changed on disk"):
        pool.load(file)


@pytest.mark.parametrize("size", [0, 100, -4])
def test_a_file_that_was_truncated_while_it_served_is_refused_and_crashes_nothing(path, pool, size):
    file = open_weights(path, clock=later)
    resident = TensorPool(FakeDevice()).load(file)
    os.truncate(path, size if size >= 0 else file.token.size + size)
    with pytest.raises(WeightsError, match=rf"it has \d+ bytes, not {file.token.size}"):
        pool.load(file)
    assert np.array_equal(resident.buffers[0].array, OLD["w"])
    resident.free()


@pytest.mark.parametrize("rename", [os.link, os.rename, lambda path, other: path.unlink()], ids=["link", "move", "rm"])
def test_a_rewrite_is_found_although_times_and_size_are_the_old_ones_and_names_came_or_went(path, pool, rename):
    file = open_weights(path, clock=later)
    assert_old(pool, file)
    edit(path, file, "w")
    rename(path, path.with_name("other"))
    for _ in range(2):
        with pytest.raises(
            WeightsError, match=r"tensor 'w' is not the same; .* refused until the model is loaded again"
        ):
            pool.load(file)
        assert pool.resident_bytes == pool.device.live_bytes == 0


@pytest.mark.parametrize("declared", [(), ("w",)])
def test_what_the_first_load_found_stands_in_for_digests_that_nobody_declared(path, pool, declared):
    undeclare(path, *declared)
    before = path.read_bytes()
    file = open_weights(path, clock=later)
    assert_old(pool, file)
    path.chmod(0o600)
    assert_old(pool, file)
    os.utime(path)
    assert_old(pool, file)
    os.link(path, path.with_name("backup"))
    assert_old(pool, file)
    edit(path, file, "b")
    path.unlink()
    for _ in range(2):
        with pytest.raises(WeightsError, match="tensor 'b' is not the same"):
            pool.load(file)
    # The right bytes are right whenever they came.
    path.with_name("backup").write_bytes(before)
    assert_old(pool, file)


def edit(path, file, name):
    """Change the first byte of a tensor and leave no trace in the times that can be set."""
    status = path.stat()
    with path.open("r+b") as written:
        written.seek(file.header.data_offset + file.header.tensors[name].begin)
        [byte] = written.read(1)
        written.seek(-1, os.SEEK_CUR)
        written.write(bytes([byte ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def undeclare(path, *kept):
    """Let the file declare digests of these tensors alone."""
    header = read_header(path)
    metadata = {
        "argument_order": json.dumps(header.argument_order),
        "tensor_digests": json.dumps({name: header.tensor_digests[name] for name in kept}),
    }
    save_file(OLD, path, metadata=metadata)
    os.utime(path, ns=(10**18, 10**18))


def test_a_file_without_digests_that_was_touched_before_its_first_load_cannot_be_proved_to_be_the_same(path, pool):
    undeclare(path)
    file = open_weights(path, clock=later)
    path.chmod(0o600)
    with pytest.raises(WeightsError, match="not loaded before, so its tensors cannot be proved"):
        pool.load(file)


@pytest.mark.parametrize("hosts", [None, PrivateWeightStore, PooledWeightStore])
def test_a_column_major_file_is_proved_by_what_it_was_when_it_was_loaded_first(path, hosts):
    matrix = np.random.default_rng(3).standard_normal((300, 70)).astype(np.float32)
    write_weights(path, [("w", matrix)])
    file = open_weights(path, column_major=True, clock=later)
    device = FakeDevice(unified=hosts is None)
    pool, store = TensorPool(device), hosts and hosts()

    def load():
        host = store and pool.host_copy(store, "m", file)
        weights = pool.load(file, host)
        try:
            return np.array(weights.buffers[0].array)
        finally:
            weights.free()
            if host:
                host.release()

    for change in (lambda: None, lambda: path.chmod(0o600), lambda: os.link(path, path.with_name("backup"))):
        change()
        assert np.array_equal(load(), matrix.T)
    edit(path, file, "w")
    path.unlink()
    with pytest.raises(WeightsError, match="tensor 'w' is not the same"):
        load()


def test_a_copy_that_another_worker_made_proves_later_loads(path):
    undeclare(path)
    file = open_weights(path, clock=later)
    pool, store = TensorPool(FakeDevice()), PrivateWeightStore()
    copy = store.acquire("m", file, partial(fill_views, open_weights(path), lambda: None))

    class Attached(PrivateWeightStore):
        def acquire(self, name, file, fill):
            return copy

    pool.host_copy(Attached(), "m", file).release()
    path.chmod(0o600)
    assert_old(pool, file)
    pool.host_copy(store, "m", file).release()


def test_a_digest_is_taken_once(path, monkeypatch):
    undeclare(path)
    hashed = []
    monkeypatch.setattr(content, "_sha256", lambda array, check: hashed.append(array.nbytes) or str(array.nbytes))
    file = open_weights(path, clock=later)
    pool = TensorPool(FakeDevice())
    for _ in range(3):
        assert_old(pool, file)
    assert sorted(hashed) == [OLD["b"].nbytes, OLD["w"].nbytes]


def test_a_file_that_is_replaced_while_it_is_read_gives_the_old_version(path, monkeypatch):
    during_a_read(monkeypatch, lambda: os.replace(path, path.with_name("old")))
    pool = TensorPool(FakeDevice())
    assert_old(pool, open_weights(path, clock=later))
    during_a_read(monkeypatch, lambda: path.with_name("old").unlink())
    assert_old(pool, open_weights(path.with_name("old"), clock=later))


def test_a_file_that_is_rewritten_while_it_is_read_is_refused_and_nothing_is_kept(path, monkeypatch):
    during_a_read(monkeypatch, lambda: rewrite(path, NEW, keep_times=True))
    device = FakeDevice()
    with pytest.raises(WeightsError, match="changed on disk"):
        TensorPool(device).load(open_weights(path, clock=later))
    assert device.live_buffers == 0


def during_a_read(monkeypatch, change):
    preadv = os.preadv
    pending = [change]

    def read(fd, buffers, offset):
        if pending:
            pending.pop()()
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)


def test_a_file_that_changes_while_its_header_is_read_is_refused(path, monkeypatch):
    pread = os.pread

    def read(fd, size, offset):
        os.utime(path)
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", read)
    with pytest.raises(WeightsError, match="changed while its header was read"):
        open_weights(path)


def test_a_token_tells_versions_apart_once_it_is_settled(path):
    token = ContentToken.of(path.stat())
    assert token == open_weights(path).token
    assert not token.is_settled(token.ctime_ns)
    assert not token.is_settled(token.ctime_ns - 10**12)
    assert token.is_settled(token.ctime_ns + 10**8)


def test_what_is_learned_of_a_file_holds_for_that_version_only(path):
    now = ContentToken.of(path.stat()).ctime_ns
    file = open_weights(path, clock=lambda: now)
    assert not file.learn({"w": "key"}, file.token)
    now += 10**9
    assert file.learn({"w": "key"}, file.token)
    assert file.contents() == {"w": "key"}
    os.utime(path)
    assert file.contents() == {}
    assert not file.learn({"b": "key"}, file.token)
    file.confirm(list)
    assert file.contents() == {}


def test_a_file_is_closed_with_its_last_reference(path):
    file = open_weights(path)
    fd = file.fileno()
    os.fstat(fd)
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
