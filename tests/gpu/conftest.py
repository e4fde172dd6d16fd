"""What `make test-gpu` runs on a card. In CI the same tests run on the CPU, which keeps them working (docs/gpu.md).

Programs here are texts: tracing with jax before the device is open would claim most of the card's memory.
"""

from collections.abc import Iterator

import pytest
from support.card import open_card

from rsrv.runtime import CompilePool, FakeDevice
from rsrv.runtime.device import Device
from rsrv.serve.loading import ProgramSource


@pytest.fixture(scope="session", autouse=True)
def device() -> Iterator[Device]:
    device = open_card()
    yield device
    device.close()


@pytest.fixture(scope="session")
def pool(device) -> Iterator[CompilePool]:
    with CompilePool(platform=device.platform, timeout_seconds=120.0) as pool:
        yield pool


@pytest.fixture(scope="session")
def source(device, pool) -> ProgramSource:
    return ProgramSource(device=device, pool=pool)


@pytest.fixture
def card(device) -> Device:
    """A device that counts its memory: the CPU does not, so a fake card stands in for it."""
    return device if device.memory() is not None else FakeDevice(unified=False, memory_bytes=64 << 20)
