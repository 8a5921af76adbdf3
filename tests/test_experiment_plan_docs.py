"""docs/experiment-plan.md: its example is a plan, its tables are the plan's keys and the known flags.

`python -m tests.test_experiment_plan_docs` writes the tables anew.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from moetune.applications.experiments.plan_checks import check_plan
from moetune.applications.experiments.plan_fields import (
    LOAD_PLACEHOLDERS,
    SERVER_PLACEHOLDERS,
    TABLES,
    Field,
    fields_of,
)
from moetune.applications.experiments.plan_file import PlanError, parse_plan
from moetune.applications.experiments.plan_text import render_plan
from moetune.domain.experiment import HIGHER_IS_BETTER
from moetune.domain.experiment_plan import Plan
from moetune.domain.version import release_text
from moetune.servers.flag_data import SERVERS, flag_book

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCUMENT = Path(__file__).parents[1] / "docs" / "experiment-plan.md"
KINDS = {
    "str": "text",
    "int": "whole number",
    "float": "number",
    "bool": "true or false",
    "list of str": "list of texts",
    "list of int": "list of whole numbers",
    "table of str": "table of texts",
}


def text() -> str:
    return DOCUMENT.read_text("utf-8")


def example() -> str:
    blocks = re.findall(r"```toml\n(.*?)```", text(), re.S)
    assert len(blocks) == 1
    return str(blocks[0])


def meanings(kind: type) -> dict[str, str]:
    """What the docstring of a dataclass says of each attribute."""
    lines = (kind.__doc__ or "").partition("Attributes:\n")[2]
    found = re.findall(r"^        (\w+): (.*?)(?=^        \w+: |\Z)", lines, re.S | re.M)
    return {name: " ".join(words.split()) for name, words in found}


def rows(table: str) -> list[str]:
    told = meanings(TABLES[table] if table else Plan)
    return [
        f"| `{one.name}` | {KINDS[one.kind]} | {default(one)} | {told[one.name]} |"
        for one in fields_of(table).values()
    ]


def default(field: Field) -> str:
    if field.required:
        return "the file's name" if field.key == "name" else "required"
    if field.default in ("", (), {}):
        return "none"
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    return f'`"{field.default}"`' if isinstance(field.default, str) else f"`{field.default:g}`"


def flag_rows(server: str) -> Iterator[str]:
    book = flag_book(server)
    for flag in {flag.name: flag for flag in book.flags.values()}.values():
        first, last = release_text(flag.since), release_text(flag.until)
        span = f"{first} and later" if flag.until == book.inspected[-1] else f"{first} to {last}"
        if flag.since == book.inspected[0]:
            span = "all that were read" if flag.until == book.inspected[-1] else f"up to {last}"
        shown = "log" if any(one.active for one in flag.proofs) else "argument" if flag.proofs else "no line"
        yield f"| `{flag.name}` | {span} | {flag.what} | {shown} |"


def tables() -> dict[str, list[str]]:
    """Heading of a table's section to its rows."""
    heads = {name: f"[{name}]" for name in TABLES} | {"": "At the top", "intervention": "[[intervention]]"}
    return {heads[name]: rows(name) for name in ("", *TABLES)} | {
        {"sglang": "SGLang", "vllm": "vLLM"}[server]: list(flag_rows(server)) for server in SERVERS
    }


def section(heading: str) -> str:
    parts = re.split(r"^#{2,4} ", text(), flags=re.M)
    return next(part for part in parts if part.splitlines()[0].strip("`") == heading)


def test_the_example_is_a_plan() -> None:
    plan = parse_plan(example().encode(), "example", DOCUMENT.parent)
    assert [one.name for one in plan.interventions]
    assert parse_plan(render_plan(plan).encode(), "again", DOCUMENT.parent).server == plan.server
    found = check_plan(plan)
    assert [one.intervention for one in found if one.severity == "error"] == ["fused all-reduce"]


@pytest.mark.parametrize("heading", list(tables()))
def test_a_table_is_what_the_program_knows(heading: str) -> None:
    """Each key with its kind and default, each flag with its releases: neither more nor less."""
    written = [line for line in section(heading).splitlines() if line.startswith("| `")]
    assert written == tables()[heading]


def test_what_messages_point_at_is_this_page() -> None:
    with pytest.raises(PlanError) as error:
        parse_plan(b"", "x", DOCUMENT.parent)
    assert f"docs/{DOCUMENT.name}" in (error.value.hint or "")


def test_names_that_may_stand_in_braces_and_metrics_are_told() -> None:
    page = " ".join(text().split())
    assert ", ".join(f"`{{{name}}}`" for name in SERVER_PLACEHOLDERS) in page
    assert ", ".join(f"`{{{name}}}`" for name in LOAD_PLACEHOLDERS) in page
    assert ", ".join(f"`{name}`" for name in HIGHER_IS_BETTER) in page


def rewrite() -> None:
    """Put the tables into the page."""
    page = text()
    for heading, lines in tables().items():
        part = section(heading)
        new = re.sub(r"(?:^\| `.*\n)+", "".join(line + "\n" for line in lines), part, count=1, flags=re.M)
        page = page.replace(part, new)
    DOCUMENT.write_text(page, "utf-8")


if __name__ == "__main__":
    rewrite()
