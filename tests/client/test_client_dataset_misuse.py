"""Datasets and maps as people get them wrong: data and objects that are none, maps within maps, odd exceptions."""

import asyncio
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from support.client_stub import INLINE_ONCE

from rsrv.client import (
    AsyncKServeModel,
    InferenceIO,
    InferInput,
    KServeModel,
    OutputSpec,
    infer_async,
    infer_sync,
    pool_view,
    scratch,
)
from rsrv.client.dataset import course as courses
from rsrv.client.dataset.survey import survey
from rsrv.client.steps import Lend, run
from rsrv.client.transport import pools
from rsrv.core.errors import DeadlineExceeded, InvalidRequest, UsageError

X = np.arange(120, dtype=np.float32).reshape(30, 4)


pytestmark = pytest.mark.usefixtures("small_pools")


class Doubled(InferenceIO):
    """Rows of X; `seen` has what came back. `inside` is called in a method with that name."""

    def __init__(self, **inside):
        self.inside = inside
        self.seen = np.zeros_like(X)

    def __len__(self):
        return len(X)

    def item_input_bytes(self):
        return 16

    def output_specs(self):
        return [OutputSpec("y", np.float32, (4,))]

    def encode_chunk(self, rows, slot):
        self.inside.get("encode_chunk", lambda: None)()
        x = scratch(slot, "x", (len(rows), 4), np.float32)
        pool_view(x)[:] = X[rows.start : rows.stop]
        return x

    def decode_chunk(self, rows, response):
        self.inside.get("decode_chunk", lambda: None)()
        self.seen[rows.start : rows.stop] = response.array("y")


METHODS = ["encode_chunk", "decode_chunk"]


# --- one within another -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("work", ["rows", "items", "dataset"])
def test_a_map_inside_of_a_method_would_wait_for_itself_and_is_refused(server, model, method, work):
    other = {
        "rows": lambda: model.map(X),
        "items": lambda: list(model.map(iter(X))),
        "dataset": lambda: infer_async(model, Doubled()),
    }[work]
    with pytest.raises(UsageError, match="encode_chunk or decode_chunk of another one") as caught:
        infer_async(model, Doubled(**{method: other}))
    assert "model(x)" in caught.value.hint
    assert pools.inline_pool().free == 8


@pytest.mark.parametrize("method", METHODS)
def test_an_event_loop_refuses_it_too(server, model, method):
    async def main():
        async with AsyncKServeModel(server.url, "twice", **INLINE_ONCE) as other:
            with pytest.raises(UsageError, match="encode_chunk or decode_chunk of another one"):
                await other.infer_async(Doubled(**{method: lambda: model.map(X)}))

    asyncio.run(main())


@pytest.mark.parametrize("method", METHODS)
def test_single_requests_inside_of_a_method_are_no_problem(model, method):
    io = Doubled(**{method: lambda: np.testing.assert_array_equal(model(X[:2], "y"), 2 * X[:2])})
    infer_async(model, io)
    np.testing.assert_array_equal(io.seen, 2 * X)


def test_maps_may_be_chained_and_nested_in_loops(model):
    np.testing.assert_array_equal(list(model.map(model.map(model.map(iter(X))))), 8 * X)
    np.testing.assert_array_equal([model.map(y[np.newaxis])[0] for y in model.map(iter(X))], 4 * X)


def test_a_map_that_is_collected_inside_of_its_own_method_does_not_wait_for_it(model):
    io = Doubled()
    course = courses.Course(model, io, run(survey(model)))
    io.inside["encode_chunk"] = course.abandon  # as a generator's end does, on the thread where garbage is collected
    ended = []

    def work():
        try:
            run(course.run(range(4)))
        except BaseException as error:
            ended.append(type(error).__name__)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert ended == ["Cancelled"]
    assert pools.inline_pool().free == 8


# --- exceptions ---------------------------------------------------------------------------------------------------


def stop():
    next(iter(()))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("drive", [infer_sync, infer_async])
def test_stop_iteration_is_an_error_like_others(model, drive, method):
    with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
        drive(model, Doubled(**{method: stop}))
    assert caught.value.__notes__[0].startswith(f"raised by {method}(range(")
    assert pools.inline_pool().free == 8


@pytest.mark.parametrize("method", METHODS)
def test_stop_iteration_does_not_hang_an_event_loop(server, model, method):
    async def main():
        async with AsyncKServeModel(server.url, "twice", **INLINE_ONCE) as other:
            async with asyncio.timeout(20):
                with pytest.raises(RuntimeError, match="raised StopIteration"):
                    await other.infer_async(Doubled(**{method: stop}))

    asyncio.run(main())


def test_a_slot_that_comes_too_late_is_given_back(server, monkeypatch):
    class Late(Lend):
        def take(self):
            slot = self.pool.acquire(self.span)
            time.sleep(max(0.0, self.deadline - time.monotonic()) + 0.001)
            return slot

    monkeypatch.setattr(courses, "Lend", Late)
    with KServeModel(server.url, "twice", **{**INLINE_ONCE, "deadline": 0.2}) as model, pytest.raises(DeadlineExceeded):
        infer_async(model, Doubled())
    assert pools.inline_pool().free == 8


# --- what is no dataset -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drive", [infer_sync, infer_async])
@pytest.mark.parametrize("data", [{"x": X}, X, object()])
def test_data_without_the_methods_of_a_dataset_is_refused_with_a_way_out(server, model, drive, data):
    with pytest.raises(UsageError, match=f"{type(data).__name__} is no InferenceIO: it has no method") as caught:
        drive(model, data)
    assert "model.map" in caught.value.hint
    assert not server.requests


