"""The frame of the command line: exit codes, what goes to stdout and stderr, and what starting it imports."""

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import typer

from rsrv.cli import errors, output
from rsrv.cli.main import app, command, main
from rsrv.core.errors import ConfigError, InvalidRequest, PortTaken, ServerUnreachable, UsageError


@pytest.fixture
def failing(monkeypatch):
    """Makes ``rsrv env`` raise what the test says."""

    def arrange(error: BaseException) -> None:
        def collect() -> None:
            raise error

        monkeypatch.setattr("rsrv.cli.env.collect", collect)

    return arrange


def run_python(code: str, *, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, **(env or {})}
    )


@pytest.mark.parametrize(
    ("arguments", "unless_typer_needs_it"),
    [
        (["--help"], ["pydantic"]),
        (["--version"], ["pydantic"]),
        (["models", "--help"], []),
        (["bundle", "--help"], []),
        (["nonsense"], []),
    ],
)
def test_starting_the_command_line_imports_nothing_heavy(arguments, unless_typer_needs_it):
    """Typer itself loads pydantic as soon as it has options to convert."""
    code = f"""
import sys
from rsrv.cli.main import main
main({arguments!r})
unwanted = ["numpy", "grpc", "google.protobuf", "jax", "yaml", "rich", *{unless_typer_needs_it!r}]
sys.exit(repr(heavy) if (heavy := [m for m in unwanted if m in sys.modules]) else 0)
"""
    outcome = run_python(code)
    assert outcome.returncode == 0, outcome.stderr


@pytest.mark.parametrize("names", [["KServeModel"], ["Server", "infer_sync", "InferInput", "InferOutput"], ["Admin"]])
def test_the_client_library_imports_neither_jax_torch_yaml_nor_pydantic(names):
    code = f"""
import sys
from rsrv.client import {", ".join(names)}
heavy = [m for m in ("jax", "jaxlib", "torch", "yaml", "pydantic", "typer") if m in sys.modules]
sys.exit(repr(heavy) if heavy else 0)
"""
    outcome = run_python(code)
    assert outcome.returncode == 0, outcome.stderr


def test_python_dash_m_rsrv_is_the_command_line():
    outcome = subprocess.run([sys.executable, "-m", "rsrv", "--version"], capture_output=True, text=True, timeout=60)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, "rsrv 0.1.0\n", "")


def test_a_wrong_command_is_a_usage_error_with_a_suggestion(capsys):
    assert main(["modles"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: No such command 'modles'. Did you mean 'models'" in err


def test_a_wrong_option_is_a_usage_error_that_names_the_help(capsys):
    assert main(["models", "--urll", "x"]) == 2
    err = capsys.readouterr().err
    assert "--url" in err
    assert "hint: rsrv models --help" in err


def test_no_command_shows_the_help_and_is_a_usage_error(capsys):
    assert main([]) == 2
    assert "Usage: rsrv" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("bad tensor"), 1),
        (UsageError("no such file"), 2),
        (ServerUnreachable("nobody there"), 3),
        (ConfigError("bad key"), 78),
        (PortTaken("port 8001 is taken"), 78),
        (KeyboardInterrupt(), 130),
        (ValueError("surprise"), 1),
        (typer.Exit(7), 7),
    ],
)
def test_every_kind_of_failure_has_its_exit_code(failing, capsys, error, code):
    failing(error)
    assert main(["env"]) == code
    assert capsys.readouterr().out == ""


def test_a_failure_is_told_with_its_hint_on_stderr(failing, capsys):
    failing(InvalidRequest("input 'x' has 3 axes, wanted 2", hint="add a batch axis"))
    assert main(["env"]) == 1
    assert capsys.readouterr().err == "error: input 'x' has 3 axes, wanted 2\nhint: add a batch axis\n"


