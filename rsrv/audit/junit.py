"""Audit reports as JUnit XML, the form that CI systems show: a suite per bundle, a case per part of the audit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from rsrv.audit.findings import CheckReport, Finding

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(reports: Sequence[CheckReport], *, strict: bool = False, name: str = "rsrv bundle check") -> str:
    """An XML document. Errors are failures, with `strict` warnings and skipped parts too; else warnings are output."""
    suites = [_suite(report, strict) for report in reports]
    root = ElementTree.Element("testsuites", {"name": name, **_totals(suites)})
    root.extend(suites)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(report: CheckReport, strict: bool) -> ElementTree.Element:
    cases = [_case(report, check, strict) for check in report.checks]
    for skipped in report.skipped:
        case = ElementTree.Element("testcase", classname=_clean(report.bundle), name=_clean(skipped.check))
        tag = "failure" if strict else "skipped"
        ElementTree.SubElement(case, tag, message=_clean(f"not checked: {skipped.reason}"))
        cases.append(case)
    suite = ElementTree.Element(
        "testsuite",
        name=_clean(report.bundle),
        tests=str(len(cases)),
        failures=str(sum(case.find("failure") is not None for case in cases)),
        errors="0",
        skipped=str(sum(case.find("skipped") is not None for case in cases)),
    )
    suite.extend(cases)
    return suite


def _case(report: CheckReport, check: str, strict: bool) -> ElementTree.Element:
    case = ElementTree.Element("testcase", classname=_clean(report.bundle), name=_clean(check))
    findings = report.of(check)
    failures = [finding for finding in findings if strict or finding.severity == "error"]
    others = [finding for finding in findings if finding not in failures]
    if failures:
        element = ElementTree.SubElement(
            case, "failure", type=failures[0].severity, message=_clean(failures[0].message)
        )
        element.text = _clean("\n".join(map(_line, failures)))
    if others:
        ElementTree.SubElement(case, "system-out").text = _clean("\n".join(map(_line, others)))
    return case


def _totals(suites: Sequence[ElementTree.Element]) -> dict[str, str]:
    return {key: str(sum(int(suite.get(key, "0")) for suite in suites)) for key in ("tests", "failures", "errors")}


def _line(finding: Finding) -> str:
    rule = f" [{finding.rule}]" if finding.rule else ""
    hint = f" ({finding.hint})" if finding.hint else ""
    return f"{finding.severity}{rule}: {finding.message}{hint}"


def _clean(text: str) -> str:
    """XML 1.0 cannot hold most control characters, escaped or not; file names and error texts can."""
    return _FORBIDDEN.sub("�", text)
