"""Makes ``tests/`` importable, so that every room can use ``from support.… import …``; sees at the end what is left."""

import glob
import re

import psutil

_before = set()


def pytest_collection_modifyitems(items):
    """The files with slow tests first: at the end, a process that runs one of them is alone."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_sessionstart(session):
    _before.update(glob.glob("/dev/shm/*rsrv*"))


def pytest_sessionfinish(session):
    """Fail a run that leaves something in shared memory; of several processes, the one that steers them looks."""
    if hasattr(session.config, "workerinput"):
        return
    left = sorted(path for path in set(glob.glob("/dev/shm/*rsrv*")) - _before if not _in_use_elsewhere(path))
    if left:
        session.config.get_terminal_writer().line(f"\nleft in shared memory: {', '.join(left)}", red=True)
        session.exitstatus = 1


def _in_use_elsewhere(path):
    """Whether it belongs to a process that lives and is not ours: somebody else may run servers meanwhile."""
    owner = re.search(r"rsrv-[a-z-]+-(\d+)-[0-9a-f]{16}$", path)
    if owner is None or not psutil.pid_exists(pid := int(owner[1])):
        return False
    me = psutil.Process()
    return pid != me.pid and pid not in {child.pid for child in me.children(recursive=True)}
