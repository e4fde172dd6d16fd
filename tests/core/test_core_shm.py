"""Shared-memory regions: every rule of registration, access and reaping, and the attacks that a client can try."""

import mmap
import os
import re
import secrets
import stat
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from rsrv.core.errors import Code, InvalidRequest, RegionLimit, UnregisteredRegion
from rsrv.core.shm import OwnedRegion, RegionRegistry, RegionStatus, same_ipc_namespace

HUGE = [2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _nothing_stays_behind():
    """Every test gives back its descriptors and its names in /dev/shm. Those of others come and go meanwhile."""

    def state() -> tuple[set[str], int]:
        return set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))

    before = state()
    yield
    after = state()
    assert {name for name in after[0] - before[0] if f"-{os.getpid()}-" in name} == set()
    assert after[1] <= before[1]


@pytest.fixture
def registry():
    registry = RegionRegistry()
    yield registry
    registry.close()


@contextmanager
def shm_file(data: bytes, name: str | None = None):
    """An object in /dev/shm as a foreign client makes it; yields its name and a descriptor."""
    name = name or f"rsrvtest-{os.getpid()}-{secrets.token_hex(8)}"
    fd = os.open(f"/dev/shm/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(fd, data)
        yield name, fd
    finally:
        os.close(fd)
        if os.path.lexists(f"/dev/shm/{name}"):
            os.unlink(f"/dev/shm/{name}")


@pytest.fixture
def region(registry):
    """A registered region "r": 100 bytes 0..99, which start at byte 50 of an object of 200 bytes."""
    data = bytes(50) + bytes(range(100)) + bytes(50)
    with shm_file(data) as (name, fd):
        registry.register("r", name, 50, 100)
        yield name, fd


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(timeout=60)
    return child.pid


# --- registration -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "/", "//"])
def test_a_key_is_accepted_with_and_without_leading_slashes(registry, prefix):
    with shm_file(b"abcdef") as (name, _):
        registry.register("r", prefix + name, 1, 4)
        assert registry.read("r", 0, 4).tobytes() == b"bcde"
        assert registry.status() == [RegionStatus("r", prefix + name, 1, 4)]
        assert registry.total_bytes == 4


@pytest.mark.parametrize(
    ("name", "offset", "byte_size", "text"),
    [
        ("", 0, 8, "1 to 1024 characters"),
        ("x" * 1025, 0, 8, "1 to 1024 characters"),
        ("r", -1, 8, "offset -1 of shared memory region 'r'"),
        ("r", 2**63, 8, "offset 9223372036854775808"),
        ("r", 0, 0, "byte_size 0 of shared memory region 'r'"),
        ("r", 0, -8, "byte_size -8"),
        ("r", 0, 2**63, "byte_size 9223372036854775808"),
        ("r", 0, 17, "17 bytes at offset 0 do not fit"),
        ("r", 9, 8, "8 bytes at offset 9 do not fit"),
        ("r", 16, 1, "1 bytes at offset 16 do not fit"),
        ("r", 2**63 - 1, 2**63 - 1, "do not fit"),
        ("r", 2**63 - 8, 16, "do not fit"),
        ("r", 2**62, 2**62, "do not fit"),
    ],
)
def test_a_registration_is_refused_for_numbers_that_do_not_fit(registry, name, offset, byte_size, text):
    with shm_file(bytes(16)) as (key, _):
        with pytest.raises(InvalidRequest, match=re.escape(text)):
            registry.register(name, key, offset, byte_size)
        assert len(registry) == registry.total_bytes == 0
        registry.register("r", key, 8, 8)  # the last bytes of the object


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        "///",
        ".",
        "..",
        "/..",
        "../../etc/passwd",
        "/../../etc/passwd",
        "a/b",
        "/a/b",
        "a/",
        "nul\0byte",
        "\0",
        "x" * 256,
        "ü" * 128,
        "/" + "x" * 5000,
        "lone\ud800surrogate",
    ],
)
def test_a_key_that_is_not_the_name_of_an_object_is_refused(registry, key):
    with pytest.raises(InvalidRequest, match="shared memory key"):
        registry.register("r", key, 0, 1)
    assert not same_ipc_namespace(key)


