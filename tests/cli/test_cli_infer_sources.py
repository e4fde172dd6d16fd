"""``rsrv infer --input``: what each way of writing an input becomes, and what is said about those that do not work."""

import json
import os

import ml_dtypes
import numpy as np
import pytest

from rsrv.cli.infer.rows import RandomRows
from rsrv.cli.infer.sources import read_inputs
from rsrv.client import ModelMetadata, TensorMeta
from rsrv.core.errors import UsageError

TENSORS = {
    "x": TensorMeta("x", "FP32", (-1, 2)),
    "d": TensorMeta("d", "FP64", (-1,)),
    "n": TensorMeta("n", "INT8", (-1,)),
    "u": TensorMeta("u", "UINT64", (-1, 1)),
    "m": TensorMeta("m", "BOOL", (2,)),
    "h": TensorMeta("h", "BF16", (-1, 2)),
    "s": TensorMeta("s", "FP32", (-1, 2, -1)),
    "q": TensorMeta("q", "FP32", (2, 2)),
    "t": TensorMeta("t", "BYTES", (-1,)),
}


def metadata(*names):
    return ModelMetadata("net", "stub", tuple(TENSORS[name] for name in names), ())


def read(*specs, **options):
    names = dict.fromkeys(spec.partition("=")[0] for spec in specs)
    inputs = read_inputs(specs, metadata(*names), **options)
    return {name: np.asarray(rows[:]) for name, rows in inputs.rows.items()}


def refused(*specs, **options):
    with pytest.raises(UsageError) as caught:
        read(*specs, **options)
    return f"{caught.value.message} | {caught.value.hint}"


# --- JSON and generated -------------------------------------------------------------------------------------------


def test_json_takes_the_dtype_of_the_model():
    arrays = read("x=[[1, 2.5]]", "n=[1, -128]", "m=[true, false]", "h=[[0.5, 1]]")
    assert {name: array.dtype.name for name, array in arrays.items()} == {
        "x": "float32",
        "n": "int8",
        "m": "bool",
        "h": "bfloat16",
    }
    np.testing.assert_array_equal(arrays["x"], np.float32([[1, 2.5]]))
    np.testing.assert_array_equal(arrays["m"], [True, False])


@pytest.mark.parametrize("value", ["[128]", "[1.5]", "[1e30]"])
def test_json_that_does_not_fit_the_dtype_is_refused_rather_than_rounded(value):
    assert "at [0] is not a INT8" in refused(f"n={value}")


@pytest.mark.parametrize(("name", "datatype"), [("x", "FP32"), ("h", "BF16")])
def test_numbers_do_not_become_infinite(tmp_path, name, datatype):
    assert f"the value 1e+300 at [0, 1] is not a {datatype}" in refused(f"{name}=[[1, 1e300]]")
    (tmp_path / "x.csv").write_text("1,2\n-1e300,inf\n")
    assert f"the value -1e+300 at [1, 0] is not a {datatype}" in refused(f"{name}=@{tmp_path}/x.csv")
    np.save(tmp_path / "x.npy", np.array([[np.inf, 1], [np.nan, -1e300]]))
    text = refused(f"{name}=@{tmp_path}/x.npy")
    assert f"input '{name}': {tmp_path}/x.npy has the value -1e+300, which is too large for" in text
    np.save(tmp_path / "x.npy", np.array([[np.inf, -np.inf]]))
    assert np.isinf(read(f"{name}=@{tmp_path}/x.npy")[name]).all()


def test_a_file_of_one_number_is_converted_like_others(tmp_path):
    np.save(tmp_path / "k.npy", np.float64(1.5))
    one = ModelMetadata("net", "stub", (TensorMeta("k", "FP32", ()),), ())
    (rows,) = read_inputs([f"k=@{tmp_path}/k.npy"], one).rows.values()
    assert (rows.dtype, np.asarray(rows).tolist()) == (np.float32, 1.5)


def test_random_values_repeat_and_depend_on_the_dtype():
    first, second = read("x=random", "n=random", "m=random", rows=100), read("x=random", "n=random", rows=100)
    np.testing.assert_array_equal(first["x"], second["x"])
    assert first["x"].shape == (100, 2)
    assert first["x"].std() > 0.5
    assert first["n"].min() >= 0
    assert len(set(first["n"].tolist())) > 10
    assert first["m"].shape == (2,)


