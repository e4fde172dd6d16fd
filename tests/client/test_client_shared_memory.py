"""`KServeModel` through shared memory: the mode table, what lies in a region, and every way in which it goes wrong."""

import asyncio
import errno
import logging
import os
import signal
import subprocess
import sys
import threading

import grpc
import numpy as np
import pytest
from support.client_stub import own_shared_memory

from rsrv.client import AsyncKServeModel, KServeModel, RetryPolicy
from rsrv.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    InvalidResponse,
    ModelPreparing,
    RegionLimit,
    RsrvError,
    ServerUnreachable,
    UsageError,
)

X = np.arange(8, dtype=np.float32).reshape(2, 4)
UNIMPLEMENTED = (grpc.StatusCode.UNIMPLEMENTED, "unknown method", "")
INTERNAL = (grpc.StatusCode.INTERNAL, "broken", "internal")


def in_regions(request):
    """Names of the tensors of `request` that are in a region: inputs and wanted outputs."""
    tensors = [*request.inputs, *request.outputs]
    return [tensor.name for tensor in tensors if "shared_memory_region" in tensor.parameters]


ONCE = RetryPolicy(enabled=False)


@pytest.fixture
def model(server):
    with KServeModel(server.url, "twice", shared_memory="on", retry=ONCE) as handle:
        yield handle


# --- the mode table -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_server_that_sees_our_memory_is_sent_regions_both_ways(server, mode):
    with KServeModel(server.url, "twice", shared_memory=mode) as model:
        outputs = model.infer({"x": X})
        assert model.transport == "shared memory"
    np.testing.assert_array_equal(outputs["y"], 2 * X)
    np.testing.assert_array_equal(outputs["total"], np.float32([28, 2, 7]))
    (request,) = server.requests
    assert in_regions(request) == ["x", "y", "total"]
    assert len(request.raw_input_contents) == 0


@pytest.mark.parametrize(
    ("mode", "rows", "way"),
    [("auto", 8191, "inline"), ("auto", 8192, "shared memory"), ("on", 2, "shared memory")],
)
def test_auto_keeps_small_calls_inline_inputs_and_outputs_together(server, monkeypatch, mode, rows, way):
    monkeypatch.setattr("rsrv.client.shared.LEAST_SHARED_BYTES", 8192 * 4 * 4 * 2 + 12)  # x, y and total
    x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    with KServeModel(server.url, "twice", shared_memory=mode) as model:
        np.testing.assert_array_equal(model.infer({"x": x})["y"], 2 * x)
        assert model.transport == way
    assert bool(in_regions(server.requests[0])) is (way == "shared memory")


@pytest.mark.parametrize("probe", [False, UNIMPLEMENTED])
def test_auto_goes_inline_when_the_server_does_not_see_our_memory(server, probe):
    if probe is False:
        server.same_namespace = False
    else:
        server.refuse["IsSameIPCNamespace"] = probe
    with KServeModel(server.url, "twice") as model:
        np.testing.assert_array_equal(model.infer({"x": X})["y"], 2 * X)
        assert model.transport == "inline"
    assert server.calls == ["IsSameIPCNamespace", "ModelInfer"]


def test_on_refuses_a_server_in_another_namespace(server):
    server.same_namespace = False
    with (
        KServeModel(server.url, "twice", shared_memory="on") as model,
        pytest.raises(UsageError, match="another IPC namespace") as caught,
    ):
        model.infer({"x": X})
    assert "auto" in (caught.value.hint or "")
    assert server.requests == []


