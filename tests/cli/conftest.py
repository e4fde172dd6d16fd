import pytest
from support.audits import audit_process_of_the_file, one_audit_process  # noqa: F401
from support.client_stub import StubServer

from rsrv.cli import output


@pytest.fixture
def stub():
    with StubServer() as running:
        yield running


@pytest.fixture(autouse=True)
def human_mode():
    yield
    output.set_mode("human")
    output.set_debug(False)
