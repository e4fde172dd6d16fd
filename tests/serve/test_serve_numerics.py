"""The numerics mode of a server: what is in the environment before a client exists, what a device can do, the probe."""

import logging

import numpy as np
import pytest
from support.bundles import write_affine

from rsrv.core.config import EndpointsConfig, RuntimeConfig, ServerConfig
from rsrv.core.errors import ConfigError, DeviceError, ProgramError
from rsrv.runtime import CompilePool, open_device
from rsrv.serve import numerics
from rsrv.serve.loading import ProgramSource
from rsrv.serve.numerics import OVERRIDE, ServerNumerics, numerics_for, prepare_environment, probe
from rsrv.serve.worker import RunningServer
from rsrv.stablehlo.policy import Policy


class Card:
    """A device that is only asked what it is."""

    def __init__(self, platform, capability=None):
        self.platform, self.kind = platform, f"a {platform}"
        self.facts = {} if capability is None else {"compute capability": capability}


@pytest.fixture(scope="module")
def parts():
    with CompilePool() as pool:
        device = open_device("cpu")
        yield device, ProgramSource(device=device, pool=pool)
        device.close()


def test_only_f32_forbids_tf32_to_the_libraries(caplog):
    for mode in ("auto", "tf32"):
        environ = {}
        prepare_environment(mode, environ)
        assert environ == {}
    prepare_environment("f32", environ)
    assert environ == {OVERRIDE: "0"}
    assert not caplog.records
    environ = {OVERRIDE: "1"}
    prepare_environment("f32", environ)
    assert environ == {OVERRIDE: "0"}
    assert "variable replaced name=NVIDIA_TF32_OVERRIDE was='1'" in caplog.text


def test_the_policy_follows_the_device():
    assert numerics_for("auto", Card("cuda", "8.6")).policy == Policy("auto", True)
    assert numerics_for("auto", Card("cuda", "7.5")).policy == Policy("auto", False)
    assert numerics_for("f32", Card("cpu")).policy == Policy("f32", False)
    assert numerics_for("tf32", Card("cuda", "9.0")).mode == "tf32"


@pytest.mark.parametrize("card", [Card("cuda", "7.5"), Card("cpu"), Card("rocm", "9.0"), Card("fake")])
def test_tf32_on_a_device_without_it_is_refused(card):
    with pytest.raises(ConfigError, match=f"runtime.numerics is tf32, but a {card.platform} on {card.platform}"):
        numerics_for("tf32", card)


def test_the_probe_finds_float32_on_a_cpu(parts, caplog):
    caplog.set_level(logging.INFO)
    assert probe(ServerNumerics(Policy("f32")), *parts) == ServerNumerics(Policy("f32"), False, True)
    assert "numerics probe mode=f32 tf32_active=False pinned_exact=True" in caplog.text
    assert probe(ServerNumerics(Policy("auto")), *parts) == ServerNumerics(Policy("auto"), False, None)


def test_the_probe_tells_tf32_from_noise():
    matrix = numerics._matrix()
    assert matrix.shape == (512, 512)
    assert (matrix == matrix.T).all()
    assert len(np.unique(matrix)) == 512
    # TF32 keeps 10 bits of the fraction, and every value is nearer to 1 than to the next number.
    assert matrix.max() - 1 < 2**-11
    assert numerics._tf32_was_used(matrix) is False
    assert numerics._tf32_was_used(np.ones_like(matrix)) is True
    assert numerics._tf32_was_used(matrix + np.float32(1e-3)) is None


def test_only_a_pinned_product_that_is_not_exact_ends_the_start(monkeypatch, caplog, parts):
    answers = {"auto": np.ones((512, 512), np.float32), "f32": np.ones((512, 512), np.float32)}
    monkeypatch.setattr(numerics, "_product", lambda device, source, policy: answers[policy.numerics])
    assert probe(ServerNumerics(Policy("auto", True)), *parts).tf32_active is True
    with pytest.raises(DeviceError, match="does not compute a product pinned to float32 exactly"):
        probe(ServerNumerics(Policy("f32", True)), *parts)

    def broken(device, source, policy):
        raise ProgramError("nothing compiles today")

    monkeypatch.setattr(numerics, "_product", broken)
    assert probe(ServerNumerics(Policy("auto")), *parts).tf32_active is None
    assert "numerics probe failed why=nothing compiles today" in caplog.text


def test_a_server_in_f32_says_for_each_model_what_it_did(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(OVERRIDE, "1")
    caplog.set_level(logging.INFO)
    write_affine(tmp_path / "affine", batch_sizes=(1, 2))
    seen = []
    server = RunningServer(
        ServerConfig(
            model_dirs=[str(tmp_path)],
            runtime=RuntimeConfig(backend="cpu", numerics="f32"),
            endpoints=EndpointsConfig(grpc_port=0, http_port=0),
        )
    )
    monkeypatch.setattr(
        "rsrv.serve.compiling.CompilePool", lambda **kw: seen.append(numerics.os.environ[OVERRIDE]) or CompilePool(**kw)
    )
    server.open()
    try:
        server.load()
        assert seen == ["0"]  # in the environment that the compile processes inherit
        assert server.numerics == ServerNumerics(Policy("f32", False))
        assert server.registry.prepared("affine").numerics == "f32 (nothing to pin)"
        assert "numerics='f32 (nothing to pin)'" in caplog.text
    finally:
        server.stop()


def test_a_server_does_not_start_in_tf32_without_a_card(tmp_path, monkeypatch):
    write_affine(tmp_path / "affine")
    monkeypatch.setattr("rsrv.runtime.backends.cuda_plugin_installed", lambda: False)
    server = RunningServer(
        ServerConfig(
            model_dirs=[str(tmp_path)],
            runtime=RuntimeConfig(numerics="tf32"),
            endpoints=EndpointsConfig(grpc_port=0, http_port=0),
        )
    )
    with pytest.raises(ConfigError, match=r"runtime\.numerics is tf32, but cpu on cpu has no TF32"):
        server.open()
