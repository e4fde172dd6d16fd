"""What a conversion file may say, and the worklist that follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.triton import config_pbtxt, write_convert_config, write_triton_model

from rsrv.core.errors import ConfigError, UsageError
from rsrv.export.repository import load_convert_config, plan, select
from rsrv.export.repository.worklist import outlook, unknown_exclusions

CONFIG = config_pbtxt([("x", "TYPE_FP32", [4])], [("y", "TYPE_FP32", [4])], 4)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    (tmp_path / "handle.py").write_text("def handler(ctx): return [1]\n")
    return tmp_path


def refusal(here: Path, **keys: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        load_convert_config(write_convert_config(here, **keys))
    assert raised.value.exit_code == 78
    assert str(here / "convert.yaml") in raised.value.message
    return raised.value.message + (f" ({raised.value.hint})" if raised.value.hint else "")


def test_relative_paths_start_at_the_file_also_in_options(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"weights_path": "w.pt", "data_dir": "/data", "kind": "x", "size_path": 3}
    handlers = [{"file": "handle.py", "models": ["a", "b"], "options": options}]
    write_convert_config(here, handlers=handlers, **{"x-note": "mine"})
    monkeypatch.chdir(here.parent)
    config = load_convert_config(Path(here.name) / "convert.yaml")
    assert config.source_dirs == (here / "source",)
    assert (config.output_root, config.report_path, config.json_path) == (
        here / "out", here / "report.md", here / "report.json",
    )  # fmt: skip
    (handler,) = config.handlers
    assert handler.file == here / "handle.py"
    assert handler.options == {"weights_path": str(here / "w.pt"), "data_dir": "/data", "kind": "x", "size_path": 3}
    assert config.handler_of("b") is handler
    assert config.handler_of("c") is None


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"output_root": None}, "output_root is missing; wanted string"),
        ({"report_path": 3}, "report_path: 3 is not accepted; wanted string"),
        ({"output_rot": "x"}, "unknown key output_rot (did you mean output_root?)"),
        ({"source_dirs": "source"}, "source_dirs: 'source' is not accepted"),
        ({"source_dirs": ["nowhere"]}, "nowhere' is not an existing directory"),
        ({"source_dirs": []}, "neither source_dirs nor handlers has an entry"),
        ({"report_path": "report.json"}, "ends in .json"),
        ({"output_root": "handle.py"}, "is not a directory"),
        ({"report_path": "source"}, "is a directory, wanted a file"),
        ({"output_root": "source"}, "source' lies in source_dirs[0], where every directory is a model"),
        ({"output_root": "source/bundles"}, "source/bundles' lies in source_dirs[0]"),
        ({"source_dirs": ["source", "./source"]}, "source' is source_dirs[0] once more"),
        ({"timeout_seconds": 0}, "timeout_seconds: 0 is not accepted"),
        ({"exclude": {"m": {}}}, "exclude.m.reason is missing"),
        ({"exclude": {"m": {"reason": "r", "remove_existing": "yes"}}}, "exclude.m.remove_existing: 'yes'"),
        ({"exclude": ["m"]}, "exclude: ['m'] is not accepted; wanted a mapping of models, each with a reason"),
        ({"handlers": [{"file": "handle.py", "models": []}]}, "handlers[0].models: [] is not accepted"),
        ({"handlers": [{"file": "handle.py", "model": ["a"]}]}, "did you mean models?"),
        ({"handlers": [{"file": "gone.py", "models": ["a"]}]}, "gone.py' does not exist"),
        ({"handlers": [{"file": "convert.yaml", "models": ["a"]}]}, "wanted a name that ends in .py"),
        ({"handlers": [{"file": "handle.py", "models": ["../a"]}]}, "no bundle can be called '../a'"),
        ({"handlers": [{"file": "handle.py", "models": [".a"]}]}, "marks a file that servers skip"),
        (
            {"handlers": [{"file": "handle.py", "models": ["a"]}, {"file": "handle.py", "models": ["b", "a"]}]},
            "handlers[1].models: 'a' is a model of handlers[0], too",
        ),
        (
            {"handlers": [{"file": "handle.py", "models": ["a"]}], "exclude": {"a": {"reason": "old"}}},
            "handlers[0].models: 'a' is excluded: old",
        ),
    ],
)
def test_what_does_not_hold_is_named_with_file_key_and_value(here: Path, keys: dict[str, Any], said: str) -> None:
    assert said in refusal(here, **keys)


@pytest.mark.parametrize(
    ("text", "said"), [("a: [", "line 1"), ("- a", "the file holds a list"), ("", "holds nothing")]
)
def test_a_file_that_is_no_mapping_is_refused(here: Path, text: str, said: str) -> None:
    (here / "convert.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_convert_config(here / "convert.yaml")


def test_models_of_one_name_get_names_of_their_own(here: Path) -> None:
    for source in ("one", "two", "three", "four"):
        write_triton_model(here / source, "net", CONFIG)
    write_triton_model(here / "one", "net__dynamic2", CONFIG)
    (here / "one" / ".git").mkdir()
    (here / "one" / "README").write_text("not a model")
    handlers = [{"file": "handle.py", "models": ["net", "made"]}]
    config = load_convert_config(
        write_convert_config(here, source_dirs=["one", "two", "three", "four"], handlers=handlers)
    )
    items = plan(config)
    assert [(item.model, item.bundle) for item in items] == [
        ("net", "net"),
        ("net__dynamic2", "net__dynamic2"),
        ("net", "net__dynamic"),
        ("net", "net__dynamic3"),
        ("net", "net__dynamic4"),
        ("made", "made"),
    ]
    assert [item.disposition for item in items] == ["handler", "generic", "handler", "handler", "handler", "handler"]
    assert items[2].source == here / "two" / "net"
    assert items[-1].source is None
    assert [item.bundle for item in select(items, ["net__dynamic3", "made"])] == ["net__dynamic3", "made"]
    assert len(select(items, ["net"])) == 4
    with pytest.raises(UsageError, match="--only names 'nett', which is neither a model nor a bundle") as raised:
        select(items, ["nett"])
    assert raised.value.hint == "did you mean 'net'?"


def test_the_outlook_says_what_a_run_would_do(here: Path) -> None:
    source = here / "source"
    write_triton_model(source, "ready", CONFIG)
    (source / "ready/1/model.pt").write_text("")
    write_triton_model(source, "empty", CONFIG)
    write_triton_model(source, "broken", "input [ {")
    write_triton_model(source, "old", CONFIG)
    (source / "bare").mkdir()
    exclude = {"old": {"reason": "replaced by ready", "remove_existing": True}, "olld": {"reason": "a slip"}}
    config = load_convert_config(write_convert_config(here, exclude=exclude))
    items = plan(config)
    said = {item.bundle: outlook(item) for item in items}
    assert said["ready"] == "batch sizes 1, 2, 4"
    assert "there is no 1/model.pt or 1/model.pt2" in said["empty"]
    assert "broken/config.pbtxt: 1:9 : Expected" in said["broken"]
    assert "bare/config.pbtxt: no such file" in said["bare"]
    assert said["old"] == "replaced by ready; an existing bundle is removed"
    assert unknown_exclusions(config, items) == ["olld"]
