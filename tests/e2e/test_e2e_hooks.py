"""A server whose models run their hooks in processes, over the wire: whatever a hook does, its request fails alone."""

import os
import signal
import threading
import time
from contextlib import suppress

import grpc
import numpy as np
import psutil
import pytest
from support.bundles import write_affine
from support.server import ServerProcess

from rsrv.core.wire import decode_response, encode_request, join

INFER = "/inference.GRPCInferenceService/ModelInfer"

ECHO, OS_EXIT, HANG, DIVIDE, REJECT, NOTHING, SCRIBBLE, CHATTER, THREADS, EXIT, SLEEP, CRASH = range(12)

HOOKS = """
import ctypes, os, signal, sys, threading, time

def hang():
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    while True:
        pass

def chatter(inputs):
    for file in (sys.stdout, sys.stderr):
        print("a hook says hello", "x" * 100_000, file=file, flush=True)
    return inputs

def sleep():
    print("asleep", flush=True)
    time.sleep(3600)

def reject():
    raise rsrv.HookRejected("not these rows")

def scribble(inputs):
    inputs["x"][...] = 9
    return inputs

def threads(inputs):
    for _ in range(8):
        threading.Thread(target=time.sleep, args=(3600,)).start()
    return inputs

def preprocess(inputs):
    return [
        lambda: inputs, lambda: os._exit(7), hang, lambda: 1 // 0, reject, lambda: None, lambda: scribble(inputs),
        lambda: chatter(inputs), lambda: threads(inputs), lambda: sys.exit(3), sleep,
        lambda: ctypes.string_at(0),
    ][int(inputs["x"][0, 0])]()

def postprocess(outputs):
    return {"y": outputs["y"] * 10}
"""


def write_hooked(directory, block):
    write_affine(directory, hooks=HOOKS)
    manifest = directory / "manifest.yaml"
    manifest.write_text(manifest.read_text() + f"\nhooks: {{mode: process, {block}}}\n")


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    repo = tmp_path_factory.mktemp("hooks") / "repo"
    write_hooked(repo / "hooked", "processes: 2, timeout_seconds: 4")
    write_hooked(repo / "fragile", "processes: 1, timeout_seconds: 600")
    write_affine(repo / "plain")
    return repo


@pytest.fixture(scope="module")
def server(repo):
    with ServerProcess(repo, env={"RSRV_WORKER_HOOKS_MAX_LOST": "6"}) as server:
        server.wait_ready()
        yield server
        processes = hook_processes(server)
        assert processes
        assert server.stop() == 0
        assert not psutil.wait_procs(processes, timeout=30)[1]


def hook_processes(server):
    found = []
    for child in psutil.Process(server.pid).children():
        with suppress(psutil.NoSuchProcess):  # lost, and not yet missed by the server
            if any("hook_processes" in word for word in child.cmdline()):
                found.append(child)
    return found


def infer(server, x, model="hooked"):
    with grpc.insecure_channel(server.url) as channel:
        body = join(encode_request(model, [("x", np.asarray(x, np.float32))]))
        return decode_response(channel.unary_unary(INFER)(body, timeout=60)).array("y")


def refused(server, what, model="hooked"):
    with pytest.raises(grpc.RpcError) as error:
        infer(server, [[what, 2, 3]], model)
    return dict(error.value.trailing_metadata())["rsrv-reason"], error.value.details()


def require_serving(server, model="hooked"):
    np.testing.assert_array_equal(infer(server, [[0, 2, 3]], model), [[10, 50, 70]])


def wait_for_text(server, text, times):
    until = time.monotonic() + 30
    while server.log.count(text) < times:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_rows_pass_through_both_hooks(server):
    np.testing.assert_array_equal(infer(server, [[0, 1, 2], [3, 4, 5]]), [[10, 30, 50], [70, 90, 110]])


@pytest.mark.parametrize(
    ("what", "reason", "text"),
    [
        (DIVIDE, "hook_error", "hook preprocess of model 'hooked' raised ZeroDivisionError"),
        (REJECT, "hook_rejected", "not these rows"),
        (NOTHING, "hook_error", "returned None"),
        (SCRIBBLE, "hook_error", "raised ValueError"),
        (EXIT, "hook_error", "raised SystemExit"),
    ],
)
def test_an_error_is_told_to_its_caller_and_ends_no_process(server, what, reason, text):
    before = {process.pid for process in hook_processes(server)}
    told, details = refused(server, what)
    assert told == reason
    assert text in details
    require_serving(server)
    assert {process.pid for process in hook_processes(server)} == before
    if what == DIVIDE:
        server.wait_for_log("ZeroDivisionError: ")  # the traceback


@pytest.mark.parametrize("what", [CHATTER, THREADS])
def test_what_hooks_print_or_start_disturbs_nothing(server, what):
    np.testing.assert_array_equal(infer(server, [[what, 2, 3]])[:, 1:], [[50, 70]])
    require_serving(server)
    if what == CHATTER:
        wait_for_text(server, "a hook says hello", 2)  # stdout goes to the log as well


def test_processes_that_exit_crash_hang_or_are_killed_fail_their_request_alone_until_there_were_too_many(server):
    cases = [
        (OS_EXIT, "ended its process: it ended with exit code 7"),
        (CRASH, "ended its process: it was ended by SIGSEGV"),
        (HANG, "did not return within 4 s"),
    ]
    for lost, (what, text) in enumerate(cases, 1):
        reason, details = refused(server, what)
        assert reason == "hook_error"
        assert text in details
        require_serving(server)
        assert server.metric("rsrv_worker_hook_processes_lost_total") == lost
    assert server.http("/readyz")[0] == 200

    [fragile] = [process for process in hook_processes(server) if "fragile" in str(process.cmdline())]
    told = []
    caller = threading.Thread(target=lambda: told.append(refused(server, SLEEP, "fragile")))
    caller.start()
    wait_for_text(server, "asleep", 1)
    fragile.send_signal(signal.SIGKILL)
    caller.join()
    reason, details = told[0]
    assert reason == "hook_error"
    assert "ended its process: it was ended by SIGKILL" in details
    require_serving(server, "fragile")

    for _ in range(3):
        assert refused(server, OS_EXIT)[0] == "hook_error"
    reason, details = refused(server, ECHO)
    assert reason == "failed"
    assert "6 hook processes were lost (hooks.max_lost: 6); at last: hook preprocess of model 'hooked'" in details
    np.testing.assert_array_equal(infer(server, [[1, 2, 3]], "plain"), [[3, 5, 7]])
    require_serving(server, "fragile")


def test_the_processes_end_with_a_server_that_is_killed(repo):
    with ServerProcess(repo) as server:
        server.wait_ready()
        processes = hook_processes(server)
        assert len(processes) == 3
        os.kill(server.pid, signal.SIGKILL)
        assert not psutil.wait_procs(processes, timeout=30)[1]


def test_a_signal_to_the_whole_group_lets_accepted_requests_finish(repo):
    with ServerProcess(repo) as server:
        server.wait_ready()
        for process in hook_processes(server):
            process.send_signal(signal.SIGTERM)
        require_serving(server)
        assert server.metric("rsrv_worker_hook_processes_lost_total") == 0
        assert server.stop() == 0
