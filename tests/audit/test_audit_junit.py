from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from rsrv.audit import CheckReport, Finding, Skipped, to_junit


def report() -> CheckReport:
    return CheckReport(
        bundle="net",
        path=Path("/models/net"),
        checks=["manifest", "files", "model.b1.mlir"],
        findings=[
            Finding("warning", "files", "a <b> & c", rule="B-15a", file="a", hint="seal"),
            Finding("error", "model.b1.mlir", "first", rule="B-11"),
            Finding("error", "model.b1.mlir", "second"),
        ],
        skipped=[Skipped("model.b2.mlir", "no jaxlib")],
    )


def parsed(strict: bool = False) -> ElementTree.Element:
    return ElementTree.fromstring(to_junit([report(), CheckReport("fine", Path("/fine"), ["manifest"])], strict=strict))


def case(root: ElementTree.Element, name: str) -> ElementTree.Element:
    (found,) = root.findall(f"testsuite[@name='net']/testcase[@name='{name}']")
    return found


def test_there_is_a_suite_per_bundle_and_a_case_per_part() -> None:
    root = parsed()
    assert [suite.get("name") for suite in root] == ["net", "fine"]
    assert [c.get("name") for c in root[0]] == ["manifest", "files", "model.b1.mlir", "model.b2.mlir"]
    assert {c.get("classname") for c in root[0]} == {"net"}


def test_errors_fail_their_case_with_all_their_texts() -> None:
    (failure,) = case(parsed(), "model.b1.mlir")
    assert failure.tag == "failure"
    assert failure.get("message") == "first"
    assert failure.text == "error [B-11]: first\nerror: second"


def test_warnings_are_output_and_skipped_parts_are_skipped() -> None:
    root = parsed()
    (output,) = case(root, "files")
    assert (output.tag, output.text) == ("system-out", "warning [B-15a]: a <b> & c (seal)")
    (skipped,) = case(root, "model.b2.mlir")
    assert (skipped.tag, skipped.get("message")) == ("skipped", "not checked: no jaxlib")
    assert {k: root[0].get(k) for k in ("tests", "failures", "skipped")} == {
        "tests": "4",
        "failures": "1",
        "skipped": "1",
    }
    assert (root.get("tests"), root.get("failures")) == ("5", "1")


def test_strict_makes_failures_of_warnings_and_of_what_was_skipped() -> None:
    root = parsed(strict=True)
    assert case(root, "files")[0].tag == "failure"
    assert case(root, "model.b2.mlir")[0].tag == "failure"
    assert root[0].get("failures") == "3"
    assert root[0].get("skipped") == "0"


def test_characters_that_xml_cannot_hold_are_replaced() -> None:
    odd = CheckReport("a\x00b\ud800\uffff", Path("/x"), ["files"], [Finding("error", "files", "bad \x1b[31m name\x08")])
    root = ElementTree.fromstring(to_junit([odd]))
    assert root[0].get("name") == "a�b��"
    assert root[0][0][0].get("message") == "bad �[31m name�"
