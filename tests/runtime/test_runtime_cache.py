"""The executable cache: what it finds again, what it refuses, and that nothing about it ever fails a caller."""

import errno
import json
import logging
import os
import stat
import threading
from pathlib import Path

import numpy as np
import pytest

from rsrv.core.errors import CacheError
from rsrv.runtime import CompileOptions, execute
from rsrv.runtime.cache import DIRECTORY, ExecutableCache, list_entries, open_cache
from rsrv.runtime.cache_directory import SUFFIX, CacheDirectory
from rsrv.runtime.compiled import Compiled
from rsrv.runtime.fingerprint import cpu_features, fingerprint
from rsrv.stablehlo import ProgramReport, ProgramSignature, TensorType
from rsrv.stablehlo.policy import Policy

F32 = TensorType("f32", (4,))
REPORT = ProgramReport(ProgramSignature((F32,), (F32,)), custom_calls=("f",), stablehlo_version="1.13.7")
COMPILED = Compiled(REPORT, b"native code" * 100, 0.5, 4096, "f32 (nothing to pin)", ("mind the gap",))
FACTS = {"platform": "cpu", "device": "cpu", "jaxlib": "0.10.2", "cpu": "x86_64 0123", "threads": "2"}
KEY = "a" * 64


@pytest.fixture
def cache(tmp_path):
    cache = open_cache(tmp_path / "cache", FACTS)
    yield cache
    cache.close()


@pytest.fixture
def entry(cache, tmp_path):
    """The file of an entry that can be used."""
    cache.store(KEY, COMPILED, label="net batch 8")
    return tmp_path / "cache" / DIRECTORY / (KEY + SUFFIX)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_was_stored_is_found_again_with_all_that_a_warm_start_needs(cache, entry):
    assert cache.load(KEY) == COMPILED
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    assert stat.S_IMODE(entry.parent.stat().st_mode) == 0o700
    assert (cache.stats.hits, cache.stats.misses, cache.stats.stored) == (1, 0, 1)
    assert cache.load("b" * 64) is None
    assert cache.stats.misses == 1


def test_a_program_that_cannot_be_serialised_is_remembered_as_such(cache):
    lost = Compiled(REPORT, None, 0.5)
    cache.store(KEY, lost)
    assert cache.load(KEY) == lost


def test_the_key_depends_on_everything_that_changes_the_code(tmp_path):
    def key(program="p" * 64, policy=Policy(), options=CompileOptions(), facts=FACTS):  # noqa: B008
        cache = open_cache(tmp_path / "keys", facts)
        try:
            return cache.key(program, policy, options)
        finally:
            cache.close()

    keys = [
        key(),
        key(program="q" * 64),
        key(policy=Policy(numerics="f32")),
        key(policy=Policy(tf32_capable=True)),
        key(policy=Policy(batch=8)),
        key(options=CompileOptions((("xla_cpu_enable_fast_math", True),))),
        key(options=CompileOptions((("xla_cpu_enable_fast_math", False),))),
        *(key(facts={**FACTS, name: "another"}) for name in FACTS),
        key(facts={**FACTS, "XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}),
    ]
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:-1], "sha256"),
        (lambda data: data[:20], "not an entry of this version"),
        (lambda data: b"", "0 bytes are not an entry"),
        (lambda data: data + b"x", "sha256"),
        (lambda data: b"RSRVEXE9" + data[8:], "not an entry of this version"),
    ],
)
def test_a_truncated_or_strange_entry_is_one_warning_and_then_gone(cache, entry, caplog, damage, words):
    entry.write_bytes(damage(entry.read_bytes()))
    assert cache.load(KEY) is None
    (message,) = warnings(caplog)
    assert words in message
    assert str(entry) in message
    assert not entry.exists()
    assert cache.load(KEY) is None
    assert len(warnings(caplog)) == 1
    cache.store(KEY, COMPILED)
    assert cache.load(KEY) == COMPILED


def test_a_flipped_bit_anywhere_is_noticed(cache, entry):
    whole = entry.read_bytes()
    for position in [*range(60), *range(60, len(whole), 97), len(whole) - 1]:
        data = bytearray(whole)
        data[position] ^= 1 << position % 8
        entry.write_bytes(data)
        assert cache.load(KEY) is None, position
        cache.store(KEY, COMPILED)
    assert cache.load(KEY) == COMPILED


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"cpu": "x86_64 9999"}, "cpu is 'x86_64 0123', here it is 'x86_64 9999'"),
        ({"jaxlib": "0.11.0"}, "jaxlib is '0.10.2', here it is '0.11.0'"),
        ({"XLA_FLAGS": "--xla_x=1"}, "XLA_FLAGS is None, here it is '--xla_x=1'"),
    ],
)
def test_an_entry_of_another_cpu_or_jaxlib_is_not_looked_at_and_refused_under_our_name(
    tmp_path, entry, caplog, changed, words
):
    here = open_cache(tmp_path / "cache", {**FACTS, **changed})
    theirs, ours = (ExecutableCache.key(c, "p" * 64, Policy(), CompileOptions()) for c in (_with(FACTS), here))
    assert theirs != ours
    assert here.load(ours) is None
    assert not warnings(caplog)
    entry.rename(entry.with_name(ours + SUFFIX))
    assert here.load(ours) is None
    (message,) = warnings(caplog)
    assert words in message
    here.close()