@pytest.mark.parametrize("item", [(), (3,), (70, 300)])  # many, some, and less than one row in a block
def test_a_row_of_random_values_is_the_same_in_whatever_range_it_is_read(item):
    rows = 40_000 if item == () else 9
    whole = RandomRows((rows, *item), np.dtype(np.float32))[:]
    assert whole.shape == (rows, *item)
    again = RandomRows((rows, *item), np.dtype(np.float32))
    for start, stop in [(0, 1), (rows // 2 - 1, rows // 2 + 3), (rows - 2, rows)]:
        np.testing.assert_array_equal(again[start:stop], whole[start:stop])
    assert again[3:3].shape == (0, *item)


def test_generated_inputs_have_as_many_rows_as_the_others_unless_told():
    assert read("x=[[1,2],[3,4],[5,6]]", "n=zeros")["n"].shape == (3,)
    assert read("x=[[1,2],[3,4],[5,6]]", "n=zeros", rows=2)["n"].shape == (2,)
    assert read("n=zeros", default_rows=lambda: 7)["n"].shape == (7,)


def test_an_open_axis_of_a_generated_input_is_one(capsys):
    assert read("s=zeros", rows=2)["s"].shape == (2, 2, 1)
    assert "open axes are taken as 1" in capsys.readouterr().err


# --- files --------------------------------------------------------------------------------------------------------


def test_an_npy_file_is_mapped_and_not_read(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((3, 2), np.float32))
    (rows,) = read_inputs([f"x=@{tmp_path}/x.npy"], metadata("x")).rows.values()
    assert isinstance(rows, np.memmap)


def test_bfloat16_files_are_read_as_numpy_writes_them(tmp_path):
    array = np.array([[1.5, -2]], ml_dtypes.bfloat16)
    np.save(tmp_path / "h.npy", array)
    np.savez(tmp_path / "h.npz", h=array)
    for name in ("h.npy", "h.npz"):
        np.testing.assert_array_equal(read(f"h=@{tmp_path / name}")["h"], array)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int16, np.uint8, bool, ">f4"])
def test_a_file_is_converted_between_floats_and_where_no_value_changes(tmp_path, dtype):
    np.save(tmp_path / "x.npy", np.array([[0, 1]], dtype))
    array = read(f"x=@{tmp_path}/x.npy")["x"]
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, np.float32([[0, 1]]))


@pytest.mark.parametrize(("name", "dtype"), [("n", np.int64), ("x", np.int64), ("n", np.float32), ("x", "U1")])
def test_a_file_whose_values_could_change_is_refused_and_the_way_out_is_said(tmp_path, name, dtype):
    np.save(tmp_path / "a.npy", np.zeros((1, 2) if name == "x" else 1, dtype))
    text = refused(f"{name}=@{tmp_path}/a.npy")
    assert f"a.npy holds {np.dtype(dtype)}; wanted {name} " in text
    assert ".astype('" in text


@pytest.mark.parametrize(
    ("shape", "hint"),
    [((2,), "the first axis counts the rows"), ((2, 5), "reversed"), ((3, 4), "None"), ((1, 2, 3), "None")],
)
def test_a_file_of_another_shape_is_refused(tmp_path, shape, hint):
    np.save(tmp_path / "x.npy", np.zeros(shape, np.float32))
    text = refused(f"x=@{tmp_path}/x.npy")
    assert f"has the shape {list(shape)}; wanted x FP32[-1,2]" in text
    assert hint in text


def test_an_archive_gives_the_member_that_is_named_or_has_the_name_of_the_input(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.float32([[1, 2]]), other=np.float32([[3, 4]]))
    np.savez(tmp_path / "one.npz", whatever=np.float32([[5, 6]]))
    assert read(f"x=@{tmp_path}/a.npz")["x"].tolist() == [[1, 2]]
    assert read(f"x=@{tmp_path}/a.npz:other")["x"].tolist() == [[3, 4]]
    assert read(f"x=@{tmp_path}/one.npz")["x"].tolist() == [[5, 6]]
    text = refused(f"d=@{tmp_path}/a.npz")
    assert "has none of that name; it has: x, other" in text
    assert f"choose one: d=@{tmp_path}/a.npz:x" in text
    assert "has no 'y'; it has: x, other" in refused(f"x=@{tmp_path}/a.npz:y")


