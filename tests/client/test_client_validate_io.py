"""The dry run of an IO: what fits passes, and every way not to fit is told with the tensor and a way out."""

import ctypes
import logging

import numpy as np
import pytest
from support.client_stub import StubServer

from rsrv.client import KServeModel, ModelIOSpec, TensorMeta, infer_async, validate_io
from rsrv.client.dataset.io import InferenceIO, OutputSpec, PoolInferInput, pool_view, scratch
from rsrv.core.errors import IOMismatch, UsageError


def tensors(*metas):
    return {meta.name: meta for meta in metas}


IMAGES = ModelIOSpec(
    "net",
    tensors(TensorMeta("image", "FP32", (-1, 3, 4, 5), 0)),
    tensors(
        TensorMeta("scores", "FP32", (-1, 10), 0),
        TensorMeta("label", "INT64", (-1,), 0),
        TensorMeta("total", "FP32", (3,)),
    ),
)


class Images(InferenceIO):
    """Fits `IMAGES`; tests change one method or attribute at a time."""

    n_items = 4
    n_bytes = 240
    name, shape, dtype = "image", (3, 4, 5), np.float32
    outputs = ()
    rows_encoded = rows_decoded = None

    @classmethod
    def with_outputs(cls, *outputs):
        io = cls()
        io.outputs = outputs
        return io

    def __len__(self):
        return self.n_items

    def item_input_bytes(self):
        return self.n_bytes

    def output_specs(self):
        return list(self.outputs)

    def encode_chunk(self, rows, slot):
        self.rows_encoded = rows
        one = scratch(slot, self.name, (len(rows), *self.shape), self.dtype)
        self.fill(pool_view(one), rows)
        return one

    def fill(self, array, rows):
        array[...] = 7

    def decode_chunk(self, rows, response):
        self.rows_decoded, self.decoded = rows, response.arrays()


def io_with(**changes):
    io = Images()
    for name, value in changes.items():
        setattr(io, name, value)
    return io


def errors_of(io, spec=IMAGES, **options):
    """The findings, one text each, of an IO that does not fit."""
    with pytest.raises(IOMismatch, match=f"does not fit model '{spec.name}'") as caught:
        validate_io(spec, io, **options)
    texts = [str(finding) for finding in caught.value.findings]
    assert all(text in caught.value.message for text in texts)
    assert (caught.value.reason, caught.value.exit_code) == ("io_mismatch", 2)
    return texts


# --- what fits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("items", [1, 3, 100])
def test_an_io_that_fits_has_no_findings(items):
    io = Images()
    assert validate_io(IMAGES, io, items) == []
    rows = min(items, 4)
    assert io.rows_encoded == io.rows_decoded == range(rows)
    shapes = {name: (array.dtype, array.shape) for name, array in io.decoded.items()}
    assert shapes == {"scores": (np.float32, (rows, 10)), "label": (np.int64, (rows,)), "total": (np.float32, (3,))}
    assert not any(array.any() for array in io.decoded.values())


def test_declared_outputs_come_in_their_order_and_alone():
    io = io_with(outputs=[OutputSpec("label", np.int64), OutputSpec("scores", np.float32, (10,))])
    assert validate_io(IMAGES, io, 2) == []
    assert [(name, array.shape) for name, array in io.decoded.items()] == [("label", (2,)), ("scores", (2, 10))]


def test_random_answers_look_like_scores_and_labels():
    io = Images()
    assert validate_io(IMAGES, io, 4, random=True) == []
    scores, label = io.decoded["scores"], io.decoded["label"]
    assert 0 <= scores.min() < scores.max() < 1
    assert set(label.tolist()) <= set(range(10))
    again = Images()
    validate_io(IMAGES, again, 4, random=True)
    np.testing.assert_array_equal(again.decoded["scores"], scores)  # a failure can be repeated


def test_a_model_is_asked_for_its_tensors_and_gets_no_request():
    class Rows(Images):
        name, shape, n_bytes = "x", (4,), 16

    with StubServer() as server, KServeModel(server.url, "twice") as model:
        assert validate_io(model, Rows(), 3) == []
        with pytest.raises(IOMismatch, match="model 'twice'"):
            validate_io(model, Images())
        assert set(server.calls) == {"ModelMetadata"}


