"""`model.map` over arrays and over items that come one by one, and `model(x)`."""

import threading
from itertools import count, islice

import grpc
import numpy as np
import pytest
from support.client_stub import own_shared_memory

from rsrv.client import KServeModel, RetryPolicy
from rsrv.core.errors import InvalidRequest, InvalidResponse, ModelPreparing, UnknownModel, UsageError

X = np.arange(120, dtype=np.float32).reshape(30, 4)
NO_METADATA = (grpc.StatusCode.UNIMPLEMENTED, "no such method", "")


pytestmark = pytest.mark.usefixtures("small_pools")


@pytest.fixture(params=["off", "on"])
def model(server, request):
    """Its outputs have a row for each item, as far as its metadata goes."""
    server.outputs = [("y", "FP32", [-1, 4])]
    with KServeModel(
        server.url, "twice", shared_memory=request.param, max_batch_size=4, retry=RetryPolicy(enabled=False)
    ) as handle:
        yield handle


def read_until_error(stream, found):
    """Append to `found` what `stream` gives, until it raises."""
    for one in stream:
        found.append(one)


def threads_of_ours():
    return [one for one in threading.enumerate() if one.name.startswith("rsrv-dataset") and one.is_alive()]


@pytest.fixture(autouse=True)
def no_thread_is_left_to_others():
    """A stream that is closed early does not wait for its requests."""
    yield
    for thread in threads_of_ours():
        thread.join(10)
    assert not threads_of_ours()


# --- arrays -------------------------------------------------------------------------------------------------------


def test_an_array_gives_an_array_with_as_many_rows(server, model):
    y = model.map(X)
    np.testing.assert_array_equal(y, 2 * X)
    assert y.flags.writeable
    assert len(server.requests) == 8


def test_a_mapping_gives_a_mapping(server, model):
    outputs = model.map({"x": X})
    assert list(outputs) == ["y"]
    np.testing.assert_array_equal(outputs["y"], 2 * X)


def test_several_outputs_come_as_a_mapping_also_for_one_array(server, model):
    server.outputs = [("y", "FP32", [-1, 4]), ("total", "FP32", [-1])]  # the stub's total has three elements
    outputs = model.map(X, batch=3)
    assert list(outputs) == ["y", "total"]
    np.testing.assert_array_equal(outputs["total"].reshape(-1, 3)[:, 1:], [[3, 7]] * 10)
    np.testing.assert_array_equal(model.map(X, batch=3, outputs=["y"]), 2 * X)


def test_the_number_of_rows_in_a_request_can_be_given(server, model):
    model.map(X, batch=10)
    assert sorted(request.inputs[0].shape[0] for request in server.requests) == [10, 10, 10]
    server.requests.clear()
    server.max_batch_size = 6
    model.map(X, batch="auto")
    assert sorted(request.inputs[0].shape[0] for request in server.requests) == [6] * 5


@pytest.mark.parametrize("batch", [0, -1, "all", 1.5])
def test_other_numbers_of_rows_are_refused(model, batch):
    with pytest.raises(UsageError, match="batch="):
        model.map(X, batch=batch)


def test_arrays_may_be_memory_mapped_strided_or_of_the_other_byte_order(tmp_path, model):
    np.save(tmp_path / "x.npy", X)
    np.testing.assert_array_equal(model.map(np.load(tmp_path / "x.npy", mmap_mode="r")), 2 * X)
    np.testing.assert_array_equal(model.map(X[::-2]), 2 * X[::-2])
    np.testing.assert_array_equal(model.map(np.asfortranarray(X)), 2 * X)
    np.testing.assert_array_equal(model.map(X.astype(">f4")), 2 * X)


def test_whatever_numpy_takes_for_an_array_will_do(model):
    class Tensor:
        def __array__(self, dtype=None, copy=None):
            return X

    np.testing.assert_array_equal(model.map(Tensor()), 2 * X)
    np.testing.assert_array_equal(model.map({"x": X.tolist()})["y"], 2 * X)


def test_no_rows_give_no_rows_and_no_request(server, model):
    y = model.map(X[:0])
    assert (y.shape, y.dtype) == ((0, 4), np.float32)
    assert model.map({"x": X[:0]})["y"].shape == (0, 4)
    assert server.requests == []


