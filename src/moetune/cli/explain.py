"""`moetune explain`: the story of a code, or the list of all codes."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import click

from moetune.cli.options import OUTPUT, sink_from, with_options
from moetune.cli.tables import Column, Table

if TYPE_CHECKING:
    from moetune.domain.findings import Code

SCHEMA = "moetune.explain/1"
_WIDTH = 80
_EPILOG = """\b
Examples:
  moetune explain MOE021
  moetune explain"""


@click.command(epilog=_EPILOG)
@click.argument("codes", nargs=-1, metavar="[CODE]...")
@with_options(*OUTPUT)
def explain(codes: tuple[str, ...], **values: bool) -> int:
    """Say what a finding's CODE means: what happens, why, what it costs, how it is mended. Without one:
    list them all.
    """  # noqa: D205 - one sentence is the help text
    del values["exit_zero"]  # there is no 1
    sink = sink_from(values)
    from moetune.domain.finding_codes import all_codes, find_code

    asked = [find_code(name) for name in codes]
    if asked:
        for number, code in enumerate(asked):
            if number:
                sink.line()
            sink.heading(f"{code.code}: {code.title}")
            sink.line(f"  {code.severity.value}")
            sink.line()
            for line in textwrap.wrap(code.story, _WIDTH, break_long_words=False, break_on_hyphens=False):
                sink.line(line)
    else:
        rows = tuple((code.code, code.severity.value, code.title) for code in all_codes().values())
        sink.table(Table((Column("code"), Column("severity"), Column("title")), rows), indent=0)
    shown = asked or list(all_codes().values())
    sink.document({"schema": SCHEMA, "codes": [_json(code) for code in shown]})
    return 0


def _json(code: Code) -> dict[str, str]:
    return {
        "code": code.code,
        "title": code.title,
        "severity": code.severity.value,
        "story": code.story,
    }