@pytest.mark.parametrize("mode", ["on", "off"])
def test_what_passes_here_passes_there(mode):
    """The same IO through the drivers: what the dry run lends and answers is what they lend and answer."""

    class Rows(Images):
        name, shape, n_bytes, n_items, outputs = "x", (4,), 16, 10, (OutputSpec("y", np.float32, (4,)),)

        def fill(self, array, rows):
            array[...] = np.arange(rows.start, rows.stop)[:, None]

        def decode_chunk(self, rows, response):
            self.results[rows.start : rows.stop] = response.array("y")

    io = Rows()
    io.results = np.full((10, 4), np.nan, np.float32)
    with (
        StubServer() as server,
        KServeModel(server.url, "twice", max_batch_size=3, shared_memory=mode) as model,
    ):
        assert validate_io(model, io, 4) == []
        assert not np.nan_to_num(io.results[:4], nan=1).any()
        infer_async(model, io)
    np.testing.assert_array_equal(io.results, np.repeat(np.arange(0, 20, 2)[:, None], 4, 1))


def test_any_object_with_the_four_methods_will_do():
    class Plain:
        __len__, item_input_bytes = Images.__len__, Images.item_input_bytes
        encode_chunk, decode_chunk, fill = Images.encode_chunk, Images.decode_chunk, Images.fill
        n_items, n_bytes, name, shape, dtype = 4, 240, "image", (3, 4, 5), np.float32

    assert validate_io(IMAGES, Plain()) == []


def test_several_inputs_of_every_dtype_in_one_list():
    import ml_dtypes

    kinds = {"FP16": np.float16, "BF16": ml_dtypes.bfloat16, "INT8": np.int8, "UINT64": np.uint64, "BOOL": np.bool_}
    spec = ModelIOSpec(
        "many", tensors(*(TensorMeta(k, k, (-1, 3)) for k in kinds)), tensors(*(TensorMeta(k, k, (-1,)) for k in kinds))
    )

    class Many(Images):
        n_bytes = 3 * (2 + 2 + 1 + 8 + 1)

        def encode_chunk(self, rows, slot):
            staged = scratch(slot, {name: ((len(rows), 3), kind) for name, kind in kinds.items()})
            for view in pool_view(*staged):
                view[...] = 1
            return staged

    io = Many()
    assert validate_io(spec, io, 2, random=True) == []
    assert {name: array.dtype for name, array in io.decoded.items()} == {k: np.dtype(v) for k, v in kinds.items()}


def test_rows_may_be_another_axis_than_the_first():
    spec = ModelIOSpec(
        "last", tensors(TensorMeta("image", "FP32", (2, -1), 1)), tensors(TensorMeta("bright", "FP32", (2, -1, -1), 1))
    )

    class Columns(Images):
        n_bytes, outputs = 8, (OutputSpec("bright", np.float32, (2, 6)),)

        def encode_chunk(self, rows, slot):
            one = scratch(slot, "image", (2, len(rows)), np.float32)
            pool_view(one)[...] = 0
            return one

    io = Columns()
    assert validate_io(spec, io, 3) == []
    assert io.decoded["bright"].shape == (2, 3, 6)  # rows where the model has them, 6 because the IO says so


def test_an_open_axis_at_the_front_is_not_the_rows_where_the_server_says_which_is():
    words = TensorMeta("words", "INT64", (-1, -1), 1)
    spec = ModelIOSpec("text", tensors(words), tensors(TensorMeta("vocabulary", "INT64", (-1,))))

    class Text(Images):
        n_bytes = 48

        def encode_chunk(self, rows, slot):
            one = scratch(slot, "words", (6, len(rows)), np.int64)
            pool_view(one)[...] = 0
            return one

    io = Text()
    assert validate_io(spec, io, 4) == []
    assert io.decoded["vocabulary"].shape == (1,)
    (text, _) = errors_of(Text.with_outputs(OutputSpec("vocabulary", np.int64)), spec)
    assert "has no row axis ([-1])" in text


def test_a_model_without_rows_takes_one_item():
    spec = ModelIOSpec("one", tensors(TensorMeta("x", "FP32", (1, 3))), tensors(TensorMeta("y", "FP32", (1, 3))))

    class One(Images):
        name, shape, n_bytes, outputs = "x", (3,), 12, (OutputSpec("y", np.float32, (3,)),)

    assert validate_io(spec, One()) == []
    (wrong_input, *_, wrong_output) = errors_of(One(), spec, items=2)
    assert wrong_input == "input 'x': has shape [2,3], the model takes [1,3]"
    assert wrong_output.startswith(
        "output_specs: 2 item(s) cannot share a request: output 'y' of items 0 to 1 is FP32[1, 3]"
    )


