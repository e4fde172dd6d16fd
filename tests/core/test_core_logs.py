"""The log as lines of text and of JSON."""

import json
import logging
import sys

import pytest

from rsrv.core.logs import JsonFormatter, TextFormatter, held, let_go, set_up_logging


@pytest.fixture
def root():
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield root
    root.handlers[:], root.level = before


def record(text="hello %s", *args, exc_info=None):
    made = logging.LogRecord("rsrv.x", logging.WARNING, "f.py", 1, text, args or ("é",), exc_info)
    made.created, made.msecs = 1.25, 250.0
    return made


def test_a_record_is_one_line_of_json():
    line = JsonFormatter().format(record())
    expected = {"time": "1970-01-01T00:00:01.250Z", "level": "warning", "logger": "rsrv.x", "message": "hello é"}
    assert json.loads(line) == expected
    assert "\n" not in JsonFormatter().format(record("two\n%s"))


def test_an_exception_is_in_its_record():
    try:
        raise ValueError("no")
    except ValueError:
        fields = json.loads(JsonFormatter().format(record(exc_info=sys.exc_info())))
    assert fields["exception"].endswith("ValueError: no")


def test_what_a_client_wrote_begins_no_line_of_text():
    line = TextFormatter().format(record("id=%s", "a\n1970 ERROR forged\x1b[2J\r"))
    assert line.endswith("WARNING rsrv.x id=a\\x0a1970 ERROR forged\\x1b[2J\\x0d")
    try:
        raise ValueError("no")
    except ValueError:
        text = TextFormatter().format(record(exc_info=sys.exc_info()))
    assert text.splitlines()[1].startswith("Traceback")


@pytest.mark.parametrize("style", ["json", "text"])
def test_the_log_is_set_up_anew_in_its_style(style, root, capsys):
    set_up_logging("warning", style)
    logging.getLogger("rsrv.x").warning("told")
    logging.getLogger("rsrv.x").info("not told")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("{") is (style == "json")
    assert "told" in line


def test_what_is_held_comes_when_it_is_let_go_as_far_as_it_is_wanted(root, capsys):
    with held() as records:
        logging.getLogger("rsrv.x").info("one")
        logging.getLogger("rsrv.x").warning("two")
    assert capsys.readouterr().err == ""
    set_up_logging("warning")
    let_go(records)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("WARNING rsrv.x two")
