"""Tensors that several models have are held once; wrong digests and edited files never bring wrong bytes."""

import contextlib
import hashlib
import logging
import os
import random
import threading
import time

import numpy as np
import pytest

from rsrv.bundle.safetensors import read_header, write_weights
from rsrv.core.errors import DeviceOutOfMemory, WeightsError
from rsrv.runtime.fake import FakeDevice
from rsrv.serve.residency import tensors as module
from rsrv.serve.residency.digests import Verifier
from rsrv.serve.residency.host_pool import PooledWeightStore
from rsrv.serve.residency.store import PrivateWeightStore
from rsrv.serve.residency.tensors import TensorPool, open_weights

N = 1 << 15  # elements of a tensor that is large enough to be shared
BACKBONE = {f"layer{i}": np.random.default_rng(i).standard_normal(N + i).astype(np.float32) for i in range(4)}
BACKBONE_BYTES = sum(array.nbytes for array in BACKBONE.values())
HEAD_BYTES = 4 * N


def later():
    return time.time_ns() + 10**10


def write(path, arrays, *, clock=later):
    path.parent.mkdir(parents=True, exist_ok=True)
    write_weights(path, list(arrays.items()))
    return open_weights(path, clock=clock)


def tuned(tmp_path, number, **changes):
    """A fine-tune of the backbone: a head of its own, and what `changes` says."""
    arrays = {**BACKBONE, "head": np.full(N, number, np.float32), "bias": np.full(3, number, np.float32), **changes}
    file = write(tmp_path / f"m{number}" / "weights.safetensors", arrays)
    return file, arrays


def assert_right(weights, arrays):
    for expected, buffer in zip(arrays.values(), weights.buffers, strict=True):
        assert np.array_equal(buffer.array, expected)


@pytest.fixture
def pool():
    pool = TensorPool(FakeDevice())
    yield pool
    assert pool.resident_bytes == pool.device.live_bytes == pool.device.live_buffers == 0
    assert not pool._catalog._by_key
    assert not pool._catalog._by_digest


@pytest.fixture
def reads(monkeypatch):
    """Bytes that were read, by descriptor."""
    preadv, seen = os.preadv, {}

    def read(fd, buffers, offset):
        n = preadv(fd, buffers, offset)
        seen[fd] = seen.get(fd, 0) + n
        return n

    monkeypatch.setattr(os, "preadv", read)
    return seen


def forge(path, name, digest):
    """Let `path` declare another digest for a tensor; size and times of the file are those of an honest writer."""
    true = read_header(path).tensor_digests[name]
    path.write_bytes(path.read_bytes().replace(true.encode(), digest.encode()))


# --- where device memory is the host's --------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1])
def test_a_backbone_is_held_once_and_either_model_may_go_first(tmp_path, pool, first):
    both = [tuned(tmp_path, number) for number in (0, 1)]
    weights = [pool.load(file) for file, _ in both]
    for one, (_, arrays) in zip(weights, both, strict=True):
        assert_right(one, arrays)
        assert one.nbytes == sum(array.nbytes for array in arrays.values())
    assert pool.resident_bytes == BACKBONE_BYTES + 2 * (HEAD_BYTES + 12)
    common = weights[0].digests.keys() & weights[1].digests.keys()
    assert sum(weights[0].digests[key] for key in common) == BACKBONE_BYTES
    weights[first].free()
    assert pool.resident_bytes == BACKBONE_BYTES + HEAD_BYTES + 12
    assert_right(weights[1 - first], both[1 - first][1])
    weights[1 - first].free()


def test_what_is_known_to_be_there_is_not_read_again(tmp_path, pool, reads):
    one, two = (tuned(tmp_path, number)[0] for number in (0, 1))
    weights = [pool.load(file) for file in (one, two)]
    weights[1].free()
    reads.clear()
    again, arrays = pool.load(two), tuned(tmp_path / "same", 1)[1]
    assert reads == {two.fileno(): HEAD_BYTES + 12}
    assert_right(again, arrays)
    # That holds also for the model that was there first, when both went and the other one came back.
    for some in (weights[0], again):
        some.free()
    again = pool.load(two)
    reads.clear()
    first = pool.load(one)
    assert reads == {one.fileno(): HEAD_BYTES + 12}
    assert pool.resident_bytes == BACKBONE_BYTES + 2 * (HEAD_BYTES + 12)
    for some in (first, again):
        some.free()


