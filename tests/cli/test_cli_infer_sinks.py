"""Where the outputs of ``rsrv infer`` go: rows in any order, files that appear whole or not at all, full disks."""

import errno
import io
import json
import os

import ml_dtypes
import numpy as np
import pytest

from rsrv.cli.infer import sinks
from rsrv.cli.infer.report import Tally, Timing
from rsrv.cli.infer.stores import FileStore
from rsrv.core.errors import InvalidResponse, UsageError

Y = np.arange(14, dtype=np.float32).reshape(7, 2)
CHUNKS = [range(3, 6), range(6, 7), range(3)]  # 7 items, out of order


def fill(sink, *, y=Y):
    for rows in CHUNKS:
        outputs = {"y": y[rows.start : rows.stop], "loss": np.float32(rows.start), "boxes": np.full((rows.start, 4), 1)}
        sink.write(rows, outputs)
    return sink


def made(path=None, directory=None, **options):
    return sinks.make(path, directory, overwrite=options.get("overwrite", False)).sink(7, frozenset({"y"}))


def check(arrays, y=Y):
    np.testing.assert_array_equal(arrays["y"], y)
    assert arrays["y"].dtype == y.dtype
    assert arrays["loss"].tolist() == [0, 3, 6]  # stacked in the order of the items
    assert arrays["boxes"].shape == (9, 4)  # joined


# --- memory and files ---------------------------------------------------------------------------------------------


def test_without_a_file_the_outputs_are_joined_in_memory():
    with fill(made()) as sink:
        assert sink.finish() == {}
        check(sink.arrays())
        assert list(sink.arrays()) == ["y", "loss", "boxes"]


def test_each_output_has_a_file_in_a_directory_and_replaces_an_older_one(tmp_path):
    (tmp_path / "y.npy").write_text("old")
    with fill(made(directory=tmp_path)) as sink:
        assert (tmp_path / "y.npy").read_text() == "old"
        files = sink.finish()
        check(sink.arrays())
    assert files == {name: tmp_path / f"{name}.npy" for name in ("y", "loss", "boxes")}
    check({name: np.load(path) for name, path in files.items()})
    assert len(os.listdir(tmp_path)) == 3


def test_an_npz_file_is_what_numpy_makes(tmp_path):
    with fill(made(tmp_path / "a.npz")) as sink:
        assert not (tmp_path / "a.npz").exists()
        assert sink.finish() == dict.fromkeys(("y", "loss", "boxes"), tmp_path / "a.npz")
        check(sink.arrays())
    with np.load(tmp_path / "a.npz") as archive:
        check(dict(archive))
    assert os.listdir(tmp_path) == ["a.npz"]


def test_an_npy_file_takes_the_only_output(tmp_path):
    with made(tmp_path / "y.npy") as sink:
        for rows in CHUNKS:
            sink.write(rows, {"y": Y[rows.start : rows.stop]})
        sink.finish()
        np.testing.assert_array_equal(sink.arrays()["y"], Y)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), Y)
    with made(tmp_path / "z.npy") as sink, pytest.raises(UsageError, match="holds one output, and there are: y, loss"):
        fill(sink)
    assert os.listdir(tmp_path) == ["y.npy"]


def test_json_holds_the_values_with_their_datatypes(tmp_path):
    y = Y.copy()
    y[0, 0] = np.nan
    with fill(made(tmp_path / "a.json"), y=y) as sink:
        sink.finish()
    value = json.loads((tmp_path / "a.json").read_text())
    assert value["y"]["datatype"] == "FP32"
    assert value["y"]["shape"] == [7, 2]
    assert value["y"]["data"] == [[None, 1.0], *Y[1:].tolist()]
    assert value["loss"] == {"datatype": "FP32", "shape": [3], "data": [0, 3, 6]}


