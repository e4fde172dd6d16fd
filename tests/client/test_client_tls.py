import shutil
import subprocess

import numpy as np
import pytest
from support.client_stub import StubServer

from rsrv.client import KServeModel, Server
from rsrv.core.errors import ServerUnreachable

X = np.float32([[1, 2, 3, 4]])


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    files = ["-addext", "subjectAltName=DNS:localhost", "-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    subprocess.run(["openssl", *options.split(), *files], check=True, capture_output=True)
    return (folder / "key.pem").read_bytes(), (folder / "cert.pem").read_bytes()


def test_calls_go_over_tls_and_trust_the_given_root(certificate):
    stub = StubServer()
    url = "grpcs://" + stub.listen_with_tls(*certificate)
    with stub:
        with KServeModel(url, "twice", shared_memory="off", root_certificates=certificate[1]) as model:
            np.testing.assert_array_equal(model.infer({"x": X})["y"], 2 * X)
        with Server(url, root_certificates=certificate[1]) as server:
            assert server.live()


def test_a_server_with_an_unknown_certificate_is_not_talked_to(certificate):
    stub = StubServer()
    url = "grpcs://" + stub.listen_with_tls(*certificate)
    with (
        stub,
        KServeModel(url, "twice", shared_memory="off", deadline=5) as model,
        pytest.raises(ServerUnreachable),
    ):
        model.infer({"x": X})
    assert stub.requests == []