def test_what_was_written_a_moment_ago_is_compared_again_as_it_may_change_without_a_trace(tmp_path, pool, reads):
    one = tuned(tmp_path, 0)[0]
    two = write(tmp_path / "young" / "w.safetensors", BACKBONE, clock=lambda: token.ctime_ns)
    token = two.token
    weights = pool.load(one)
    for _ in range(2):
        reads.clear()
        young = pool.load(two)
        assert reads[two.fileno()] == BACKBONE_BYTES
        assert pool.resident_bytes == weights.nbytes
        young.free()
    weights.free()


def test_twenty_fine_tunes_take_little_more_than_one(tmp_path, pool):
    models = [tuned(tmp_path, number, head=np.full(256, number, np.float32)) for number in range(20)]
    weights = [pool.load(file) for file, _ in models]
    assert pool.resident_bytes < 1.2 * weights[0].nbytes
    for one, (_, arrays) in zip(weights, models, strict=True):
        assert_right(one, arrays)
    for one in weights:
        one.free()


def test_two_loads_of_one_file_and_of_its_next_version_share(tmp_path, pool):
    file, arrays = tuned(tmp_path, 0)
    weights = [pool.load(file), pool.load(open_weights(file.path))]
    assert pool.resident_bytes == weights[0].nbytes + 12
    for one in weights:
        assert_right(one, arrays)
        one.free()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_digest_that_lies_is_found_and_shares_nothing(tmp_path, pool, caplog, order):
    (honest, arrays), (liar, others) = tuned(tmp_path, 0), tuned(tmp_path, 1, layer2=BACKBONE["layer2"] + 1)
    forge(liar.path, "layer2", hashlib.sha256(BACKBONE["layer2"]).hexdigest())
    files = [(honest, arrays), (open_weights(liar.path, clock=later), others)]
    for _ in range(3):
        weights = [(pool.load(files[i][0]), files[i][1]) for i in order]
        for one, expected in weights:
            assert_right(one, expected)
        assert pool.resident_bytes == BACKBONE_BYTES + BACKBONE["layer2"].nbytes + 2 * (HEAD_BYTES + 12)
        for one, _ in weights:
            one.free()
    [message] = [record.message for record in caplog.records if "differ that declare one digest" in record.message]
    assert f"model=m{order[1]}" in message
    assert "'layer2'" in message


def test_a_liar_that_goes_first_leaves_nothing_behind_for_others(tmp_path, pool):
    (honest, arrays), (liar, others) = tuned(tmp_path, 0), tuned(tmp_path, 1, layer2=BACKBONE["layer2"] + 1)
    forge(liar.path, "layer2", hashlib.sha256(BACKBONE["layer2"]).hexdigest())
    liar = open_weights(liar.path, clock=later)
    for file, expected in [(honest, arrays), (liar, others)] * 2:
        weights = pool.load(file)
        assert_right(weights, expected)
        weights.free()
    one, two = pool.load(liar), pool.load(honest)
    assert_right(one, others)
    assert_right(two, arrays)
    one.free()
    two.free()


