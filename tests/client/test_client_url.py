import pytest

from rsrv.client.channels import ChannelOptions
from rsrv.client.url import Address, parse_url
from rsrv.core.errors import UsageError


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("example.org:8001", Address("example.org:8001", secure=False, local=False)),
        ("grpc://example.org:8001", Address("example.org:8001", secure=False, local=False)),
        ("HTTP://Example.org:8001/", Address("Example.org:8001", secure=False, local=False)),
        ("grpcs://example.org:443", Address("example.org:443", secure=True, local=False)),
        ("https://example.org:443", Address("example.org:443", secure=True, local=False)),
        ("127.0.0.1:1", Address("127.0.0.1:1", secure=False, local=True)),
        ("localhost:65535", Address("localhost:65535", secure=False, local=True)),
        ("[::1]:8001", Address("[::1]:8001", secure=False, local=True)),
        ("grpcs://[fe80::1%eth0]:8001", Address("[fe80::1%eth0]:8001", secure=True, local=False)),
        ("unix:/run/rsrv.sock", Address("unix:/run/rsrv.sock", secure=False, local=True)),
        ("unix:///run/rsrv.sock", Address("unix:///run/rsrv.sock", secure=False, local=True)),
    ],
)
def test_every_documented_form_is_understood(url, address):
    assert parse_url(url) == address


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost",
        "localhost:",
        ":8001",
        "localhost:http",
        "localhost:0",
        "localhost:65536",
        "localhost:-1",
        "ftp://localhost:8001",
        "://localhost:8001",
        "grpc://localhost",
        "grpc://localhost:8001/path",
        "grpc://user@localhost:8001",
        "::1:8001",
        "[::1]",
        "local host:8001",
        "unix:",
    ],
)
def test_anything_else_is_refused_with_the_url_in_the_text(url):
    with pytest.raises(UsageError, match="invalid gRPC URL") as caught:
        parse_url(url)
    assert repr(url) in caught.value.message
    assert caught.value.exit_code == 2


def test_message_limits_come_from_the_argument_then_our_variables_then_the_older_ones():
    older = {"REACTANT_CLIENT_GRPC_MAX_SEND_MSG_BYTES": "7", "REACTANT_CLIENT_GRPC_MAX_RECV_MSG_BYTES": "8"}
    ours = {**older, "RSRV_CLIENT_GRPC_MAX_SEND_MSG_BYTES": "5"}

    def limits(**options):
        built = ChannelOptions.build("h:1", **options)
        return built.max_send_bytes, built.max_receive_bytes

    assert limits(environ={}) == (536870912, 536870912)
    assert limits(environ=older) == (7, 8)
    assert limits(environ=ours) == (5, 8)
    assert limits(environ=ours, max_send_message_length=3, max_receive_message_length=4) == (3, 4)


def test_a_message_limit_that_is_no_number_names_its_variable():
    with pytest.raises(UsageError, match="RSRV_CLIENT_GRPC_MAX_RECV_MSG_BYTES='4MB'"):
        ChannelOptions.build("h:1", environ={"RSRV_CLIENT_GRPC_MAX_RECV_MSG_BYTES": "4MB"})


def test_certificates_need_tls_and_a_key_needs_its_certificate():
    with pytest.raises(UsageError, match="not a TLS address"):
        ChannelOptions.build("h:1", root_certificates=b"pem")
    with pytest.raises(UsageError, match="together"):
        ChannelOptions.build("grpcs://h:1", client_key=b"pem")
    assert ChannelOptions.build("h:1", secure=True, root_certificates=b"pem").secure
    assert not ChannelOptions.build("grpcs://h:1", secure=False).secure
