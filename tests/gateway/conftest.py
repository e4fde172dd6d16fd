"""A proxy in this process in front of scripted workers."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from support.gateway_site import Site


@pytest.fixture
def make_site():
    """`make_site(2, cap=3)`: a `Site` with so many mock workers."""
    with ExitStack() as stack:
        yield lambda count=2, **options: Site(stack, count, **options)