def test_an_object_that_is_not_there_is_refused_by_name(registry):
    with pytest.raises(InvalidRequest, match="'rsrvtest-absent': No such file"):
        registry.register("r", "/rsrvtest-absent", 0, 1)


def test_a_symbolic_link_is_not_followed(registry):
    path = f"/dev/shm/rsrvtest-link-{os.getpid()}-{secrets.token_hex(4)}"
    os.symlink("/etc/passwd", path)
    try:
        with pytest.raises(InvalidRequest, match="symbolic link"):
            registry.register("r", os.path.basename(path), 0, 1)
        assert not same_ipc_namespace(os.path.basename(path))
    finally:
        os.unlink(path)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_not_a_regular_file_is_refused_without_blocking(registry, make):
    path = f"/dev/shm/rsrvtest-odd-{os.getpid()}-{secrets.token_hex(4)}"
    make(path)
    try:
        with pytest.raises(InvalidRequest, match=r"directory|not a regular file"):
            registry.register("r", os.path.basename(path), 0, 1)
        assert not same_ipc_namespace(os.path.basename(path))
    finally:
        (os.rmdir if make is os.mkdir else os.unlink)(path)


def test_registering_a_name_again_replaces_the_region(registry):
    with shm_file(b"first") as (first, _), shm_file(b"second!") as (second, _):
        registry.register("r", first, 0, 5)
        registry.register("r", second, 0, 7)
        assert registry.read("r", 0, 7).tobytes() == b"second!"
        assert (len(registry), registry.total_bytes) == (1, 7)


def test_a_registration_that_fails_leaves_the_region_of_that_name_as_it_was(registry, region):
    with pytest.raises(InvalidRequest):
        registry.register("r", "rsrvtest-absent", 0, 1)
    with pytest.raises(InvalidRequest):
        registry.register("r", region[0], 0, 1000)
    assert registry.read("r", 3, 2).tobytes() == b"\x03\x04"


def test_a_re_created_object_needs_a_new_registration(registry):
    with shm_file(b"old") as (name, _):
        registry.register("r", name, 0, 3)
        os.unlink(f"/dev/shm/{name}")
        with shm_file(b"new", name):
            assert registry.read("r", 0, 3).tobytes() == b"old"
            registry.register("r", name, 0, 3)
            assert registry.read("r", 0, 3).tobytes() == b"new"


def test_the_server_never_unlinks_a_clients_object(registry, region):
    registry.unregister("r")
    registry.register("r", region[0], 0, 10)
    registry.close()
    assert os.path.exists(f"/dev/shm/{region[0]}")


def test_unregister_is_idempotent_and_the_empty_name_means_all(registry, region):
    registry.register("s", region[0], 0, 10)
    registry.unregister("nobody")
    registry.unregister("r")
    registry.unregister("r")
    assert [status.name for status in registry.status()] == ["s"]
    registry.register("r", region[0], 0, 10)
    registry.unregister("")
    assert (len(registry), registry.total_bytes, registry.status()) == (0, 0, [])
    registry.unregister("")


def test_status_lists_one_or_all_regions_by_name(registry, region):
    registry.register("a", "/" + region[0], 7, 9)
    assert registry.status() == [RegionStatus("a", "/" + region[0], 7, 9), RegionStatus("r", region[0], 50, 100)]
    assert registry.status("r") == [RegionStatus("r", region[0], 50, 100)]
    assert registry.status("unknown") == []


# --- limits and policy --------------------------------------------------------------------------------------------