def test_no_rows_need_metadata(server, model):
    server.refuse["ModelMetadata"] = NO_METADATA
    with pytest.raises(UsageError, match="no rows"):
        model.map({"x": X[:0]})


def test_progress_is_told_of_rows(model):
    told = []
    model.map(X, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (30, 30)


def test_without_metadata_inputs_need_their_names(server, model):
    server.refuse["ModelMetadata"] = NO_METADATA
    server.rewrite = without_total
    np.testing.assert_array_equal(model.map({"x": X})["y"], 2 * X)
    with pytest.raises(UsageError, match="called") as caught:
        model.map(X)
    assert "name" in caught.value.hint


def test_the_servers_word_on_the_model_is_raised_and_no_other(server, model):
    with KServeModel(server.url, "thrice") as other:
        for work in (other.map, other, lambda data: next(other.map(iter(data)))):
            with pytest.raises(UnknownModel, match="thrice"):
                work(X)
    server.refuse["ModelMetadata"] = (grpc.StatusCode.UNAVAILABLE, "compiling", "preparing")
    with pytest.raises(ModelPreparing, match="compiling"):
        model.map(X)
    np.testing.assert_array_equal(model.map({"x": X}, outputs=["y"])["y"], 2 * X)


def test_numbers_of_python_must_fit_the_models_dtype(server, model):
    honest = server.ModelMetadata

    def ModelMetadata(request, context):
        answer = honest(request, context)
        answer.inputs[0].datatype = "INT8"
        return answer

    server.ModelMetadata = ModelMetadata
    with pytest.raises(InvalidRequest, match="'x' is int64, model 'twice' takes x INT8"):
        model.map({"x": [[300, 1, 2, 3]]})
    assert server.requests == []


def without_total(request, answer):
    if len(answer.outputs) == 2:
        del answer.outputs[1], answer.raw_output_contents[1]
    return answer.SerializeToString()


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        (X.astype(np.float64), InvalidRequest, r"'x' is float64, model 'twice' takes x FP32\[-1,4\]"),
        ({"x": X, "z": X}, InvalidRequest, "no input 'z'; it has: x"),
        ({"x": np.float32(1)}, UsageError, r"same number of rows .* x \[\]"),
        ({}, UsageError, "empty"),
        ({"x": [[1.0], [2.0, 3.0]]}, InvalidRequest, "'x' is no array"),
        ({"x": np.array([["a"]])}, InvalidRequest, "'x' is <U1"),
    ],
)
def test_data_that_the_model_does_not_take_is_refused_by_name(server, model, data, kind, text):
    with pytest.raises(kind, match=text):
        model.map(data)
    assert server.requests == []


def test_inputs_need_the_same_number_of_rows(server, model):
    server.refuse["ModelMetadata"] = NO_METADATA
    with pytest.raises(UsageError, match=r"a \[3, 1\], b \[2\]"):
        model.map({"a": np.zeros((3, 1)), "b": np.zeros(2)})


def test_an_output_without_rows_is_an_error_with_a_way_out(server, model):
    server.outputs = [("y", "FP32", [-1, 4]), ("total", "FP32", [3])]
    with pytest.raises(
        InvalidResponse, match=r"output 'total' of items \d+ to \d+ has the shape \[3\]; wanted [42] rows"
    ) as e:
        model.map(X)
    assert "outputs=" in e.value.hint
    np.testing.assert_array_equal(model.map(X, outputs=["y"]), 2 * X)
    np.testing.assert_array_equal(model.map(X, outputs="y"), 2 * X)


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({"x": 0}, r"output total FP32\[3\] of model 'twice' has no axis for rows"),
        ({"x": 1, "total": 0}, r"input x FP32\[-1,4\] of model 'twice' has its rows on axis 1"),
        ({"total": 0}, r"input x FP32\[-1,4\] of model 'twice' has no axis for rows"),
    ],
)
def test_a_server_that_tells_of_axes_is_believed_before_anything_is_sent(server, model, axes, text):
    server.outputs = [("total", "FP32", [3])]
    server.batch_axes = axes
    with pytest.raises(UsageError, match=text):
        model.map(X)
    with pytest.raises(UsageError, match=text):
        next(model.map(iter(X)))
    assert server.requests == []
    server.outputs = [("y", "FP32", [-1, 4]), ("total", "FP32", [3])]
    server.batch_axes = {"x": 0, "y": 0}
    np.testing.assert_array_equal(model.map(X, outputs=["y"]), 2 * X)


