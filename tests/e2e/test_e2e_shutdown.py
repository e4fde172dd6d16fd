"""Start and stop as an operator sees them: taken ports, SIGTERM under load, a second signal, clients that die."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from support.bundles import write_affine
from support.server import ServerProcess

from rsrv.core.wire import decode_response, encode_request, join
from rsrv.protos import inference as pb

INFER = "/inference.GRPCInferenceService/ModelInfer"
FAKE = {"RSRV_ALLOW_FAKE": "1", "RSRV_WORKER_RUNTIME_BACKEND": "fake"}


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    repo = tmp_path_factory.mktemp("repo")
    write_affine(repo / "affine")
    return repo


def request(rows=1, model="affine"):
    return join(encode_request(model, [("x", np.ones((rows, 3), np.float32))]))


def reason(error):
    return dict(error.trailing_metadata() or ()).get("rsrv-reason")


class Load:
    """`threads` closed loops of one-row requests; `outcomes` has OK or (code, reason) of every call."""

    def __init__(self, url, threads):
        self.channel = grpc.insecure_channel(url)
        self.call = self.channel.unary_unary(INFER)
        self.outcomes = []
        self.first_answers = threading.Semaphore(0)
        self.ended = threading.Event()
        self.threads = [threading.Thread(target=self.loop) for _ in range(threads)]
        for thread in self.threads:
            thread.start()

    def loop(self):
        while not self.ended.is_set():
            try:
                decode_response(self.call(request(), timeout=60))
                self.outcomes.append("OK")
                self.first_answers.release()
            except grpc.RpcError as error:
                self.outcomes.append((error.code().name, reason(error)))
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    return

    def finish(self):
        self.ended.set()
        for thread in self.threads:
            thread.join()
        self.channel.close()


def test_sigterm_under_load_answers_every_call_and_exits_0(repo):
    # A fake device that takes 20 ms a row: requests always wait in the queue.
    with ServerProcess(repo, env={**FAKE, "RSRV_WORKER_RUNTIME_FAKE_SECONDS_PER_ROW": "0.02"}) as server:
        server.wait_ready()
        load = Load(server.url, 16)
        for _ in range(32):
            load.first_answers.acquire()
        code = server.stop()
        load.finish()
        assert code == 0, server.log
    refused = [outcome for outcome in load.outcomes if outcome != "OK"]
    assert load.outcomes.count("OK") >= 32
    # Each caller ends with one refusal: by the server with its reason, or by a connection that is gone.
    assert len(refused) == 16
    assert {code for code, _ in refused} == {"UNAVAILABLE"}
    assert {why for _, why in refused} <= {"stopping", None}
    # Nothing that was accepted was refused: the grace (30 s) is far longer than the queue.
    assert "requests refused after the grace" not in server.log


def test_requests_that_the_grace_cannot_finish_are_refused_with_stopping(repo):
    env = {
        **FAKE,
        "RSRV_WORKER_RUNTIME_FAKE_SECONDS_PER_ROW": "1.5",
        "RSRV_WORKER_SHUTDOWN_GRACE_SECONDS": "0.2",
        "RSRV_WORKER_SCHEDULER_DISCIPLINE": "fifo",  # which runs no warm-up; here it would take the device for seconds
    }
    with ServerProcess(repo, env=env) as server:
        server.wait_ready()
        with grpc.insecure_channel(server.url) as channel:
            call = channel.unary_unary(INFER)
            # 8 rows fill the largest batch, so the second waits for the first and the others behind it.
            futures = [call.future(request(rows=1), timeout=60) for _ in range(12)]
            # The first may have been answered by the time that the last arrives.
            while server.metric("rsrv_worker_inflight_requests") + sum(future.done() for future in futures) < 12:
                time.sleep(0.01)
            assert server.stop() == 0
            outcomes = []
            for future in futures:
                try:
                    decode_response(future.result())
                    outcomes.append("OK")
                except grpc.RpcError as error:
                    outcomes.append((error.code().name, reason(error)))
    assert "OK" in outcomes
    assert set(outcomes) == {"OK", ("UNAVAILABLE", "stopping")}


def test_ready_turns_false_at_once_while_requests_are_accepted_for_the_pause_and_a_second_signal_ends_it(repo):
    with ServerProcess(repo, env={"RSRV_WORKER_SHUTDOWN_PAUSE_SECONDS": "600"}) as server:
        server.wait_ready()
        with grpc.insecure_channel(server.url) as channel:
            infer, ready = (
                channel.unary_unary(INFER),
                channel.unary_unary("/inference.GRPCInferenceService/ServerReady"),
            )
            server.signal(signal.SIGTERM)
            body = server.wait_for(lambda status, body: status == 503, 30)
            assert body["state"] == "stopping"
            assert body["reason"] == "the server is stopping"
            assert not pb.ServerReadyResponse.FromString(ready(b"", timeout=30)).ready
            np.testing.assert_array_equal(decode_response(infer(request(), timeout=30)).array("y"), [[3, 3, 3]])
        server.signal(signal.SIGINT)
        assert server.wait() == 130


def test_sigterm_while_models_are_prepared_exits_0(tmp_path):
    write_affine(tmp_path / "affine", batch_sizes=range(1, 40))
    with ServerProcess(tmp_path) as server:
        server.wait_for(lambda status, body: body["phase"].startswith("compile"))
        assert server.stop() == 0, server.log


@pytest.mark.parametrize("face", ["grpc", "http"])
def test_a_taken_port_exits_78_before_any_bundle_is_opened(repo, face):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = str(taken.getsockname()[1])
        ports = {"grpc": "0", "http": "0", face: port}
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                "rsrv",
                "serve",
                str(repo),
                "--grpc-port",
                ports["grpc"],
                "--http-port",
                ports["http"],
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert result.returncode == 78
    assert f"127.0.0.1:{port} is taken" in result.stderr
    assert "compil" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["nowhere"], 2, "nowhere: there is no such directory"),
        ([], 2, "say what to serve"),
        (["--config", "nowhere.yaml"], 2, "nowhere.yaml: there is no such node file"),
        ([".", "--config", "x.yaml"], 2, "exclude each other"),
        ([".", "--worker", "w"], 2, "needs --config"),
        ([".", "--no-http", "--http-port", "1"], 2, "contradict"),
        ([".", "--grpc-port", "70000"], 78, "endpoints.grpc_port"),
    ],
)
def test_wrong_arguments_exit_with_their_code_and_say_why(tmp_path, arguments, code, text):
    result = subprocess.run(
        [sys.executable, "-m", "rsrv", "serve", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == code, result.stderr
    assert text in result.stderr


def test_a_bundle_instead_of_a_repository_is_a_usage_error(repo):
    command = [sys.executable, "-m", "rsrv", "serve", str(repo / "affine")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert f"rsrv serve {repo}" in result.stderr


def test_a_node_file_serves_its_worker(repo, tmp_path):
    node = tmp_path / "node.yaml"
    node.write_text(f"model_repo: {repo}\nmetrics_base_port: 18473\nworkers:\n- name: w0\n  port: 0\n")
    with ServerProcess(
        None, "--config", str(node), "--worker", "w0", ports=["--grpc-port", "0", "--http-port", "0"]
    ) as s:
        s.wait_ready()
        assert s.metric("rsrv_worker_info", worker="w0") == 1
        assert s.stop() == 0


CLIENT = """
    import sys, grpc, numpy as np
    from rsrv.core.shm import OwnedRegion
    from rsrv.core.wire import ShmInput, encode_request, join
    from rsrv.core.dtypes import DType
    from rsrv.protos import inference as pb
    url, number = sys.argv[1:]
    region = OwnedRegion.create("victim", 12)
    channel = grpc.insecure_channel(url)
    channel.unary_unary("/inference.GRPCInferenceService/SystemSharedMemoryRegister")(
        pb.SystemSharedMemoryRegisterRequest(name=region.name, key=region.key, byte_size=12).SerializeToString())
    call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    body = join(encode_request("affine", [ShmInput("x", DType.F32, (1, 3), region.name, 0, 12)]))
    flying = [call.future(body) for _ in range(4)]
    flying[0].result()
    print("flying", flush=True)
    while True:
        flying = [f if not f.done() else call.future(body) for f in flying]