def test_a_json_file_is_an_array_or_an_object_of_arrays(tmp_path):
    (tmp_path / "x.json").write_text("\ufeff[[1, 2], [3, 4]]", encoding="utf-8")
    (tmp_path / "o.json").write_text(json.dumps({"x": [[1, 2]], "z": [[7, 8]]}))
    assert read(f"x=@{tmp_path}/x.json")["x"].tolist() == [[1, 2], [3, 4]]
    assert read(f"x=@{tmp_path}/o.json")["x"].tolist() == [[1, 2]]
    assert read(f"x=@{tmp_path}/o.json:z")["x"].tolist() == [[7, 8]]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("1,2\n3,4\n", [[1, 2], [3, 4]]),
        ("a,b\n1,2\n", [[1, 2]]),
        ("\ufeffa,b\r\n1,2\r\n\r\n3,4", [[1, 2], [3, 4]]),
        ('\n"width","height"\n"1.5",-2e1\n', [[1.5, -20]]),
        (",b\n1,2\n", [[1, 2]]),
        ("nan,inf\n", [[np.nan, np.inf]]),
    ],
)
def test_a_csv_file_has_a_row_a_line_and_a_line_of_names_is_left_out(tmp_path, text, rows):
    (tmp_path / "x.csv").write_text(text, encoding="utf-8", newline="")
    np.testing.assert_array_equal(read(f"x=@{tmp_path}/x.csv")["x"], np.float32(rows))


def test_the_columns_of_a_csv_file_are_the_elements_of_an_item_in_c_order(tmp_path):
    (tmp_path / "x.csv").write_text("1,2,3,4\n5,6,7,8\n")
    assert read(f"s=@{tmp_path}/x.csv")["s"].tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    (tmp_path / "n.csv").write_text("1\n-2\n")
    assert read(f"n=@{tmp_path}/n.csv")["n"].tolist() == [1, -2]
    (tmp_path / "q.csv").write_text("1,2\n3,4\n")
    assert read(f"q=@{tmp_path}/q.csv")["q"].tolist() == [[1, 2], [3, 4]]
    (tmp_path / "t.tsv").write_text("1\t2\n")
    assert read(f"x=@{tmp_path}/t.tsv")["x"].tolist() == [[1, 2]]


def test_large_integers_in_a_csv_file_are_exact(tmp_path):
    (tmp_path / "u.csv").write_text(f"id\n{2**64 - 1}\n{2**53 + 1}\n")
    assert read(f"u=@{tmp_path}/u.csv")["u"].tolist() == [[2**64 - 1], [2**53 + 1]]


# --- bad files ----------------------------------------------------------------------------------------------------


BAD_FILES = {
    "x.npy": (b"hello", "x.npy is not a .npy file of numbers"),
    "cut.npy": (b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f4', 'fortran_order'", "cut.npy is not a .npy file"),
    "empty.npy": (b"", "empty.npy is not a .npy file"),
    "zip.npy": ("npz", "zip.npy is an .npz archive | rename it to .npz"),
    "x.npz": (b"PK\x03\x04 and nothing else", "x.npz is not an .npz file"),
    "array.npz": ("npy", "array.npz is not an .npz file, but a single array | rename it to .npy"),
    "pickle.npz": ("pickle", "pickle.npz: 'x' is not an array of numbers"),
    "x.json": (b"[1, 2", "x.json is not JSON"),
    "latin.json": (b'["\xff"]', "latin.json is not text in UTF-8"),
    "ragged.json": (b"[[1, 2], [3]]", "ragged.json"),
    "words.json": (b'[["a", "b"]]', "words.json must hold numbers or booleans"),
    "null.json": (b"[[1, null]]", "null.json must hold numbers or booleans"),
    "deep.json": (b"[" * 100_000, "deep.json"),
    "huge.json": (b"[[1, 1" + b"0" * 400 + b"]]", "huge.json"),
    "object.json": (b"{}", "object.json has none of that name; it has: nothing"),
    "x.csv": (b"1,2\n3,four\n", "x.csv is no table of numbers: could not convert string 'four'"),
    "ragged.csv": (b"1,2\n3\n", "ragged.csv is no table of numbers"),
    "gap.csv": (b"1,2\n3,\n", "gap.csv is no table of numbers"),
    "empty.csv": (b"\n\n", "empty.csv is empty"),
    "names.csv": (b"a,b\n", "names.csv holds names and no numbers"),
    "wide.csv": (b"1,2,3\n", "wide.csv has 3 columns, which make no item of x FP32[-1,2]"),
    "points.csv": (b"1;2\n3;4\n", "its columns must be separated by ','"),
    "bytes.csv": (b"1,\xff\n", "bytes.csv is not text in UTF-8"),
    "x.parquet": (b"PAR1", "no kind of file that can be read | .npy, .npz, .json, .csv"),
    "noend": (b"1", "no kind of file that can be read"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path, name):
    content, text = BAD_FILES[name]
    path = tmp_path / name
    with path.open("wb") as file:
        if content == "npz":
            np.savez(file, x=np.zeros((1, 2), np.float32))
        elif content == "npy":
            np.save(file, np.zeros((1, 2), np.float32))
        elif content == "pickle":
            np.savez(file, x=np.array([[{}, None]], object))
        else:
            file.write(content)
    found = refused(f"x=@{path}")
    assert text in found
    assert found.startswith("input 'x': ")
    assert str(tmp_path) in found


def test_an_integer_model_refuses_fractions_and_overflow_in_a_csv_file(tmp_path):
    (tmp_path / "n.csv").write_text("1\n1.5\n")
    assert "n.csv is no table of numbers: could not convert string '1.5'" in refused(f"n=@{tmp_path}/n.csv")
    (tmp_path / "n.csv").write_text("1\n300\n")
    assert "n.csv: the value 300 at [1, 0] is not a INT8" in refused(f"n=@{tmp_path}/n.csv")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("@/nowhere/x.npy", "there is no file '/nowhere/x.npy'"),
        ("@/nowhere/x.npz:key", "there is no file '/nowhere/x.npz'"),
        ("@/nowhere/*.png", "no file matches '/nowhere/*.png'"),
        ("[[1, 2, 3]]", "has the shape [1, 3]; wanted x FP32[-1,2]"),
        ("[" * 9999, "neither @file, JSON, zeros nor random"),
    ],
)
def test_what_is_not_there_is_said(value, text):
    assert text in refused(f"x={value}")


