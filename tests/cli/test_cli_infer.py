"""``rsrv infer`` and ``rsrv models`` against a stub server: what they send, print and return."""

import json

import grpc
import ml_dtypes
import numpy as np
import pytest

from rsrv.cli import request
from rsrv.cli.main import main
from rsrv.client import ModelMetadata, TensorMeta
from rsrv.core.errors import UsageError

X = np.arange(20, dtype=np.float32).reshape(5, 4)
META = ModelMetadata(
    "net",
    "stub",
    (
        TensorMeta("x", "FP32", (-1, 2)),
        TensorMeta("n", "INT8", (-1,)),
        TensorMeta("m", "BOOL", (2,)),
        TensorMeta("h", "BF16", (-1, 2)),
    ),
    (),
)


def run(*arguments):
    return main([str(argument) for argument in arguments])


@pytest.fixture
def x_file(tmp_path):
    np.save(tmp_path / "x.npy", X)
    return tmp_path / "x.npy"


# --- infer --------------------------------------------------------------------------------------------------------


def test_an_array_from_a_file_is_sent_and_the_outputs_are_shown(stub, x_file, capsys):
    assert run("infer", "twice", "--url", stub.url, "--input", f"x=@{x_file}") == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].split() == ["output", "dtype", "shape", "min", "mean", "max", "first", "values"]
    assert out.splitlines()[1].split(maxsplit=6) == ["y", "float32", "5×4", "0", "19", "38", "0, 2, 4, 6, …"]
    assert "shared memory" in err
    assert stub.requests[0].inputs[0].shape == [5, 4]


def test_json_output_holds_the_values(stub, x_file, capsys):
    assert run("infer", "twice", "--url", stub.url, "--input", f"x=@{x_file}", "--no-shm", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["model"] == "twice"
    assert answer["transport"] == "inline"
    assert answer["outputs"]["y"] == {"datatype": "FP32", "shape": [5, 4], "data": (2 * X).tolist()}
    assert answer["outputs"]["total"]["data"] == [190, 5, 7]
    assert answer["requests"] == 1
    assert 0 < answer["min_ms"] <= answer["median_ms"] <= answer["max_ms"]


def test_batch_sends_the_rows_in_pieces_and_joins_the_answers_in_files(stub, x_file, tmp_path, capsys):
    out_dir = tmp_path / "deep" / "out"
    arguments = ["--input", f"x=@{x_file}", "--batch", 2, "--output-dir", out_dir, "--shm"]
    assert run("infer", "twice", "--url", stub.url, *arguments) == 0
    assert [list(request.inputs[0].shape) for request in stub.requests] == [[2, 4], [2, 4], [1, 4]]
    np.testing.assert_array_equal(np.load(out_dir / "y.npy"), 2 * X)
    assert np.load(out_dir / "total.npy").shape == (9,)
    assert f"wrote {out_dir / 'y.npy'}" in capsys.readouterr().err


def test_json_with_files_names_them_instead_of_holding_the_values(stub, x_file, tmp_path, capsys):
    assert run("infer", "twice", "--url", stub.url, "--input", f"x=@{x_file}", "--output-dir", tmp_path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["outputs"]["y"] == {
        "datatype": "FP32",
        "shape": [5, 4],
        "file": str(tmp_path / "y.npy"),
    }


def test_repeat_sends_everything_again_and_counts_every_request(stub, x_file, capsys):
    arguments = ["--input", f"x=@{x_file}", "--batch", 3, "--repeat", 4, "--json"]
    assert run("infer", "twice", "--url", stub.url, *arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["requests"] == len(stub.requests) == 8
    assert answer["outputs"]["y"]["shape"] == [5, 4]


@pytest.mark.parametrize(("value", "rows"), [("zeros", 1), ("random", 1), ("[[1,2,3,4],[5,6,7,8]]", 2)])
def test_values_can_be_generated_or_typed(stub, capsys, value, rows):
    assert run("infer", "twice", "--url", stub.url, "--input", f"x={value}", "--json") == 0
    assert json.loads(capsys.readouterr().out)["outputs"]["y"]["shape"] == [rows, 4]
    sent = stub.requests[0].inputs[0]
    assert (sent.datatype, list(sent.shape)) == ("FP32", [rows, 4])


def test_generated_inputs_have_as_many_rows_as_a_batch(stub, capsys):
    assert run("infer", "twice", "--url", stub.url, "--input", "x=random", "--batch", 6) == 0
    assert [list(request.inputs[0].shape) for request in stub.requests] == [[6, 4]]


def test_the_deadline_is_passed_on(stub, capsys):
    assert run("infer", "twice", "--url", stub.url, "--input", "x=zeros", "--deadline", 77) == 0
    assert 70e9 < stub.requests[0].parameters["reactant_timeout_ns"].int64_param <= 77e9


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "no input for x FP32[-1,4]"),
        (["--input", "y=zeros"], "has no input 'y'; it has: x FP32[-1,4]"),
        (["--input", "x"], "wanted NAME=@file.npy"),
        (["--input", "x=zeros", "--input", "x=zeros"], "given twice"),
        (["--input", "x=zero"], "neither @file.npy, JSON, zeros nor random"),
        (["--input", "x=[[1],[2,3]]"], "input 'x'"),
        (["--input", 'x=["a"]'], "numbers or booleans"),
        (["--input", "x=@/nowhere/x.npy"], "there is no file '/nowhere/x.npy'"),
        (["--url", "ftp://x:1"], "invalid gRPC URL"),
        (["--batch", "0"], "--batch"),
    ],
)
def test_wrong_arguments_are_usage_errors(stub, capsys, arguments, text):
    url = [] if "--url" in arguments else ["--url", stub.url]
    assert run("infer", "twice", *url, *arguments) == 2
    assert text in capsys.readouterr().err
    assert stub.requests == []


