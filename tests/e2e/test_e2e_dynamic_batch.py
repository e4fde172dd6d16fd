"""One program with a symbolic batch axis, exported, checked and served at several sizes: the numbers of jax.jit."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.server import ServerProcess
from typer.testing import CliRunner

from rsrv.cli.main import app
from rsrv.client import KServeModel
from rsrv.core.errors import InvalidRequest

FACTORY = """
import jax, jax.numpy as jnp, numpy as np

def net(params, x):
    y = jax.lax.conv_general_dilated(x, params["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    y = jax.lax.reduce_window(jax.nn.gelu(y), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return {"features": y.reshape(y.shape[0], -1), "scores": jax.nn.softmax(y.mean((1, 2)) @ params["w"])}

def make():
    draw = np.random.default_rng(0)
    params = {"k": draw.standard_normal((3, 3, 2, 4), np.float32), "w": draw.standard_normal((4, 5), np.float32)}
    return net, params, "x=f32[1,6,6,2]"
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dynamic")
    (directory / "net.py").write_text(FACTORY)
    out = directory / "repo" / "net"
    arguments = ["export", "jax", f"{directory}/net.py:make", "--out", str(out), "--dynamic-batch"]
    made = CliRunner().invoke(app, [*arguments, "--batch-sizes", "1,4,8", "--golden", "2", "--no-diff"])
    assert made.exit_code == 0, made.output
    return out


@pytest.fixture(scope="module")
def reference(bundle):
    scope: dict = {}
    exec(FACTORY, scope)
    net, params, _ = scope["make"]()
    return lambda x: jax.jit(net)(params, jnp.asarray(x))


def rows(count):
    return np.random.default_rng(count).standard_normal((count, 6, 6, 2), np.float32)


def require_same(answer, wanted):
    for name, array in wanted.items():
        np.testing.assert_allclose(answer[name], np.asarray(array), rtol=2e-5, atol=2e-6)


def test_check_runs_the_program_at_every_listed_size(bundle):
    checked = CliRunner().invoke(app, ["bundle", "check", str(bundle), "--run", "--strict", "--json"])
    assert checked.exit_code == 0, checked.output
    checks = json.loads(checked.stdout)["bundles"][0]["checks"]
    assert [name for name in checks if "batch size" in name] == [
        f"model.mlir at batch size {size} goldens" for size in (1, 4, 8)
    ]


def test_it_is_served_at_the_bundles_sizes_with_the_numbers_of_jax_jit(bundle, reference):
    with ServerProcess(bundle.parent) as server, KServeModel(server.url, "net") as model:
        server.wait_ready()
        for count in (1, 3, 8):
            require_same(model.infer({"x": rows(count)}), reference(rows(count)))
        with pytest.raises(InvalidRequest, match="9"):
            model.infer({"x": rows(9)})
        assert server.stop() == 0


def test_an_operator_serves_it_at_other_sizes_and_from_the_cache(bundle, reference, tmp_path):
    config = tmp_path / "node.yaml"
    models = {"net": {"batch_sizes": [2, 16]}}
    worker = {"name": "w0", "port": 0, "cache_dir": f"{tmp_path}/cache", "runtime": {"numerics": "f32"}}
    node = {"model_repo": str(bundle.parent), "workers": [{**worker, "scheduler": {"models": models}}]}
    config.write_text(json.dumps(node))
    for programs in ("compiled:2", "cache:2"):
        with ServerProcess(None, "--config", str(config), "--worker", "w0") as server:
            server.wait_ready()
            with KServeModel(server.url, "net") as model:
                require_same(model.infer({"x": rows(9)}), reference(rows(9)))
            server.wait_for_log("model loaded name=net")  # it serves a moment before that is said
            assert server.stop() == 0
        assert "batch_sizes=[2, 16] weights=" in server.log
        assert f"programs={programs} numerics='f32 (pinned 1 dot_general, pinned 1 convolution)'" in server.log
