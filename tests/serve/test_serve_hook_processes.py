"""Hooks in processes of their own: what they may do to themselves, and what becomes of the calls of others."""

import os
import signal
import threading
import time
from queue import SimpleQueue

import ml_dtypes
import numpy as np
import pytest

from rsrv.core.errors import BundleError, Code, HookError, HookRejected, ModelFailed, ServerStopping
from rsrv.serve.hook_pool import Job
from rsrv.serve.hook_processes.process import HookFile
from rsrv.serve.hook_processes.processes import HookProcesses
from rsrv.serve.hook_processes.tensors import KEPT_BYTES, memory_file, read_arrays, shrink, write_arrays

HOOKS = """
import ctypes, os, signal, sys, threading, time
import numpy as np

calls = 0

def preprocess(inputs):
    global calls
    calls += 1
    what = bytes(inputs["what"]).decode()
    return ACTIONS[what](inputs)

def echo(inputs):
    return inputs

def chatter(inputs):
    print("P" * 200_000, flush=True)
    print("E" * 200_000, file=sys.stderr, flush=True)
    os.write(1, b"raw")
    return inputs

def scribble(inputs):
    inputs["x"][...] = 7
    return inputs

def leave_threads(inputs):
    threading.Thread(target=time.sleep, args=(3600,)).start()
    return inputs

def fork(inputs):
    os.fork()
    return inputs

def child_outlives(inputs):
    if os.fork() == 0:
        time.sleep(3600)
    os._exit(0)

def reject(inputs):
    raise rsrv.HookRejected("too long", hint="at most 512 words")

def exit_(inputs):
    sys.exit(3)

def sleep(inputs):
    time.sleep(3600)

def meet(inputs):
    (BUNDLE_DIR / f"met-{os.getpid()}").touch()
    while len(list(BUNDLE_DIR.glob("met-*"))) < 2:
        time.sleep(0.01)
    return ACTIONS["pid"](inputs)

def hang(inputs):
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    while True:
        pass

ACTIONS = dict(
    echo=echo, chatter=chatter, scribble=scribble, threads=leave_threads, fork=fork, outlives=child_outlives,
    reject=reject, exit=exit_, sleep=sleep, hang=hang, meet=meet,
    os_exit=lambda i: os._exit(5),
    kill=lambda i: os.kill(os.getpid(), signal.SIGKILL),
    crash=lambda i: ctypes.string_at(0),
    terminate=lambda i: (os.kill(os.getpid(), signal.SIGTERM), i)[1],
    close_all=lambda i: os.closerange(3, 256),
    divide=lambda i: 1 // 0,
    nothing=lambda i: None,
    a_list=lambda i: {"x": [1]},
    number_key=lambda i: {1: i["x"]},
    text=lambda i: {"x": np.array(["a"])},
    pid=lambda i: {"pid": np.array(os.getpid()), "calls": np.array(calls)},
    strided=lambda i: {"x": i["x"][:, ::2].T},
)
"""


def start(tmp_path, source=HOOKS, *, count=1, call_seconds=60.0, import_seconds=120.0, max_lost=4, failed=None):
    file = HookFile(tmp_path / "model.py", source.encode(), "m", 1)
    processes = HookProcesses(
        file,
        count=count,
        import_seconds=import_seconds,
        call_seconds=call_seconds,
        max_lost=max_lost,
        on_failed=(failed if failed is not None else []).append,
    )
    try:
        processes.hooks = processes.start()
    except BaseException:
        processes.close()
        raise
    return processes


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """For calls that end no process."""
    processes = start(tmp_path_factory.mktemp("hooks"))
    yield processes
    assert processes.lost == 0
    processes.close()


@pytest.fixture
def make(tmp_path):
    made = []

    def make(**kw):
        made.append(start(tmp_path, **kw))
        return made[-1]

    yield make
    for processes in made:
        processes.close()