@pytest.mark.parametrize("keep_times", [False, True])
def test_an_edited_bundle_never_feeds_another_model(tmp_path, pool, keep_times):
    (edited, _), (other, arrays) = tuned(tmp_path, 0), tuned(tmp_path, 1)
    status = edited.path.stat()
    weights = [pool.load(edited), pool.load(other)]
    for one in weights:
        one.free()
    data = bytearray(edited.path.read_bytes())
    begin = edited.header.data_offset + edited.header.tensors["layer1"].begin
    data[begin : begin + 4] = b"\x01\x02\x03\x04"
    edited.path.write_bytes(data)
    if keep_times:
        os.utime(edited.path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(WeightsError, match="changed on disk"):
        pool.load(edited)
    # Opened anew it serves what it holds, and what it declares still is what the other model has.
    anew = pool.load(open_weights(edited.path, clock=later))
    weights = pool.load(other)
    assert_right(weights, arrays)
    assert anew.buffers[1].array.view(np.uint8)[:4].tolist() == [1, 2, 3, 4]
    assert pool.resident_bytes == anew.nbytes + HEAD_BYTES + 12 + BACKBONE["layer1"].nbytes
    anew.free()
    assert_right(weights, arrays)
    weights.free()
    # Nor while the other model is resident.
    weights = pool.load(other)
    with pytest.raises(WeightsError, match="changed on disk"):
        pool.load(edited)
    assert_right(weights, arrays)
    weights.free()


def test_equal_bytes_of_another_shape_or_type_are_another_tensor(tmp_path, pool):
    array = np.zeros(N, np.float32)
    same = {"a": array, "b": array.reshape(2, -1), "c": array.view(np.int32), "d": array.view(np.float16)}
    weights = [pool.load(write(tmp_path / f"{name}.safetensors", {"w": one})) for name, one in same.items()]
    assert pool.resident_bytes == 4 * array.nbytes
    for one, expected in zip(weights, same.values(), strict=True):
        assert one.buffers[0].dtype == expected.dtype
        assert_right(one, {"w": expected})
        one.free()


def test_small_tensors_and_mapped_or_column_major_files_share_nothing(tmp_path):
    small = {f"w{i}": np.zeros(1000, np.float32) for i in range(4)}
    for arrays, options, column_major in (
        (small, {}, False),
        (BACKBONE, {"map_weights": True}, False),
        (BACKBONE, {}, True),
    ):
        path = tmp_path / "w.safetensors"
        write_weights(path, list(arrays.items()))
        pool = TensorPool(FakeDevice(), **options)
        weights = [pool.load(open_weights(path, column_major=column_major)) for _ in range(2)]
        assert pool.resident_bytes == 2 * weights[0].nbytes
        assert weights[0].digests == {}
        for one in weights:
            assert_right(one, arrays)
            one.free()
        assert pool.resident_bytes == pool.device.live_bytes == 0


def test_a_load_that_fails_gives_back_what_it_shared(tmp_path):
    (one, arrays), (two, _) = tuned(tmp_path, 0), tuned(tmp_path, 1)
    device = FakeDevice(memory_bytes=BACKBONE_BYTES + HEAD_BYTES + 12 + HEAD_BYTES)
    pool = TensorPool(device)
    weights = pool.load(one)
    for _ in range(3):
        with pytest.raises(DeviceOutOfMemory):
            pool.load(two)
        assert device.live_bytes == pool.resident_bytes == weights.nbytes
        assert {tensor.users for tensor in pool._catalog._by_key.values()} == {1}
    assert_right(weights, arrays)
    weights.free()


def test_memory_of_a_failed_load_is_unmapped_although_its_error_is_kept(tmp_path):
    file, _ = tuned(tmp_path, 0)
    before = mapped_bytes()
    errors = []
    for _ in range(5):
        try:
            TensorPool(FakeDevice(memory_bytes=1000)).load(file)
        except DeviceOutOfMemory as error:
            errors.append(error)
    assert len(errors) == 5
    assert mapped_bytes() - before < 2 * BACKBONE_BYTES


def mapped_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def test_a_model_that_goes_while_another_one_is_compared_with_it_leaves_its_tensors_there(tmp_path, pool, monkeypatch):
    (one, _), (two, arrays) = tuned(tmp_path, 0), tuned(tmp_path, 1, layer3=BACKBONE["layer3"] * 2)
    first = pool.load(one)
    is_equal = module.is_equal

    def evict(*arguments):
        threading.Thread(target=first.free).start()
        return is_equal(*arguments)

    monkeypatch.setattr(module, "is_equal", evict)
    second = pool.load(two)
    for thread in threading.enumerate():
        if thread.name.endswith("(free)"):
            thread.join()
    assert_right(second, arrays)
    assert pool.resident_bytes == second.nbytes
    second.free()


def test_any_order_of_loads_and_evictions_holds_each_content_once(tmp_path, pool):
    source = random.Random(5)
    tensors = [np.full(N, i, np.float32) for i in range(6)]
    models = []
    for number in range(8):
        chosen = source.sample(range(6), 3)
        arrays = {f"w{i}": tensors[i] for i in chosen}
        models.append((write(tmp_path / f"{number}" / "w.safetensors", arrays), arrays))
    loaded = {}
    for _ in range(300):
        number = source.randrange(8)
        if number in loaded:
            loaded.pop(number).free()
        else:
            loaded[number] = pool.load(models[number][0])
        if source.random() < 0.1:
            os.utime(models[source.randrange(8)][0].path)
        assert pool.resident_bytes == 4 * N * len({name for i in loaded for name in models[i][1]})
        for i, weights in loaded.items():
            assert_right(weights, models[i][1])
    for weights in loaded.values():
        weights.free()


# --- on a card --------------------------------------------------------------------------------------------------------


@pytest.fixture
def card():
    pool = TensorPool(FakeDevice(unified=False))
    yield pool
    assert pool.resident_bytes == pool.device.live_bytes == 0
    assert len(pool._catalog) == 0


def verify(verifier):
    for _ in range(50):
        if not verifier._due:
            return
        assert verifier.verify_next()
    raise AssertionError("the verifier does not end")


def test_a_card_shares_what_was_verified_then_at_once_and_at_later_loads(tmp_path, card, reads):
    models = [tuned(tmp_path, number) for number in (0, 1, 2)]
    verified = []
    verifier = Verifier(verified.append)
    weights = {}
    for number, (file, _) in enumerate(models):
        verifier.add(f"m{number}", file)
        weights[f"m{number}"] = card.load(file)
    assert card.resident_bytes == 3 * weights["m0"].nbytes
    verify(verifier)
    assert set(verified) == {"m0", "m1", "m2"}
    assert sum(card.share(weights[name]) for name in verified) == 2 * BACKBONE_BYTES
    assert card.resident_bytes == card.device.live_bytes == BACKBONE_BYTES + 3 * (HEAD_BYTES + 12)
    assert len(set.intersection(*(set(one.digests) for one in weights.values()))) == 4
    weights["m0"].free()
    for number in (1, 2):
        assert_right(weights[f"m{number}"], models[number][1])
    reads.clear()
    weights["m0"] = card.load(models[0][0])
    assert reads == {models[0][0].fileno(): HEAD_BYTES + 12}
    assert_right(weights["m0"], models[0][1])
    assert [card.share(one) for one in weights.values()] == [0, 0, 0]
    for one in weights.values():
        one.free()


def test_a_card_shares_also_what_comes_from_copies_in_host_memory(tmp_path, card):
    models = [tuned(tmp_path, number) for number in (0, 1)]
    verifier = Verifier()
    for number, (file, _) in enumerate(models):
        verifier.add(f"m{number}", file)
    verify(verifier)
    hosts = [card.host_copy(PrivateWeightStore(), "m", file) for file, _ in models]
    weights = [card.load(file, host) for (file, _), host in zip(models, hosts, strict=True)]
    assert card.resident_bytes == BACKBONE_BYTES + 2 * (HEAD_BYTES + 12)
    for one, host, (_, arrays) in zip(weights, hosts, models, strict=True):
        assert_right(one, arrays)
        one.free()
        host.release()


@pytest.mark.parametrize("first", [0, 1])
def test_copies_in_host_memory_share_too_and_tell_the_card_what_is_equal(tmp_path, card, first):
    models = [tuned(tmp_path, number) for number in (0, 1)]
    store = PooledWeightStore()
    hosts = [card.host_copy(store, f"m{number}", file) for number, (file, _) in enumerate(models)]
    once = BACKBONE_BYTES + 2 * (HEAD_BYTES + 12)
    assert store.resident_bytes == once
    weights = [card.load(file, host) for (file, _), host in zip(models, hosts, strict=True)]
    assert card.resident_bytes == card.device.live_bytes == once
    for one, host, (_, arrays) in zip(weights, hosts, models, strict=True):
        assert_right(one, arrays)
        assert host.nbytes == one.nbytes
        assert not any(array.flags.writeable or array.ctypes.data % 64 for array in host.arrays)
    hosts[first].release()
    weights[first].free()
    assert store.resident_bytes == card.resident_bytes == hosts[1 - first].nbytes
    for expected, array in zip(models[1 - first][1].values(), hosts[1 - first].arrays, strict=True):
        assert np.array_equal(array, expected)
    weights[1 - first].free()
    with pytest.raises(BufferError, match="1 tensors cannot be unmapped"):
        hosts[1 - first].release()
    del array
    hosts[1 - first].release()
    assert store.resident_bytes == 0


def test_only_what_another_model_declares_is_hashed(tmp_path, reads):
    one, two = tuned(tmp_path, 0)[0], tuned(tmp_path, 1)[0]
    verifier = Verifier()
    verifier.add("m0", one)
    verify(verifier)
    assert reads == {}
    verifier.add("m1", two)
    verify(verifier)
    assert reads == {one.fileno(): BACKBONE_BYTES, two.fileno(): BACKBONE_BYTES}
    verifier.add("m2", tuned(tmp_path, 2)[0])
    verify(verifier)
    assert reads[one.fileno()] == BACKBONE_BYTES
    for name in ("m0", "m1", "m2", "m2"):
        verifier.remove(name)
    assert not verifier._declaring


def test_a_declared_digest_that_is_wrong_is_told_once_and_shares_nothing(tmp_path, card, caplog):
    (honest, arrays), (liar, others) = tuned(tmp_path, 0), tuned(tmp_path, 1, layer2=BACKBONE["layer2"] + 1)
    forge(liar.path, "layer2", hashlib.sha256(BACKBONE["layer2"]).hexdigest())
    liar = open_weights(liar.path, clock=later)
    verifier = Verifier()
    verifier.add("honest", honest)
    verifier.add("liar", liar)
    with caplog.at_level(logging.WARNING):
        verify(verifier)
        verifier.add("third", tuned(tmp_path, 2)[0])
        verify(verifier)
    [message] = [record.message for record in caplog.records]
    assert "model=liar tensor='layer2'" in message
    weights = [card.load(honest), card.load(liar)]
    assert card.resident_bytes == BACKBONE_BYTES + BACKBONE["layer2"].nbytes + 2 * (HEAD_BYTES + 12)
    for one, expected in zip(weights, (arrays, others), strict=True):
        assert_right(one, expected)
        one.free()


def test_a_file_that_changed_since_it_was_opened_is_not_verified(tmp_path, card):
    files = [tuned(tmp_path, number)[0] for number in (0, 1)]
    os.utime(files[0].path)
    verified = []
    verifier = Verifier(verified.append)
    for number, file in enumerate(files):
        verifier.add(f"m{number}", file)
    verify(verifier)
    assert verified == ["m1"]
    os.truncate(files[1].path, 1000)
    verifier.add("m2", tuned(tmp_path, 2)[0])
    verify(verifier)
    files[0].close()
    verifier.add("m3", tuned(tmp_path, 3)[0])
    verify(verifier)
    assert "m0" not in verified


def test_a_file_that_was_written_a_moment_ago_is_verified_later(tmp_path, reads):
    one = tuned(tmp_path, 0)[0]
    now = one.token.ctime_ns
    two = open_weights(tuned(tmp_path, 1)[0].path, clock=lambda: now)
    verified = []
    verifier = Verifier(verified.append)
    verifier.add("m0", one)
    verifier.add("m1", two)
    assert [verifier.verify_next(), verifier.verify_next()] == [True, False]
    assert two.fileno() not in reads
    now += 10**10
    verify(verifier)
    assert verified == ["m0", "m1"]


def test_what_was_verified_of_another_version_is_not_used_for_what_is_loaded(tmp_path, card):
    (one, arrays), (two, _) = tuned(tmp_path, 0), tuned(tmp_path, 1)
    verifier = Verifier()
    verifier.add("m0", one)
    verifier.add("m1", two)
    before = [card.load(one), card.load(two)]
    os.utime(one.path)
    after = card.load(one)  # from now on the touched file counts
    verifier.add("m0", one)
    verify(verifier)
    assert card.share(before[1]) == 0
    assert card.share(before[0]) == 0
    assert card.share(after) == BACKBONE_BYTES
    assert_right(after, arrays)
    for weights in (*before, after):
        weights.free()


def test_the_verifier_works_on_a_thread_of_its_own_and_ends(tmp_path):
    done = threading.Semaphore(0)
    verifier = Verifier(lambda name: done.release())
    verifier.start()
    for number in (0, 1):
        verifier.add(f"m{number}", tuned(tmp_path, number)[0])
    for _ in range(2):
        assert done.acquire(timeout=60)
    verifier.close()
    assert not verifier._thread.is_alive()
    Verifier().close()


@pytest.mark.parametrize("closed", [True, False])
def test_a_verifier_that_was_left_behind_does_not_complain_of_closed_files(monkeypatch, closed):
    monkeypatch.setattr("rsrv.serve.residency.digests.give_way", lambda: None)
    verifier = Verifier()

    def late():
        verifier._stopping = closed
        raise ValueError("closed file")

    monkeypatch.setattr(verifier, "verify_next", late)
    with contextlib.nullcontext() if closed else pytest.raises(ValueError, match="closed file"):
        verifier._run()
