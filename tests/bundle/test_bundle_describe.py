"""`describe_bundle`: the data behind `rsrv bundle inspect`."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

import rsrv.bundle
from rsrv.bundle.describe import describe_bundle
from rsrv.bundle.iospec import IOSpec
from rsrv.bundle.writer import write_bundle
from rsrv.core.errors import BundleError


def test_a_bundle_is_described_in_full(tmp_path):
    target = write_bundle(
        tmp_path / "net",
        name="net",
        description="a net",
        executable_inputs=[IOSpec("x", "f32", (1, 3), batch_axis=0)],
        executable_outputs=[IOSpec("y", "bf16", (2, 1), batch_axis=1)],
        client_inputs=[IOSpec("jpeg", "u8", (-1,))],
        modules={4: b"module {}", 1: b"ML\xefRabc"},
        weights=[("w", np.zeros((4, 8), np.float32)), ("b", np.zeros(3, np.float32)), ("i", np.zeros(5, np.int8))],
        hooks="def preprocess(inputs):\n    return inputs\n",
        provenance={"git_commit": "abc"},
    )
    described = describe_bundle(target)
    assert (described.name, described.kind, described.format_version) == ("net", "model", "3.0")
    assert [spec.text for spec in described.client_inputs] == ["u8[?]"]
    assert [spec.text for spec in described.executable_inputs] == ["f32[n,3]"]
    assert described.client_outputs == described.executable_outputs
    output = described.executable_outputs[0]
    assert (output.datatype, output.shape, output.letters, output.batch_axis) == ("BF16", (2, -1), "an", 1)
    assert [(p.file, p.batch_keys, p.bytes, p.format) for p in described.programs] == [
        ("model.b1.mlir", (1,), 7, "bytecode"),
        ("model.b4.mlir", (4,), 9, "text"),
    ]
    weights = described.weights
    assert weights is not None
    assert (weights.tensors, weights.parameters, weights.bytes) == (3, 40, 145)
    # The second tensor begins where the aligned first one ends, the third does not.
    assert weights.aligned_bytes == 140
    assert weights.bytes_by_dtype == {"f32": 140, "i8": 5}
    assert weights.has_digests
    assert (described.hooks, described.sealed, described.coalesces) == (("preprocess",), True, True)
    assert described.provenance == {"git_commit": "abc"}
    assert described.files == 5
    assert described.bytes == sum(path.stat().st_size for path in target.iterdir())
    as_json = json.loads(json.dumps(described.to_json()))
    assert as_json["programs"][0]["batch_keys"] == [1]
    assert as_json["weights"]["bytes"] == 145
    assert as_json["client_inputs"][0]["shape"] == [-1]


def test_a_dynamic_program_is_one_file_for_all_sizes(make_bundle, manifest):
    mapping = manifest(batching={"compiled_batch_sizes": [1, 8], "dynamic": True})
    described = describe_bundle(make_bundle(manifest=mapping, programs=("model.mlir",)))
    assert [(p.file, p.batch_keys) for p in described.programs] == [("model.mlir", (1, 8))]
    assert (described.dynamic_batch, described.coalesces, described.sealed) == (True, True, False)


def test_a_program_without_a_batch_size_never_merges_requests(make_bundle, manifest):
    described = describe_bundle(make_bundle(manifest=manifest(batching={}), programs=("model.mlir",)))
    assert not described.coalesces
    assert described.programs[0].batch_keys == (0,)


def test_a_meta_is_described_and_its_weights_are_not_read(make_bundle, meta):
    files = {"model.py": "register_meta_model(run=f)", "weights.safetensors": "the hook's own format"}
    described = describe_bundle(make_bundle("pipe", manifest=meta(), programs=(), weights=False, files=files))
    assert (described.kind, described.meta_calls) == ("meta", ("detector", "classifier"))
    assert (described.weights, described.programs) == (None, ())
    assert described.hooks == ("register_meta_model",)


def test_a_broken_bundle_is_an_error(make_bundle):
    with pytest.raises(BundleError, match=r"model\.b4\.mlir"):
        describe_bundle(make_bundle(programs=("model.b1.mlir",)))


def test_every_public_name_of_the_room_exists():
    for name in rsrv.bundle.__all__:
        assert getattr(rsrv.bundle, name) is not None


def test_the_room_loads_nothing_heavy():
    code = (
        "import sys, rsrv.bundle as b; [getattr(b, name) for name in b.__all__];"
        "print([m for m in ('jax', 'jaxlib', 'torch', 'pydantic', 'grpc', 'aiohttp') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
