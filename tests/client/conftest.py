import pytest
from support.client_stub import INLINE_ONCE, StubServer, own_shared_memory

from rsrv.client import KServeModel, client_init
from rsrv.client.channels import ChannelOptions
from rsrv.client.connection import Connection


@pytest.fixture
def server():
    with StubServer() as running:
        yield running


@pytest.fixture
def connection(server):
    connection = Connection(ChannelOptions.build(server.url))
    yield connection
    connection.close()


@pytest.fixture
def model(server):
    """A handle of the model y = 2x, f32[-1,4]; see `INLINE_ONCE`."""
    server.outputs = [("y", "FP32", [-1, 4])]
    with KServeModel(server.url, "twice", **INLINE_ONCE) as handle:
        yield handle


@pytest.fixture(autouse=True)
def no_shared_memory_left_behind():
    before = own_shared_memory()
    yield
    assert own_shared_memory() <= before


@pytest.fixture(autouse=True)
def every_call_is_large_enough_for_shared_memory(monkeypatch):
    """The arrays of these tests are small."""
    monkeypatch.setattr("rsrv.client.shared.LEAST_SHARED_BYTES", 0)
    monkeypatch.setattr("rsrv.client.dataset.answers.LEAST_WINDOW_BYTES", 0)


@pytest.fixture
def small_pools():
    """Eight slots of 512 bytes: 32 items of 16 bytes each, or 16 with their outputs."""
    client_init(pool_bytes=4096)
    yield
    client_init()


@pytest.fixture(params=["off", "on"])
def mode(request):
    return request.param