KINDS = {"FP32": np.float32, "FP16": np.float16, "INT64": np.int64, "UINT8": np.uint8, "BOOL": np.bool_}


class Any(InferenceIO):
    """Sends `inputs`, name → (shape of a number of rows, dtype), and reads `outputs`."""

    def __init__(self, inputs, outputs):
        self.inputs, self.outputs = inputs, outputs

    def __len__(self):
        return 5

    def item_input_bytes(self):
        return sum(int(np.prod(shape(1))) * np.dtype(kind).itemsize for shape, kind in self.inputs.values())

    def output_specs(self):
        return self.outputs

    def encode_chunk(self, rows, slot):
        staged = scratch(slot, {name: (shape(len(rows)), kind) for name, (shape, kind) in self.inputs.items()})
        for one in staged:
            pool_view(one)[...] = 1
        return staged

    def decode_chunk(self, rows, response):
        for output in self.outputs:
            array = response.array(output.name)
            assert array.dtype == output.dtype
            assert array.size == len(rows) * int(np.prod(output.per_item_dims))


def random_tensor(rng, name, known):
    """A tensor of a model, its shape for a number of rows, and its shape for one item."""
    datatype = str(rng.choice(list(KINDS)))
    item = [int(rng.integers(1, 5)) for _ in range(rng.integers(0, 4))]
    axis = int(rng.integers(0, len(item) + 1)) if known else 0
    said = [-1 if rng.random() < 0.3 else extent for extent in item]
    meta = TensorMeta(name, datatype, (*said[:axis], -1, *said[axis:]), axis if known else None)
    return meta, lambda rows: (*item[:axis], rows, *item[axis:]), tuple(item)


@pytest.mark.parametrize("seed", range(60))
def test_random_models_take_the_io_that_is_made_for_them_and_no_other(seed):
    rng = np.random.default_rng(seed)
    known = rng.random() < 0.6  # whether the server says which axes count rows
    inputs = [random_tensor(rng, f"in{i}", known) for i in range(rng.integers(1, 4))]
    outputs = [random_tensor(rng, f"out{i}", known) for i in range(rng.integers(1, 4))]
    spec = ModelIOSpec("random", tensors(*(i[0] for i in inputs)), tensors(*(o[0] for o in outputs)))
    sent = {meta.name: (shape, KINDS[meta.datatype]) for meta, shape, _ in inputs}
    read = [OutputSpec(meta.name, KINDS[meta.datatype], item) for meta, _, item in outputs if rng.random() < 0.7]
    items = int(rng.integers(1, 6))
    assert validate_io(spec, Any(sent, read), items, random=bool(seed % 2)) == []

    meta, shape, _ = inputs[0]
    fixed = [i for i, extent in enumerate(meta.shape) if extent >= 0]

    def wrong(rows):
        extents = list(shape(rows))
        if fixed:
            extents[fixed[0]] += 1
            return extents
        return [*extents, 1]

    texts = errors_of(Any({**sent, meta.name: (wrong, sent[meta.name][1])}, read), spec, items=items)
    assert [text.split(":")[0] for text in texts] == [f"input {meta.name!r}"]


# --- warnings -----------------------------------------------------------------------------------------------------


def test_an_empty_io_is_a_warning_and_nothing_is_called(caplog):
    io = io_with(n_items=0, item_input_bytes=None)
    io.item_input_bytes = lambda: pytest.fail("called")
    with caplog.at_level(logging.WARNING, "rsrv.client"):
        (finding,) = validate_io(IMAGES, io)
    assert (finding.severity, finding.subject) == ("warning", "len(io)")
    assert "nothing was tried" in caplog.text


def test_declaring_more_bytes_than_are_carved_is_a_warning():
    (finding,) = validate_io(IMAGES, io_with(n_bytes=300), 2)
    assert str(finding) == (
        "item_input_bytes: encode_chunk carved 480 bytes, but item_input_bytes() is 300, which makes 600 for 2 item(s) "
        "(requests have fewer items than would fit)"
    )


