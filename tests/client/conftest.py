import pytest
from support.client_stub import StubServer, own_shared_memory


@pytest.fixture
def server():
    with StubServer() as running:
        yield running


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
