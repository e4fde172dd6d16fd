from __future__ import annotations

import pytest

from rsrv.core.errors import ExportError, UsageError
from rsrv.export.usercode import user_code


def failing() -> None:
    error = ValueError("two\nlines")
    error.add_note("the user's own note")
    error.add_note("--------\nFor simplicity, JAX has removed its internal frames from the traceback.")
    raise error


def test_an_exception_is_told_with_its_text_its_notes_and_the_users_frames() -> None:
    with pytest.raises(ExportError) as raised, user_code("loading", hint="look there"):
        failing()
    text = raised.value.message
    assert text.startswith("loading raised ValueError: two\nlines\nthe user's own note\n")
    assert "JAX has removed" not in text
    assert f'File "{__file__}"' in text
    assert "in failing" in text
    assert "rsrv/export" not in text
    assert raised.value.hint == "look there"
    assert isinstance(raised.value.__cause__, ValueError)


def test_errors_of_rsrv_pass_through_unchanged() -> None:
    with pytest.raises(UsageError, match="plain"), user_code("loading"):
        raise UsageError("plain")


def test_an_exception_from_deep_inside_a_package_keeps_the_frame_that_called_it() -> None:
    import json

    with pytest.raises(ExportError) as raised, user_code("parsing"):
        json.loads("{")
    assert "json.loads(" in raised.value.message
    assert "decoder.py" not in raised.value.message
