"""docs/client.md: its code compiles and uses names that exist, and its tables have every option."""

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

import rsrv.client
from rsrv.client import KServeModel, RetryPolicy
from rsrv.client.transport.lifecycle import client_init

PAGE = (Path(__file__).parents[2] / "docs" / "client.md").read_text(encoding="utf-8")
CODE = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("code", CODE, ids=lambda code: code.splitlines()[0])
def test_the_code_compiles_and_imports_what_there_is(code):
    tree = ast.parse(code)
    compile(tree, "client.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "rsrv.client":
            assert {alias.name for alias in node.names} <= set(rsrv.client.__all__)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(list(inspect.signature(KServeModel).parameters), id="KServeModel"),
        pytest.param([field.name for field in fields(RetryPolicy)], id="RetryPolicy"),
        pytest.param(list(inspect.signature(client_init).parameters), id="client_init"),
    ],
)
def test_every_option_has_a_place_in_a_table(options):
    cells = {
        name
        for line in PAGE.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert [option for option in options if option not in cells and option != "model_name"] == []


def test_the_defaults_of_the_retry_policy_are_those_of_the_table():
    rows = [line.split("|")[1:3] for line in PAGE.splitlines() if line.startswith("| `")]
    shown = {
        name: value.strip().removesuffix(" s")
        for names, values in rows
        for name, value in zip(re.findall(r"`(\w+)`", names), values.split(","), strict=False)
    }
    for field in fields(RetryPolicy):
        default = getattr(RetryPolicy(), field.name)
        wanted = "none" if default == float("inf") else default
        assert shown[field.name] == str(wanted).removesuffix(".0") or float(shown[field.name]) == default