def test_the_number_of_regions_is_limited_and_a_replacement_does_not_count():
    registry = RegionRegistry(max_regions=2)
    with shm_file(bytes(16)) as (key, _):
        registry.register("a", key, 0, 1)
        registry.register("b", key, 0, 1)
        registry.register("b", key, 0, 2)
        with pytest.raises(RegionLimit, match=r"'c'.*shm.max_regions") as caught:
            registry.register("c", key, 0, 1)
        assert caught.value.code is Code.RESOURCE_EXHAUSTED
        registry.unregister("a")
        registry.register("c", key, 0, 1)
        registry.close()


def test_the_bytes_of_all_regions_are_limited_and_a_replaced_region_gives_its_own_back():
    registry = RegionRegistry(max_total_bytes=20)
    with shm_file(bytes(32)) as (key, _):
        registry.register("a", key, 0, 15)
        with pytest.raises(RegionLimit, match=r"21 bytes.*shm.max_total_bytes"):
            registry.register("b", key, 0, 6)
        registry.register("b", key, 0, 5)
        registry.register("a", key, 0, 12)
        with pytest.raises(RegionLimit):
            registry.register("a", key, 0, 16)
        assert (registry.total_bytes, registry.status("a")[0].byte_size) == (17, 12)
        registry.close()


@pytest.mark.parametrize("key", ["rsw-model-1", "/rsw-model-1", "rsrvw-0badcafe"])
def test_regions_where_servers_keep_weights_are_denied_by_default(registry, key):
    name = key.lstrip("/") + f"-{os.getpid()}-{secrets.token_hex(4)}"
    with shm_file(b"w" * 8, name), pytest.raises(InvalidRequest, match=r"denied.*shm.deny_keys"):
        registry.register("r", name, 0, 8)


def test_only_allowed_keys_are_accepted_and_deny_wins():
    registry = RegionRegistry(allow_keys=["/rsrvtest-ok-*"], deny_keys=["*-secret"])
    with shm_file(b"1", f"rsrvtest-ok-{secrets.token_hex(4)}") as (good, _), shm_file(b"1") as (other, _):
        registry.register("r", good, 0, 1)
        with pytest.raises(InvalidRequest, match=r"shm.allow_keys"):
            registry.register("s", other, 0, 1)
    with pytest.raises(InvalidRequest, match=r"shm.deny_keys"):
        registry.register("s", "rsrvtest-ok-secret", 0, 1)
    registry.close()


def test_an_object_of_another_user_is_refused_when_the_same_uid_is_required(monkeypatch):
    registry = RegionRegistry(require_same_uid=True)
    with shm_file(b"1234") as (key, _):
        registry.register("mine", key, 0, 4)
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(InvalidRequest, match=f"belongs to uid {os.getuid()}"):
            registry.register("theirs", key, 0, 4)
    registry.close()


# --- reading and writing ------------------------------------------------------------------------------------------


def test_a_read_is_an_aligned_copy_of_the_window(registry, region):
    block = registry.read("r", 10, 20)
    assert block.tolist() == list(range(10, 30))
    assert block.dtype == np.uint8
    assert block.ctypes.data % 64 == 0
    os.pwrite(region[1], bytes(200), 0)
    assert block.tolist() == list(range(10, 30))


def test_read_into_fills_the_buffer_that_is_given(registry, region):
    target = np.zeros((2, 4), np.uint16)
    registry.read_into("r", 84, target.data)
    assert target.tobytes() == bytes(range(84, 100))


def test_a_write_lands_in_the_window_and_nowhere_else(registry, region):
    registry.write("r", 98, memoryview(b"\xff\xfe"))
    data = os.pread(region[1], 300, 0)
    assert data == bytes(50) + bytes(range(98)) + b"\xff\xfe" + bytes(50)


def test_an_empty_window_is_fine_up_to_the_end(registry, region):
    assert registry.read("r", 100, 0).size == 0
    registry.write("r", 100, memoryview(b""))
    registry.write("r", 100, np.empty((0, 3), np.float32).data)
    registry.read_into("r", 100, np.empty((2, 0), np.float32).data)
    with pytest.raises(InvalidRequest):
        registry.check("r", 101, 0)