"""


def test_clients_that_are_killed_leave_nothing_behind(repo, tmp_path):
    script = tmp_path / "client.py"
    script.write_text(textwrap.dedent(CLIENT))
    env = {**FAKE, "RSRV_WORKER_RUNTIME_FAKE_SECONDS_PER_ROW": "0.01", "RSRV_WORKER_SHM_REAP_SECONDS": "1"}
    with ServerProcess(repo, env=env) as server:
        server.wait_ready()

        def has_done_with_them():
            return (
                server.metric("rsrv_worker_inflight_requests") == 0
                and server.metric("rsrv_worker_shm_regions") == 0
                and not any(socket.raddr for socket in psutil.Process(server.pid).net_connections())
            )

        def counts():
            """Of descriptors and threads, once nothing is left of all clients."""
            until = time.monotonic() + 60
            while not has_done_with_them():
                assert time.monotonic() < until, f"not rid of them\n{server.log}"
                time.sleep(0.05)
            return [len(os.listdir(f"/proc/{server.pid}/{what}")) for what in ("fd", "task")]

        pids = set()

        def kill_some(n):
            clients = [
                subprocess.Popen([sys.executable, str(script), server.url, str(i)], stdout=subprocess.PIPE)
                for i in range(n)
            ]
            try:
                for client in clients:
                    assert client.stdout.readline() == b"flying\n"
            finally:
                for client in clients:
                    client.kill()
                    client.wait()
                    client.stdout.close()
            pids.update(client.pid for client in clients)

        seen = []

        def are_as_before():
            return len(seen) > 1 and all(now <= then for now, then in zip(seen[-1], seen[-2], strict=True))

        try:
            # Their objects still exist, so it is the dead owner that tells the server, not the unlinked name. The first
            # clients make the engine's pool grow to its size for this load, at times the second ones a little more;
            # what each dead client leaves would be more after every round.
            while not are_as_before():
                assert len(seen) < 6, f"descriptors and threads after each round: {seen}"
                kill_some(3)
                seen.append(counts())
        finally:
            for path in Path("/dev/shm").glob("rsrv-victim-*"):
                if int(path.name.split("-")[2]) in pids:
                    path.unlink()
        with grpc.insecure_channel(server.url) as channel:
            channel.unary_unary(INFER)(request(), timeout=20)
        assert server.stop() == 0


def test_a_hangup_has_the_directories_looked_through_and_ends_nothing(tmp_path):
    repo = tmp_path / "repo"
    write_affine(repo / "affine")
    with ServerProcess(repo, env={**FAKE, "RSRV_WORKER_MODEL_POLL_SECONDS": "3600"}) as server:
        server.wait_ready()
        server.signal(signal.SIGHUP)
        end = time.monotonic() + 60
        while "the model directories are looked through" not in server.log:
            assert time.monotonic() < end
            time.sleep(0.01)
        with grpc.insecure_channel(server.url) as channel:
            channel.unary_unary(INFER)(request(), timeout=60)
        assert server.stop() == 0


def test_a_hangup_of_a_server_that_follows_no_directories_is_told_in_its_log(repo):
    with ServerProcess(repo, env={**FAKE, "RSRV_WORKER_MODEL_CONTROL_MODE": "static"}) as server:
        server.wait_ready()
        server.signal(signal.SIGHUP)
        end = time.monotonic() + 60
        while "models follow no directories control_mode=static" not in server.log:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert server.stop() == 0