def _with(facts):
    return ExecutableCache(None, facts)


def test_an_entry_under_the_name_of_another_is_refused(cache, entry, caplog):
    entry.rename(entry.with_name("b" * 64 + SUFFIX))
    assert cache.load("b" * 64) is None
    assert f"holds what belongs to {KEY}" in caplog.text


def test_an_entry_with_a_right_digest_and_a_header_of_nonsense_is_a_warning(cache, entry, caplog):
    from rsrv.runtime import cache as module

    strange = ({}, {"key": KEY, "facts": FACTS, "compiled": {}}, {"key": KEY, "facts": 3}, {"key": KEY, "facts": [1]})
    for header in (*strange, {"key": KEY, "facts": "text"}):
        entry.write_bytes(b"".join(module._encode(header, b"")))
        assert cache.load(KEY) is None
    assert len(warnings(caplog)) == 5


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o755])
def test_a_directory_that_others_may_use_is_refused_with_one_warning(tmp_path, caplog, mode):
    directory = tmp_path / DIRECTORY
    directory.mkdir()
    directory.chmod(mode)
    assert open_cache(tmp_path, FACTS) is None
    (message,) = warnings(caplog)
    assert f"mode {mode:04o}, wanted 0700" in message


def test_a_directory_of_somebody_else_is_refused(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert open_cache(tmp_path, FACTS) is None
    assert "wanted 12345, who runs this process" in caplog.text


def test_a_directory_behind_a_link_is_refused(tmp_path, caplog):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / DIRECTORY).symlink_to(tmp_path / "elsewhere")
    assert open_cache(tmp_path, FACTS) is None
    assert "it is a symbolic link" in caplog.text


@pytest.mark.parametrize("what", ["file", "no parent"])
def test_a_directory_that_cannot_be_made_is_one_warning(tmp_path, caplog, what):
    (tmp_path / "taken").write_text("")
    assert open_cache(tmp_path / "taken" / ("" if what == "file" else "deeper"), FACTS) is None
    (message,) = warnings(caplog)
    assert what != "file" or message.endswith("taken is not a directory")


def test_a_directory_in_the_place_of_an_entry_is_in_the_way_of_that_entry_only(cache, entry, caplog):
    entry.unlink()
    entry.mkdir()
    assert cache.load(KEY) is None
    cache.store(KEY, COMPILED)
    assert [("is not a regular file" in text, "it is a directory" in text) for text in warnings(caplog)] == [
        (True, False),
        (False, True),
    ]
    other = "f" * 64
    cache.store(other, COMPILED)
    assert cache.load(other) == COMPILED


def test_an_entry_that_others_may_write_or_that_is_no_file_is_refused(cache, entry, caplog):
    entry.chmod(0o666)
    assert cache.load(KEY) is None
    assert "mode 0666, wanted 0600" in caplog.text
    cache.store(KEY, COMPILED)
    target = entry.rename(entry.with_name("target"))
    entry.symlink_to(target)
    assert cache.load(KEY) is None
    entry.unlink(missing_ok=True)
    os.mkfifo(entry)
    assert cache.load(KEY) is None
    assert "not a regular file" in caplog.text