def test_json_lines_are_in_order_and_repeat_what_has_no_rows(tmp_path):
    y = Y.copy()
    y[1, 0] = np.inf
    with made(tmp_path / "a.jsonl") as sink:
        fill(sink, y=y)
        sink.finish()
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [line["y"] for line in lines] == [[0, 1], [None, 3], *Y[2:].tolist()]
    assert [line["loss"] for line in lines] == [0, 0, 0, 3, 3, 3, 6]
    assert lines[6]["boxes"] == [[1] * 4] * 6
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_json_lines_may_differ_in_shape(tmp_path):
    with made(tmp_path / "a.jsonl") as sink:
        sink.write(range(2), {"y": np.ones((2, 1))})
        sink.write(range(2, 7), {"y": np.ones((5, 2))})
        sink.finish()
    assert [len(json.loads(line)["y"]) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == [1] * 2 + [2] * 5


@pytest.mark.parametrize("array", [np.zeros((7, 0), np.int64), np.ones((7, 3), ml_dtypes.bfloat16), np.ones(7, bool)])
def test_empty_items_and_every_dtype_survive_a_file(tmp_path, array):
    with made(tmp_path / "y.npy") as sink:
        sink.write(range(4), {"y": array[:4]})
        sink.write(range(4, 7), {"y": array[4:]})
        sink.finish()
        np.testing.assert_array_equal(sink.arrays()["y"], array)
        assert sink.arrays()["y"].dtype == array.dtype
    assert np.load(tmp_path / "y.npy").shape == array.shape


# --- what goes wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.npz", "a.json", "a.jsonl", "a.npy", None])
def test_what_was_not_finished_leaves_nothing(tmp_path, name):
    with made(None if name is None else tmp_path / name, tmp_path if name is None else None) as sink:
        sink.write(range(3), {"y": Y[:3]})
    assert os.listdir(tmp_path) == []


def test_answers_that_do_not_fit_together_are_named_with_their_items():
    with made() as sink:
        sink.write(range(3), {"y": Y[:3]})
        with pytest.raises(InvalidResponse, match=r"output 'y' of items 3 to 5 has the shape \[2, 2\]; wanted 3 rows"):
            sink.write(range(3, 6), {"y": Y[:2]})
        with pytest.raises(InvalidResponse, match=r"items 3 to 5 is float32\[3\] an item, that of others float32\[2\]"):
            sink.write(range(3, 6), {"y": np.zeros((3, 3), np.float32)})
        with pytest.raises(InvalidResponse, match=r"items 3 to 5 is float64\[2\] an item"):
            sink.write(range(3, 6), {"y": np.zeros((3, 2))})


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left on device"), made(tmp_path / "a.npz") as sink:
        fill(sink)
    assert os.listdir(tmp_path) == []


def test_a_write_that_the_system_cuts_short_goes_on(tmp_path, monkeypatch):
    honest = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: honest(file, data[:5], at))
    store = FileStore(tmp_path / "y.npy", (7, 2), np.dtype(np.float32))
    store.write(2, Y[2:])
    store.write(0, Y[:2])
    store.close()
    np.testing.assert_array_equal(store.array(), Y)


def test_places_that_cannot_be_are_refused_before_anything_is_sent(tmp_path):
    (tmp_path / "there.npz").write_text("precious")
    for path, text in [
        (tmp_path / "there.npz", "the file exists"),
        (tmp_path / "a.parquet", "wanted a file that ends with .npy, .npz, .json, .jsonl"),
        (tmp_path / "no" / "a.npz", "there is no directory"),
    ]:
        with pytest.raises(UsageError, match=text):
            made(path)
    with pytest.raises(UsageError, match="exclude each other"):
        made(tmp_path / "a.npz", tmp_path)
    with fill(made(tmp_path / "there.npz", overwrite=True)) as sink:
        sink.finish()
    with np.load(tmp_path / "there.npz") as archive:
        check(dict(archive))


def test_outputs_with_the_same_file_name_are_refused(tmp_path):
    places = sinks.make(None, tmp_path, overwrite=False)
    with pytest.raises(UsageError, match="same file name"):
        places.require_places(["a/b", "a_b"])
    with places.sink(1, frozenset()) as sink, pytest.raises(UsageError, match="same file name"):
        sink.write(range(1), {"a/b": np.zeros(1), "a_b": np.zeros(1)})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "text"), [("y", "is a directory"), ("n" * 300, "File name too long"), ("a\0b", "null")]
)
def test_an_output_whose_file_has_no_place_is_refused_by_name_before_or_at_the_first_answer(tmp_path, name, text):
    (tmp_path / "y.npy").mkdir()
    places = sinks.make(None, tmp_path, overwrite=False)
    places.require_places(["z"])
    with pytest.raises(UsageError, match=text) as caught:
        places.require_places(["z", name])
    assert f"output {name!r}" in caught.value.message
    with places.sink(7, frozenset({name})) as sink, pytest.raises(UsageError, match=text):
        sink.write(range(7), {"z": Y, name: Y})
    assert os.listdir(tmp_path) == ["y.npy"]


