"""TLS with certificates made here: an authority, a server, a client, and others that do not fit."""

import shutil
import subprocess

import numpy as np
import pytest
from support.client_stub import StubServer

from rsrv.client import KServeModel, Server
from rsrv.client.failures import answered_by_server
from rsrv.core.errors import Code, ServerUnreachable, TlsFailed, UsageError

X = np.float32([[1, 2, 3, 4]])


class Certificates:
    """`key` and `certificate` of a name that `issue` made, as PEM bytes."""

    def __init__(self, folder):
        self._folder = folder

    def issue(self, name, *, by=None, host="localhost"):
        options = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
        options += ["-subj", f"/CN={name}", "-keyout", self._path(name, "key"), "-out", self._path(name, "pem")]
        if by is not None:
            options += ["-CA", self._path(by, "pem"), "-CAkey", self._path(by, "key")]
            options += ["-addext", "basicConstraints=critical,CA:FALSE", "-addext", f"subjectAltName=DNS:{host}"]
        subprocess.run(["openssl", *options], check=True, capture_output=True)

    def key(self, name):
        return self._path(name, "key").read_bytes()

    def certificate(self, name):
        return self._path(name, "pem").read_bytes()

    def _path(self, name, suffix):
        return self._folder / f"{name}.{suffix}"


@pytest.fixture(scope="module")
def pem(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make certificates")
    made = Certificates(tmp_path_factory.mktemp("tls"))
    made.issue("authority")
    made.issue("stranger")
    made.issue("server", by="authority")
    made.issue("elsewhere", by="authority", host="example.org")
    made.issue("client", by="authority")
    made.issue("intruder", by="stranger")
    return made


@pytest.fixture
def listen(pem):
    """Starts a TLS server with the certificate of a name; gives its URL."""
    stubs = []

    def listen(name="server", clients=None):
        stub = StubServer()
        url = "grpcs://" + stub.listen_with_tls(pem.key(name), pem.certificate(name), clients)
        stubs.append(stub.__enter__())
        return url

    yield listen
    for stub in stubs:
        stub.stop()


def refused(url, **options):
    """The error of a call that no server gets; it comes at once, for there is time for many attempts."""
    with Server(url, timeout=20, **options) as server, pytest.raises(ServerUnreachable) as caught:
        server.live()
    return caught.value


def test_calls_go_over_tls_and_trust_the_given_root(pem, listen):
    url = listen()
    with KServeModel(url, "twice", shared_memory="off", root_certificates=pem.certificate("authority")) as model:
        np.testing.assert_array_equal(model.infer({"x": X})["y"], 2 * X)
    with Server(url, root_certificates=pem.certificate("authority")) as server:
        assert server.live()


def test_one_root_of_several_is_enough(pem, listen):
    roots = pem.certificate("stranger") + pem.certificate("authority")
    with Server(listen(), root_certificates=roots) as server:
        assert server.live()


@pytest.mark.parametrize("root", ["stranger", None])
def test_a_server_with_an_unknown_certificate_is_not_talked_to(pem, listen, root):
    url = listen()
    error = refused(url, root_certificates=None if root is None else pem.certificate(root))
    assert isinstance(error, TlsFailed)
    assert (error.code, error.reason, error.exit_code) == (Code.UNAVAILABLE, "tls", 3)
    assert url.removeprefix("grpcs://") in error.message
    assert "root_certificates" in error.hint
    assert answered_by_server(error)


def test_a_request_over_an_impossible_connection_is_not_tried_again(pem, listen):
    with KServeModel(listen(), "twice", shared_memory="off", deadline=30) as model:
        with pytest.raises(TlsFailed) as caught:
            model.infer({"x": X})
        assert not hasattr(caught.value, "__notes__")


def test_a_certificate_for_another_host_is_not_trusted(pem, listen):
    error = refused(listen("elsewhere"), root_certificates=pem.certificate("authority"))
    assert isinstance(error, TlsFailed)
    assert "name for which its certificate was made" in error.hint


def test_a_client_certificate_opens_a_server_that_wants_one(pem, listen):
    url = listen(clients=pem.certificate("authority"))
    options = {"client_key": pem.key("client"), "client_cert": pem.certificate("client")}
    with Server(url, root_certificates=pem.certificate("authority"), **options) as server:
        assert server.live()


@pytest.mark.parametrize("client", [None, "intruder"])
def test_without_the_right_client_certificate_the_hint_asks_for_it(pem, listen, client):
    options = {} if client is None else {"client_key": pem.key(client), "client_cert": pem.certificate(client)}
    url = listen(clients=pem.certificate("authority"))
    error = refused(url, root_certificates=pem.certificate("authority"), **options)
    assert "certificate of the client" in error.hint


def test_tls_to_a_server_without_it_and_the_other_way_round_each_say_which_scheme_to_write(pem, listen, server):
    error = refused(f"grpcs://localhost:{server.port}", root_certificates=pem.certificate("authority"))
    assert isinstance(error, TlsFailed)
    assert "grpc://" in error.hint
    error = refused(listen().replace("grpcs", "grpc"))
    assert "grpcs://" in error.hint


def test_a_key_of_another_certificate_is_an_error_with_a_hint(pem, listen):
    options = {"client_key": pem.key("server"), "client_cert": pem.certificate("client")}
    error = refused(listen(), root_certificates=pem.certificate("authority"), **options)
    assert isinstance(error, TlsFailed)
    assert "the key has to be the certificate's" in error.hint


@pytest.mark.parametrize("option", ["root_certificates", "client_cert", "client_key"])
@pytest.mark.parametrize("given", [b"secret rubbish", b"", "the/path.pem"])
def test_what_is_no_pem_is_refused_before_anything_is_sent_and_not_shown(pem, option, given):
    options = {"client_key": pem.key("client"), "client_cert": pem.certificate("client")}
    with pytest.raises(UsageError, match=option) as caught:
        Server("grpcs://localhost:1", **{**options, option: given})
    assert "secret" not in caught.value.message
    assert "PEM" in caught.value.message
