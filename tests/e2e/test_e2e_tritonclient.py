"""The current tritonclient against a real server: inline, system shared memory both ways, mixed; bit for bit."""

import numpy as np
import pytest
from support.bundles import N, write_model
from support.server import ServerProcess

triton = pytest.importorskip("tritonclient.grpc")
shm = pytest.importorskip("tritonclient.utils.shared_memory")
from tritonclient.utils import InferenceServerException, np_to_triton_dtype  # noqa: E402

DTYPES = [np.float16, np.float32, np.float64, np.int8, np.int16, np.int32, np.int64,
          np.uint8, np.uint16, np.uint32, np.uint64, np.bool_]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repo = tmp_path_factory.mktemp("repo")
    write_model(
        repo / "pair",
        lambda a, b: (a + b, a - b),
        {"a": ((N, 16), np.float32), "b": ((N, 16), np.float32)},
        {"sum": ((N, 16), np.float32), "difference": ((N, 16), np.float32)},
    )
    write_model(
        repo / "every",
        lambda *xs: tuple(x[:, ::-1] for x in xs),
        {f"in_{np.dtype(d).name}": ((N, 5), d) for d in DTYPES},
        {f"out_{np.dtype(d).name}": ((N, 5), d) for d in DTYPES},
        batch_sizes=(1, 4),
    )
    with ServerProcess(repo) as server:
        server.wait_ready()
        yield server
        assert server.stop() == 0


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(server.url) as client:
        yield client


@pytest.fixture
def region(client):
    """Creates regions of a given size and cleans up after the test."""
    handles = []

    def create(name, n_bytes):
        handle = shm.create_shared_memory_region(name, f"/test-{name}", n_bytes)
        handles.append((name, handle))
        client.register_system_shared_memory(name, f"/test-{name}", n_bytes)
        return handle

    yield create
    for name, handle in handles:
        client.unregister_system_shared_memory(name)
        shm.destroy_shared_memory_region(handle)


def tensor(name, array):
    result = triton.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    result.set_data_from_numpy(array)
    return result


def pair(rng, rows):
    return [rng.standard_normal((rows, 16)).astype(np.float32) for _ in range(2)]


def test_inline_answers_are_bit_exact_at_every_row_count(client):
    rng = np.random.default_rng(0)
    for rows in range(1, 9):
        a, b = pair(rng, rows)
        answer = client.infer("pair", [tensor("a", a), tensor("b", b)], request_id=f"r{rows}")
        np.testing.assert_array_equal(answer.as_numpy("sum"), a + b, strict=True)
        np.testing.assert_array_equal(answer.as_numpy("difference"), a - b, strict=True)
        assert answer.get_response().id == f"r{rows}"
        assert answer.get_response().model_name == "pair"


def test_every_dtype_that_the_wire_has_travels_bit_exact(client):
    rng = np.random.default_rng(1)
    arrays = {}
    for dtype in map(np.dtype, DTYPES):
        if dtype.kind == "b":
            arrays[dtype] = rng.random((3, 5)) < 0.5
        elif dtype.kind == "f":
            arrays[dtype] = rng.standard_normal((3, 5)).astype(dtype)
        else:
            info = np.iinfo(dtype)
            arrays[dtype] = rng.integers(info.min, info.max, (3, 5), dtype=dtype, endpoint=True)
    answer = client.infer("every", [tensor(f"in_{d.name}", a) for d, a in arrays.items()])
    for dtype, array in arrays.items():
        np.testing.assert_array_equal(answer.as_numpy(f"out_{dtype.name}"), array[:, ::-1], strict=True)


def test_only_the_requested_outputs_come_back_in_the_requested_order(client):
    a, b = pair(np.random.default_rng(2), 2)
    wanted = [triton.InferRequestedOutput("difference"), triton.InferRequestedOutput("sum")]
    answer = client.infer("pair", [tensor("a", a), tensor("b", b)], outputs=wanted)
    assert [o.name for o in answer.get_response().outputs] == ["difference", "sum"]
    np.testing.assert_array_equal(answer.as_numpy("sum"), a + b)
    only = client.infer("pair", [tensor("a", a), tensor("b", b)], outputs=wanted[:1])
    assert only.as_numpy("sum") is None


