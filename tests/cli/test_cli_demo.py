"""Parts of ``rsrv demo`` that need no server; the whole of it is in tests/e2e."""

import pytest

from rsrv.cli.demo_model import SOURCE
from rsrv.cli.local_server import LocalServer
from rsrv.cli.main import main
from rsrv.core.errors import RsrvError


def test_a_server_that_does_not_start_is_reported_with_what_it_said(tmp_path):
    log = tmp_path / "server.log"
    with LocalServer(tmp_path / "nowhere", log) as server, pytest.raises(RsrvError, match="exited with 2") as caught:
        server.wait_ready()
    assert "no such directory" in caught.value.message
    assert "nowhere" in log.read_text()


def test_keep_does_not_overwrite_a_directory(tmp_path, capsys):
    assert main(["demo", "--keep", str(tmp_path)]) == 2
    assert f"{tmp_path} exists already" in capsys.readouterr().err


def test_the_models_source_compiles_and_reads_its_own_digits():
    names = {}
    exec(compile(SOURCE, "digits.py", "exec"), names)
    pixels, digits = names["images"](200, seed=5)
    assert pixels.shape == (200, 8, 8)
    read = names["reference"](pixels)["digit"]
    assert (read == digits).mean() > 0.95
