import glob
import re

import psutil
import pytest


@pytest.fixture(autouse=True)
def _nothing_is_left_in_shared_memory():
    before = set(glob.glob("/dev/shm/*"))
    yield
    left = {path for path in glob.glob("/dev/shm/*") if "rsrv" in path} - before
    assert not {path for path in left if not _in_use_elsewhere(path)}


def _in_use_elsewhere(path: str) -> bool:
    """Whether it belongs to a process that lives and is not ours: other tests run beside these."""
    owner = re.search(r"rsrv-[a-z-]+-(\d+)-[0-9a-f]{16}$", path)
    if owner is None or not psutil.pid_exists(pid := int(owner[1])):
        return False
    me = psutil.Process()
    return pid != me.pid and pid not in {child.pid for child in me.children(recursive=True)}
