from collections.abc import Iterator

import pytest
from support.audits import audit_process_of_the_file, one_audit_process  # noqa: F401

from rsrv.audit.programs import parse_pool
from rsrv.runtime import CompilePool, PjrtDevice


@pytest.fixture(scope="module")
def pool() -> Iterator[CompilePool]:
    with parse_pool() as pool:
        yield pool


@pytest.fixture(scope="module")
def device() -> Iterator[PjrtDevice]:
    device = PjrtDevice("cpu")
    yield device
    device.close()
