"""The end of a process that served: its exit code, what still runs then, and what cannot keep it."""

import subprocess
import sys

import pytest

from rsrv.cli import foreground
from rsrv.cli.main import main

BEGIN = """
import atexit, sys, threading
from rsrv.cli import foreground
class Last:
    def __del__(self):
        print("taken apart")
last = Last()
"""


def run(code):
    command = [sys.executable, "-c", BEGIN + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_process_that_served_runs_its_exit_functions_and_takes_no_interpreter_apart():
    ended = run("foreground.serves(); atexit.register(print, 'exit function'); foreground.end_soon(75); sys.exit(75)")
    assert (ended.returncode, ended.stdout, ended.stderr) == (75, "exit function\n", "")


def test_what_hooks_have_written_and_not_closed_is_kept(tmp_path):
    paths = tmp_path / "text", tmp_path / "bytes", tmp_path / "closed"
    opened = "; ".join(
        f"{name} = open({str(path)!r}, {mode!r})"
        for name, path, mode in zip(("text", "raw", "closed"), paths, ("w", "wb", "w"), strict=True)
    )
    written = "print('kept', file=text); raw.write(b'kept'); closed.close()"
    ended = run(f"foreground.serves(); {opened}; {written}; foreground.end_soon(0)")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [path.read_text() for path in paths] == ["kept\n", "kept", ""]


def test_other_processes_end_as_always():
    ended = run("foreground.end_soon(0); sys.exit(3)")
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "taken apart\n", "")


@pytest.mark.parametrize(
    ("left", "text"),
    [
        ("threading.Thread(target=threading.Event().wait, name='forever').start()", "forever"),
        ("atexit.register(threading.Event().wait)", "an exit function"),
    ],
)
def test_what_hooks_left_behind_changes_no_exit_code(left, text):
    ended = run(f"foreground._LEFT_BEHIND_SECONDS = 0.1; foreground.serves(); {left}; foreground.end_soon(75)")
    assert ended.returncode == 75
    assert f"ended although hooks left something running: {text}" in ended.stderr


def test_the_command_line_of_a_process_ends_it_with_its_code_and_that_of_a_caller_does_not(monkeypatch, tmp_path):
    codes = []
    monkeypatch.setattr(foreground, "serves", lambda: None)
    monkeypatch.setattr(foreground, "end_soon", codes.append)
    arguments = ["serve", str(tmp_path / "nowhere")]
    assert main(arguments) == 2
    assert codes == []
    monkeypatch.setattr(sys, "argv", ["rsrv", *arguments])
    assert main() == 2
    assert codes == [2]