@pytest.mark.parametrize(
    ("offset", "n"),
    [(-1, 1), (0, -1), (0, 101), (100, 1), (99, 2), (1, 100)]
    + [(huge, 8) for huge in HUGE]
    + [(0, huge) for huge in HUGE]
    + [(2**62, 2**62), (2**63 - 4, 8), (2**64 - 50, 50), (-(2**63), 8)],
)
def test_a_window_outside_the_region_is_refused_before_memory_is_touched(registry, region, offset, n):
    text = re.escape(f"{n} bytes at offset {offset} are outside shared memory region 'r' of 100 bytes")
    with pytest.raises(InvalidRequest, match=text) as caught:
        registry.check("r", offset, n)
    assert caught.value.code is Code.INVALID_ARGUMENT
    with pytest.raises(InvalidRequest, match=text):
        registry.read("r", offset, n)
    if 0 <= n <= 101:
        with pytest.raises(InvalidRequest, match=text):
            registry.read_into("r", offset, memoryview(bytearray(n)))
        with pytest.raises(InvalidRequest, match=text):
            registry.write("r", offset, memoryview(bytes(n)))
    assert os.pread(region[1], 300, 0) == bytes(50) + bytes(range(100)) + bytes(50)


@pytest.mark.parametrize("name", ["unknown", ""])
def test_an_unregistered_region_is_a_failed_precondition_that_old_clients_recognise(registry, name):
    for access in (
        lambda: registry.check(name, 0, 1),
        lambda: registry.read(name, 0, 1),
        lambda: registry.read_into(name, 0, memoryview(bytearray(1))),
        lambda: registry.write(name, 0, memoryview(b"x")),
    ):
        with pytest.raises(UnregisteredRegion, match="unregistered shared memory region") as caught:
            access()
        assert caught.value.code is Code.FAILED_PRECONDITION
        assert repr(name) in caught.value.message


@pytest.mark.parametrize("length", [0, 60, 149])
def test_a_file_truncated_after_registration_is_an_error_that_names_the_region(registry, region, length):
    os.truncate(region[1], length)
    match = f"region 'r' was truncated after it was registered: its object '{region[0]}' holds {length} bytes"
    for access in (
        lambda: registry.check("r", 0, 100),
        lambda: registry.read("r", 0, 100),
        lambda: registry.read_into("r", 0, memoryview(bytearray(100))),
        lambda: registry.write("r", 0, memoryview(bytes(100))),
    ):
        with pytest.raises(InvalidRequest, match=re.escape(match)):
            access()
    assert os.fstat(region[1]).st_size == length  # a refused write does not grow it again


def test_the_part_that_a_truncated_file_still_has_can_be_used(registry, region):
    os.truncate(region[1], 60)
    assert registry.read("r", 0, 10).tolist() == list(range(10))


def test_a_file_truncated_during_the_copy_is_an_error_too(registry, region, monkeypatch):
    preadv = os.preadv

    def truncate_first(fd, buffers, offset):
        os.truncate(region[1], 80)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", truncate_first)
    with pytest.raises(InvalidRequest, match="region 'r' was truncated"):
        registry.read("r", 0, 100)


def test_short_transfers_are_continued(registry, region, monkeypatch):
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:7]], offset))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:7], offset))
    assert registry.read("r", 0, 100).tolist() == list(range(100))
    registry.write("r", 0, memoryview(bytes(range(100, 200))))
    monkeypatch.undo()
    assert os.pread(region[1], 100, 50) == bytes(range(100, 200))


def test_a_process_without_descriptors_reports_a_limit_and_does_not_blame_the_client(registry, region, monkeypatch):
    def exhausted(path, flags, *rest):
        raise OSError(24, "Too many open files", path)

    monkeypatch.setattr(os, "open", exhausted)
    with pytest.raises(RegionLimit, match=f"no descriptor for shared memory object '{region[0]}': Too many open files"):
        registry.register("another", region[0], 0, 1)


