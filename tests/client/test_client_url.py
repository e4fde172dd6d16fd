import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import grpc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.client_stub import StubServer

from rsrv.client import Server
from rsrv.client.channels import ChannelOptions
from rsrv.client.connection import Connection
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
        ("[0:0:0:0:0:0:0:1]:1/", Address("[0:0:0:0:0:0:0:1]:1", secure=False, local=True)),
        ("[2001:db8::7]:1", Address("[2001:db8::7]:1", secure=False, local=False)),
        ("[fe80::1%br-0.100]:1", Address("[fe80::1%br-0.100]:1", secure=False, local=False)),
        ("127.8.9.1:1", Address("127.8.9.1:1", secure=False, local=True)),
        ("127.example.org:1", Address("127.example.org:1", secure=False, local=False)),
        ("my_host-1:08001", Address("my_host-1:8001", secure=False, local=False)),
        ("LocalHost:1", Address("LocalHost:1", secure=False, local=True)),
        ("unix:rsrv.sock", Address("unix:rsrv.sock", secure=False, local=True)),
        ("unix:/a b/100%?#", Address("unix:/a%20b/100%25%3F%23", secure=False, local=True)),
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
        "unix://",
        "unix://relative/path",
        "unix:/a,b",
        "unix:/a\0b",
        "unix:/\ud800",
        "unix:/" + 107 * "a",
        "unix:/" + 54 * "é",
        "UNIX:/run/rsrv.sock",
        "[::1]:",
        "[::1]:0",
        "[:::::]:1",
        "[1.2.3.4]:1",
        "[fe80::1%]:1",
        "[fe80::1%a b]:1",
        "[localhost]:1",
        "256.0.0.1:1",
        "1.2.3:1",
        "localhost:\u0661",
        "loc\0alhost:1",
        "münchen.example:1",
        "localhost:1\n",
        " localhost:1",
        "localhost:1,localhost:2",
        "dns:///localhost:1",
        "localhost:1?x=1",
    ],
)
def test_anything_else_is_refused_with_the_url_in_the_text(url):
    with pytest.raises(UsageError, match="invalid gRPC URL") as caught:
        parse_url(url)
    assert repr(url) in caught.value.message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("url", [None, 8001, b"localhost:1", ["localhost:1"]])
def test_what_is_no_text_is_refused_by_its_type(url):
    with pytest.raises(UsageError, match=f"not {type(url).__name__}"):
        parse_url(url)


_PIECES = st.sampled_from(
    ["grpc", "grpcs", "HTTP", "unix", ":", "://", "//", "/", "[", "]", "::1", "%", "@", ".", "-", "0", "8001", "99999"]
)


@settings(deadline=None)
@given(
    st.lists(_PIECES | st.text(max_size=3), max_size=8).map("".join)
    | st.builds("{}{}:{}".format, st.sampled_from(["", "grpc://", "grpcs://"]), st.text(max_size=6), st.integers())
)
@example("")
def test_any_text_is_either_an_address_that_stays_the_same_or_an_error_that_shows_it(text):
    try:
        address = parse_url(text)
    except UsageError as refusal:
        error = refusal
    else:
        error = None
    if error is not None:
        assert repr(text) in error.message
        assert error.hint
        return
    assert re.fullmatch(r"[\x21-\x7e]+", address.target)
    if not address.target.startswith("unix:"):
        assert parse_url(address.target) == Address(address.target, secure=False, local=address.local)
        assert 1 <= int(address.target.rpartition(":")[2]) <= 65535


def test_a_socket_whose_path_has_blanks_and_signs_is_reached_by_its_plain_path(tmp_path):
    path = f"{tmp_path}/a b%20?#é"
    with StubServer("unix:" + quote(path)), Server(f"unix:{path}") as plain, Server(f"unix://{path}") as triple:
        assert plain.live()
        assert triple.live()


def test_an_ipv6_address_is_reached():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    with StubServer("[::1]:0") as stub, Server(f"grpc://[::1]:{stub.also_ports[0]}") as server:
        assert server.live()


class Meeting(grpc.GenericRpcHandler):
    """Answers when as many calls as the barrier wants are there, each with the address that it came from."""

    def __init__(self, parties):
        self._barrier = threading.Barrier(parties)

    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(self._answer)

    def _answer(self, body, context):
        self._barrier.wait(20)
        return context.peer().encode()


@pytest.fixture
def meeting():
    pool = ThreadPoolExecutor(64)
    server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((Meeting(64),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()
    pool.shutdown()


def test_one_channel_carries_as_many_calls_as_the_server_takes(meeting):
    options = ChannelOptions.build(meeting)
    first, second = Connection(options), Connection(options)
    with ThreadPoolExecutor(64) as threads:
        calls = [threads.submit(handle.call, "Meet", b"", 30.0) for handle in (first, second) for _ in range(32)]
        peers = {call.result() for call in calls}
    first.close()
    second.close()
    assert len(peers) == 1


def test_own_channels_to_one_target_stay_apart_and_are_never_closed(meeting):
    options = ChannelOptions.build(meeting)
    channels = [grpc.insecure_channel(meeting, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(4)]
    handles = [Connection(options, channel=channel) for channel in channels]

    def meet():
        with ThreadPoolExecutor(64) as threads:
            calls = [threads.submit(handle.call, "Meet", b"", 30.0) for handle in handles for _ in range(16)]
            return {call.result() for call in calls}

    assert len(meet()) == 4
    for handle in handles:
        handle.close()
    handles = [Connection(options, channel=channel) for channel in channels]
    assert len(meet()) == 4
    for channel in channels:
        channel.close()


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


VARIABLES = [f"{older}_CLIENT_GRPC_MAX_{way}_MSG_BYTES" for older in ("RSRV", "REACTANT") for way in ("SEND", "RECV")]


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("value", ["4MB", "1.5", "0", "-1", "2147483648", " "])
def test_a_message_limit_that_is_none_names_its_variable_and_value(variable, value):
    with pytest.raises(UsageError, match=f"^{variable}='{value}' is not"):
        ChannelOptions.build("h:1", environ={variable: value})


@pytest.mark.parametrize("option", ["max_send_message_length", "max_receive_message_length"])
@pytest.mark.parametrize("value", [0, -1, 2**31, 1.5, True, "512"])
def test_a_message_limit_that_is_no_number_of_bytes_is_refused_whatever_the_environment_says(option, value):
    with pytest.raises(UsageError, match=f"^{option}={value!r} is not"):
        ChannelOptions.build("h:1", **{option: value}, environ=dict.fromkeys(VARIABLES, "5"))


def test_an_empty_variable_and_one_that_an_argument_outranks_are_not_looked_at():
    assert ChannelOptions.build("h:1", environ=dict.fromkeys(VARIABLES, "")).max_send_bytes == 512 << 20
    built = ChannelOptions.build("h:1", environ={VARIABLES[0]: "rubbish"}, max_send_message_length=9)
    assert built.max_send_bytes == 9
    assert ChannelOptions.build("h:1", max_send_message_length=2**31 - 1).open().close() is None


def test_certificates_need_tls_and_a_key_needs_its_certificate():
    with pytest.raises(UsageError, match="not a TLS address"):
        ChannelOptions.build("h:1", root_certificates=b"pem")
    with pytest.raises(UsageError, match="together"):
        ChannelOptions.build("grpcs://h:1", client_key=b"pem")
    root = b"-----BEGIN CERTIFICATE-----"
    assert ChannelOptions.build("h:1", secure=True, root_certificates=root).secure
    assert not ChannelOptions.build("grpcs://h:1", secure=False).secure