def test_an_unknown_output_is_refused_by_the_server(model):
    with pytest.raises(InvalidRequest, match="no output 'z'"):
        model.map(X, outputs=["z"])


def test_rows_of_different_sizes_do_not_fit_into_one_array(server, model):
    server.outputs = [("y", "FP32", [-1, -1])]

    lock, answered = threading.Lock(), []

    def shrinking(request, answer):
        with lock:
            answered.append(request)
            width = 4 if len(answered) == 1 else 2
        del answer.outputs[1], answer.raw_output_contents[1]
        n = request.inputs[0].shape[0]
        answer.outputs[0].shape[:] = [n, width]
        answer.raw_output_contents[0] = np.zeros((n, width), np.float32).tobytes()
        return answer.SerializeToString()

    server.rewrite = shrinking
    with pytest.raises(InvalidResponse, match=r"rows of float32\[\d\].*do not fit into one array") as caught:
        model.map(X)
    assert any("items" in note for note in caught.value.__notes__)
    answered.clear()
    found = list(model.map(iter(X)))
    assert {y.shape for y in found} == {(4,), (2,)}


# --- items --------------------------------------------------------------------------------------------------------


def test_items_give_their_outputs_one_by_one_in_order(server, model):
    found = list(model.map(iter(X)))
    assert len(found) == 30
    np.testing.assert_array_equal(found, 2 * X)
    assert len(server.requests) == 8
    assert not threads_of_ours()


def test_named_items_give_named_outputs(model):
    found = list(model.map({"x": row} for row in X))
    assert all(list(one) == ["y"] for one in found)
    np.testing.assert_array_equal([one["y"] for one in found], 2 * X)


def test_a_list_is_one_of_items_and_numbers_of_python_take_the_models_dtype(model):
    np.testing.assert_array_equal(list(model.map(X.tolist())), 2 * X)
    told = []
    list(model.map([[1, 2, 3, 4]] * 3, progress=lambda *state: told.append(state)))
    assert told == [(3, 3)]


def test_no_items_give_none_without_a_call(server, model):
    assert list(model.map([])) == []
    assert server.calls == []


def test_an_endless_iterator_is_read_only_a_few_requests_ahead(server, model):
    read = []

    def endless():
        for i in count():
            read.append(i)
            yield np.full(4, i, np.float32)

    stream = model.map(endless())
    assert read == []
    for i, y in enumerate(islice(stream, 50)):
        np.testing.assert_array_equal(y, np.full(4, 2 * i))
        assert len(read) <= i + 1 + 8 * 4  # eight slots, each with a request of four items
    stream.close()
    model.close()
    assert own_shared_memory() == set()


def test_a_source_may_yield_the_same_array_again_and_again(model):
    def frames():
        frame = np.empty(4, np.float32)
        for i in range(30):
            frame[:] = i
            yield frame

    np.testing.assert_array_equal(np.array(list(model.map(frames())))[:, 0], 2 * np.arange(30))


def test_an_error_of_the_source_comes_after_all_results_before_it(server, model):
    def source():
        yield from X[:10]
        raise OSError("the disk is gone")

    stream, found = model.map(source()), []
    with pytest.raises(OSError, match="the disk is gone"):
        read_until_error(stream, found)
    np.testing.assert_array_equal(found, 2 * X[:10])
    assert not threads_of_ours()


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (np.zeros(3, np.float32), r"item 6: input 'x' is float32\[3\], that of the first is float32\[4\]"),
        (np.zeros(4, np.int64), r"item 6: input 'x' is int64, model 'twice' takes x FP32\[-1,4\]"),
        ({"x": X[0]}, "item 6 is a dict; wanted one array"),
        ([[1], [2, 3]], "item 6: input 'x' is no array"),
    ],
)
def test_an_item_unlike_the_others_fails_at_its_place(server, model, bad, text):
    found = []
    with pytest.raises(InvalidRequest, match=text):
        read_until_error(model.map([*X[:6], bad, *X[6:]]), found)
    np.testing.assert_array_equal(found, 2 * X[:6])


