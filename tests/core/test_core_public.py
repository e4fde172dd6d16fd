"""The public list of rsrv.core."""

import rsrv.core
from rsrv.core import errors, shm, wire


def test_every_error_is_listed():
    kinds = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert kinds <= set(rsrv.core.__all__)


def test_every_name_of_the_wire_codec_is_listed():
    assert set(wire.__all__) <= set(rsrv.core.__all__)


def test_listed_names_are_the_objects_of_their_modules():
    assert rsrv.core.parse_request is wire.parse_request
    assert rsrv.core.RegionRegistry is shm.RegionRegistry
    assert rsrv.core.InvalidRequest is errors.InvalidRequest
    assert all(hasattr(rsrv.core, name) for name in rsrv.core.__all__)