def test_another_number_of_rows_than_items_is_a_warning():
    class Crops(Images):
        n_bytes = 480

        def encode_chunk(self, rows, slot):
            one = scratch(slot, "image", (2 * len(rows), 3, 4, 5), np.float32)
            pool_view(one)[...] = 0
            return one

    (finding,) = validate_io(IMAGES, Crops(), 2)
    assert str(finding) == "input 'image': has 4 rows (axis 0 of [4,3,4,5]) for 2 item(s)"


def test_an_output_that_cannot_be_made_up_leaves_decode_untried():
    spec = ModelIOSpec("words", IMAGES.inputs, tensors(TensorMeta("text", "BYTES", (-1,))))
    io = Images()
    (finding,) = validate_io(spec, io)
    assert "was not tried" in finding.message
    assert "BYTES" in finding.message
    assert io.rows_decoded is None


# --- inputs that do not fit ---------------------------------------------------------------------------------------


def test_a_wrong_name_tells_those_that_there_are():
    assert errors_of(io_with(name="img")) == [
        "input 'img': the model has no input of that name; it has: image",
        "input 'image': the model needs it, and encode_chunk returned no descriptor for it",
    ]


def test_a_wrong_dtype():
    (text,) = errors_of(io_with(dtype=np.float64, n_bytes=480))
    assert text == "input 'image': is sent as FP64, the model takes FP32"


def encoding(shape):
    def encode_chunk(rows, slot):
        one = scratch(slot, "image", shape(len(rows)), np.float32)
        pool_view(one)[...] = 0
        return one

    return encode_chunk


@pytest.mark.parametrize(
    ("shape", "hint"),
    [
        (lambda n: (5, 4, 3, n), "the axis order looks reversed: [2,3,4,5] fits; axes are row-major, as in NumPy"),
        (lambda n: (3, 4, 5, n), "with axis 3 moved to position 0 it would fit"),
        (lambda n: (3, n, 4, 5), "with axis 0 moved to position 1 it would fit"),
        (lambda n: (n, 4, 5, 3), "with axis 3 moved to position 1 it would fit"),
        (lambda n: (n, 60), "the number of elements is right: reshape it"),
        (lambda n: (n, 4, 3, 4), None),
    ],
)  # fmt: skip
def test_a_wrong_shape_tells_what_may_have_happened(shape, hint):
    text = errors_of(io_with(encode_chunk=encoding(shape)), items=2)[0]
    wrong = f"input 'image': has shape [{','.join(map(str, shape(2)))}], the model takes [-1,3,4,5]"
    assert text == (f"{wrong} ({hint})" if hint else wrong)


def test_one_axis_too_many_is_recognised():
    (text,) = errors_of(io_with(encode_chunk=encoding(lambda n: (1, n, 3, 4, 5))))
    assert "there seems to be one axis too many at the front" in text


def test_a_missing_row_axis_is_recognised():
    (text,) = errors_of(io_with(encode_chunk=encoding(lambda n: (3, 4, 5))))
    assert "the row axis seems to be missing" in text


def test_carving_more_than_declared_is_an_error_also_when_it_still_fits():
    (text,) = errors_of(io_with(n_bytes=100), items=2)
    assert text == (
        "item_input_bytes: encode_chunk carved 480 bytes, but item_input_bytes() is 100, which makes 200 for 2 item(s) "
        "(a full chunk would not fit its slot: count all inputs of an item, in bytes)"
    )


def test_carving_far_more_than_declared_is_the_same_error():
    (text, *_) = errors_of(io_with(n_bytes=1, shape=(3, 400, 500)))
    assert "encode_chunk: asked for 2400000 bytes more after carving 0, but item_input_bytes() is 1" in text


@pytest.mark.parametrize("n_bytes", [0, -4, 1.5, None, "240"])
def test_item_bytes_that_are_no_size(n_bytes):
    (text,) = errors_of(io_with(n_bytes=n_bytes))
    assert text == f"item_input_bytes: returned {n_bytes!r}, want the bytes of one item, an integer above 0"


def test_bytes_that_nobody_writes_are_found():
    def fill(array, rows):
        array[:, :2] = 1
        array[0, 2] = 0xA5  # one of the patterns, by chance

    (text,) = errors_of(io_with(fill=fill), items=2)
    assert text == (
        "input 'image': 80 of its 480 bytes are never written, the first at index [1,2,0,0] (they would be sent with "
        "what an earlier request left there: fill them, with 0 for example)"
    )