def ask(processes, what, x=(1, 2)):
    word = np.frombuffer(what.encode(), np.uint8)
    return processes.call("preprocess", {"what": word, "x": np.array(x)})


def is_gone(pid):
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


# --- what passes through ----------------------------------------------------------------------------------------------


def test_the_hooks_are_those_that_the_file_registers(shared):
    assert shared.hooks.preprocess is not None
    assert shared.hooks.postprocess is None


def test_arrays_of_every_kind_come_back_as_they_were(shared):
    arrays = {
        "what": np.frombuffer(b"echo", np.uint8),
        "bf16": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
        "f8": np.arange(3).astype(ml_dtypes.float8_e4m3fn),
        "bool": np.array([[True, False]]),
        "scalar": np.float64(3.5).reshape(()),
        "ünïcode name": np.arange(4, dtype=np.int64)[::-1],
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big": np.arange(3_000_000, dtype=np.float32),
        "no rows": np.empty((0, 3), np.float32),
    }
    back = shared.call("preprocess", arrays)
    assert list(back) == list(arrays)
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype
        assert back[name].shape == array.shape
        np.testing.assert_array_equal(back[name], array)
        assert back[name].flags.c_contiguous
        assert not back[name].flags.writeable
        assert back[name].__array_interface__["data"][0] % 64 == 0


def test_results_may_be_views_in_any_order_of_memory(shared):
    np.testing.assert_array_equal(ask(shared, "strided", [[1, 2, 3], [4, 5, 6]])["x"], [[1, 4], [3, 6]])


def test_a_result_does_not_change_with_the_next_call(shared):
    first = ask(shared, "echo", [1, 2])
    ask(shared, "echo", [3, 4])
    np.testing.assert_array_equal(first["x"], [1, 2])


@pytest.mark.parametrize("what", ["chatter", "threads", "fork", "terminate"])
def test_what_hooks_print_fork_start_or_are_sent_does_not_disturb_the_conversation(shared, what):
    for value in (1, 2):
        np.testing.assert_array_equal(ask(shared, what, [value])["x"], [value])
    np.testing.assert_array_equal(ask(shared, "echo", [3])["x"], [3])


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("divide", "hook preprocess of model 'm' raised ZeroDivisionError"),
        ("exit", "hook preprocess of model 'm' raised SystemExit"),
        ("scribble", "hook preprocess of model 'm' raised ValueError"),
        ("nothing", "hook preprocess of model 'm' returned None, wanted dict[str, np.ndarray]"),
        ("a_list", "hook preprocess of model 'm' returned list for 'x', wanted np.ndarray"),
        ("number_key", "hook preprocess of model 'm' returned the key 1, wanted a str"),
        ("text", "hook preprocess of model 'm' returned what cannot be sent: tensor 'x': dtype <U1 is not supported"),
    ],
)
def test_what_goes_wrong_in_a_hook_is_told_as_in_thread_mode_and_costs_no_process(shared, what, text):
    pid = ask(shared, "pid")["pid"]
    with pytest.raises(HookError) as error:
        ask(shared, what)
    assert error.value.message.startswith(text)
    assert ask(shared, "pid")["pid"] == pid


def test_a_hook_may_refuse_the_data(shared):
    with pytest.raises(HookRejected, match="too long") as error:
        ask(shared, "reject")
    assert error.value.hint == "at most 512 words"
    assert (error.value.code, error.value.reason) == (Code.INVALID_ARGUMENT, "hook_rejected")


# --- processes that are lost ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("os_exit", "ended its process: it ended with exit code 5"),
        ("kill", "ended its process: it was ended by SIGKILL"),
        ("crash", "ended its process: it was ended by SIGSEGV"),
        ("outlives", "ended its process: it ended with exit code 0"),
        ("close_all", "ended its process"),
    ],
)
def test_a_process_that_ends_fails_its_call_alone_and_is_replaced(make, what, text):
    processes = make()
    [pid] = processes.pids
    with pytest.raises(HookError) as error:
        ask(processes, what)
    assert error.value.message.startswith(f"hook preprocess of model 'm' {text}")
    np.testing.assert_array_equal(ask(processes, "echo")["x"], [1, 2])
    assert processes.lost == 1
    assert processes.pids != (pid,)
    assert is_gone(pid)