def test_on_trusts_the_caller_when_the_server_lacks_the_probe(server):
    server.refuse["IsSameIPCNamespace"] = UNIMPLEMENTED
    with KServeModel(server.url, "twice", shared_memory="on") as model:
        np.testing.assert_array_equal(model.infer({"x": X})["y"], 2 * X)
    assert in_regions(server.requests[0]) == ["x", "y", "total"]


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_any_other_answer_to_the_probe_is_an_error(server, mode):
    server.refuse["IsSameIPCNamespace"] = INTERNAL
    with KServeModel(server.url, "twice", shared_memory=mode) as model:
        with pytest.raises(RsrvError, match="broken"):
            model.infer({"x": X})
        server.refuse.clear()
        np.testing.assert_array_equal(model.infer({"x": X})["y"], 2 * X)
    assert server.calls.count("IsSameIPCNamespace") == 2


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_refused_registration_is_an_error_in_both_modes(server, mode):
    server.refuse["SystemSharedMemoryRegister"] = (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many regions", "shm_limit")
    with (
        KServeModel(server.url, "twice", shared_memory=mode) as model,
        pytest.raises(RegionLimit, match="too many regions") as caught,
    ):
        model.infer({"x": X})
    assert 'shared_memory="off"' in caught.value.hint
    assert own_shared_memory() == set()


def test_the_server_is_asked_once_also_by_concurrent_first_calls(server):
    with KServeModel(server.url, "twice") as model:
        threads = [threading.Thread(target=model.infer, args=({"x": X},)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert server.calls.count("IsSameIPCNamespace") == 1
    assert server.calls.count("ModelMetadata") == 1
    assert server.calls.count("ModelInfer") == 8


def test_the_probe_object_carries_the_nonce_and_is_gone_afterwards(server):
    """The stub compares the nonce with the object's bytes; with no object left, a second look would fail."""
    with KServeModel(server.url, "twice", shared_memory="on") as model:
        model.infer({"x": X})
        assert all("-client-" in name for name in own_shared_memory())


@pytest.mark.parametrize(("mode", "inline"), [("auto", True), ("on", False)])
@pytest.mark.parametrize(("room", "event"), [(16, "shm_full"), (0, "shm_unavailable")])
def test_a_full_shared_memory_of_this_machine_means_inline_unless_insisted(
    server, monkeypatch, caplog, mode, inline, room, event
):
    honest = os.posix_fallocate

    def full(fd, offset, n_bytes):
        if n_bytes > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        honest(fd, offset, n_bytes)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with KServeModel(server.url, "twice", shared_memory=mode) as model, caplog.at_level(logging.WARNING):
        if inline:
            np.testing.assert_array_equal(model.infer({"x": X})["y"], 2 * X)
            assert event in caplog.text
        else:
            with pytest.raises(RegionLimit, match="no room for"):
                model.infer({"x": X})


# --- outputs ------------------------------------------------------------------------------------------------------


def test_outputs_of_unknown_size_come_inline_beside_the_others(server, model):
    server.outputs[0] = ("y", "FP32", [-1, -1])
    outputs = model.infer({"x": X})
    np.testing.assert_array_equal(outputs["y"], 2 * X)
    assert in_regions(server.requests[0]) == ["x", "total"]
    assert [o.name for o in server.requests[0].outputs] == ["y", "total"]


@pytest.mark.parametrize("missing", [False, True])
def test_without_a_batch_size_in_the_models_config_open_axes_are_unknown(server, model, missing):
    if missing:
        server.refuse["ModelConfig"] = UNIMPLEMENTED
    server.max_batch_size = 0
    np.testing.assert_array_equal(model.infer({"x": X})["y"], 2 * X)
    assert in_regions(server.requests[0]) in (["x", "total"], ["x"])


@pytest.mark.parametrize(("axes", "placed"), [({"x": 0, "y": 0}, ["x", "y", "total"]), ({"x": 0}, ["x", "total"])])
def test_batch_axes_that_the_server_tells_size_the_outputs_without_its_config(server, model, axes, placed):
    server.batch_axes, server.max_batch_size = axes, 0
    np.testing.assert_array_equal(model.infer({"x": X})["y"], 2 * X)
    assert in_regions(server.requests[0]) == placed
    assert "ModelConfig" not in server.calls


def test_a_datatype_that_we_do_not_know_stays_inline(server, model):
    server.outputs[1] = ("total", "BYTES", [3])
    server.rewrite = lambda request, answer: answer.SerializeToString()
    assert model.infer({"x": X}, ["y"])["y"][0, 1] == 2
    assert in_regions(server.requests[0]) == ["x", "y"]


def test_wanted_outputs_keep_their_order_and_unknown_names_are_the_servers_to_refuse(server, model):
    assert list(model.infer({"x": X}, ["total", "y"])) == ["total", "y"]
    with pytest.raises(InvalidRequest, match="nothing"):
        model.infer({"x": X}, ["nothing"])


def test_every_batch_size_gets_windows_of_its_size(server, model):
    for rows in (1, 7, 3, 1000, 1):
        x = np.random.default_rng(rows).standard_normal((rows, 4), np.float32)
        np.testing.assert_array_equal(model.infer({"x": x})["y"], 2 * x)
    sizes = [request.outputs[0].parameters["shared_memory_byte_size"].int64_param for request in server.requests]
    assert sizes == [16, 112, 48, 16000, 16]


def test_answers_are_copies_that_later_calls_do_not_touch(model):
    first = model.infer({"x": X})["y"]
    model.infer({"x": X + 100})
    np.testing.assert_array_equal(first, 2 * X)
    assert not first.flags.writeable


def test_an_empty_tensor_travels_inline(server, model):
    empty = np.zeros((0, 4), np.float32)
    assert model.infer({"x": empty})["y"].shape == (0, 4)
    assert in_regions(server.requests[0]) == ["total"]


def test_compressed_answers_of_older_servers_are_read(server, model):
    def compress(request, answer):
        kept = [entry for entry in answer.raw_output_contents if entry]
        del answer.raw_output_contents[:]
        answer.raw_output_contents.extend(kept)
        return answer.SerializeToString()

    server.outputs[0] = ("y", "FP32", [-1, -1])
    server.rewrite = compress
    outputs = model.infer({"x": X})
    np.testing.assert_array_equal(outputs["y"], 2 * X)
    assert outputs["total"][2] == 7


def changing(**parameters):
    def rewrite(request, answer):
        for key, value in parameters.items():
            parameter = answer.outputs[0].parameters[f"shared_memory_{key}"]
            if isinstance(value, str):
                parameter.string_param = value
            else:
                parameter.int64_param = value
        return answer.SerializeToString()

    return rewrite


@pytest.mark.parametrize(
    "change",
    [{"region": "elsewhere"}, {"offset": 0}, {"byte_size": 31}, {"byte_size": 1 << 40}, {"byte_size": -1}],
)
def test_an_answer_in_another_place_than_the_offered_one_is_refused(server, model, change):
    server.rewrite = changing(**change)
    with pytest.raises(InvalidResponse):
        model.infer({"x": X})
    server.rewrite = None
    np.testing.assert_array_equal(model.infer({"x": X})["y"], 2 * X)


def test_an_answer_with_another_dtype_or_shape_must_still_fit(server, model):
    def twice_as_large(request, answer):
        answer.outputs[0].datatype = "FP64"
        return answer.SerializeToString()

    server.rewrite = twice_as_large
    with pytest.raises(InvalidResponse, match=r"'y' FP64\[2, 4\]"):
        model.infer({"x": X})


def test_an_answer_of_a_datatype_without_a_size_is_not_read(server, model):
    def text(request, answer):
        answer.outputs[0].datatype = "BYTES"
        return answer.SerializeToString()

    server.rewrite = text
    with pytest.raises(InvalidResponse, match=r"output 'y': .*BYTES"):
        model.infer({"x": X})


def test_outputs_are_learned_again_after_the_server_refused_them(server, model):
    """A model that was replaced by one with larger outputs is served again by the second call."""
    server.outputs[1] = ("total", "FP32", [1])
    with pytest.raises(InvalidRequest, match="total needs more than 4"):
        model.infer({"x": X})
    server.outputs[1] = ("total", "FP32", [3])
    assert model.infer({"x": X})["total"][1] == 2


# --- the life of a region -----------------------------------------------------------------------------------------


def test_one_region_serves_a_handle_and_goes_with_it(server):
    with KServeModel(server.url, "twice", shared_memory="on") as model:
        for _ in range(5):
            model.infer({"x": X})
        (name,) = own_shared_memory()
        assert set(server.regions) == {name}
        assert server.regions[name] == ("/" + name, os.stat(f"/dev/shm/{name}").st_size)
    assert own_shared_memory() == set()
    assert server.regions == {}


def test_a_larger_request_gets_a_new_region_before_the_old_one_goes(server, model):
    model.infer({"x": X})
    (small,) = own_shared_memory()
    large = np.ones((100_000, 4), np.float32)
    np.testing.assert_array_equal(model.infer({"x": large})["y"], 2 * large)
    with server.unregistered:
        assert server.unregistered.wait_for(lambda: small not in server.regions, timeout=30)
    assert len(own_shared_memory()) == 1
    register = [i for i, call in enumerate(server.calls) if call == "SystemSharedMemoryRegister"]
    assert register[1] < server.calls.index("SystemSharedMemoryUnregister")


def test_concurrent_calls_on_one_handle_never_mix_their_windows(server, model):
    wrong = []

    def call(number):
        for step in range(30):
            x = np.full((1 + (number * step) % 40, 4), number * 1000 + step, np.float32)
            outputs = model.infer({"x": x})
            if not np.array_equal(outputs["y"], 2 * x) or outputs["total"][1] != len(x):
                wrong.append((number, step))

    threads = [threading.Thread(target=call, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(own_shared_memory()) == 1


def test_after_a_timeout_the_window_is_not_used_again(server):
    """The server answers late, into the abandoned region; the next call's answer must not be overwritten."""
    release = threading.Event()

    def hold_first(request, answer):
        if request.id == "slow":
            release.wait(30)
        return answer.SerializeToString()

    server.rewrite = hold_first
    with KServeModel(server.url, "twice", shared_memory="on", deadline=10) as model:
        model.infer({"x": X})
        (before,) = own_shared_memory()
        model.deadline = 0.3
        with pytest.raises(DeadlineExceeded):
            model.infer({"x": X}, id="slow")
        model.deadline = 10
        np.testing.assert_array_equal(model.infer({"x": X + 1})["y"], 2 * (X + 1))
        (after,) = own_shared_memory()
        assert after != before
        release.set()


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "invalid", InvalidRequest),
        (grpc.StatusCode.UNAVAILABLE, "preparing", ModelPreparing),
    ],
)
def test_a_refused_request_keeps_the_region(server, model, status, reason, kind):
    model.infer({"x": X})
    before = own_shared_memory()
    server.refuse["ModelInfer"] = (status, "not now", reason)
    with pytest.raises(kind):
        model.infer({"x": X})
    server.refuse.clear()
    model.infer({"x": X})
    assert own_shared_memory() == before


def test_a_server_that_forgot_the_region_is_told_again_within_the_call(server, model):
    model.infer({"x": X})
    (before,) = server.regions
    server.regions.clear()
    np.testing.assert_array_equal(model.infer({"x": X})["y"], 2 * X)
    assert set(server.regions) == {before}


def test_a_server_that_dies_leaves_no_region_behind(server):
    with KServeModel(server.url, "twice", shared_memory="on", retry=ONCE) as model:
        model.infer({"x": X})
        server.stop()
        with pytest.raises(ServerUnreachable):
            model.infer({"x": X})
        assert own_shared_memory() == set()


def test_the_setup_counts_against_the_deadline(server):
    held = threading.Event()
    answer = server.ModelMetadata

    def slow(request, context):
        held.wait(30)
        return answer(request, context)

    server.ModelMetadata = slow
    try:
        with (
            KServeModel(server.url, "twice", shared_memory="on", deadline=0.3) as model,
            pytest.raises(DeadlineExceeded),
        ):
            model.infer({"x": X})
        assert server.requests == []
    finally:
        held.set()


SCRIPT = """
import os, signal, sys
import numpy as np
from rsrv.client import KServeModel
model = KServeModel(sys.argv[1], "twice", shared_memory="on")
x = np.ones((2, 4), np.float32)
assert model.infer({"x": x})["y"][0, 0] == 2
"""


def run_client(server, code):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT + code, server.url], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_handle_that_nobody_closed_is_unlinked_at_exit(server):
    outcome = run_client(server, "print(os.getpid())")
    assert (outcome.returncode, outcome.stderr) == (0, "")
    assert not [name for name in os.listdir("/dev/shm") if f"-{outcome.stdout.strip()}-" in name]
    assert server.regions == {}


def test_a_forked_child_leaves_the_region_of_its_parent_alone_and_opens_its_own(server):
    outcome = run_client(
        server,
        """
mine = {name for name in os.listdir("/dev/shm") if f"-{os.getpid()}-" in name}
assert len(mine) == 1
pid = os.fork()
if pid == 0:
    signal.alarm(30)
    assert model.infer({"x": 3 * x})["y"][0, 0] == 6
    own = {name for name in os.listdir("/dev/shm") if f"-{os.getpid()}-" in name}
    assert len(own) == 1 and mine <= set(os.listdir("/dev/shm"))
    model.close()
    assert mine <= set(os.listdir("/dev/shm")) and not own & set(os.listdir("/dev/shm"))
    sys.exit(0)  # with exit handlers
assert os.waitpid(pid, 0)[1] == 0
assert mine <= set(os.listdir("/dev/shm"))
assert model.infer({"x": x})["y"][0, 0] == 2
model.close()
assert not mine & set(os.listdir("/dev/shm"))
""",
    )
    assert (outcome.returncode, outcome.stderr) == (0, "")


def test_ctrl_c_during_a_call_gives_the_window_back(server):
    release = threading.Event()

    def hold(request, answer):
        if request.id:  # the call is under way now
            os.kill(int(request.id), signal.SIGINT)
            release.wait(30)
        return answer.SerializeToString()

    server.rewrite = hold
    outcome = run_client(
        server,
        """
model.deadline = 0
try:
    model.infer({"x": x}, id=str(os.getpid()))
except KeyboardInterrupt:
    model.close()
    assert not [name for name in os.listdir("/dev/shm") if f"-{os.getpid()}-" in name]
    sys.exit(7)
""",
    )
    release.set()
    assert (outcome.returncode, outcome.stderr) == (7, "")


@pytest.mark.parametrize("method", ["IsSameIPCNamespace", "SystemSharedMemoryRegister", "ModelMetadata"])
def test_what_is_asked_before_the_first_call_is_asked_again_of_a_busy_server(server, method):
    honest = getattr(server, method)

    def busy(request, context):
        setattr(server, method, honest)
        server.abort(context, grpc.StatusCode.UNAVAILABLE, "stopping", "stopping")

    setattr(server, method, busy)
    x = np.ones((2, 4), np.float32)
    with KServeModel(server.url, "twice", retry=RetryPolicy(initial_backoff=0.01)) as model:
        np.testing.assert_array_equal(model.infer({"x": x})["y"], 2 * x)
        assert model.transport == "shared memory"
    assert server.calls.count(method) == 2


def test_a_window_that_comes_too_late_for_a_cancelled_task_goes_back(server):
    honest, asked, go_on = server.SystemSharedMemoryRegister, threading.Event(), threading.Event()

    def late(request, context):
        asked.set()
        assert go_on.wait(30)
        return honest(request, context)

    server.SystemSharedMemoryRegister = late
    x = np.ones((2, 4), np.float32)

    async def main():
        async with AsyncKServeModel(server.url, "twice") as model:
            task = asyncio.create_task(model.infer({"x": x}))
            assert await asyncio.to_thread(asked.wait, 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            go_on.set()
            windows = model.model._windows
            await asyncio.to_thread(windows._lock.acquire)  # held until the region is there
            windows._lock.release()
            np.testing.assert_array_equal((await model.infer({"x": x}))["y"], 2 * x)
            async with asyncio.timeout(30):  # a thread gives it back, some time after that
                while [arena.live for arena in windows._arenas] != [{}]:
                    await asyncio.sleep(0.001)

    asyncio.run(main())
