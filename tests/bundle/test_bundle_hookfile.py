"""Hook files read without running them: what they register, what is certainly wrong, and what only a run can tell."""

from __future__ import annotations

import pytest

from rsrv.bundle.hookfile import MAX_HOOK_BYTES, inspect_hooks, parse_hooks
from rsrv.core.errors import BundleError


def problems(source: str, *, meta: bool = False) -> list[str]:
    found = parse_hooks(source.encode(), file="model.py").problems(meta=meta)
    assert {(problem.rule, problem.file) for problem in found} <= {("B-72", "model.py")}
    return [problem.message.removesuffix(" (B-72)") for problem in found]


def test_nothing_of_the_file_runs(tmp_path):
    marker = tmp_path / "ran"
    (tmp_path / "model.py").write_text(f"open({str(marker)!r}, 'w')\ndef preprocess(inputs): return inputs\n")
    registrations = inspect_hooks(tmp_path / "model.py")
    assert registrations.functions == {"preprocess": 2}
    assert not marker.exists()


@pytest.mark.parametrize(
    ("source", "functions"),
    [
        ("def preprocess(inputs): ...\n\ndef postprocess(outputs): ...", {"preprocess": 1, "postprocess": 3}),
        ("preprocess = lambda inputs: inputs", {"preprocess": 1}),
        ("import functools\npreprocess: object = functools.partial(print)", {"preprocess": 2}),
        ("from mine import tidy as preprocess", {"preprocess": 1}),
        ("preprocess, postprocess = a, b", {"preprocess": 1, "postprocess": 1}),
        ("with open('x'):\n    def preprocess(inputs): ...", {"preprocess": 2}),
        ("class preprocess:\n    def __init__(self, inputs): ...", {"preprocess": 1}),
        ("def preprocess(inputs, *, strict=True): ...", {"preprocess": 1}),
        ("def preprocess(*args): ...", {"preprocess": 1}),
        ("@wrap\ndef preprocess(): ...", {"preprocess": 2}),
    ],
)
def test_module_level_functions_are_hooks(source, functions):
    registrations = parse_hooks(source.encode(), file="model.py")
    assert registrations.functions == functions
    assert not registrations.unclear
    assert problems(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "register_model(preprocess=f)",
        "rsrv.register_model('net', postprocess=g)",
        "import rsrv\ndef f(inputs): ...\nrsrv.serve.register_model(preprocess=f)",
    ],
)
def test_a_call_of_register_model_is_a_registration(source):
    registrations = parse_hooks(source.encode(), file="model.py")
    assert [function for function, _ in registrations.calls] == ["register_model"]
    assert problems(source) == []
    assert problems(source, meta=True) == [
        f"model.py:{source.count(chr(10)) + 1}: 'register_model' has no place in a bundle of kind: meta"
    ]


def test_a_meta_registers_run():
    assert problems("def run(inputs, call): ...", meta=True) == []
    assert problems("register_meta_model(run=f)", meta=True) == []


@pytest.mark.parametrize(
    ("source", "meta", "text"),
    [
        ("", False, "model.py: registers nothing; define 'preprocess' or 'postprocess'"),
        ("def helper(x): ...", False, "model.py: registers nothing"),
        ("def helper(x): ...", True, "model.py: registers nothing; define 'run'"),
        ("preprocess = None", False, "model.py: registers nothing"),
        ("if __name__ == '__main__':\n    def preprocess(inputs): ...", False, "model.py: registers nothing"),
        ("class Hooks:\n    def preprocess(self, inputs): ...", False, "model.py: registers nothing"),
        ("def run(inputs, call): ...", False, "model.py:1: 'run' has no place in a bundle of kind: model"),
        ("\nregister_meta_model(run=f)", False, "model.py:2: 'register_meta_model' has no place"),
        ("def preprocess(inputs): ...", True, "model.py:1: 'preprocess' has no place in a bundle of kind: meta"),
        ("def preprocess(inputs): ...\nregister_model()", False, "model.py:1: defines 'preprocess' and calls"),
        ("register_model()\nregister_model()", False, "model.py:2: registers 2 times"),
        ("async def preprocess(inputs): ...", False, "model.py:1: 'preprocess' is a coroutine"),
        ("def preprocess(): ...", False, "model.py:1: 'preprocess' cannot be called as preprocess(inputs)"),
        ("def preprocess(inputs, strict): ...", False, "cannot be called as preprocess(inputs)"),
        ("def postprocess(outputs, *, strict): ...", False, "cannot be called as postprocess(outputs)"),
        ("def run(inputs): ...", True, "cannot be called as run(inputs, call)"),
    ],
)
def test_what_is_certainly_wrong_is_reported_with_its_line(source, meta, text):
    found = problems(source, meta=meta)
    assert len(found) == 1
    assert text in found[0]


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    from fast import preprocess\nexcept ImportError:\n    def preprocess(inputs): ...",
        "if FAST:\n    register_model(preprocess=a)\nelse:\n    register_model(preprocess=b)",
        "for f in fs:\n    register_model(preprocess=f)",
        "def setup():\n    register_model(preprocess=f)\nsetup()",
        "from mine import *",
        "r = register_model\nr(preprocess=f)",
        "getattr(rsrv, 'register_model')(preprocess=f)",
        "match X:\n    case 1:\n        def preprocess(inputs): ...",
    ],
)
def test_what_only_a_run_can_tell_is_not_called_wrong(source):
    assert parse_hooks(source.encode(), file="model.py").unclear
    assert problems(source) == []


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (b"def preprocess(inputs:\n", "model.py:1: does not compile"),
        (b"x = 1\nreturn x\n", "model.py:2: does not compile: 'return' outside function"),
        (b"a\x00b", "does not compile"),
        (b"caf\xe9 = 1", "does not compile"),
        (b"(" * 5000 + b")" * 5000, "does not compile"),
        (b"-" * 200_000 + b"1", "does not compile"),
    ],
)
def test_what_does_not_compile_is_refused_with_its_line(source, text):
    with pytest.raises(BundleError, match="does not compile") as raised:
        parse_hooks(source, file="model.py")
    assert (raised.value.rule, raised.value.file) == ("B-71", "model.py")
    assert text in raised.value.message


def test_the_declared_encoding_counts_and_warnings_stay_quiet():
    source = "# -*- coding: latin-1 -*-\nname = '\xe9'\nx = '\\d'\ndef preprocess(inputs): ...\n".encode("latin-1")
    assert parse_hooks(source, file="model.py").functions == {"preprocess": 4}


def test_a_huge_or_missing_hook_file_is_refused(tmp_path):
    with open(tmp_path / "model.py", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(BundleError, match=f"at most {MAX_HOOK_BYTES}") as raised:
        inspect_hooks(tmp_path / "model.py")
    assert raised.value.rule == "B-71"
    with pytest.raises(BundleError, match="cannot be opened"):
        inspect_hooks(tmp_path / "missing.py")
