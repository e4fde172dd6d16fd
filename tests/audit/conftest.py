from collections.abc import Iterator

import pytest

from rsrv.audit.programs import parse_pool
from rsrv.runtime import CompilePool


@pytest.fixture(scope="module")
def pool() -> Iterator[CompilePool]:
    with parse_pool() as pool:
        yield pool