def test_a_hook_that_hangs_is_ended_while_another_call_goes_on_beside_it(make):
    processes = make(count=2, call_seconds=3.0)
    pids = processes.pids
    answers = SimpleQueue()

    def run(what):
        job = Job(lambda: ask(processes, what), lambda *answer: answers.put(answer), what="hook")
        processes.pool.submit(job)

    run("hang")
    run("echo")
    value, error = answers.get(timeout=60)
    np.testing.assert_array_equal(value["x"], [1, 2])
    value, error = answers.get(timeout=60)
    assert isinstance(error, HookError)
    assert error.message == "hook preprocess of model 'm' did not return within 3 s"
    assert processes.lost == 1
    assert sum(is_gone(pid) for pid in set(pids) - set(processes.pids)) == 1


def test_as_many_calls_run_at_a_time_as_there_are_processes(make):
    processes = make(count=2)
    answers = SimpleQueue()
    for _ in range(2):
        processes.pool.submit(Job(lambda: ask(processes, "meet"), lambda *answer: answers.put(answer), what="hook"))
    met = [answers.get(timeout=60)[0] for _ in range(2)]
    assert {int(answer["pid"]) for answer in met} == set(processes.pids)
    assert [int(answer["calls"]) for answer in met] == [1, 1]  # they share no state


def test_a_process_that_is_killed_while_it_has_nothing_to_do_costs_no_call(make):
    processes = make()
    [pid] = processes.pids
    os.kill(pid, signal.SIGKILL)
    while processes._idle[0].alive:
        time.sleep(0.001)
    np.testing.assert_array_equal(ask(processes, "echo")["x"], [1, 2])
    assert processes.lost == 1


def test_the_last_process_that_may_be_lost_ends_them_all_and_says_why(make):
    failed = []
    processes = make(count=2, max_lost=2, failed=failed)
    pids = processes.pids
    for what in ("kill", "os_exit"):
        with pytest.raises(HookError, match="ended its process"):
            ask(processes, what)
    with pytest.raises(ModelFailed, match=r"model 'm' failed \(hooks: 2 hook processes were lost"):
        ask(processes, "echo")
    answers = SimpleQueue()
    while not processes.pool._closed:
        time.sleep(0.001)
    processes.pool.submit(Job(lambda: 1, lambda value, error: answers.put(error), what="hook"))
    assert isinstance(answers.get(timeout=60), ModelFailed)
    processes.close()
    [error] = failed
    assert error.message == (
        "2 hook processes were lost (hooks.max_lost: 2); at last: hook preprocess of model 'm' ended its process: "
        "it ended with exit code 5"
    )
    assert all(is_gone(pid) for pid in pids)


def test_a_replacement_that_cannot_import_its_file_any_more_counts_as_lost(tmp_path, make):
    gone = tmp_path / "gone"
    source = f"import os\nif os.path.exists({str(gone)!r}): raise ValueError('no')\n{HOOKS}"
    failed = []
    processes = make(source=source, max_lost=2, failed=failed)
    gone.touch()
    with pytest.raises(HookError, match="it ended with exit code 5"):
        ask(processes, "os_exit")
    with pytest.raises(HookError, match="could not run: its file cannot be imported any more"):
        ask(processes, "echo")
    # It is told on a thread of its own, which closes the pool after that.
    while not processes.pool._closed:
        time.sleep(0.001)
    processes.close()
    assert "ValueError: no" in failed[0].message


