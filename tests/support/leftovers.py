"""What tests leave in shared memory."""

import glob
import re

import psutil


def in_shared_memory():
    """The paths of all objects of rsrv there are now, whoever made them."""
    return set(glob.glob("/dev/shm/*rsrv*"))


def left_since(before):
    """Those that are new, but for what a living process has that is not ours: somebody else may test meanwhile."""
    return sorted(path for path in in_shared_memory() - before if not _in_use_elsewhere(path))


def _in_use_elsewhere(path):
    owner = re.search(r"rsrv-[a-z-]+-(\d+)-[0-9a-f]{16}$", path)
    if owner is None or not psutil.pid_exists(pid := int(owner[1])):
        return False
    me = psutil.Process()
    return pid != me.pid and pid not in {child.pid for child in me.children(recursive=True)}