def test_items_with_other_inputs_than_the_first_fail_at_their_place(server, model):
    server.refuse["ModelMetadata"] = NO_METADATA
    server.rewrite = without_total
    found = []
    with pytest.raises(InvalidRequest, match="item 2 has the inputs x, z; the first has x"):
        read_until_error(model.map([{"x": X[0]}, {"x": X[1]}, {"x": X[2], "z": X[2]}]), found)
    np.testing.assert_array_equal([one["y"] for one in found], 2 * X[:2])


def test_a_refused_request_fails_at_its_place_and_nothing_new_is_sent(server, model):
    honest = server.ModelInfer

    def ModelInfer(request, context):
        answer = honest(request, context)
        total = dict(zip([one.name for one in answer.outputs], answer.raw_output_contents, strict=True))
        if len(server.requests) > 3 and total:
            server.abort(context, grpc.StatusCode.INVALID_ARGUMENT, "enough", "invalid")
        return answer

    server.ModelInfer = ModelInfer
    found = []
    with pytest.raises(InvalidRequest, match="enough") as caught:
        read_until_error(model.map(np.full(4, i, np.float32) for i in count()), found)
    assert len(found) % 4 == 0
    np.testing.assert_array_equal(np.array(found).reshape(-1, 4)[:, 0], 2 * np.arange(len(found)))
    assert any(f"items {len(found)} to {len(found) + 3}" in note for note in caught.value.__notes__)
    assert not threads_of_ours()


def test_a_shorter_answer_fails_at_its_place(server, model):
    server.outputs = [("y", "FP32", [-1, -1])]  # not known beforehand, so that only its rows can be checked

    def shorter(request, answer):
        del answer.outputs[1], answer.raw_output_contents[1]
        answer.outputs[0].shape[0] -= 1
        answer.raw_output_contents[0] = answer.raw_output_contents[0][16:]
        return answer.SerializeToString()

    server.rewrite = shorter
    with pytest.raises(InvalidResponse, match=r"output 'y' of items 0 to 3 has the shape \[3, 4\]; wanted 4 rows"):
        list(model.map(iter(X)))


def test_who_stops_reading_stops_the_sending(server, model):
    hang = threading.Event()

    def late(request, answer):
        hang.wait(10)
        return answer.SerializeToString()

    stream = model.map(np.full(4, i, np.float32) for i in count())
    next(stream)
    server.rewrite = late
    stream.close()
    hang.set()
    for thread in threads_of_ours():
        thread.join(10)
    sent = len(server.requests)
    assert sent <= 9
    np.testing.assert_array_equal(model.map(X), 2 * X)


# --- one call -----------------------------------------------------------------------------------------------------


def test_a_call_sends_all_rows_in_one_request(server, model):
    np.testing.assert_array_equal(model(X, outputs=["y"]), 2 * X)
    assert list(model({"x": X}, ["y"])) == ["y"]
    np.testing.assert_array_equal(model(X.tolist(), ["y"]), 2 * X)
    assert len(server.requests) == 3
    assert {request.inputs[0].shape[0] for request in server.requests} == {30}


def test_a_call_remembers_what_the_input_is_called(server, model):
    model(X)
    before = server.calls.count("ModelMetadata")
    model(X)
    assert server.calls.count("ModelMetadata") == before


def test_a_call_after_a_refused_one_asks_again_what_the_model_takes(server, model):
    honest = server.ModelMetadata

    def ModelMetadata(request, context):
        answer = honest(request, context)
        answer.inputs[0].datatype = "FP64"
        return answer

    server.ModelMetadata = ModelMetadata
    with pytest.raises(InvalidRequest, match="takes x FP64"):
        model(X)
    server.ModelMetadata = honest
    np.testing.assert_array_equal(model(X, "y"), 2 * X)


def test_auto_takes_the_largest_compiled_size_and_asks_nothing_more(server, model):
    server.batch_sizes = [1, 6]
    model.map(X, batch="auto")
    assert sorted(request.inputs[0].shape[0] for request in server.requests) == [6] * 5
    assert server.calls.count("ModelMetadata") == 1
    assert "ModelConfig" not in server.calls


def test_a_call_with_the_wrong_dtype_names_the_input(server, model):
    with pytest.raises(InvalidRequest, match="'x' is int8"):
        model(X.astype(np.int8))