def test_a_model_of_strings_says_that_they_cannot_be_sent():
    assert "input t BYTES[-1] cannot be sent: datatype 'BYTES' is not supported" in refused("t=[1]")


def test_a_key_for_a_file_of_one_array_is_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((1, 2), np.float32))
    (tmp_path / "x.csv").write_text("1,2\n")
    (tmp_path / "x.json").write_text("[[1,2]]")
    for name in ("x.npy", "x.csv", "x.json"):
        assert ":key cannot choose" in refused(f"x=@{tmp_path}/{name}:key")


# --- rows ---------------------------------------------------------------------------------------------------------


def count(*specs):
    names = dict.fromkeys(spec.partition("=")[0] for spec in specs)
    return read_inputs(specs, metadata(*names)).count()


def test_rows_that_differ_between_inputs_cannot_be_batched():
    assert count("x=[[1,2],[3,4]]", "n=[1,2]", "m=zeros") == 2
    with pytest.raises(UsageError, match="different numbers of rows: x 1, n 3"):
        count("x=[[1,2]]", "n=[1,2,3]")
    with pytest.raises(UsageError, match="no input has rows along axis 0"):
        count("m=zeros")


def test_no_rows_at_all_are_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((0, 2), np.float32))
    with pytest.raises(UsageError, match="nothing to send: x has 0 rows"):
        count(f"x=@{tmp_path}/x.npy")


def test_where_the_server_tells_its_batch_axes_an_open_axis_is_not_taken_for_one():
    inputs = (TensorMeta("x", "FP32", (-1, 2), 0), TensorMeta("words", "INT32", (-1,), None))
    model = ModelMetadata("net", "stub", inputs, ())
    read = read_inputs(["x=[[1,2],[3,4]]", "words=[1,2,3]"], model)
    assert read.batched == {"x"}
    assert read.count() == 2


def test_a_server_that_tells_no_inputs_gets_what_is_given():
    model = ModelMetadata("net", "stub", (), ())
    given = read_inputs(["a=[[1.5]]", "b=[3]", "c=2"], model)
    assert {name: rows.dtype.name for name, rows in given.rows.items()} == {"a": "float64", "b": "int64", "c": "int64"}
    assert given.count() == 1
    with pytest.raises(UsageError, match="does not tell its shape"):
        read_inputs(["a=zeros"], model)
    with pytest.raises(UsageError, match="no input is given"):
        read_inputs([], model)


def test_a_column_that_is_not_separated_as_it_should_be_is_shown(tmp_path):
    (tmp_path / "x.csv").write_text("1;2\n")
    assert "no number: '1;2' | columns must be separated by ','" in refused(f"x=@{tmp_path / 'x.csv'}")


def test_numbers_of_thousands_of_digits_are_refused(tmp_path):
    (tmp_path / "x.json").write_text(f"[[{'9' * 5000}, 1]]")
    assert "x.json cannot be read: Exceeds the limit" in refused(f"x=@{tmp_path / 'x.json'}")
    assert "is neither @file, JSON, zeros nor random" in refused(f"x=[[{'9' * 5000}, 1]]")


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.npy")
    assert "x.npy is not a regular file" in refused(f"x=@{tmp_path / 'x.npy'}")


def test_the_home_directory_may_be_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    np.save(tmp_path / "x.npy", np.float32([[1, 2]]))
    np.testing.assert_array_equal(read("x=@~/x.npy")["x"], [[1, 2]])


def test_more_rows_than_memory_can_ever_have_are_refused():
    assert "rows are more than any machine can address" in refused("x=zeros", rows=10**19)
