from collections.abc import Iterator

import pytest

from rsrv.runtime import CompilePool, PjrtDevice


@pytest.fixture(scope="session")
def cpu() -> Iterator[PjrtDevice]:
    device = PjrtDevice("cpu")
    yield device
    device.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[CompilePool]:
    with CompilePool(timeout_seconds=120.0) as pool:
        yield pool