def test_content_that_looks_like_a_pattern_is_no_unwritten_byte():
    for value in (0xA5, 0x5A):

        def fill(array, rows, value=value):
            array.view(np.uint8)[...] = value

        assert validate_io(IMAGES, io_with(fill=fill)) == []


@pytest.mark.parametrize(("bytes_behind", "n_bytes"), [(0, 1), (0, 64), (5, 3)])
def test_a_write_behind_a_buffer_is_found(bytes_behind, n_bytes):
    def fill(array, rows):
        array[...] = 0
        ctypes.memset(array.ctypes.data + array.nbytes + bytes_behind, 1, n_bytes)

    (text,) = errors_of(io_with(fill=fill))
    assert text == (
        f"input 'image': wrote {n_bytes} bytes outside of its buffers, {bytes_behind} bytes behind the end of input "
        "'image' (they would change another buffer, or another request)"
    )


def test_a_write_between_two_buffers_is_found_although_the_second_is_written_later():
    spec = ModelIOSpec("two", tensors(*(TensorMeta(n, "UINT8", (-1, 64)) for n in "ab")), {})

    class Two(Images):
        n_bytes = 128

        def encode_chunk(self, rows, slot):
            a, b = scratch(slot, dict.fromkeys("ab", ((1, 64), np.uint8)))
            ctypes.memset(pool_view(a).ctypes.data, 1, 65)
            pool_view(b)[...] = 2
            return [a, b]

    (text,) = errors_of(Two(), spec)
    assert text.startswith("input 'a': wrote 1 bytes outside of its buffers, 0 bytes behind the end of input 'a'")


def test_a_buffer_of_ones_own_is_refused():
    from rsrv.core.shm import BufferPool

    with BufferPool(4096, n_slots=1, use_shm=False) as pool, pool.acquire() as mine:
        own = scratch(mine, "image", (1, 3, 4, 5), np.float32)
        texts = errors_of(io_with(encode_chunk=lambda rows, slot: own))
    assert "input 'image': its buffer is not a part of the slot of this call" in texts[0]


def test_a_buffer_that_is_not_carved_is_refused():
    def encode_chunk(rows, slot):
        slot.view(np.float32, (1, 3, 4, 5))[...] = 0
        return PoolInferInput("image", slot, (1, 3, 4, 5), np.float32)

    assert "its bytes are not carved from the slot" in errors_of(io_with(encode_chunk=encode_chunk))[0]


def test_hand_made_descriptors_over_a_carved_buffer_are_fine():
    def encode_chunk(rows, slot):
        part = slot.subslot(240)
        part.view(np.float32, (1, 3, 4, 5))[...] = 0
        return PoolInferInput("image", part, (1, 3, 4, 5), np.float32)

    assert validate_io(IMAGES, io_with(encode_chunk=encode_chunk)) == []


def test_two_inputs_on_the_same_bytes_and_one_input_twice():
    spec = ModelIOSpec("two", tensors(*(TensorMeta(n, "FP32", (-1,)) for n in "ab")), {})

    def encode_chunk(rows, slot):
        part = slot.subslot(4)
        part.view(np.float32, 1)[...] = 0
        return [PoolInferInput(name, part, (1,), np.float32) for name in "abb"]

    texts = errors_of(io_with(encode_chunk=encode_chunk, n_bytes=4), spec)
    assert "input 'b': lies on the bytes of input 'a' (carve a buffer for each input)" in texts
    assert "input 'b': is sent twice (return one descriptor for each input)" in texts


@pytest.mark.parametrize(
    ("returned", "text"), [(None, "a NoneType"), ([], "no descriptors"), (np.zeros(3), "a ndarray"), ([3], "a int")]
)
def test_what_is_no_descriptor_is_named(returned, text):
    assert f"encode_chunk: returned {text}" in errors_of(io_with(encode_chunk=lambda rows, slot: returned))[0]


def test_an_encode_that_says_something_else_the_second_time_is_a_warning():
    calls = []

    def encode_chunk(rows, slot):
        calls.append(rows)
        one = scratch(slot, "image", (len(calls), 3, 4, 5), np.float32)
        pool_view(one)[...] = 0
        return one

    (finding,) = validate_io(IMAGES, io_with(encode_chunk=encode_chunk))
    assert str(finding) == "encode_chunk: returned other tensors for the same items when it was called again"


