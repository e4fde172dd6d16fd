"""The documentation says what the code does: generated pages are current, every reason and exit code is explained."""

import ast
import importlib.util
import inspect
import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from rsrv.bundle import open_bundle
from rsrv.core import errors
from rsrv.core.errors import RsrvError

DOCS = Path(__file__).parents[1] / "docs"


def load_generator():
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = load_generator().PAGES
ERRORS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, RsrvError)]


@pytest.mark.parametrize("page", PAGES)
def test_a_generated_page_is_what_the_code_makes_now(page):
    assert (DOCS / page).read_text(encoding="utf-8") == PAGES[page](), "run `make docs`"


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_is_explained_with_its_reason_status_and_exit_code(kind):
    rows = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        for line in (DOCS / "errors.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    found = [row for row in rows if row[0] == kind.reason]
    assert len(found) == 1, f"reason {kind.reason!r} has {len(found)} rows in docs/errors.md"
    _, status, number, exception, when = found[0]
    assert (status, exception) == (kind.code.name, kind.__name__)
    assert int(number) in (kind.code.http_status, kind.exit_code)
    assert when


def reasons_of_refused_operations():
    """Every reason that the code gives to a WrongState or a CapacityFull, by its syntax, and those of the matrix."""
    from rsrv.serve.admin.matrix import MATRIX, NO_OP, YES

    found = {cell for row in MATRIX.values() for cell in row.values()} - {YES, NO_OP}
    for path in (DOCS.parent / "rsrv").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("WrongState", "CapacityFull"):
                given = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
                ends = [
                    end for value in given for end in (getattr(value, "body", value), getattr(value, "orelse", value))
                ]
                found |= {end.value for end in ends if isinstance(end, ast.Constant)}
    return found


def test_every_reason_of_a_refused_operation_is_explained():
    section = (
        (DOCS / "errors.md").read_text(encoding="utf-8").split("## Answers to administrators")[1].split("\n## ")[0]
    )
    reasons = reasons_of_refused_operations()
    assert {"not_drained", "fixed", "program_capacity", "not_failed"} <= reasons
    assert [reason for reason in sorted(reasons) if f"`{reason}`" not in section] == []


def test_links_between_pages_lead_somewhere():
    pages = [*DOCS.glob("*.md"), DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md"]
    for page in (page for page in pages if page.exists()):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def anchors(page):
    """Of its headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_to_headings_lead_to_one():
    for page in [*DOCS.glob("*.md"), DOCS.parent / "README.md"]:
        for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
            there = page.parent / target if target else page
            if there.suffix == ".md":
                assert anchor in anchors(there), f"{page.name} links to {target}#{anchor}"


def test_every_path_and_every_rpc_of_the_administration_is_in_the_table():
    from rsrv.core.config import ServerConfig
    from rsrv.serve.admin.http import admin_http_routes

    page = (DOCS / "protocol.md").read_text(encoding="utf-8")
    section = page.split("## Administration")[1]
    routes = admin_http_routes(Mock(), Mock(), ServerConfig(model_dirs=["models"]))
    assert [f"{method} {path}" for method, path in routes if f"`{method} {path}`" not in section] == []
    proto = (DOCS.parent / "protos" / "admin" / "rsrv_admin.proto").read_text(encoding="utf-8")
    rpcs = re.findall(r"^  rpc (\w+)", proto, re.MULTILINE)
    assert len(rpcs) > 20
    assert [rpc for rpc in rpcs if not re.search(rf"\b{rpc}\b", section)] == []


def test_the_table_of_what_is_possible_in_which_state_is_that_of_the_code():
    from rsrv.serve.admin.matrix import MATRIX, NO_OP, YES

    page = (DOCS / "operations.md").read_text(encoding="utf-8")
    table = page.split("Which command is possible")[1].split("\n\n")[1].splitlines()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    shown = {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}
    assert len(shown) == 8
    for operation, cells in MATRIX.items():
        name = {"stage": "programs …", "select": "programs …", "remove": "programs …"}.get(operation, operation)
        (row,) = (row for key, row in shown.items() if f"`{name}`" in key)
        for state, verdict in cells.items():
            cell = row.get(f"`{state.value}`")
            if cell is not None and verdict == NO_OP:
                assert cell == "changes nothing", (operation, state)
            elif cell is not None and verdict != YES:
                assert cell == f"`{verdict}`", (operation, state)
            elif cell is not None:
                assert cell.strip("`") not in {"changes nothing", "removing", "failed", "not_ready"}, (operation, state)


def python_blocks(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def test_the_first_model_of_the_readme_is_that_of_the_quick_start_and_answers_as_they_say(tmp_path):
    from rsrv.export import call_factory, export_bundle

    pages = [DOCS.parent / "README.md", DOCS / "quickstart.md"]
    factory, again = (next(block for block in python_blocks(page) if "def classifier" in block) for page in pages)
    assert factory == again
    (tmp_path / "model.py").write_text(factory)
    made = call_factory(f"{tmp_path / 'model.py'}:classifier")
    bundle = open_bundle(export_bundle("jax", made.fn, made.params, made.inputs, dir=tmp_path / "classifier"))
    (client,) = (block for block in python_blocks(pages[0]) if "KServeModel" in block)
    assert re.findall(r'\)\["(\w+)"\]', client) == [spec.name for spec in bundle.manifest.executable_outputs]
