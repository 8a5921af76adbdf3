"""What lint found, in the formats that code hosts read: SARIF 2.1.0 and GitHub's workflow commands."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from moetune import __version__
from moetune.domain.findings import Severity
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moetune.applications.lint_report import Linted
    from moetune.domain.findings import Code, Finding

_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {
    Severity.CRASH: "error",
    Severity.CANNOT_RUN: "error",
    Severity.WRONG_NUMBERS: "error",
    Severity.NEVER_READ: "warning",
    Severity.COSTS_SPEED: "warning",
    Severity.INFO: "note",
}
_GITHUB = {"error": "error", "warning": "warning", "note": "notice"}


def to_sarif(linted: Linted) -> dict[str, Any]:
    """A SARIF 2.1.0 log with one run.

    Source: OASIS, Static Analysis Results Interchange Format (SARIF) version 2.1.0.
    """
    codes: dict[str, Code] = {found.code.code: found.code for found in linted.findings}
    places = {code: index for index, code in enumerate(sorted(codes))}
    driver = {
        "name": "moetune",
        "version": __version__,
        "rules": [_rule(codes[code]) for code in sorted(codes)],
    }
    run = {
        "tool": {"driver": driver},
        "results": [_result(found, places[found.code.code]) for found in linted.findings],
        "columnKind": "utf16CodeUnits",
    }
    return {"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(code: Code) -> dict[str, Any]:
    return {
        "id": code.code,
        "name": code.title,
        "shortDescription": {"text": f"{code.severity.value}: {code.title}"},
        "fullDescription": {"text": code.story},
        "help": {"text": code.story},
        "defaultConfiguration": {"level": _LEVELS[code.severity]},
    }


def _result(found: Finding, place: int) -> dict[str, Any]:
    mend = f" Mend: {found.mend}" if found.mend else ""
    result: dict[str, Any] = {
        "ruleId": found.code.code,
        "ruleIndex": place,
        "level": _LEVELS[found.code.severity],
        "message": {"text": found.message + mend},
    }
    if found.where:
        location = {"artifactLocation": {"uri": _uri(found.where)}, "region": {"startLine": 1}}
        result["locations"] = [{"physicalLocation": location}]
    if found.facts:
        result["properties"] = dict(found.facts)
    return result


def _uri(path: str) -> str:
    """A path as a reference: file names hold `[`, `,` and spaces."""
    text = quote(PurePath(path).as_posix(), safe="/=,")
    return f"file://{text}" if text.startswith("/") else text


def to_github(linted: Linted) -> Iterator[str]:
    """One workflow command for each finding, which GitHub shows beside the file.

    Source: GitHub's documentation, "Workflow commands for GitHub Actions".
    """
    for found in linted.findings:
        level = _GITHUB[_LEVELS[found.code.severity]]
        title = f"{found.code.code} {found.code.severity.value}"
        mend = f"\nmend: {found.mend}" if found.mend else ""
        yield (
            f"::{level} file={_property(found.where)},line=1,title={_property(title)}"
            f"::{_data(found.message + mend)}"
        )


def _data(text: str) -> str:
    lines = [printable(line, 2000) for line in text.split("\n")]
    return "%0A".join(line.replace("%", "%25").replace("\r", "%0D") for line in lines)


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
