import pytest
from residency_support import NBYTES, Site
from sched_support import Clock, FakeDevice
from store_support import written

from rsrv.serve.scheduler import Policy, Scheduler, batch, dispatch


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Threads that give way have all the time that a busy machine takes to let them end: tests look for them."""
    monkeypatch.setattr("rsrv.core.niceness._LEFT_BEHIND_SECONDS", 60.0)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Makes sites, with a budget in models, and closes them."""
    sites = []
    # A gate in a quick program would hold the dispatch thread.
    monkeypatch.setattr(dispatch, "QUICK_NS", 0)

    def make(budget=10, **options):
        sites.append(Site(tmp_path, round(budget * NBYTES), **options))
        return sites[-1]

    yield make
    for each in sites:
        each.close()


@pytest.fixture(params=[True, False], ids=["unified", "card"])
def either(site, request):
    def make(budget=10, **options):
        return site(budget, unified=request.param, **options)

    return make


@pytest.fixture
def shm(tmp_path):
    """The directory of shared regions, in the place of /dev/shm."""
    directory = tmp_path / "shm"
    directory.mkdir()
    return directory


@pytest.fixture
def file(tmp_path):
    """The weights that a shared store is asked for."""
    return written(tmp_path / "w.safetensors")


# --- schedulers; modules with other needs have their own of the same names --------------------------------------------


@pytest.fixture
def device():
    device = FakeDevice()
    yield device
    assert device.most_at_once <= 1


@pytest.fixture
def no_small(monkeypatch):
    """Even the smallest batch lies in a pooled block, where a mistake in giving it back shows."""
    monkeypatch.setattr(batch, "SMALL_BYTES", 0)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def make(device, clock):
    """Schedulers of any policy."""
    made = []

    def make(**settings):
        scheduler = Scheduler(device, Policy(**{"discipline": "fifo", "max_queue_depth": 64, **settings}), clock=clock)
        made.append(scheduler)
        return scheduler

    yield make
    for scheduler in made:
        scheduler.stop()
        assert scheduler._dispatcher.pool.lent == 0, "a staged block was not given back"
        assert not scheduler._backlog.roster.closing, "an incarnation is never finished"


@pytest.fixture
def scheduler(make):
    return make()
