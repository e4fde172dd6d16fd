"""``rsrv infer`` and ``rsrv models`` against a stub server: what they send, print and return."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import grpc
import numpy as np
import pytest
from support.client_stub import StubServer, own_shared_memory

from rsrv.cli.infer import sending, sources
from rsrv.cli.main import main
from rsrv.client.steps import Pause
from rsrv.core.shm.owned import OwnedRegion

X = np.arange(20, dtype=np.float32).reshape(5, 4)


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
    assert sorted(list(request.inputs[0].shape) for request in stub.requests) == [[1, 4], [2, 4], [2, 4]]
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
        (["--input", "x"], "wanted NAME=@FILE"),
        (["--input", "x=zeros", "--input", "x=zeros"], "given twice"),
        (["--input", "x=zero"], "neither @file, JSON, zeros nor random"),
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


# --- datasets -----------------------------------------------------------------------------------------------------


@pytest.fixture
def many(tmp_path):
    """A file of 100 rows, and what the model answers to it."""
    x = np.arange(400, dtype=np.float32).reshape(100, 4)
    np.save(tmp_path / "many.npy", x)
    return tmp_path / "many.npy", 2 * x


def dataset(stub, path, *arguments):
    return run("infer", "twice", "--url", stub.url, "--input", f"x=@{path}", *arguments)


@pytest.mark.parametrize("shm", ["--shm", "--no-shm"])
@pytest.mark.parametrize("told", [False, True])
def test_a_dataset_comes_back_whole_and_in_order(stub, many, tmp_path, capsys, shm, told):
    if told:
        stub.batch_axes = {"x": 0, "y": 0}
    path, y = many
    assert dataset(stub, path, "--batch", 7, shm, "--only", "y", "--output", tmp_path / "y.npy") == 0
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), y)
    assert len(stub.requests) == 15
    assert {len(request.outputs) for request in stub.requests} == ({1} if told or shm == "--shm" else {0})
    out, err = capsys.readouterr()
    assert out.splitlines()[1].split(maxsplit=6) == ["y", "float32", "100×4", "0", "399", "798", "0, 2, 4, 6, …"]
    assert "100 rows, at most 7 a request, in " in err
    assert f"15 × {'shared memory' if shm == '--shm' else 'inline'}; milliseconds each: median" in err
    assert err.splitlines()[0] == f"wrote {tmp_path / 'y.npy'}"
    assert own_shared_memory() == set()


def test_only_the_rows_of_a_request_are_read_at_a_time(stub, many, capsys, monkeypatch):
    path, _ = many
    asked = []

    class Watched:
        def __init__(self, rows):
            self._rows, self.shape, self.dtype = rows, rows.shape, rows.dtype

        def __getitem__(self, rows):
            asked.append((rows.start, rows.stop))
            return self._rows[rows]

    honest = sources.files.READERS[".npy"]
    monkeypatch.setitem(sources.files.READERS, ".npy", lambda *arguments: Watched(honest(*arguments)))
    assert dataset(stub, path, "--batch", 30) == 0
    assert sorted(asked) == [(0, 30), (30, 60), (60, 90), (90, 100)]


def test_json_lines_are_a_line_a_row(stub, tmp_path, capsys):
    (tmp_path / "x.csv").write_text("a,b,c,d\n1,2,3,4\n5,6,7,8\n9,10,11,12\n")
    assert dataset(stub, tmp_path / "x.csv", "--batch", 2, "--output", tmp_path / "y.jsonl") == 0
    lines = [json.loads(line) for line in (tmp_path / "y.jsonl").read_text().splitlines()]
    assert lines == [
        {"y": [2, 4, 6, 8], "total": [36, 2, 7]},
        {"y": [10, 12, 14, 16], "total": [36, 2, 7]},
        {"y": [18, 20, 22, 24], "total": [42, 1, 7]},
    ]


def test_auto_asks_the_server_how_many_rows_it_takes(stub, many, capsys):
    path, _ = many
    assert dataset(stub, path, "--batch", "auto", "--json") == 0
    assert {request.inputs[0].shape[0] for request in stub.requests} == {8, 4}
    answer = json.loads(capsys.readouterr().out)
    assert (answer["rows"], answer["requests"]) == (100, 13)
    assert answer["rows_per_second"] > 0
    assert answer["bytes_per_second"] > 0
    assert answer["outputs"]["total"]["shape"] == [39]


def test_a_server_without_a_configuration_of_models_is_asked_a_row_at_a_time(stub, tmp_path, capsys):
    stub.refuse["ModelConfig"] = (grpc.StatusCode.UNIMPLEMENTED, "no such method", "")
    assert run("infer", "twice", "--url", stub.url, "--input", "x=random", "--rows", 3, "--batch", "auto") == 0
    assert len(stub.requests) == 3
    assert "3 rows, at most 1 a request" in capsys.readouterr().err


def test_the_batch_is_a_number_or_auto(stub, capsys):
    for batch in ("0", "-1", "many", "1.5"):
        assert run("infer", "twice", "--url", stub.url, "--input", "x=zeros", "--batch", batch) == 2
        assert f"--batch '{batch}': wanted" in capsys.readouterr().err


def test_a_repeated_dataset_is_written_once(stub, many, tmp_path, capsys):
    path, y = many
    arguments = ["--batch", 25, "--repeat", 3, "--only", "y", "--output-dir", tmp_path / "out", "--json"]
    assert dataset(stub, path, *arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["requests"], answer["rows"]) == (12, 300)
    assert answer["outputs"] == {"y": {"datatype": "FP32", "shape": [100, 4], "file": str(tmp_path / "out" / "y.npy")}}
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "y.npy"), y)


def test_a_request_that_fails_is_named_by_its_rows_and_leaves_no_file(stub, many, tmp_path, capsys):
    path, _ = many

    def refuse_the_fourth(request, answer):
        if request.inputs[0].shape[0] == 10 and np.frombuffer(request.raw_input_contents[0], np.float32)[0] == 120:
            answer.outputs[0].shape[0] = 9
            answer.raw_output_contents[0] = answer.raw_output_contents[0][:144]
        return answer.SerializeToString()

    stub.rewrite = refuse_the_fourth
    assert dataset(stub, path, "--batch", 10, "--no-shm", "--output", tmp_path / "y.npz") == 1
    err = capsys.readouterr().err
    assert "error: output 'y' of items 30 to 39 has the shape [9, 4]; wanted 10 rows" in err
    assert "note: " in err
    assert not [name for name in os.listdir(tmp_path) if "y.npz" in name or name.endswith(".part")]


def test_json_errors_hold_the_notes(stub, many, capsys):
    stub.refuse["ModelInfer"] = (grpc.StatusCode.INVALID_ARGUMENT, "no", "invalid")
    assert run("--json", "infer", "twice", "--url", stub.url, "--input", f"x=@{many[0]}", "--batch", 100) == 1
    error = json.loads(capsys.readouterr().err)["error"]
    assert error["message"] == "no"
    assert any("0" in note and "99" in note for note in error["notes"])


def test_an_interrupted_dataset_leaves_nothing(stub, many, tmp_path, capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sending.Dataset, "decode_chunk", interrupt)
    before = set(os.listdir(tmp_path))
    assert dataset(stub, many[0], "--batch", 10, "--output", tmp_path / "y.npz") == 130
    assert set(os.listdir(tmp_path)) == before
    assert own_shared_memory() == set()


def test_a_terminal_shows_a_bar(stub, many, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert dataset(stub, many[0], "--batch", 10) == 0
    assert "100/100" in capsys.readouterr().err


def test_pictures_are_a_dataset(stub, tmp_path, capsys):
    from PIL import Image

    stub.outputs = [("y", "FP32", [-1, 4])]
    for number in range(5):
        Image.fromarray(np.full((2, 2), number, np.uint8)).save(tmp_path / f"{number}.png")
    metadata = stub.ModelMetadata

    def of_pictures(request, context):
        answer = metadata(request, context)
        answer.inputs[0].shape[:] = [-1, 2, 2]
        return answer

    stub.ModelMetadata = of_pictures
    arguments = ["--batch", 2, "--image-scale", 1, "--image-mean", "1", "--only", "y", "--json"]
    assert dataset(stub, tmp_path, *arguments) == 0
    y = np.array(json.loads(capsys.readouterr().out)["outputs"]["y"]["data"])
    np.testing.assert_array_equal(y[:, 0, 0], [-2, 0, 2, 4, 6])
    (tmp_path / "3.png").write_bytes(b"damaged")
    assert dataset(stub, tmp_path, *arguments) == 2
    assert f"{tmp_path / '3.png'} is not a picture" in capsys.readouterr().err


# --- how the server is reached ------------------------------------------------------------------------------------


def test_it_is_said_why_there_is_no_shared_memory(stub, capsys, monkeypatch):
    arguments = ["infer", "twice", "--url", stub.url, "--input", "x=zeros"]
    stub.same_namespace = False
    assert run(*arguments) == 0
    assert "without shared memory: the server runs in another IPC namespace" in capsys.readouterr().err
    assert run(*arguments, "--batch", 1, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["transport"] == "inline"
    assert "another IPC namespace" in answer["why_inline"]
    stub.refuse["IsSameIPCNamespace"] = (grpc.StatusCode.UNIMPLEMENTED, "no such method", "")
    assert run(*arguments) == 0
    assert "without shared memory: the server does not say whether" in capsys.readouterr().err
    assert run(*arguments, "--no-shm") == 0
    assert "without shared memory" not in capsys.readouterr().err


def test_a_full_dev_shm_is_said(stub, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(OwnedRegion, "create", full)
    assert run("infer", "twice", "--url", stub.url, "--input", "x=zeros") == 0
    assert "No space left on device" in capsys.readouterr().err
    assert run("infer", "twice", "--url", stub.url, "--input", "x=zeros", "--batch", 1) == 0
    assert "1 × inline" in capsys.readouterr().err


def test_a_small_request_is_inline_and_says_why(stub, x_file, capsys):
    assert run("infer", "twice", "--url", stub.url, "--input", f"x=@{x_file}") == 0
    assert "without shared memory: less than 128.0 KiB are faster inline" in capsys.readouterr().err


def test_a_region_that_is_lost_on_the_way_leaves_only_the_way_of_the_answers(stub, x_file, capsys, monkeypatch):
    monkeypatch.setattr("rsrv.client.shared.LEAST_SHARED_BYTES", 0)
    forgotten = (grpc.StatusCode.FAILED_PRECONDITION, "unregistered shared memory region", "shm_unregistered")
    honest = stub.ModelInfer

    def ModelInfer(request, context):
        if not request.raw_input_contents:
            stub.abort(context, *forgotten)
        return honest(request, context)

    stub.ModelInfer = ModelInfer
    for batch in ([], ["--batch", 2]):
        assert run("infer", "twice", "--url", stub.url, "--input", f"x=@{x_file}", *batch, "--json") == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["transport"] == "inline"
        assert "given up" in answer["why_inline"]


def test_sigterm_leaves_no_file_behind(stub, x_file, tmp_path):
    some_done, over = threading.Event(), threading.Event()
    honest = stub.ModelInfer

    def ModelInfer(request, context):
        if len(stub.requests) >= 3:
            some_done.set()
            over.wait(20)
        return honest(request, context)

    stub.ModelInfer = ModelInfer
    arguments = ["--input", f"x=@{x_file}", "--batch", "1", "--only", "y", "--output", "y.npz"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rsrv", "infer", "twice", "--url", stub.url, *arguments],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
    )
    try:
        assert some_done.wait(60)
        process.send_signal(signal.SIGTERM)
        _, words = process.communicate(timeout=30)
    finally:
        over.set()
        process.kill()
        process.wait()
    assert process.returncode == 128 + signal.SIGTERM, words
    assert os.listdir(tmp_path) == ["x.npy"]
    assert not [name for name in os.listdir("/dev/shm") if f"-{process.pid}-" in name]


def test_a_busy_server_is_asked_again_unless_told_not_to(stub, capsys, monkeypatch):
    honest = stub.ModelInfer
    monkeypatch.setattr(Pause, "take", lambda pause: None)

    def full_at_first(request, context):
        if stub.calls.count("ModelInfer") == 1:
            stub.abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full", "queue_full")
        return honest(request, context)

    stub.ModelInfer = full_at_first
    arguments = ["infer", "twice", "--url", stub.url, "--input", "x=zeros"]
    assert run(*arguments, "--no-retry") == 1
    assert "queue is full" in capsys.readouterr().err
    stub.calls.clear()
    assert run(*arguments) == 0
    assert stub.calls.count("ModelInfer") == 2


def test_metadata_is_sent_with_every_call(stub, capsys):
    pairs = ["--metadata", "authorization=Bearer x=y", "--metadata", "X-Team=vision"]
    assert run("infer", "twice", "--url", stub.url, "--input", "x=zeros", *pairs) == 0
    assert stub.metadata["authorization"] == "Bearer x=y"
    assert stub.metadata["x-team"] == "vision"
    assert run("models", "--url", stub.url, "--metadata", "x-team=other") == 0
    assert stub.metadata["x-team"] == "other"


@pytest.mark.parametrize("text", ["novalue", "=x", "a b=x", "grpc-x=y", "a-bin=y", "a=\n", "ä=x"])
def test_metadata_that_grpc_does_not_take_is_refused(stub, capsys, text):
    assert run("infer", "twice", "--url", stub.url, "--input", "x=zeros", "--metadata", text) == 2
    assert "metadata" in capsys.readouterr().err
    assert stub.calls == []


def test_certificates_are_read_from_files_and_need_an_address_with_tls(stub, tmp_path, capsys):
    (tmp_path / "ca.pem").write_text("whatever")
    url = ["infer", "twice", "--url", stub.url, "--input", "x=zeros"]
    assert run(*url, "--root-cert", tmp_path / "ca.pem") == 2
    assert "hint: write grpcs://" in capsys.readouterr().err
    assert run(*url, "--root-cert", tmp_path / "no.pem") == 2
    assert f"--root-cert {tmp_path / 'no.pem'}: No such file or directory" in capsys.readouterr().err


def test_a_call_over_tls(tmp_path, capsys):
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make certificates")
    key, certificate = tmp_path / "key.pem", tmp_path / "server.pem"
    options = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=x"]
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate]
    subprocess.run(["openssl", "req", "-x509", *options, *names], check=True, capture_output=True)
    stub = StubServer()
    url = "grpcs://" + stub.listen_with_tls(key.read_bytes(), certificate.read_bytes())
    with stub:
        assert run("infer", "twice", "--url", url, "--input", "x=zeros", "--root-cert", certificate) == 0
        assert run("models", "--url", url, "--root-cert", certificate) == 0


def test_an_unknown_output_and_a_place_that_is_taken_are_refused_before_anything_is_sent(stub, tmp_path, capsys):
    (tmp_path / "y.npz").write_text("precious")
    url = ["infer", "twice", "--url", stub.url, "--input", "x=zeros"]
    assert run(*url, "--only", "z") == 2
    assert "--only z: model 'twice' has the outputs y, total" in capsys.readouterr().err
    assert run(*url, "--output", tmp_path / "y.npz") == 2
    assert "hint: --overwrite replaces it" in capsys.readouterr().err
    assert run(*url, "--output", tmp_path / "y.npy") == 2
    assert "choose one with --only NAME" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["y.npz"]
    assert run(*url, "--output", tmp_path / "y.npz", "--overwrite") == 0
    with np.load(tmp_path / "y.npz") as archive:
        assert sorted(archive) == ["total", "y"]


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
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4], "batch_axis": None}],
            "outputs": [
                {"name": "y", "datatype": "FP32", "shape": [-1, 4], "batch_axis": None},
                {"name": "total", "datatype": "FP32", "shape": [3], "batch_axis": None},
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


@pytest.mark.parametrize(
    ("places", "text"),
    [
        (["--output-dir", "out"], "output 'y': '{}/out/y.npy' is a directory"),
        (["--output", "both.npy"], "{}/both.npy holds one output, and there are: y, total"),
    ],
)
def test_outputs_without_a_place_are_found_before_anything_is_sent(stub, x_file, tmp_path, capsys, places, text):
    (tmp_path / "out" / "y.npy").mkdir(parents=True)
    option, place = places
    for batch in ([], ["--batch", 2]):
        arguments = ["--input", f"x=@{x_file}", option, tmp_path / place, *batch]
        assert run("infer", "twice", "--url", stub.url, *arguments) == 2
        assert text.format(tmp_path) in capsys.readouterr().err
    assert stub.requests == []
