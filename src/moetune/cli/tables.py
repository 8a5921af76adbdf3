"""Tables as text: aligned, never shortened, readable at 80 columns and in a pipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading, and whether its values are numbers that line up on the right."""

    heading: str
    right: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Columns and the rows below them."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]


def render_table(table: Table, rule: str | None = None) -> Iterator[str]:
    """Yield the lines of a table.

    Args:
        table: what to show.
        rule: character of the line below the headings; None draws none.
    """
    rows = [tuple(column.heading for column in table.columns), *table.rows]
    widths = [max(len(row[index]) for row in rows) for index in range(len(table.columns))]
    for number, row in enumerate(rows):
        cells = (
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(row, widths, table.columns, strict=True)
        )
        yield "  ".join(cells).rstrip()
        if number == 0 and rule is not None:
            yield "  ".join(rule * width for width in widths)
