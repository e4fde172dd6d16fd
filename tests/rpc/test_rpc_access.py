"""The bearer token, and what tells a page of somebody else from an administrator."""

import pytest

from rsrv.core.errors import ConfigError, ForeignOrigin, Unauthenticated
from rsrv.rpc.access import BearerToken, read_token, require_own_host, require_same_origin
from rsrv.rpc.listen import is_loopback


@pytest.mark.parametrize("header", ["Bearer s3cret", "bearer s3cret", "BEARER  s3cret "])
def test_the_token_of_the_server_is_let_in(header):
    BearerToken("s3cret").require(header)


@pytest.mark.parametrize(
    "header",
    [None, "", "s3cret", "Basic s3cret", "Bearer", "Bearer s3cre", "Bearer s3cret2", "Bearer é", "Bearer \udcff"],
)
def test_any_other_is_not_and_the_error_does_not_say_what_it_should_be(header):
    with pytest.raises(Unauthenticated) as caught:
        BearerToken("s3cret").require(header)
    assert "s3cret" not in caught.value.message
    assert "endpoints.admin_token_file" in caught.value.hint


def test_a_token_file_may_end_in_a_new_line(tmp_path):
    file = tmp_path / "token"
    file.write_text("  s3cret\n")
    read_token(str(file)).require("Bearer s3cret")
    assert read_token(None) is None


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", "schlüssel".encode(), b"\xff\xfe", b"a\nb"])
def test_a_file_without_a_token_is_a_configuration_error(tmp_path, content):
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"endpoints.admin_token_file: {file}"):
        BearerToken.read(str(file))


def test_a_missing_token_file_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        BearerToken.read(str(tmp_path / "none"))


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "localhost.", "127.0.0.1", "127.8.9.10", "::1", "[::1]"])
def test_loopback_addresses_are_known(host):
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["", "0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "example.org", "127.0.0.1.example.org"]
)
def test_others_are_not_loopback(host):
    assert not is_loopback(host)


@pytest.mark.parametrize(
    "header",
    [
        "localhost",
        "localhost:8002",
        "LocalHost:1",
        "localhost.",
        "127.0.0.1",
        "127.0.0.1:8002",
        "127.1.2.3:99",
        "[::1]",
        "[::1]:8002",
    ],
)
def test_a_server_on_loopback_is_called_by_a_loopback_address(header):
    require_own_host(header, "127.0.0.1")
    require_own_host(header, "::1")


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "evil.example",
        "evil.example:8002",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.1:x",
        "::1",
        "[::1",
        "[::1]x",
        "10.0.0.1",
        "user@localhost",
    ],
)
def test_a_name_of_somebody_else_is_refused_on_loopback(header):
    with pytest.raises(ForeignOrigin, match="the header Host is") as caught:
        require_own_host(header, "127.0.0.1")
    assert caught.value.code.http_status == 403


def test_on_another_address_any_name_may_be_the_servers():
    for configured in ("0.0.0.0", "10.0.0.1", "gpu7", ""):
        require_own_host("anything.example:80", configured)
        require_own_host(None, configured)


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        (None, "localhost:8002"),
        ("http://localhost:8002", "localhost:8002"),
        ("http://LOCALHOST:8002", "localhost:8002"),
        ("https://gpu7", "gpu7"),
    ],
)
def test_the_servers_own_origin_is_let_in(origin, host):
    require_same_origin(origin, host)


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "http://localhost:3000", "null", "", "http://[::1", "file://"]
)
def test_another_origin_is_refused_also_one_on_the_same_machine(origin):
    with pytest.raises(ForeignOrigin, match="page of"):
        require_same_origin(origin, "localhost:8002")