# --- outputs that do not fit --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (OutputSpec("score", np.float32, 10), "output 'score': the model has no output of that name; it has: scores, "),
        (OutputSpec("scores", np.float64, 10), "output 'scores': is declared as FP64, the model answers FP32"),
        (OutputSpec("scores", np.float32, 11), "'scores': is declared with [11] for each item, the model answers [10]"),
        (OutputSpec("scores", np.float32, (1, 10)), "(per_item_dims leaves the row axis out)"),
        (OutputSpec("label", np.int64, 1), "output 'label': is declared with [1] for each item, the model answers []"),
        (OutputSpec("total", np.float32, 3), "output 'total': has no row axis ([3])"),
    ],
)  # fmt: skip
def test_a_declared_output_that_does_not_fit(output, text):
    io = io_with(outputs=[output])
    first, second = errors_of(io)
    assert text in first
    assert second == "decode_chunk: was not tried, because of the outputs that are declared"
    assert io.rows_decoded is None


def test_an_output_with_reversed_axes_and_one_that_is_listed_twice():
    spec = ModelIOSpec("maps", IMAGES.inputs, tensors(TensorMeta("map", "FP32", (-1, 3, 5), 0)))
    reversed_axes = io_with(outputs=[OutputSpec("map", np.float32, (5, 3))])
    assert "looks reversed: [3,5] fits" in errors_of(reversed_axes, spec)[0]
    twice = [OutputSpec("label", np.int64)] * 2
    assert "output 'label': output_specs() lists it twice" in errors_of(io_with(outputs=twice))[0]


def test_what_is_no_output_spec_is_named():
    texts = errors_of(io_with(outputs=["label"]))
    assert texts[0] == "output_specs: lists 'label' (want OutputSpec(name, dtype, per_item_dims))"


def test_everything_that_was_found_is_told_at_once():
    io = io_with(name="img", dtype=np.float64, n_bytes=100, outputs=[OutputSpec("score", np.float32)])
    texts = errors_of(io)
    assert [text.split(":")[0] for text in texts] == [
        "output 'score'",
        "input 'img'",
        "input 'image'",
        "item_input_bytes",
        "decode_chunk",
    ]


# --- what the user's code raises ----------------------------------------------------------------------------------


def test_an_exception_of_encode_is_raised_with_the_rows_and_what_was_found_before():
    def fill(array, rows):
        raise KeyError("item 2 has no pixels")

    with pytest.raises(KeyError, match="item 2") as caught:
        validate_io(IMAGES, io_with(fill=fill, outputs=[OutputSpec("score", np.float32)]), 3)
    assert caught.value.__notes__ == [
        "raised by encode_chunk(range(0, 3), slot) in the dry run of validate_io: look at how it reads these items and "
        "at the shapes that it asks for",
        "validate_io found before: output 'score': the model has no output of that name; it has: scores, label, total",
    ]


def test_a_decode_that_reads_out_of_range_is_raised_with_the_shapes_it_got():
    def decode_chunk(rows, response):
        response.array("scores")[0, 10]

    with pytest.raises(IndexError) as caught:
        validate_io(IMAGES, io_with(decode_chunk=decode_chunk), 2)
    (note,) = caught.value.__notes__
    assert "raised by decode_chunk(range(0, 2), response) in the dry run" in note
    assert "scores float32[2,10], label int64[2], total float32[3]" in note


def test_an_encode_that_cannot_be_called_again_is_told_so():
    pixels = iter([7.0])

    def fill(array, rows):
        array[...] = next(pixels)

    with pytest.raises(StopIteration) as caught:
        validate_io(IMAGES, io_with(fill=fill))
    assert "this is its second call for these items" in caught.value.__notes__[0]


@pytest.mark.parametrize("method", ["item_input_bytes", "output_specs"])
def test_exceptions_of_the_other_methods_say_which(method):
    def fails():
        raise OSError("no disk")

    with pytest.raises(OSError, match="no disk") as caught:
        validate_io(IMAGES, io_with(**{method: fails}))
    assert f"raised by {method}() in the dry run" in caught.value.__notes__[0]


def test_missing_methods_and_no_items_to_try_are_refused():
    texts = errors_of([1, 2, 3])
    assert texts[0].startswith("list: has no method item_input_bytes, encode_chunk, decode_chunk")
    with pytest.raises(UsageError, match="items=0"):
        validate_io(IMAGES, Images(), 0)