def test_arrays_are_no_explicit_tensors(model):
    with pytest.raises(UsageError, match="a sequence with a ndarray; wanted InferInput"):
        infer_sync(model, [X])
    np.testing.assert_array_equal(infer_sync(model, [InferInput("x", X)]).array("y"), 2 * X)


@pytest.mark.parametrize("method", METHODS)
def test_methods_that_nobody_would_await_are_refused(server, model, method):
    async def coroutine(*_):
        raise AssertionError("never run")

    io = Doubled()
    setattr(io, method, coroutine)
    with pytest.raises(UsageError, match=f"{method} of Doubled is a coroutine function"):
        infer_async(model, io)

    async def main():
        async with AsyncKServeModel(server.url, "twice", **INLINE_ONCE) as other:
            with pytest.raises(UsageError, match=f"{method} of Doubled is a coroutine function"):
                await other.infer_async(io)
            for work in (lambda: other.map(X, progress=coroutine), lambda: other.map(iter(X), progress=coroutine)):
                with pytest.raises(UsageError, match="progress is a coroutine function"):
                    work()
            with pytest.raises(UsageError, match="progress is a coroutine function"):
                await other.infer_async(Doubled(), progress=coroutine)

    asyncio.run(main())
    assert not server.requests


@pytest.mark.parametrize("n_bytes", [None, "16", 16.5, 0])
def test_the_bytes_of_an_item_are_a_whole_number(server, model, n_bytes):
    io = Doubled()
    io.item_input_bytes = lambda: n_bytes
    with pytest.raises(UsageError, match=r"item_input_bytes\(\) of Doubled is"):
        infer_async(model, io)
    assert not server.requests


@pytest.mark.parametrize("data", [5, None, "text", b"bytes"])
def test_what_has_no_items_is_refused_at_once(server, model, data):
    with pytest.raises(UsageError, match=f"cannot map a {type(data).__name__}"):
        model.map(data)

    async def main():
        async with AsyncKServeModel(server.url, "twice", **INLINE_ONCE) as other:
            with pytest.raises(UsageError, match=f"cannot map a {type(data).__name__}"):
                other.map(data)

    asyncio.run(main())


def test_an_asynchronous_source_needs_the_other_face(model):
    async def source():
        yield X[0]

    with pytest.raises(UsageError, match="asynchronous") as caught:
        model.map(source())
    assert "AsyncKServeModel" in caught.value.hint


def test_a_source_may_have_items_by_number_only(model):
    class Numbered:
        def __getitem__(self, at):
            return X[at]

    np.testing.assert_array_equal(list(model.map(Numbered())), 2 * X)


def test_other_batches_are_refused_before_an_item_is_read(model):
    with pytest.raises(UsageError, match="batch=0"):
        model.map(iter(X), batch=0)


# --- shapes and dtypes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "text", "hint"),
    [
        (X[0], r"the data: an item of input 'x' has the shape \[\], model 'twice' takes \[4\]", "newaxis"),
        (X[:, :3], r"the data: .* has the shape \[3\]", "FP32"),
        (X[:0, :3], r"the data: .* has the shape \[3\]", "FP32"),
        ([X[:1], X[1:2]], r"item 0: an item of input 'x' has the shape \[1, 4\]", "leading 1"),
    ],
)
def test_items_of_another_shape_are_refused_where_the_server_tells_it(server, model, data, text, hint):
    server.batch_axes = {"x": 0, "y": 0}
    with pytest.raises(InvalidRequest, match=text) as caught:
        list(model.map(data))
    assert hint in caught.value.hint
    assert not server.requests


def fixed_inputs(server, shape):
    honest = server.ModelMetadata

    def ModelMetadata(request, context):
        answer = honest(request, context)
        answer.inputs[0].shape[:] = shape
        return answer

    server.ModelMetadata = ModelMetadata


def test_a_model_of_fixed_shapes_takes_rows_only_by_its_own_number(server, model):
    fixed_inputs(server, [5, 4])
    for data in (X, iter(X)):
        with pytest.raises(UsageError, match=r"x FP32\[5,4\] of model 'twice' has no open axis for rows.*at most 4"):
            list(model.map(data))
    assert not server.requests
    np.testing.assert_array_equal(model.map(X, batch=5), 2 * X)
    np.testing.assert_array_equal(model(X[:5], "y"), 2 * X[:5])


def test_items_without_bytes_are_sent(server, model):
    server.outputs = [("y", "FP32", [-1, -1])]
    server.rewrite = without_total
    assert model.map(X[:, :0]).shape == (30, 0)
    assert [y.shape for y in model.map(iter(X[:, :0]))] == [(0,)] * 30


def without_total(request, answer):
    if len(answer.outputs) == 2:
        del answer.outputs[1], answer.raw_output_contents[1]
    return answer.SerializeToString()


def test_an_output_is_named_once(model):
    with pytest.raises(UsageError, match="names an output twice"):
        model.map(X, outputs=["y", "y"])


def test_integers_of_numpy_are_numbers_of_rows(server, model):
    np.testing.assert_array_equal(model.map(X, batch=np.int64(10)), 2 * X)
    assert len(server.requests) == 3
    with KServeModel(server.url, "twice", **{**INLINE_ONCE, "max_batch_size": np.int32(15)}) as other:
        other.map(X)
    assert len(server.requests) == 5


def test_the_hint_for_another_dtype_is_python(server, model):
    honest = server.ModelMetadata

    def ModelMetadata(request, context):
        answer = honest(request, context)
        answer.inputs[0].datatype = "BF16"
        return answer

    server.ModelMetadata = ModelMetadata
    with pytest.raises(InvalidRequest) as caught:
        model.map(X)
    hint = caught.value.hint.partition(": ")[2]
    assert eval(hint, {"array": X, "np": np, "ml_dtypes": ml_dtypes}).dtype == ml_dtypes.bfloat16