def test_a_file_of_somebody_else_in_a_directory_of_many_users_is_refused(tmp_path, monkeypatch):
    (tmp_path / "y.npy").write_text("theirs")
    tmp_path.chmod(0o1777)
    for user, refused in [(os.geteuid(), False), (0, False), (12345, True)]:
        monkeypatch.setattr("os.geteuid", lambda user=user: user)
        for options in ({"directory": tmp_path}, {"path": tmp_path / "y.npy", "overwrite": True}):
            places = {"path": None, "directory": None, "overwrite": False, **options}
            if refused:
                with pytest.raises(UsageError, match="another user's"):
                    sinks.make(**places).require_places(["y"])
            else:
                sinks.make(**places).require_places(["y"])


def test_an_npy_file_of_several_outputs_is_refused_before_anything_is_sent(tmp_path):
    with pytest.raises(UsageError, match="holds one output, and there are: y, loss"):
        sinks.make(tmp_path / "y.npy", None, overwrite=False).require_places(["y", "loss"])


# --- in brief -----------------------------------------------------------------------------------------------------


def row(array):
    tally = Tally()
    tally.add(range(1), {"y": array})
    (line,) = tally.table()
    return line


def test_the_summary_of_an_output():
    assert row(np.float32([[1, 2], [3, 4.5]])) == ("y", "float32", "2×2", 1, 2.625, 4.5, "1, 2, 3, 4.5")
    assert row(np.array(True)) == ("y", "bool", "scalar", 1, 1, 1, "1")
    assert row(np.zeros((0, 3), np.int64)) == ("y", "int64", "0×3", None, None, None, "")
    assert np.isnan(row(np.float32([np.nan, 1]))[3:6]).all()
    assert row(np.ones(3 << 20, np.uint8))[3:6] == (1, 1, 1)


def test_a_summary_of_many_answers_is_that_of_all_of_them_joined():
    tally = Tally()
    for rows in CHUNKS:
        tally.add(rows, {"y": Y[rows.start : rows.stop], "loss": np.float32(rows.start)})
    assert tally.table() == [
        ("y", "float32", "7×2", 0, 6.5, 13, "0, 1, 2, 3, …"),
        ("loss", "float32", "3", 0, 3, 6, "0"),
    ]
    assert tally.describe()["y"] == {"datatype": "FP32", "shape": [7, 2]}


def test_rates_and_percentiles():
    timing = Timing(elapsed=2.0)
    for milliseconds in range(1, 101):
        timing.add(milliseconds / 1000, 10, 1 << 20)
    facts = timing.facts()
    assert (facts["requests"], facts["rows"], facts["rows_per_second"]) == (100, 1000, 500)
    assert (facts["min_ms"], facts["median_ms"], facts["p99_ms"], facts["max_ms"]) == (1, 50.5, 100, 100)
    assert facts["bytes_per_second"] == 100 * (1 << 20) / 2


def test_lines_that_do_not_fit_on_the_disk_leave_no_file(tmp_path, monkeypatch):
    class Full(io.StringIO):
        def close(self):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with made(tmp_path / "y.jsonl") as sink:
        sink.write(range(7), {"y": Y})
        sink._file.close()
        sink._file = Full()
        with pytest.raises(OSError, match="No space left") as caught:
            sink.finish()
    assert caught.value.filename.endswith(".part")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("options", [{"path": "y.npz"}, {"directory": "out"}])
def test_a_directory_that_takes_no_files_is_refused_before_anything_is_sent(tmp_path, monkeypatch, options):
    def refused(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("pathlib.Path.touch", refused)
    with pytest.raises(UsageError, match=r"no file can be made in .*Read-only file system"):
        made(**{name: tmp_path / value for name, value in options.items()})
