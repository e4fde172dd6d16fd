import pytest

from rsrv.client.status import _parse
from rsrv.core.errors import UsageError


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        ("127.0.0.1", (False, "127.0.0.1", 8002)),
        ("worker:9000", (False, "worker", 9000)),
        ("http://worker:9000/", (False, "worker", 9000)),
        ("https://worker", (True, "worker", 8002)),
        ("[::1]:7", (False, "::1", 7)),
    ],
)
def test_the_address_of_the_http_port_has_a_default_port(url, parsed):
    assert _parse(url) == parsed


@pytest.mark.parametrize("url", ["", "unix:path", "grpc://a:1", "a:b", "a:0", "a:99999", "a/b"])
def test_other_addresses_are_wrong_usage(url):
    with pytest.raises(UsageError):
        _parse(url)