def test_a_file_that_is_no_array_is_a_usage_error(stub, tmp_path, capsys):
    (tmp_path / "x.npy").write_text("hello")
    assert run("infer", "twice", "--url", stub.url, "--input", f"x=@{tmp_path}/x.npy") == 2
    assert "x.npy is not a .npy file of numbers" in capsys.readouterr().err


def test_a_failed_call_exits_with_1_and_an_unreachable_server_with_3(stub, capsys):
    stub.refuse["ModelInfer"] = (grpc.StatusCode.INVALID_ARGUMENT, "input 'x': 4 columns, wanted 5", "invalid")
    assert run("infer", "twice", "--url", stub.url, "--input", "x=zeros") == 1
    assert capsys.readouterr().err == "error: input 'x': 4 columns, wanted 5\n"
    assert run("infer", "nobody", "--url", stub.url, "--input", "x=zeros") == 1
    stub.stop()
    assert run("infer", "twice", "--url", stub.url, "--input", "x=zeros") == 3
    assert "no answer from" in capsys.readouterr().err


def test_insisting_on_shared_memory_with_a_foreign_server_says_what_to_leave_out(stub, capsys):
    stub.same_namespace = False
    assert run("infer", "twice", "--url", stub.url, "--input", "x=zeros", "--shm") == 2
    err = capsys.readouterr().err
    assert "another IPC namespace" in err
    assert "leave out --shm" in err


# --- how inputs are read ------------------------------------------------------------------------------------------


def read(*specs, rows=1):
    given = {spec.partition("=")[0] for spec in specs}
    needed = ModelMetadata("net", "stub", tuple(t for t in META.inputs if t.name in given), ())
    return request.read_inputs(specs, needed, rows=rows)


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
    with pytest.raises(UsageError, match=r"'n'.*is not a INT8"):
        read(f"n={value}")


def test_bfloat16_files_are_read_back_as_numpy_writes_them(tmp_path):
    array = np.array([[1.5, -2]], ml_dtypes.bfloat16)
    files = request.write_outputs({"h": array}, tmp_path)
    np.testing.assert_array_equal(read(f"h=@{files['h']}")["h"], array)


def test_random_values_repeat_and_depend_on_the_dtype():
    first, second = read("x=random", "n=random", "m=random", rows=100), read("x=random", "n=random", rows=100)
    np.testing.assert_array_equal(first["x"], second["x"])
    assert first["x"].shape == (100, 2)
    assert first["x"].std() > 0.5
    assert first["n"].min() >= 0
    assert len(set(first["n"].tolist())) > 10
    assert first["m"].shape == (2,)


def test_rows_that_differ_between_inputs_cannot_be_batched():
    with pytest.raises(UsageError, match="different numbers of rows"):
        request.send(None, {"x": X[:, :2], "n": np.zeros(3, np.int8)}, META, batch=2, repeat=1)
    with pytest.raises(UsageError, match="no input of model 'net' has rows"):
        request.send(None, {"m": np.zeros(2, bool)}, META, batch=2, repeat=1)


def test_inputs_without_rows_go_along_with_every_piece():
    sent = []

    class Handle:
        def infer(self, piece):
            sent.append({name: array.shape for name, array in piece.items()})
            return {"y": piece["x"], "loss": np.float32(len(piece["x"]))}

    outputs = request.send(Handle(), {"x": X[:, :2], "m": np.zeros(2, bool)}, META, batch=3, repeat=1).outputs
    assert sent == [{"x": (3, 2), "m": (2,)}, {"x": (2, 2), "m": (2,)}]
    np.testing.assert_array_equal(outputs["y"], X[:, :2])
    np.testing.assert_array_equal(outputs["loss"], [3, 2])


def test_the_summary_of_an_output():
    assert request.summary("y", np.float32([[1, 2], [3, 4.5]])) == (
        "y",
        "float32",
        "2×2",
        1,
        2.625,
        4.5,
        "1, 2, 3, 4.5",
    )
    assert request.summary("s", np.array(True)) == ("s", "bool", "scalar", 1, 1, 1, "1")
    assert request.summary("e", np.zeros((0, 3), np.int64)) == ("e", "int64", "0×3", None, None, None, "")
    assert np.isnan(request.summary("n", np.float32([np.nan, 1]))[4])


# --- models -------------------------------------------------------------------------------------------------------


def test_models_lists_states_tensors_and_reasons(stub, capsys):
    assert run("models", "--url", stub.url) == 0
    header, ready, broken = capsys.readouterr().out.splitlines()
    assert header.split() == ["name", "state", "inputs", "outputs", "reason"]
    assert "READY" in ready
    assert "x FP32[-1,4]" in ready
    assert "y FP32[-1,4], total FP32[3]" in ready
    assert broken.split(maxsplit=4) == ["broken", "UNAVAILABLE", "-", "-", "weights.safetensors is missing"]


def test_models_as_json(stub, capsys):
    assert run("--json", "models", "--url", stub.url, "--ready") == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "name": "twice",
            "state": "READY",
            "reason": "",
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
            "outputs": [
                {"name": "y", "datatype": "FP32", "shape": [-1, 4]},
                {"name": "total", "datatype": "FP32", "shape": [3]},
            ],
        }
    ]


def test_models_quiet_prints_the_names(stub, capsys):
    assert run("--quiet", "models", "--url", stub.url) == 0
    assert capsys.readouterr() == ("twice\nbroken\n", "")


def test_models_of_an_unreachable_server(stub, capsys):
    stub.stop()
    assert run("models", "--url", stub.url) == 3
    assert "error: no answer from" in capsys.readouterr().err
