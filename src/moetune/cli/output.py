"""The one sink of everything that is printed: data on stdout, people on stderr."""

from __future__ import annotations

import errno
import json
import os
import sys
import textwrap
from typing import TYPE_CHECKING, TextIO

import click

from moetune.cli.tables import Table, render_table
from moetune.domain.errors import OutputError
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_WIDTH = 80  # of prose, in a terminal and in a pipe alike
_INDENT = 16  # of the values of fields
_WRAPPER = textwrap.TextWrapper(_WIDTH - _INDENT, break_long_words=False, break_on_hyphens=False)
_LONGEST_LINE = 1 << 16  # longer than any path or config: nothing that we print is cut


def clean(text: object) -> str:
    """Text from outside, safe for a terminal: one line, no control sequence, no hidden character."""
    return printable(str(text), _LONGEST_LINE)


class Prose(str):
    """A value that may be broken between its words; paths and commands may not."""

    __slots__ = ()


class Sink:
    """Where a verb says what it has to say.

    With `as_json`, stdout carries the document alone and the report is left out: notes, warnings
    and errors still go to stderr.

    Args:
        as_json: print the document instead of the report.
        color: False switches colours off; None lets the terminal and NO_COLOR decide.
    """

    def __init__(self, as_json: bool = False, color: bool | None = None) -> None:
        self.as_json = as_json
        self._color = color

    def heading(self, text: str) -> None:
        """A line that begins a part of the report."""
        self._report(text, bold=True)

    def line(self, text: str = "") -> None:
        """A line of the report."""
        self._report(text)

    def fields(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Names and values, aligned; empty values are left out, a repeated name is shown once."""
        last = ""
        for name, value in pairs:
            if not value:
                continue
            text = clean(value)
            lines = _WRAPPER.wrap(text) if isinstance(value, Prose) else [text]
            for line in lines:
                label = "" if name == last else clean(name)
                self._write(sys.stdout, f"  {self._dim(label.ljust(_INDENT - 4))}  {line}", report=True)
                last = name

    def table(self, table: Table, indent: int = 2) -> None:
        """An aligned table; never shortened, no lines drawn unless a terminal reads them."""
        ruled = self._is_terminal(sys.stdout) and "utf" in (sys.stdout.encoding or "").lower()
        for number, row in enumerate(render_table(table, rule="\u2500" if ruled else None)):
            self._report(f"{'':{indent}}{row}", bold=number == 0)

    def document(self, document: Mapping[str, object]) -> None:
        """The JSON document of a verb: printed where JSON was asked for."""
        if self.as_json:
            self._write(sys.stdout, json.dumps(document, indent=2, sort_keys=True))

    def note(self, text: str) -> None:
        """Something that a person should know, not part of the result."""
        self._write(sys.stderr, clean(text))

    def warning(self, text: str) -> None:
        """Something that a person should look at."""
        self._write(sys.stderr, self._style("warning: ", sys.stderr, fg="yellow", bold=True) + clean(text))

    def _report(self, text: str, *, bold: bool = False) -> None:
        text = clean(text)
        self._write(sys.stdout, self._style(text, sys.stdout, bold=True) if bold else text, report=True)

    def _dim(self, text: str) -> str:
        return self._style(text, sys.stdout, dim=True)

    def _style(self, text: str, stream: TextIO, **style: object) -> str:
        return click.style(text, **style) if text and self._colored(stream) else text  # type: ignore[arg-type]

    def _colored(self, stream: TextIO) -> bool:
        if self._color is not None:
            return self._color
        return (
            not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and self._is_terminal(stream)
        )

    @staticmethod
    def _is_terminal(stream: TextIO) -> bool:
        return stream.isatty()

    def _write(self, stream: TextIO, line: str, *, report: bool = False) -> None:
        if report and self.as_json:
            return
        try:
            stream.write(line + "\n")
            stream.flush()
        except BrokenPipeError:
            # Nobody reads any more (`| head`): the work goes on and its exit code stands.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except OSError as error:
            if error.errno != errno.EBADF:
                raise OutputError(f"cannot write to {stream.name}: {error.strerror}") from error