def test_the_text_of_the_file_is_that_of_the_load_for_every_process(tmp_path, make):
    processes = make()
    (tmp_path / "model.py").write_text("raise ValueError('another version')")
    with pytest.raises(HookError):
        ask(processes, "os_exit")
    np.testing.assert_array_equal(ask(processes, "echo")["x"], [1, 2])


# --- start and end ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("x = 1", "registers nothing"),
        ("raise ValueError('no')", "line 1: ValueError: no"),
        ("raise SystemExit(3)", "line 1: SystemExit: 3"),
        ("import os; os._exit(3)", "importing it ended its process: it ended with exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "importing it ended its process: .* SIGKILL"),
    ],
)
def test_a_file_that_cannot_be_imported_fails_the_load_with_its_reason(tmp_path, source, text):
    with pytest.raises(BundleError, match=rf"model\.py: {text}"):
        start(tmp_path, source, count=2)


def test_an_import_that_hangs_ends_at_its_time_limit_and_leaves_no_process(tmp_path):
    pid_file = tmp_path / "pid"
    source = f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(3600)"
    with pytest.raises(BundleError, match=r"model\.py: importing it took longer than 3 s") as error:
        start(tmp_path, source, import_seconds=3.0)
    assert error.value.hint == "hooks.import_timeout_seconds says how long it may take"
    assert not pid_file.exists() or is_gone(int(pid_file.read_text()))


def test_closing_ends_the_calls_that_run_and_the_processes(make):
    processes = make()
    pids = processes.pids
    answers = SimpleQueue()
    for _ in range(2):
        processes.pool.submit(Job(lambda: ask(processes, "sleep"), lambda *a: answers.put(a), what="hook"))
    while not processes._busy:
        time.sleep(0.001)
    processes.close()
    for _ in range(2):
        assert isinstance(answers.get(timeout=60)[1], ServerStopping)
    with pytest.raises(ServerStopping):
        ask(processes, "echo")
    assert processes.lost == 0
    assert all(is_gone(pid) for pid in pids)


def test_no_descriptor_is_left_open(make):
    before = len(os.listdir("/proc/self/fd"))
    processes = make()
    with pytest.raises(HookError):
        ask(processes, "kill")
    ask(processes, "echo")
    processes.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rsrv-hook-m")]


# --- the bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        None,
        [["x"]],
        [["x", "f32", [-1], 0]],
        [["x", "f32", [1.0], 0]],
        [["x", "f32", [4], -4]],
        [["x", "f99", [4], 0]],
        [["x", "f32", [4], 4]],
        [["x", "f32", [1 << 40], 0]],
    ],
)
def test_headers_that_make_no_sense_are_refused(headers):
    fd = memory_file("test")
    try:
        write_arrays(fd, {"x": np.arange(4, dtype=np.float32)})
        with pytest.raises(ValueError):
            read_arrays(fd, headers)
    finally:
        os.close(fd)


def test_a_large_call_does_not_keep_its_memory():
    fd = memory_file("test")
    try:
        headers = write_arrays(fd, {"x": np.zeros(KEPT_BYTES + 4096, np.uint8)})
        assert len(read_arrays(fd, headers)["x"]) == KEPT_BYTES + 4096
        shrink(fd)
        assert os.fstat(fd).st_size == KEPT_BYTES
    finally:
        os.close(fd)


def test_a_process_that_cannot_be_made_is_an_error_and_nobody_waits_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr("rsrv.serve.hook_processes.processes.HookProcess", FailingProcess)
    processes = HookProcesses(
        HookFile(tmp_path / "model.py", b"", "m", 1),
        count=1,
        import_seconds=60,
        call_seconds=None,
        max_lost=4,
        on_failed=lambda error: None,
    )
    try:
        with pytest.raises(HookError, match="a hook process of model 'm' cannot be started: not even a pipe"):
            processes.start()
    finally:
        processes.close()


class FailingProcess:
    def __init__(self, file):
        raise MemoryError("not even a pipe")
