import glob

import pytest


@pytest.fixture(autouse=True)
def _nothing_is_left_in_shared_memory():
    before = set(glob.glob("/dev/shm/*"))
    yield
    left = {path for path in glob.glob("/dev/shm/*") if "rsrv" in path or "test-" in path} - before
    assert not left
