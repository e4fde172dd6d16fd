"""The documentation says what the code does: generated pages are current, every reason and exit code is explained."""

import importlib.util
import inspect
import re
from pathlib import Path

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


def test_links_between_pages_lead_somewhere():
    pages = [*DOCS.glob("*.md"), DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md"]
    for page in (page for page in pages if page.exists()):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


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