def test_in_json_mode_a_failure_is_one_json_object(failing, capsys):
    failing(ServerUnreachable("nobody there", hint="start it"))
    assert main(["--json", "env"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert json.loads(err) == {
        "error": {"code": "UNAVAILABLE", "reason": "unreachable", "message": "nobody there", "hint": "start it"}
    }


def test_an_unexpected_error_is_short_and_says_how_to_see_more(failing, capsys, monkeypatch):
    monkeypatch.delenv("RSRV_DEBUG", raising=False)
    failing(ValueError("surprise"))
    assert main(["env"]) == 1
    err = capsys.readouterr().err
    assert "unexpected ValueError: surprise" in err
    assert "--debug" in err
    assert "Traceback" not in err


def test_debug_shows_the_traceback(failing, capsys, monkeypatch):
    failing(ValueError("surprise"))
    assert main(["--debug", "env"]) == 1
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("RSRV_DEBUG", "1")
    assert main(["env"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(("module", "extra"), [("jax", "serve"), ("jaxlib.mlir", "serve"), ("torch", "torch")])
def test_a_missing_extra_says_what_to_install(failing, capsys, module, extra):
    failing(ModuleNotFoundError(f"No module named {module!r}", name=module))
    assert main(["env"]) == 1
    assert f"hint: pip install 'rsrv[{extra}]'" in capsys.readouterr().err


def test_a_failed_file_operation_names_the_file(failing, capsys):
    failing(PermissionError(13, "Permission denied", "/somewhere/x.npy"))
    assert main(["env"]) == 1
    assert capsys.readouterr().err == "error: /somewhere/x.npy: Permission denied\n"


def test_a_reader_that_goes_away_ends_the_command_quietly():
    code = "import sys; from rsrv.cli.main import main; sys.stdin.read(); sys.exit(main(['env']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stdin is not None
    process.stdin.close()
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(timeout=60) == errors.EXIT_BROKEN_PIPE


def test_a_table_in_a_pipe_is_plain_aligned_text(capsys):
    output.table("models", ["name", "rows"], [("resnet", 1.5), ("m[b]x", None)])
    assert capsys.readouterr().out == "models\nname    rows\nresnet  1.5\nm[b]x   -\n"


def test_a_table_is_a_list_of_objects_as_json_and_the_first_column_when_quiet(capsys):
    output.set_mode("json")
    output.table("models", ["name", "rows"], [("a", 1), ("b", 2)])
    assert json.loads(capsys.readouterr().out) == [{"name": "a", "rows": 1}, {"name": "b", "rows": 2}]
    output.set_mode("quiet")
    output.table("models", ["name", "rows"], [("a", 1), ("b", 2)])
    output.note("not shown")
    assert capsys.readouterr() == ("a\nb\n", "")


def test_json_understands_what_commands_hold(capsys):
    @dataclass
    class Row:
        path: Path
        shape: tuple[int, ...]

    output.json({"row": Row(Path("/a"), (1, 2)), "n": np.int64(3), "x": np.float32([0.5]), "set": {"b", "a"}})
    assert json.loads(capsys.readouterr().out) == {
        "row": {"path": "/a", "shape": [1, 2]},
        "n": 3,
        "x": [0.5],
        "set": ["a", "b"],
    }


def test_numbers_that_json_does_not_have_are_null(capsys):
    output.json({"x": np.float32([1, np.nan, np.inf]), "y": ml_dtypes.bfloat16(1.5), "z": float("-inf")})
    assert json.loads(capsys.readouterr().out) == {"x": [1, None, None], "y": 1.5, "z": None}


def read_all(terminal):
    """What came out until the last process let go of the other end, which reading says with an error."""
    found = b""
    with suppress(OSError):
        while part := os.read(terminal, 65536):
            found += part
    return found


@pytest.mark.parametrize(("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colour_appears_on_a_terminal_only_and_not_with_no_color(environment, coloured):
    leader, follower = pty.openpty()
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    code = (
        "from rsrv.cli import output; output.error('broken [red]x', hint='mend'); output.table('t', ['a'], [['[b]']])"
    )
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=follower,
            stderr=follower,
            env={**clean, "TERM": "xterm-256color", **environment},
        )
        os.close(follower)
        shown = read_all(leader).decode()
        assert process.wait(timeout=60) == 0
    finally:
        os.close(leader)
    assert "broken [red]x" in shown
    assert "[b]" in shown
    assert ("\x1b[" in shown and "31m" in shown) is coloured


def test_env_prints_the_versions_that_a_bug_report_needs(capsys, monkeypatch):
    monkeypatch.setenv("RSRV_API_TOKEN", "hunter2")
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["rsrv"] == "0.1.0"
    assert facts["numpy"] == np.__version__
    assert facts["cpus"] == os.cpu_count()
    assert {"python", "grpcio", "protobuf", "jax", "jaxlib", "stablehlo"} <= facts.keys()
    assert facts["RSRV_API_TOKEN"] == "(set)"


def every_command():
    def walk(node, path):
        yield path, node
        for name, child in getattr(node, "commands", {}).items():
            yield from walk(child, f"{path} {name}")

    return list(walk(command(), "rsrv"))


@pytest.mark.parametrize(("path", "node"), [pytest.param(p, n, id=p) for p, n in every_command()])
def test_every_command_has_a_help_text_and_every_leaf_an_example(path, node):
    assert node.help
    if not hasattr(node, "commands"):
        assert "Example:\n    rsrv" in node.help
    for param in node.params:
        if param.name not in ("help", "install_completion", "show_completion"):
            assert param.help, f"{path}: {param.name} has no help"


def test_help_keeps_the_lines_of_examples(capsys):
    assert main(["infer", "--help"]) == 0
    out = capsys.readouterr().out
    assert "      rsrv infer net --input x=random\n" in out


def test_shell_completion_offers_the_commands():
    code = "import sys; from rsrv.cli.main import main; sys.exit(main([]))"
    outcome = run_python(
        code,
        env={
            "_RSRV_COMPLETE": "complete_bash",
            "COMP_WORDS": "rsrv mo",
            "COMP_CWORD": "1",
            "_TYPER_COMPLETE_ARGS": "rsrv mo",
        },
    )
    assert outcome.returncode == 0, outcome.stderr
    assert "models" in outcome.stdout


def test_the_application_offers_every_command_of_this_release():
    names = {path.removeprefix("rsrv ") for path, node in every_command() if not hasattr(node, "commands")}
    assert app.info.name == "rsrv"
    assert names >= {
        "export jax",
        "bundle check",
        "bundle seal",
        "bundle inspect",
        "bundle ls",
        "serve",
        "infer",
        "models",
        "env",
        "demo",
        "config show",
        "config schema",
        "config check",
    }


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;owned\x07\x9b2J", "\\x1b]0;owned\\x07\\x9b2J"),
        ("right\u202eleft", "right\\u202eleft"),
        ("file \udcff", "file \\udcff"),
        ("two\n\tlines, naïve 日本", "two\n\tlines, naïve 日本"),
    ],
)
def test_names_that_strangers_chose_cannot_command_the_terminal(capsys, text, shown):
    output.data(text)
    output.warn(text)
    output.table(None, ["name"], [(text,)])
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{shown}\n")
    assert printed.err == f"warning: {shown}\n"
    assert shown in printed.out.removeprefix(shown)


def test_a_terminal_without_unicode_shows_escapes_instead_of_an_error():
    code = "from rsrv.cli import output; output.data('x → é'); output.error('x → é')"
    ended = run_python(code, env={"PYTHONIOENCODING": "ascii"})
    assert (ended.returncode, ended.stdout) == (0, "x \\u2192 \\xe9\n")
    assert ended.stderr == "error: x \\u2192 \\xe9\n"


def test_a_failed_write_says_why_also_when_the_system_names_no_file(failing, capsys):
    failing(OSError(28, "No space left on device"))
    assert main(["env"]) == 1
    assert capsys.readouterr().err == "error: No space left on device\n"