def test_a_full_dev_shm_is_reported_as_a_limit(registry, region, monkeypatch):
    def full(fd, data, offset):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(RegionLimit, match="region 'r': No space left"):
        registry.write("r", 0, memoryview(b"x"))


def test_a_sparse_region_larger_than_memory_is_refused_not_allocated(registry):
    with shm_file(b"") as (key, fd):
        os.truncate(fd, 2**60)
        registry.register("r", key, 0, 2**60)
        with pytest.raises(RegionLimit, match="no memory for 1152921504606846976 bytes"):
            registry.read("r", 0, 2**60)
        assert registry.read("r", 2**60 - 4, 4).tobytes() == bytes(4)


def test_an_object_unlinked_while_registered_stays_usable(registry, region):
    os.unlink(f"/dev/shm/{region[0]}")
    assert registry.read("r", 0, 3).tolist() == [0, 1, 2]


def test_a_lease_keeps_a_region_usable_after_it_was_unregistered(registry, region):
    with registry.lease("r") as held:
        registry.unregister("r")
        buffer = bytearray(4)
        held.read_into(5, memoryview(buffer))
        assert buffer == bytes([5, 6, 7, 8])
        with pytest.raises(UnregisteredRegion):
            registry.read("r", 0, 1)


def test_a_lease_is_of_the_region_that_was_registered_when_it_was_taken(registry, region):
    with shm_file(b"other") as (other, _), registry.lease("r") as held:
        registry.register("r", other, 0, 5)
        buffer = bytearray(2)
        held.read_into(1, memoryview(buffer))
        assert buffer == b"\x01\x02"
        assert registry.read("r", 0, 5).tobytes() == b"other"


def test_500_cycles_of_registration_under_concurrent_reads_and_writes_mix_up_nothing():
    """Every read is all of one region's bytes or `UnregisteredRegion`; a closed descriptor never serves a copy."""
    registry = RegionRegistry()
    n = 20_000
    finished = threading.Event()
    outcomes: list[set[object]] = []

    def read() -> None:
        seen: set[object] = set()
        outcomes.append(seen)
        while not finished.is_set():
            try:
                values = np.unique(registry.read("r", 0, n))
                seen.add(int(values[0]) if values.size == 1 else "mixed")
                registry.write("w", 0, memoryview(bytes(n)))
            except UnregisteredRegion:
                seen.add("unregistered")
            except BaseException as error:
                seen.add(repr(error))

    with shm_file(b"\x01" * n) as (one, _), shm_file(b"\x02" * n) as (two, _), shm_file(bytes(n)) as (scratch, _):
        registry.register("r", one, 0, n)
        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 30
        while not (len(outcomes) == 3 and all(outcomes)):  # all of them are at it
            assert time.monotonic() < end
            time.sleep(0.001)
        for cycle in range(500):
            registry.register("r", (one, two)[cycle % 2], 0, n)
            registry.register("w", scratch, 0, n)
            if cycle % 3:
                registry.unregister("" if cycle % 5 else "r")
        finished.set()
        for thread in threads:
            thread.join()
        registry.close()
    assert set().union(*outcomes) <= {1, 2, "unregistered"}
    assert {1, 2} & set().union(*outcomes)


# --- reaping ------------------------------------------------------------------------------------------------------


def test_an_unlinked_region_is_reaped_once_it_has_been_idle_long_enough():
    clock = Clock()
    registry = RegionRegistry(reap_seconds=60, clock=clock)
    with shm_file(b"x" * 8) as (key, _):
        registry.register("r", key, 0, 8)
        registry.register("s", key, 0, 8)
        clock.now += 100
        assert registry.reap() == []
        os.unlink(f"/dev/shm/{key}")
        registry.read("r", 0, 1)
        assert registry.reap() == ["s"]
        clock.now += 59.9
        assert registry.reap() == []
        clock.now += 0.1
        assert registry.reap() == ["r"]
        assert registry.reap() == []
        assert (len(registry), registry.total_bytes) == (0, 0)


