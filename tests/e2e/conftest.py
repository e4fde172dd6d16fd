import os

import pytest
from support.leftovers import in_shared_memory, left_since


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    return tmp_path_factory.mktemp("programs") / "cache"


@pytest.fixture(scope="module", autouse=True)
def _servers_share_what_they_have_compiled(compiled):
    """Those that are given no cache of their own: few of these tests are about compiling, and all need programs."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RSRV_WORKER_CACHE_DIR", str(compiled))
        yield


@pytest.fixture(autouse=True)
def _nothing_is_left_in_shared_memory():
    """Where several processes test at a time, tests/conftest.py looks once, at the end: another test may be killing
    its clients meanwhile, and sweeps up after them later."""
    before = in_shared_memory()
    yield
    if "PYTEST_XDIST_WORKER" not in os.environ:
        assert left_since(before) == []
