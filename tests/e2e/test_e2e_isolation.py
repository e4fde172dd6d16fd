"""Bundles that are wrong in every way beside one that is not: each fails alone and says where, the good one serves."""

import json
import re
import shutil

import grpc
import numpy as np
import pytest
from support.bundles import N, specs, write_affine, write_model
from support.server import ServerProcess

from rsrv.bundle.digests import seal
from rsrv.bundle.writer import write_bundle
from rsrv.core.wire import decode_response, encode_request, join
from rsrv.protos import inference as pb

SERVICE = "/inference.GRPCInferenceService"

COMPILE_SECONDS = 20
MEMORY_BYTES = 400 << 20
"""What a compilation of this repository's good bundle stays far below."""

INDEX_OF_X = """%c = stablehlo.slice %x [0:1, 0:1] : (tensor<1x3xf32>) -> tensor<1x1xf32>
        %r = stablehlo.reshape %c : (tensor<1x1xf32>) -> tensor<f32>
        %i = stablehlo.convert %r : (tensor<f32>) -> tensor<i32>"""
"""An index that nobody knows before the program runs."""

HOOK = "def preprocess(inputs): return inputs\n"


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def truncate(path, n=-20):
    path.write_bytes(path.read_bytes()[:n])


def flip_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def nested_cases(depth):
    """Text that MLIR's parser recurses into until its stack ends."""
    tensor = "tensor<1x3xf32>"
    opening = ('"stablehlo.case"(%i) ({ %r = ' * depth)[: -len(" %r = ")]
    closing = f"stablehlo.return %x : {tensor} }}) : (tensor<i32>) -> {tensor} " + (
        f"stablehlo.return %r : {tensor} }}) : (tensor<i32>) -> {tensor} " * (depth - 1)
    )
    return f"""module {{ func.func public @main(%x: {tensor}) -> {tensor} {{
        %i = stablehlo.constant dense<0> : tensor<i32>
        %out = {opening} {closing}
        return %out : {tensor} }} }}""".encode()


def deep_choice(depth):
    """Cases inside each other that cannot be decided beforehand: the parser bears them, the compiler does not.

    Of 500 it dies as well; the time until then grows with the square, and must stay far below `COMPILE_SECONDS`.
    """
    tensor = "tensor<1x3xf32>"
    opening = "".join(f'%c{level} = "stablehlo.case"(%i) ({{ ' for level in range(depth))
    closing = "".join(
        f"}}) : (tensor<i32>) -> {tensor}\n" + (f"stablehlo.return %c{level} : {tensor} " if level else "")
        for level in reversed(range(depth))
    )
    return f"""module {{ func.func public @main(%x: {tensor}) -> {tensor} {{
        {INDEX_OF_X}
        {opening}%y = stablehlo.add %x, %x : {tensor}
        stablehlo.return %y : {tensor} {closing} return %c0 : {tensor} }} }}""".encode()


def endless():
    """A chain of operations that LLVM needs minutes for."""
    tensor = "tensor<1x3xf32>"
    chain = "\n".join(f"%{i + 1} = stablehlo.tanh %{i} : {tensor}" for i in range(16_000))
    return f"""module {{ func.func public @main(%x: {tensor}) -> {tensor} {{
        %0 = stablehlo.add %x, %x : {tensor}
        {chain}
        return %16000 : {tensor} }} }}""".encode()


def swelling(times, big=40_000_000):
    """Constants of 160 MB that are three numbers in the program: the compiler pads them."""
    tensor = "tensor<1x3xf32>"
    steps = "\n".join(
        f"""%k{n} = stablehlo.constant dense<[1.0, 2.0, {n}.0]> : tensor<3xf32>
        %p{n} = stablehlo.pad %k{n}, %z, low = [{n}], high = [{big - 3 - n}], interior = [0] :
          (tensor<3xf32>, tensor<f32>) -> tensor<{big}xf32>
        %d{n} = stablehlo.dynamic_slice %p{n}, %i, sizes = [3] : (tensor<{big}xf32>, tensor<i32>) -> tensor<3xf32>
        %e{n} = stablehlo.reshape %d{n} : (tensor<3xf32>) -> {tensor}
        %s{n + 1} = stablehlo.add %s{n}, %e{n} : {tensor}"""
        for n in range(times)
    )
    return f"""module {{ func.func public @main(%x: {tensor}) -> {tensor} {{
        %z = stablehlo.constant dense<0.0> : tensor<f32>
        {INDEX_OF_X}
        %s0 = stablehlo.add %x, %x : {tensor}
        {steps}
        return %s{times} : {tensor} }} }}""".encode()


def one_program(program):
    def make(directory):
        write_bundle(
            directory,
            name=directory.name,
            executable_inputs=specs({"x": ((N, 3), np.float32)}),
            executable_outputs=specs({"y": ((N, 3), np.float32)}),
            modules={1: program},
            weights=[],
        )

    return make