def test_a_region_of_a_dead_owner_is_reaped_and_one_of_a_living_owner_stays():
    clock = Clock()
    registry = RegionRegistry(reap_seconds=60, clock=clock)
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    theirs = f"rsrv-client-{owner.pid}-{secrets.token_hex(8)}"
    with shm_file(b"x", theirs), OwnedRegion.create("client", 8) as mine:
        registry.register("theirs", f"/{theirs}", 0, 1)
        registry.register("mine", mine.key, 0, 8)
        registry.read("theirs", 0, 1)
        clock.now += 60
        assert registry.reap() == []
        owner.kill()
        owner.communicate(timeout=60)
        assert registry.reap() == ["theirs"]
        assert [status.name for status in registry.status()] == ["mine"]
        registry.close()


def test_a_killed_owner_that_nobody_waited_for_counts_as_dead():
    clock = Clock()
    registry = RegionRegistry(reap_seconds=60, clock=clock)
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    name = f"rsrv-client-{owner.pid}-{secrets.token_hex(8)}"
    with shm_file(b"x", name):
        registry.register("r", name, 0, 1)
        clock.now += 60
        owner.kill()
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
        assert registry.reap() == ["r"]
    owner.communicate(timeout=60)


def test_a_region_whose_owner_was_dead_before_it_was_registered_is_reaped_when_nobody_uses_it():
    clock = Clock()
    registry = RegionRegistry(reap_seconds=60, clock=clock)
    pid = dead_pid()
    unused = f"rsrv-client-{pid}-{secrets.token_hex(8)}"
    used = f"rsrv-client-{pid}-{secrets.token_hex(8)}"
    with shm_file(b"x", unused), shm_file(b"x", used):
        registry.register("unused", unused, 0, 1)
        registry.register("used", used, 0, 1)
        # Somebody uses it although its pid means nothing here: a client in another pid namespace.
        registry.read("used", 0, 1)
        clock.now += 60
        assert registry.reap() == ["unused"]
        os.unlink(f"/dev/shm/{used}")
        assert registry.reap() == ["used"]


@pytest.mark.parametrize(
    "form", ["rsrv-client-{}-0123456789abcde", "client-{}-0123456789abcdef", "rsrv-{}-0123456789abcdef"]
)
def test_a_pid_counts_only_in_names_of_our_own_form(form):
    clock = Clock()
    registry = RegionRegistry(reap_seconds=60, clock=clock)
    with shm_file(b"x", form.format(dead_pid())) as (key, _):
        registry.register("r", key, 0, 1)
        clock.now += 1000
        assert registry.reap() == []
        registry.close()


def test_a_region_in_use_is_not_reaped():
    clock = Clock()
    registry = RegionRegistry(reap_seconds=60, clock=clock)
    with shm_file(b"x") as (key, _):
        registry.register("r", key, 0, 1)
        os.unlink(f"/dev/shm/{key}")
        with registry.lease("r"):
            clock.now += 1000
            assert registry.reap() == []
        assert registry.reap() == []
        clock.now += 60
        assert registry.reap() == ["r"]


# --- the namespace probe ------------------------------------------------------------------------------------------


def test_the_probe_tells_whether_an_object_can_be_opened_here():
    with shm_file(b"x") as (name, _):
        assert same_ipc_namespace(name)
        assert same_ipc_namespace("/" + name)
    assert not same_ipc_namespace(name)
    assert not same_ipc_namespace("")


def test_the_probe_compares_the_nonce_with_the_first_bytes_of_the_object():
    nonce = secrets.token_bytes(16)
    with shm_file(nonce + b"more") as (name, _):
        assert same_ipc_namespace(name, nonce)
        assert not same_ipc_namespace(name, secrets.token_bytes(16))
        os.truncate(f"/dev/shm/{name}", 15)
        assert not same_ipc_namespace(name, nonce)


def test_the_probe_cannot_be_used_to_guess_an_object_byte_by_byte():
    with shm_file(b"secret key material, and more") as (name, _):
        for nonce in (b"s", b"secret key mater", b"secret key mater"[:15], b"secret key materi"):
            assert same_ipc_namespace(name, nonce) is (len(nonce) == 16)


