"""What an operator's machine, a careless hook and a hostile client can do to a real server, and what becomes of it."""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import grpc
import numpy as np
import pytest
from support.bundles import write_affine
from support.ports import lasting_ports
from support.server import ServerProcess

from rsrv.core.dtypes import DType
from rsrv.core.wire import ShmInput, decode_response, encode_request, join
from rsrv.protos import inference as pb

SERVICE = "/inference.GRPCInferenceService"
ONES = np.ones((1, 3), np.float32)


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    repo = tmp_path_factory.mktemp("repo")
    write_affine(repo / "affine", batch_sizes=(1,))
    return repo


def infer(server, model, inputs):
    with grpc.insecure_channel(server.url) as channel:
        body = join(encode_request(model, inputs))
        return decode_response(channel.unary_unary(f"{SERVICE}/ModelInfer")(body, timeout=60)).arrays()


# --- the environment ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [("--xla_nonsense=1", "Unknown flag"), ("--xla_cpu_enable_fast_math=perhaps", "it ended")],
)
def test_flags_that_xla_does_not_take_are_a_configuration_error_that_quotes_it(repo, flags, words):
    command = ServerProcess(repo).command
    env = {**os.environ, "RSRV_WORKER_RUNTIME_BACKEND": "cpu", "XLA_FLAGS": flags}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 78
    assert ended.stdout == ""
    error = ended.stderr[ended.stderr.index("error:") :]
    assert f"XLA does not start with XLA_FLAGS={flags!r}" in error
    assert words in error


