import gc
import logging
import os
import subprocess
import sys

import pytest

from rsrv.core.errors import ConfigError, DeviceError
from rsrv.runtime import FakeDevice, PjrtDevice, backends, open_device


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_without_a_gpu_the_cpu_is_opened_silently(backend, caplog):
    with caplog.at_level(logging.DEBUG, logger="rsrv"):
        device = open_device(backend)
    assert isinstance(device, PjrtDevice)
    assert device.platform == "cpu"
    assert caplog.records == []


def test_cuda_without_a_plugin_falls_back_with_a_warning(caplog, monkeypatch):
    monkeypatch.setattr(backends, "cuda_plugin_installed", lambda: False)
    assert open_device("cuda").platform == "cpu"
    assert "cuda_unavailable fallback=cpu" in caplog.text


@pytest.mark.parametrize("backend", ["cuda", "gpu"])
def test_cuda_without_a_plugin_is_refused_when_no_fallback_is_allowed(backend, monkeypatch):
    monkeypatch.setattr(backends, "cuda_plugin_installed", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA plugin is installed") as caught:
        open_device(backend, allow_cpu_fallback=False)
    assert caught.value.hint == "pip install 'rsrv[cuda]'"


def test_a_plugin_without_a_card_falls_back_or_raises_as_configured(caplog, monkeypatch):
    """As on a machine where the wheel is installed and jax then finds no GPU."""
    monkeypatch.setattr(backends, "cuda_plugin_installed", lambda: True)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "")
    assert open_device("auto", allow_cpu_fallback=False).platform == "cpu"
    assert open_device("cuda").platform == "cpu"
    assert caplog.text.count("cuda_unavailable fallback=cpu") == 2
    with pytest.raises(DeviceError, match="no cuda client"):
        open_device("cuda", allow_cpu_fallback=False)


def test_the_fake_is_refused_outside_of_tests():
    with pytest.raises(ConfigError, match=r"runtime\.backend is fake") as caught:
        open_device("fake", environ={})
    assert caught.value.hint == "set RSRV_ALLOW_FAKE=1"
    with pytest.raises(ConfigError):
        open_device("fake", environ={"RSRV_ALLOW_FAKE": "yes"})
    assert isinstance(open_device("fake", environ={"RSRV_ALLOW_FAKE": "1"}), FakeDevice)


def test_an_unknown_backend_is_named():
    with pytest.raises(ConfigError, match=r"runtime\.backend is 'tpu', wanted auto, cpu, cuda or fake"):
        open_device("tpu")


def test_cpu_threads_bounds_the_threads_of_the_client(monkeypatch):
    monkeypatch.setenv("NPROC", "1")  # restored afterwards

    def threads_of_a_device(count):
        gc.collect()
        before = len(os.listdir("/proc/self/task"))
        device = open_device("cpu", cpu_threads=count)
        try:
            return len(os.listdir("/proc/self/task")) - before
        finally:
            device.close()

    assert threads_of_a_device(9) > threads_of_a_device(1)
    assert os.environ["NPROC"] == "1"


def test_the_fake_needs_no_jaxlib():
    code = (
        "import sys; from rsrv.runtime import open_device; open_device('fake'); "
        "print([name for name in ('jax', 'jaxlib') if name in sys.modules])"
    )
    environ = {**os.environ, "RSRV_ALLOW_FAKE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.strip() == "[]"
