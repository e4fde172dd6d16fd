import pytest
from residency_support import NBYTES, Site
from store_support import written

from rsrv.serve.scheduler import dispatch


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