def wrong_arity(directory):
    write_affine(directory)
    other = write_model(
        directory.parent / "other", lambda x: (x,), {"x": ((N, 3), np.float32)}, {"y": ((N, 3), np.float32)}
    )
    shutil.copy(other / "model.b4.mlir", directory / "model.b4.mlir")
    shutil.rmtree(other)
    seal(directory)


def hostile_header(directory):
    write_affine(directory)
    (directory / "weights.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{}")


def with_hooks(text):
    def make(directory):
        write_affine(directory, hooks=HOOK)
        (directory / "model.py").write_text(text)

    return make


def broken(change, file="manifest.yaml", *arguments):
    def make(directory):
        write_affine(directory)
        change(directory / file, *arguments)

    return make


def meta(directory):
    directory.mkdir()
    (directory / "manifest.yaml").write_text(
        'format_version: "3.0"\nkind: meta\nmeta: {calls: [good]}\n'
        'client_inputs: [{name: x, dtype: f32, shape: "n"}]\nclient_outputs: [{name: y, dtype: f32, shape: "n"}]\n'
    )
    (directory / "model.py").write_text("def run(inputs, call): return inputs\n")


def escaping_symlink(directory):
    outside = directory.parent.parent / "outside"
    if not outside.exists():
        write_affine(outside)
    directory.symlink_to(outside)