@pytest.mark.parametrize("where", ["inputs", "outputs", "both", "mixed"])
def test_system_shared_memory_is_bit_exact(client, region, where):
    rows = 4
    n = rows * 16 * 4
    a, b = pair(np.random.default_rng(3), rows)
    inputs, outputs = [tensor("a", a), tensor("b", b)], []
    if where in ("inputs", "both"):
        handle = region("in", 2 * n)
        shm.set_shared_memory_region(handle, [a, b])
        for position, one in enumerate(inputs):
            one.set_shared_memory("in", n, offset=position * n)
    if where in ("outputs", "both"):
        into = region("out", 2 * n)
        for position, name in enumerate(("sum", "difference")):
            outputs.append(triton.InferRequestedOutput(name))
            outputs[-1].set_shared_memory("out", n, offset=position * n)
    if where == "mixed":
        handle, into = region("in", n), region("out", 2 * n)
        shm.set_shared_memory_region(handle, [b])
        inputs[1].set_shared_memory("in", n)
        outputs = [triton.InferRequestedOutput("sum"), triton.InferRequestedOutput("difference")]
        outputs[1].set_shared_memory("out", n, offset=n)
    answer = client.infer("pair", inputs, outputs=outputs or None)
    for position, (name, expected) in enumerate((("sum", a + b), ("difference", a - b))):
        if where in ("outputs", "both") or (where == "mixed" and name == "difference"):
            found = shm.get_contents_as_numpy(into, np.float32, [rows, 16], offset=position * n).copy()
        else:
            found = answer.as_numpy(name)
        np.testing.assert_array_equal(found, expected, strict=True)


def test_regions_are_listed_and_an_unregistered_one_is_a_failed_precondition(client, region):
    region("listed", 64)
    assert client.get_system_shared_memory_status().regions["listed"].byte_size == 64
    a, b = pair(np.random.default_rng(4), 1)
    inputs = [tensor("a", a), tensor("b", b)]
    inputs[0].set_shared_memory("nowhere", 64)
    with pytest.raises(InferenceServerException, match="unregistered shared memory region 'nowhere'") as error:
        client.infer("pair", inputs)
    assert "FAILED_PRECONDITION" in error.value.status()


def test_metadata_config_index_and_statistics_are_what_tritonclient_expects(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("pair")
    assert client.is_model_ready("pair", "1")
    assert not client.is_model_ready("nobody")
    about = client.get_server_metadata()
    assert about.name == "rsrv"
    assert list(about.extensions) == [
        "system_shared_memory",
        "model_repository",
        "model_configuration",
        "statistics",
        "rsrv_control",
        "rsrv_admin",
    ]
    metadata = client.get_model_metadata("pair")
    assert metadata.platform == "xla_stablehlo"
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [
        ("a", "FP32", [-1, 16]),
        ("b", "FP32", [-1, 16]),
    ]
    config = client.get_model_config("pair").config
    assert config.max_batch_size == 8
    assert [(t.name, t.data_type, list(t.dims)) for t in config.output] == [("sum", 11, [16]), ("difference", 11, [16])]
    index = client.get_model_repository_index().models
    assert [(m.name, m.state, m.reason) for m in index] == [("every", "READY", ""), ("pair", "READY", "")]

    before = client.get_inference_statistics("pair").model_stats[0]
    a, b = pair(np.random.default_rng(5), 3)
    client.infer("pair", [tensor("a", a), tensor("b", b)])
    with pytest.raises(InferenceServerException):
        client.infer("pair", [tensor("a", a)])
    after = client.get_inference_statistics("pair").model_stats[0]
    assert after.inference_count - before.inference_count == 3
    assert after.execution_count - before.execution_count == 1
    assert after.inference_stats.success.count - before.inference_stats.success.count == 1
    assert after.inference_stats.fail.count - before.inference_stats.fail.count == 1
    assert after.inference_stats.compute_infer.ns > before.inference_stats.compute_infer.ns
    assert {s.name for s in client.get_inference_statistics().model_stats} == {"every", "pair"}


@pytest.mark.parametrize(
    ("model", "version", "code"),
    [("nobody", "", "NOT_FOUND"), ("pair", "2", "NOT_FOUND"), ("", "", "INVALID_ARGUMENT")],
)
def test_unknown_names_and_versions(client, model, version, code):
    a, b = pair(np.random.default_rng(6), 1)
    with pytest.raises(InferenceServerException) as error:
        client.infer(model, [tensor("a", a), tensor("b", b)], model_version=version)
    assert code in error.value.status()


def test_parameters_of_sequence_models_are_refused(client):
    a, b = pair(np.random.default_rng(7), 1)
    with pytest.raises(InferenceServerException, match=r"sequence_\w+' is not supported") as error:
        client.infer("pair", [tensor("a", a), tensor("b", b)], sequence_id=5, sequence_start=True)
    assert "INVALID_ARGUMENT" in error.value.status()


def test_priority_and_timeout_parameters_are_understood(client):
    a, b = pair(np.random.default_rng(8), 1)
    answer = client.infer("pair", [tensor("a", a), tensor("b", b)], priority=3, timeout=60_000_000)
    np.testing.assert_array_equal(answer.as_numpy("sum"), a + b)
    with pytest.raises(InferenceServerException) as error:
        client.infer("pair", [tensor("a", a), tensor("b", b)], timeout=1)
    assert "DEADLINE_EXCEEDED" in error.value.status()


def test_bytes_tensors_are_refused_with_the_list_of_what_is_supported(client):
    words = triton.InferInput("a", [1, 16], "BYTES")
    words.set_data_from_numpy(np.full((1, 16), b"x", np.object_))
    with pytest.raises(InferenceServerException, match=r"BYTES.*FP32"):
        client.infer("pair", [words, tensor("b", np.zeros((1, 16), np.float32))])
