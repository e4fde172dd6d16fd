"""Restarts with a cache: the second start compiles nothing, and a cache that cannot be used is a warning at most."""

import json
import os
import shutil
import stat
import threading
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from support.bundles import N, write_affine, write_model
from support.server import ServerProcess

from rsrv.core.wire import decode_response, encode_request, join
from rsrv.runtime.cache import DIRECTORY

X = np.float32([[1, 2, 3]])


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    repo = tmp_path_factory.mktemp("restart")
    write_affine(repo / "affine", batch_sizes=(1, 4))
    write_affine(repo / "twin", scale=3.0, batch_sizes=(1, 4))  # other weights, the same programs
    write_model(
        repo / "root",
        lambda x: (np.float32(2) * x,),
        {"x": ((N, 3), np.float32)},
        {"y": ((N, 3), np.float32)},
        batch_sizes=(2,),
    )
    return repo


@pytest.fixture(scope="module")
def first(repo, tmp_path_factory):
    """A first start with an empty cache: the cache that it left, and what it said."""
    cache_dir = tmp_path_factory.mktemp("first") / "cache"
    with serve(repo, cache_dir) as server:
        progress = server.wait_ready()["progress"]
        answers(server)
        readyz = server.http("/readyz")
        loaded = {
            source: server.metric("rsrv_worker_programs_loaded_total", source=source)
            for source in ("compiled", "shared")
        }
        stored = server.metric("rsrv_worker_cache_stored_total")
        server.wait_settled()  # ready comes before the last line of the start
        code = server.stop()
    return SimpleNamespace(
        cache_dir=cache_dir, progress=progress, readyz=readyz, loaded=loaded, stored=stored, code=code, log=server.log
    )


@pytest.fixture
def cache_dir(tmp_path):
    """Where there is nothing yet."""
    return tmp_path / "cache"


@pytest.fixture
def warm_dir(first, cache_dir):
    """A copy of the cache that the first start left."""
    return shutil.copytree(first.cache_dir, cache_dir)


def serve(repo, cache_dir, **more):
    env = {f"RSRV_WORKER_{key}": value for key, value in {"CACHE_DIR": str(cache_dir), **more}.items()}
    return ServerProcess(repo, env=env)


def infer(server, model, x=X):
    with grpc.insecure_channel(server.url) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        return decode_response(call(join(encode_request(model, [("x", x)])), timeout=30)).array("y")


def answers(server):
    np.testing.assert_array_equal(infer(server, "affine"), X * 2 + 1)
    np.testing.assert_array_equal(infer(server, "twin"), X * 3 + 1)
    np.testing.assert_array_equal(infer(server, "root"), X * 2)


def entries(cache_dir):
    return sorted((cache_dir / DIRECTORY).iterdir())


def warnings(server, about="cache"):
    return [line for line in server.log.splitlines() if " WARNING " in line and about in line]


def test_a_first_start_compiles_every_program_and_keeps_it(first):
    assert first.progress["programs"] == first.progress["compiled"] == 5
    assert first.progress["from_cache"] == 0
    assert first.loaded == {"compiled": 3, "shared": 2}
    assert first.stored == 3
    assert first.code == 0
    assert len(entries(first.cache_dir)) == 3
    assert stat.S_IMODE((first.cache_dir / DIRECTORY).stat().st_mode) == 0o700


def test_readyz_and_the_log_count_programs(first):
    status, body = first.readyz
    assert status == 200
    assert json.loads(body)["progress"]["programs"] == 5
    assert "programs='compiled 5/5'" in first.log


def test_a_second_start_takes_every_program_from_the_cache_and_answers_the_same(repo, warm_dir):
    with serve(repo, warm_dir) as server:
        body = server.wait_ready()
        assert body["progress"]["compiled"] == 5
        assert body["progress"]["from_cache"] >= 3
        answers(server)
        assert server.metric("rsrv_worker_programs_loaded_total", source="compiled") == 0
        assert server.metric("rsrv_worker_cache_lookups_total", result="hit") >= 3
        assert server.metric("rsrv_worker_compile_seconds_total") == 0
        server.wait_settled()  # ready comes before the line that counts programs
        assert server.stop() == 0
        assert "compiling model" not in server.log
        assert "from cache" in server.log
        assert not warnings(server)


def test_a_damaged_entry_is_one_warning_and_one_compilation(repo, warm_dir):
    truncated, flipped, _ = entries(warm_dir)
    truncated.write_bytes(truncated.read_bytes()[:-7])
    flipped.write_bytes(flipped.read_bytes()[:-7] + b"flipped")
    with serve(repo, warm_dir) as server:
        server.wait_ready()
        answers(server)
        assert server.metric("rsrv_worker_programs_loaded_total", source="compiled") == 2
        assert server.metric("rsrv_worker_cache_lookups_total", result="rejected") == 2
        assert server.stop() == 0
        assert len(warnings(server)) == 2
        for entry in (truncated, flipped):
            assert sum(entry.stem in line for line in warnings(server)) == 1
    with serve(repo, warm_dir) as server:
        server.wait_ready()
        assert server.metric("rsrv_worker_programs_loaded_total", source="compiled") == 0
        assert server.stop() == 0


def test_what_was_compiled_for_other_threads_or_options_is_compiled_anew(repo, warm_dir):
    for more in ({"RUNTIME_CPU_THREADS": "1"}, {"RUNTIME_XLA_OPTIONS": "xla_cpu_enable_fast_math=false"}):
        with serve(repo, warm_dir, **more) as server:
            server.wait_ready()
            assert server.metric("rsrv_worker_programs_loaded_total", source="compiled") == 3
            assert server.stop() == 0
            assert not warnings(server)


def test_a_cache_that_cannot_be_used_is_one_warning_and_the_server_serves(repo, cache_dir):
    (cache_dir / DIRECTORY).mkdir(parents=True)
    (cache_dir / DIRECTORY).chmod(0o777)
    with serve(repo, cache_dir) as server:
        server.wait_ready()
        answers(server)
        assert server.stop() == 0
        assert len(warnings(server)) == 1
        assert "mode 0777, wanted 0700" in server.log
    assert entries(cache_dir) == []


def test_two_servers_may_start_on_one_empty_cache_at_the_same_time(repo, cache_dir):
    codes = []

    def run():
        with serve(repo, cache_dir) as server:
            server.wait_ready()
            answers(server)
            codes.append((server.stop(), warnings(server)))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [(0, []), (0, [])]
    assert len(entries(cache_dir)) == 3
    assert all(entry.suffix == ".executable" for entry in entries(cache_dir))


def test_an_option_that_xla_does_not_know_is_a_configuration_error_that_names_it(repo, cache_dir):
    """One with a value that it does not take is another: tests/runtime/test_runtime_options.py."""
    server = serve(repo, cache_dir, RUNTIME_XLA_OPTIONS="xla_cpu_no_such_flag=1")
    with pytest.raises(AssertionError, match="ended with 78"), server:
        pass
    assert "No such compile option: 'xla_cpu_no_such_flag'" in server.log
    assert "runtime.xla_options" in server.log


def test_options_reach_every_compilation(repo, tmp_path):
    dump = tmp_path / "dump"
    with ServerProcess(repo, env={"RSRV_WORKER_RUNTIME_XLA_OPTIONS": f"xla_dump_to={dump}"}) as server:
        server.wait_ready()
        answers(server)
        assert server.stop() == 0
    assert any(name.endswith(".txt") for name in os.listdir(dump))