@pytest.mark.parametrize("call", ["open", "write", "rename"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_full_or_unwritable_disk_is_one_warning_and_leaves_nothing_behind(
    cache, tmp_path, monkeypatch, caplog, call, code
):
    real = getattr(os, call)

    def failing(*arguments, **keywords):
        if call == "open" and not arguments[1] & os.O_CREAT:
            return real(*arguments, **keywords)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing)
        cache.store(KEY, COMPILED)
        cache.store("b" * 64, COMPILED)
    (message,) = warnings(caplog)
    assert os.strerror(code) in message
    assert list((tmp_path / "cache" / DIRECTORY).iterdir()) == []
    assert cache.load(KEY) is None


def test_the_least_recently_used_go_when_the_bound_is_reached(tmp_path):
    cache = open_cache(tmp_path, FACTS)
    cache.store("a", COMPILED)
    size = (tmp_path / DIRECTORY / f"a{SUFFIX}").stat().st_size
    cache.close()
    cache = open_cache(tmp_path, FACTS, max_bytes=3 * size + size // 2)
    for name in "bc":
        cache.store(name, COMPILED)
    for age, name in enumerate("bca"):
        os.utime(tmp_path / DIRECTORY / f"{name}{SUFFIX}", (age, age))
    assert cache.load("b") is not None  # now the most recently used
    cache.store("d", COMPILED)
    with CacheDirectory(tmp_path / DIRECTORY) as directory:
        assert {file.name for file in directory.files()} == {"a", "b", "d"}
    assert cache.stats.evicted == 1
    cache.close()


def test_an_entry_larger_than_the_bound_is_not_kept(tmp_path):
    cache = open_cache(tmp_path, FACTS, max_bytes=100)
    cache.store(KEY, COMPILED)
    assert cache.empty
    cache.close()


def test_what_a_process_left_half_written_is_swept_up_later(tmp_path):
    cache = open_cache(tmp_path, FACTS, max_bytes=1 << 20)
    old, new = (tmp_path / DIRECTORY / f".{name}.1.2.tmp" for name in ("old", "new"))
    old.write_text("")
    new.write_text("")
    os.utime(old, (0, 0))
    cache.store(KEY, COMPILED)
    assert (old.exists(), new.exists()) == (False, True)
    cache.close()


def test_several_servers_share_one_directory(tmp_path):
    """Writers of the same keys, readers and one that trims: whoever finds something finds it whole."""
    caches = [open_cache(tmp_path, FACTS, max_bytes=8000) for _ in range(4)]
    keys = [f"{n:064}" for n in range(8)]
    wrong = []

    def work(cache, seed):
        rng = np.random.default_rng(seed)
        for _ in range(150):
            key = keys[rng.integers(len(keys))]
            found = cache.load(key)
            if found is None:
                cache.store(key, COMPILED)
            elif found != COMPILED:
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(cache, n)) for n, cache in enumerate(caches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sum(cache.stats.rejected for cache in caches) == 0
    assert sum(cache.stats.hits for cache in caches) > 0
    for cache in caches:
        cache.close()


def test_entries_are_listed_with_what_they_are_for_and_what_is_wrong_with_them(cache, entry):
    cache.store("b" * 64, COMPILED)
    os.utime(entry, (5, 5))
    entry.with_name("c" + SUFFIX).write_bytes(b"x")
    with CacheDirectory(entry.parent, create=False) as directory:
        first, *others = list_entries(directory)
        assert (first.key, first.label, first.facts, first.problem, first.used) == (KEY, "net batch 8", FACTS, "", 5)
        assert [other.problem for other in others if other.key == "c"] == [
            "its 1 bytes are not an entry of this version"
        ]
        assert list_entries(directory)[0].used == 5


def test_a_real_executable_survives_the_cache(tmp_path, cpu, pool):
    program = b"""func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {
      %0 = stablehlo.add %a, %a : tensor<4xf32>
      return %0 : tensor<4xf32> }"""
    cache = open_cache(tmp_path, fingerprint(cpu))
    compiled = pool.compile(program)
    key = cache.key("p", Policy(), CompileOptions())
    cache.store(key, compiled)
    found = cache.load(key)
    executable = cpu.load(found.blob, found.report.signature, scratch_bytes=found.scratch_bytes)
    assert executable.scratch_bytes == 16
    assert execute(cpu, executable, [np.arange(4, dtype=np.float32)])[0].tolist() == [0, 2, 4, 6]
    cache.close()


def test_the_fingerprint_knows_threads_flags_and_the_machine(cpu, tmp_path):
    plain = fingerprint(cpu, {})
    assert plain["platform"] == "cpu"
    assert plain["threads"] == str(len(os.sched_getaffinity(0)))
    assert fingerprint(cpu, {"NPROC": "7"})["threads"] == "7"
    assert fingerprint(cpu, {"XLA_FLAGS": "--a"})["XLA_FLAGS"] == "--a"
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("model name\t: A\nflags\t\t: sse avx\nbogomips : 1\n\nprocessor : 1\n")
    two.write_text("model name\t: A\nflags\t\t: sse avx avx2\nbogomips : 1\n\nprocessor : 1\n")
    assert cpu_features(one) != cpu_features(two)
    two.write_text("model name\t: A\nflags\t\t: avx sse\nbogomips : 2\n\n")
    assert cpu_features(one) == cpu_features(two)
    assert cpu_features(tmp_path / "none") == cpu_features(tmp_path / "none")


def test_a_closed_or_missing_directory_says_so(tmp_path):
    with pytest.raises(CacheError, match="cannot be opened: No such file"):
        CacheDirectory(Path(tmp_path / "none"), create=False)
    assert json.loads(json.dumps(COMPILED.to_json()))["serialized"]
