"""Makes ``tests/`` importable, so that every room can use ``from support.… import …``; sees at the end what is left."""

from importlib.util import find_spec

from support.leftovers import in_shared_memory, left_since

if find_spec("hypothesis"):  # tests/gpu run without it
    from hypothesis import HealthCheck, settings

    # How long an example takes says how busy the machine is, and nothing about the property.
    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")

_before = set()


def pytest_collection_modifyitems(items):
    """The files with slow tests first: at the end, a process that runs one of them is alone."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_sessionstart(session):
    _before.update(in_shared_memory())


def pytest_sessionfinish(session):
    """Fail a run that leaves something in shared memory; of several processes, the one that steers them looks."""
    if hasattr(session.config, "workerinput"):
        return
    if left := left_since(_before):
        session.config.get_terminal_writer().line(f"\nleft in shared memory: {', '.join(left)}", red=True)
        session.exitstatus = 1
