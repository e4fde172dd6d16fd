from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rsrv.core.errors import ExportError, UsageError
from rsrv.export import call_factory, load_factory

GOOD = """
import sibling

def fn(params, x):
    return x

def make():
    return fn, {"w": sibling.W}, ["x=f32[1]"]

class Models:
    @staticmethod
    def named():
        return {"fn": fn, "params": {}, "inputs": "x=f32[1]", "output_names": ["y"]}

def broken():
    return helper()

def helper():
    raise ValueError("no weights here")

def needs(path):
    return path

def short():
    return fn, {}

def typo():
    return {"fn": fn, "params": {}, "inputs": [], "input_name": "x"}

def no_fn():
    return "fn", {}, []

VALUE = 3
"""


@pytest.fixture(autouse=True)
def _clean_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("model", "sibling", "half_there"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "sibling.py").write_text("W = 7\n")
    path = tmp_path / "model.py"
    path.write_text(GOOD)
    return path


def test_a_file_and_its_siblings_are_importable(file: Path) -> None:
    made = call_factory(f"{file}:make")
    assert made.params == {"w": 7}
    assert made.inputs == ["x=f32[1]"]
    assert made.output_names is None


def test_an_attribute_may_be_nested_and_a_dict_may_bring_names(file: Path) -> None:
    assert call_factory(f"{file}:Models.named").output_names == ["y"]


def test_a_module_is_found_in_the_current_directory(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert load_factory("model:make")()[1] == {"w": 7}


@pytest.mark.parametrize(
    ("spec", "says", "hint"),
    [
        ("model.py", "is not MODULE:FN", "package.module:function"),
        ("{file}:", "is not MODULE:FN", ""),
        ("{dir}/absent.py:make", "no such file", ""),
        ("no_such_module_here:make", "no module 'no_such_module_here'", "current directory"),
        ("{file}:mke", "has no attribute 'mke'", "did you mean 'make'?"),
        ("{file}:VALUE", "'VALUE' is a int, want a function", ""),
        ("{file}:needs", "missing a required argument: 'path'", ""),
    ],
)
def test_a_wrong_spec_is_a_usage_error(file: Path, spec: str, says: str, hint: str) -> None:
    with pytest.raises(UsageError) as raised:
        call_factory(spec.format(file=file, dir=file.parent))
    assert says in raised.value.message
    assert hint in (raised.value.hint or "")


@pytest.mark.parametrize(
    ("attribute", "says"),
    [
        ("short", "returned a tuple of 2"),
        ("typo", "returned a dict with unknown keys input_name"),
        ("no_fn", "returned a str as fn"),
    ],
)
def test_a_factory_that_returns_something_else_is_told_what_is_wanted(file: Path, attribute: str, says: str) -> None:
    with pytest.raises(ExportError) as raised:
        call_factory(f"{file}:{attribute}")
    assert says in raised.value.message
    assert "(fn, params, inputs)" in str(raised.value.hint)


def test_a_factory_that_raises_shows_the_users_frames_only(file: Path) -> None:
    with pytest.raises(ExportError) as raised:
        call_factory(f"{file}:broken")
    text = raised.value.message
    assert "ValueError: no weights here" in text
    assert f'File "{file}", line' in text
    assert "in helper" in text
    assert "rsrv/export" not in text


def test_an_import_that_fails_inside_the_file_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import no_such_module_here\n")
    with pytest.raises(ExportError) as raised:
        load_factory(f"{tmp_path}/bad.py:make")
    assert "No module named 'no_such_module_here'" in raised.value.message
    assert f"{tmp_path}/bad.py" in raised.value.message


def test_a_missing_import_of_a_module_that_exists_is_not_taken_for_a_missing_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_there.py").write_text("import no_such_module_here\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExportError, match="importing half_there raised ModuleNotFoundError"):
        load_factory("half_there:make")