BUNDLES = {
    "kills-the-parser": (one_program(nested_cases(20_000)), "signature", "reading the program ended its process"),
    "kills-the-compiler": (one_program(deep_choice(1_000)), "compile", "compiling the program ended its process"),
    "eats-memory": (one_program(swelling(6)), "compile", f"took more than {MEMORY_BYTES} bytes of memory"),
    "never-compiles": (one_program(endless()), "compile", f"took longer than {COMPILE_SECONDS} s"),
    "bit-flipped": (broken(flip_bit, "model.b4.mlir"), "digests", "model.b4.mlir"),
    "hostile-header": (hostile_header, "weights", "weights.safetensors"),
    "missing-program": (broken(lambda p: p.unlink(), "model.b4.mlir"), "manifest", "model.b4.mlir"),
    "missing-weights": (broken(lambda p: p.unlink(), "weights.safetensors"), "manifest|weights", "weights.safetensors"),
    "no-yaml": (broken(lambda p: p.write_text("a: [")), "manifest", "manifest"),
    "python-tag": (broken(lambda p: p.write_text("a: !!python/object/apply:os.getpid []")), "manifest", "python|tag"),
    "raising-hook": (with_hooks("raise ValueError('no')\n" + HOOK), "hooks", "line 1: ValueError: no"),
    "truncated-program": (broken(truncate, "model.b8.mlir"), "digests", "model.b8.mlir"),
    "truncated-weights": (broken(truncate, "weights.safetensors", -8), "weights", "weights.safetensors"),
    "two-forms": (with_hooks(HOOK + "register_model(postprocess=lambda x: x)"), "hooks", "two forms"),
    "wrong-arity": (wrong_arity, "signature", "model.b4|argument|takes"),
    "wrong-dtype": (broken(edit, "manifest.yaml", "dtype: f32", "dtype: i32"), "signature", "f32.*i32|i32.*f32"),
    "yaml-bomb": (
        broken(lambda p: p.write_text("\n".join(f"a{i}: &a{i} [{f'*a{i - 1},' * 9 if i else 1}]" for i in range(9)))),
        "manifest",
        "alias",
    ),
    "a-meta": (meta, "hooks|manifest", "kind: meta, which is not supported yet"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repo = tmp_path_factory.mktemp("isolation") / "repo"
    repo.mkdir()
    write_affine(repo / "good")
    for name, (make, _, _) in BUNDLES.items():
        make(repo / name)
    escaping_symlink(repo / "escaping")
    (repo / "no-bundle").mkdir()
    (repo / ".hidden").mkdir()
    (repo / ".hidden" / "manifest.yaml").write_text("x")
    (repo / "writing.partial").mkdir()
    (repo / "writing.partial" / "manifest.yaml").write_text("x")
    limits = {"COMPILE_TIMEOUT_SECONDS": str(COMPILE_SECONDS), "COMPILE_MEMORY_BYTES": str(MEMORY_BYTES)}
    with ServerProcess(repo, env={f"RSRV_WORKER_RUNTIME_{key}": value for key, value in limits.items()}) as server:
        server.wait_settled(170)  # twenty bundles, and one of them takes all of COMPILE_SECONDS
        yield server
        assert server.stop() == 0


def call(server, method, request, response):
    with grpc.insecure_channel(server.url) as channel:
        return response.FromString(channel.unary_unary(f"{SERVICE}/{method}")(request.SerializeToString(), timeout=30))


def infer(server, model, x):
    with grpc.insecure_channel(server.url) as channel:
        body = join(encode_request(model, [("x", np.asarray(x, np.float32))]))
        return decode_response(channel.unary_unary(f"{SERVICE}/ModelInfer")(body, timeout=30)).array("y")


def test_the_good_bundle_serves_beside_all_the_bad_ones(server):
    np.testing.assert_array_equal(infer(server, "good", [[1, 2, 3]]), [[3, 5, 7]])
    assert call(server, "ModelReady", pb.ModelReadyRequest(name="good"), pb.ModelReadyResponse).ready


@pytest.mark.parametrize("name", sorted(BUNDLES))
def test_a_bad_bundle_fails_alone_and_says_where_and_why(server, name):
    _, phase, text = BUNDLES[name]
    index = call(server, "RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse)
    [row] = [row for row in index.models if row.name == name]
    assert row.state == "UNAVAILABLE"
    assert re.match(rf"({phase}): ", row.reason), row.reason
    assert re.search(text, row.reason), row.reason
    with pytest.raises(grpc.RpcError) as error:
        infer(server, name, [[1, 2, 3]])
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert dict(error.value.trailing_metadata())["rsrv-reason"] == "failed"
    assert row.reason in error.value.details()
    assert not call(server, "ModelReady", pb.ModelReadyRequest(name=name), pb.ModelReadyResponse).ready


def test_the_index_lists_every_bundle_and_nothing_else(server):
    index = call(server, "RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse)
    assert {row.name for row in index.models} - {"escaping"} == {*BUNDLES, "good"}
    assert all(row.state == "UNAVAILABLE" for row in index.models if row.name != "good")
    ready = call(server, "RepositoryIndex", pb.RepositoryIndexRequest(ready=True), pb.RepositoryIndexResponse)
    assert [row.name for row in ready.models] == ["good"]


def test_a_symlink_out_of_the_repository_is_not_served(server):
    with pytest.raises(grpc.RpcError) as error:
        infer(server, "escaping", [[1, 2, 3]])
    assert error.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND)


def test_readyz_says_that_not_all_models_are_ready_and_which(server):
    status, body = server.readyz()
    assert status == 503
    assert "yaml-bomb (failed)" in body["reason"]
    assert body["progress"]["prepared"] == 1
    assert body["progress"]["failed"] == body["progress"]["models"] - 1
    assert server.http("/v2/health/ready")[0] == 503
    assert server.http("/livez")[0] == 200


def test_with_ready_when_any_the_server_is_ready_although_models_failed(tmp_path):
    write_affine(tmp_path / "good")
    hostile_header(tmp_path / "bad")
    # The usual rule, all, is that of the server above.
    for rule, ready in (("any", 200), ("good:bad", 503)):
        with ServerProcess(tmp_path, env={"RSRV_WORKER_STARTUP_READY_WHEN": rule}) as server:
            server.wait_settled()
            assert server.http("/readyz")[0] == ready
            assert server.http("/v2/health/ready")[0] == ready
            assert server.http("/livez")[0] == 200
            assert server.stop() == 0


def test_no_hooks_refuses_a_bundle_with_hooks_by_its_file_and_serves_the_others(tmp_path):
    write_affine(tmp_path / "plain")
    write_affine(tmp_path / "hooked", hooks=HOOK)
    with ServerProcess(tmp_path, "--no-hooks") as server:
        server.wait_settled()
        np.testing.assert_array_equal(infer(server, "plain", [[1, 2, 3]]), [[3, 5, 7]])
        with pytest.raises(grpc.RpcError, match=r"hooked/model.py: the bundle has hooks, and hooks are not allowed"):
            infer(server, "hooked", [[1, 2, 3]])
        assert server.stop() == 0


def test_weights_that_were_replaced_are_served_and_reported(tmp_path):
    write_affine(tmp_path / "m", scale=2.0)
    write_affine(tmp_path.parent / "elsewhere" / "m", scale=10.0)
    shutil.copy(tmp_path.parent / "elsewhere" / "m" / "weights.safetensors", tmp_path / "m" / "weights.safetensors")
    with ServerProcess(tmp_path) as server:
        server.wait_ready()
        np.testing.assert_array_equal(infer(server, "m", [[1, 2, 3]]), [[11, 21, 31]])
        server.wait_for_log("model modified name=m files=weights.safetensors")
        assert server.stop() == 0
    with ServerProcess(tmp_path, env={"RSRV_WORKER_BUNDLES_DIGESTS": "strict"}) as server:
        server.wait_settled()
        with pytest.raises(grpc.RpcError, match=r"weights\.safetensors has sha256"):
            infer(server, "m", [[1, 2, 3]])
        assert server.stop() == 0


def test_the_line_on_stdout_is_one_json_object(server):
    assert set(server.listening) == {"host", "grpc_port", "http_port"}
    assert json.loads(json.dumps(server.listening)) == server.listening
