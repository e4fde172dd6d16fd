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
