"""How errors become statuses, apart from any engine."""

import grpc
import pytest

from rsrv.core.errors import Code, InvalidRequest, RsrvError, ServerStopping
from rsrv.rpc import error_trailers, status_of
from rsrv.rpc.grpcio_call import STATUS


def test_every_code_has_grpcios_status_of_the_same_number_and_name():
    assert set(STATUS) == set(Code)
    assert all(STATUS[code].value[0] == int(code) and STATUS[code].name == code.name for code in Code)
    assert len(STATUS) == len(grpc.StatusCode)


def test_the_trailers_carry_the_reason():
    assert error_trailers(ServerStopping("x")) == {"rsrv-reason": "stopping"}
    assert error_trailers(ValueError("secret")) == {"rsrv-reason": "internal"}


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (InvalidRequest("m"), Code.INVALID_ARGUMENT, "m"),
        (InvalidRequest("m", hint="h"), Code.INVALID_ARGUMENT, "m (h)"),
        (RsrvError("m", code=Code.OK), Code.INTERNAL, "m"),
        (ValueError("secret"), Code.INTERNAL, "internal error"),
        (KeyboardInterrupt(), Code.INTERNAL, "internal error"),
    ],
)
def test_the_text_is_message_and_hint_or_nothing_of_an_unknown_error(error, code, text):
    status = status_of(error)
    assert (status.code, status.text) == (code, text)


@pytest.mark.parametrize(
    ("character", "kept"), [("a", 4096), ("é", 682), ("€", 455), ("😀", 341), ("%", 1365), ("\n", 1365)]
)
def test_a_text_is_cut_by_what_it_takes_percent_encoded(character, kept):
    text = status_of(InvalidRequest(character * 10_000)).text
    assert text == character * kept + " …"
    assert status_of(InvalidRequest(character * 300)).text == character * 300