def test_flags_that_xla_takes_are_no_hindrance(repo):
    with ServerProcess(repo, env={"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}) as server:
        server.wait_ready()
        assert server.stop() == 0


def test_the_soft_limit_on_open_files_is_raised():
    code = """if True:
        import resource
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        from rsrv.core.process import MAX_FILES, raise_file_limit
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, MAX_FILES), hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (64, 64)
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("streams", ["2>&-", "2>/dev/full", "<&- >&- 2>&-"])
def test_a_server_without_streams_or_room_for_its_log_serves_all_the_same(repo, streams):
    ports = lasting_ports(2)
    server = ServerProcess(repo, ports=["--grpc-port", str(ports[0]), "--http-port", str(ports[1])])
    command = f"exec {shlex.join(server.command)} {streams}"
    process = subprocess.Popen(["bash", "-c", command], env=server._env, stdout=subprocess.DEVNULL)
    try:
        # Without a limit it would look for the server less and less often while that starts.
        options = [("grpc.max_reconnect_backoff_ms", 500)]
        with grpc.insecure_channel(f"127.0.0.1:{ports[0]}", options=options) as channel:
            live = channel.unary_unary(f"{SERVICE}/ServerLive")
            assert pb.ServerLiveResponse.FromString(live(b"", timeout=90, wait_for_ready=True)).live
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


# --- signals before there is anything to stop -----------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_server_listens_ends_it_with_0(repo, number):
    server = ServerProcess(repo)
    process = subprocess.Popen(
        server.command, env=server._env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    watchdog = threading.Timer(90, process.kill)
    watchdog.start()
    assert "configuration" in process.stderr.readline()
    process.send_signal(number)
    process.communicate()
    watchdog.cancel()
    assert process.returncode == 0


# --- hooks ----------------------------------------------------------------------------------------------------------

IMPORT_HANGS = """
import threading
print("importing", file=__import__("sys").stderr, flush=True)
threading.Event().wait()
def preprocess(inputs): return inputs
"""
THREAD_STAYS = """
import threading
threading.Thread(target=threading.Event().wait, name="forever", daemon=False).start()
def preprocess(inputs): return inputs
"""
EXIT_HANGS = """
import atexit, threading
atexit.register(threading.Event().wait)
def preprocess(inputs): return inputs
"""


@pytest.mark.parametrize(
    ("hooks", "text"), [(THREAD_STAYS, "left something running: forever"), (EXIT_HANGS, "an exit function")]
)
def test_what_a_hook_leaves_running_cannot_keep_the_process_from_ending(tmp_path, hooks, text):
    write_affine(tmp_path / "m", batch_sizes=(1,), hooks=hooks)
    with ServerProcess(tmp_path) as server:
        server.wait_ready()
        assert server.stop() == 0
        assert text in server.log


def test_a_model_py_that_never_returns_cannot_keep_the_process_from_ending(tmp_path):
    write_affine(tmp_path / "m", batch_sizes=(1,), hooks=IMPORT_HANGS)
    with ServerProcess(tmp_path) as server:
        server.wait_for(lambda status, body: "importing" in server.log)
        assert server.stop() == 0
        assert "model not loaded name=m phase=hooks reason=stopping" in server.log


def test_what_hooks_print_goes_to_stderr_and_blocks_nobody(tmp_path):
    """The test's reader takes one line of stdout, like every supervisor; a pipe holds 64 KB."""
    hooks = 'def preprocess(inputs):\n    print("z" * 200_000, flush=True)\n    return inputs\n'
    write_affine(tmp_path / "m", batch_sizes=(1,), hooks=hooks)
    with ServerProcess(tmp_path) as server:
        server.wait_ready()
        np.testing.assert_array_equal(infer(server, "m", [("x", ONES)])["y"], ONES * 3)
        assert server.process.stdout.read() == ""
        assert server.stop() == 0
        assert "z" * 200_000 in server.log


BAD_HOOKS = (
    "import sys; sys.exit(3)",
    "raise KeyboardInterrupt",
    "raise type('Mine', (BaseException,), {})('secret')",
    "inputs['x'][...] = 5",
    "return preprocess(inputs)",
)


@pytest.fixture(scope="module")
def badly_hooked(tmp_path_factory):
    repo = tmp_path_factory.mktemp("hooked")
    for number, statement in enumerate(BAD_HOOKS):
        hooks = f"def preprocess(inputs):\n    {statement}\n    return inputs\n"
        write_affine(repo / f"bad{number}", batch_sizes=(1,), hooks=hooks)
    write_affine(repo / "affine", batch_sizes=(1,))
    with ServerProcess(repo) as server:
        server.wait_settled()
        yield server
        assert server.stop() == 0


@pytest.mark.parametrize("number", range(len(BAD_HOOKS)), ids=BAD_HOOKS)
def test_a_hook_that_does_what_it_must_not_fails_its_request_and_the_next_one_is_served(badly_hooked, number):
    with pytest.raises(grpc.RpcError) as caught:
        infer(badly_hooked, f"bad{number}", [("x", ONES)])
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in caught.value.details()
    assert badly_hooked.metric("rsrv_worker_inflight_requests") == 0
    np.testing.assert_array_equal(infer(badly_hooked, "affine", [("x", ONES)])["y"], ONES * 3)


# --- shared memory --------------------------------------------------------------------------------------------------


def test_a_claim_that_the_model_does_not_take_costs_no_memory(repo):
    """A sparse object holds nothing and may be as long as one likes; its size must not be allocated to be refused."""
    name = f"rsrv-test-sparse-{os.getpid()}-{uuid.uuid4().hex[:16]}"
    path, size = Path("/dev/shm") / name, 4 << 30
    with ServerProcess(repo) as server, grpc.insecure_channel(server.url) as channel:
        server.wait_ready()
        path.touch()
        try:
            os.truncate(path, size)
            register = pb.SystemSharedMemoryRegisterRequest(name="r", key=name, byte_size=size)
            channel.unary_unary(f"{SERVICE}/SystemSharedMemoryRegister")(register.SerializeToString(), timeout=60)
            before = peak_bytes(server.pid)
            for dtype, shape in [(DType.F32, (1 << 30,)), (DType.F32, (1, 1 << 30)), (DType.U8, (1 << 30, 4))]:
                with pytest.raises(grpc.RpcError) as caught:
                    infer(server, "affine", [ShmInput("x", dtype, shape, "r", 0, size)])
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert peak_bytes(server.pid) - before < 256 << 20
        finally:
            path.unlink()
        assert server.stop() == 0


def peak_bytes(pid):
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) << 10