# --- regions of our own -------------------------------------------------------------------------------------------


def test_an_owned_region_has_the_name_mode_and_size_that_were_promised():
    with OwnedRegion.create("pool", 1000) as region:
        assert re.fullmatch(rf"rsrv-pool-{os.getpid()}-[0-9a-f]{{16}}", region.name)
        assert region.key == "/" + region.name
        status = os.stat(f"/dev/shm/{region.name}")
        assert (status.st_size, stat.S_IMODE(status.st_mode)) == (1000, 0o600)
        assert status.st_blocks * 512 >= 1000  # reserved: a write cannot meet a full /dev/shm
        assert region.byte_size == len(region.view) == 1000
        region.view[10:13] = b"abc"
        with open(f"/dev/shm/{region.name}", "rb") as file:
            assert file.read() == bytes(10) + b"abc" + bytes(987)
    assert not os.path.exists(f"/dev/shm/{region.name}")
    region.close()


def test_names_of_owned_regions_are_distinct():
    regions = [OwnedRegion.create("pool", 1) for _ in range(20)]
    assert len({region.name for region in regions}) == 20
    for region in regions:
        region.close()


def test_closing_under_an_array_unlinks_at_once_and_keeps_the_memory_for_the_array():
    region = OwnedRegion.create("pool", 8)
    array = np.frombuffer(region.view, np.uint8)
    region.close()
    assert not os.path.exists(f"/dev/shm/{region.name}")
    array[:] = 7
    assert array.sum() == 56
    del array
    region.close()
    with pytest.raises(ValueError, match="released"):
        region.view[0]


@pytest.mark.parametrize("prefix", ["a/b", "../x", "nul\0", "x" * 300])
def test_an_owned_region_is_refused_a_prefix_that_cannot_stand_in_a_name(prefix):
    with pytest.raises(ValueError, match="shared memory key"):
        OwnedRegion.create(prefix, 10)


@pytest.mark.parametrize("n_bytes", [0, -5])
def test_an_owned_region_has_at_least_one_byte(n_bytes):
    with pytest.raises(ValueError, match=str(n_bytes)):
        OwnedRegion.create("pool", n_bytes)


def test_a_region_that_does_not_fit_into_dev_shm_is_an_os_error_and_leaves_nothing(monkeypatch):
    def full(fd, offset, n_bytes):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no room for 1000 bytes of shared memory") as caught:
        OwnedRegion.create("pool", 1000)
    assert caught.value.errno == 28


def test_a_failure_to_map_leaves_nothing(monkeypatch):
    def refuse(fd, n_bytes):
        raise PermissionError("no mapping today")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(PermissionError, match="no mapping today"):
        OwnedRegion.create("pool", 1000)


def test_an_owned_region_is_unlinked_when_its_process_ends_without_closing_it():
    code = """
import os
from rsrv.core.shm import OwnedRegion
region = OwnedRegion.create("pool", 100)
if os.fork() == 0:
    raise SystemExit  # a forked child runs its exit hooks and must leave the parent's object alone
os.wait()
assert os.path.exists("/dev/shm/" + region.name)
print(region.name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    name = done.stdout.strip()
    assert name.startswith("rsrv-pool-")
    assert not os.path.exists(f"/dev/shm/{name}")


def test_an_owned_region_can_be_registered_and_read_by_a_server(registry):
    with OwnedRegion.create("client", 64) as region:
        registry.register(region.name, region.key, 0, region.byte_size)
        np.frombuffer(region.view, np.float32)[:] = np.arange(16)
        assert registry.read(region.name, 0, 64).view(np.float32).tolist() == list(range(16))
        registry.write(region.name, 4, memoryview(np.float32([-1.5]).tobytes()))
        assert np.frombuffer(region.view, np.float32, 1, 4)[0] == -1.5
    registry.unregister("")
