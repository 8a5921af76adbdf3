"""TOML with the line of every key and list item, so that a fault in a plan can be pointed at.

Python's own reader (`tomllib`, before 3.11 the package `tomli`) decides what is TOML and what it means;
the scanner here only walks a text that the reader has accepted, and notes where things stand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from moetune.domain.text import printable

MAX_BYTES = 256 << 10
MAX_LINE = 8 << 10
MAX_DEPTH = 8

Place = tuple[str | int, ...]
"""Keys and positions that lead to a value: `("intervention", 0, "arguments", 2)`."""

_BLANK = re.compile(r"[ \t]*")
_BETWEEN = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_SCALAR = re.compile(r"[^,\]}#\r\n]+")
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))")
_ESCAPED = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", "e": "\x1b"}
_AT_LINE = re.compile(r"\(at line (\d{1,9}), column \d{1,9}\)")


class TomlFault(Exception):  # noqa: N818 - it is turned into an error that names the file
    """What is wrong with a text as TOML.

    Args:
        reason: for people.
        line: where, 0 when it is about the whole text.
    """

    def __init__(self, reason: str, line: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.line = line


@dataclass(frozen=True, slots=True)
class TomlDocument:
    """A document and where its values stand.

    Attributes:
        value: the document, as `tomllib` reads it.
        lines: place of a key, table or list item to its line, the first is 1.
    """

    value: Mapping[str, Any]
    lines: Mapping[Place, int]

    def line(self, place: Place) -> int:
        """The line of a value; of what holds it where it has none of its own, 1 for the document."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place, 1)


def read_toml(data: bytes) -> TomlDocument:
    """Read a text as TOML.

    Raises:
        TomlFault: for what is too large, too deep, no UTF-8 or no TOML.
    """
    if len(data) > MAX_BYTES:
        raise TomlFault(f"is larger than {MAX_BYTES} bytes, which no plan is")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as broken:
        raise TomlFault(
            f"is not UTF-8 text (byte {broken.start})", 1 + data[: broken.start].count(b"\n")
        ) from None
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    # A key of thousands of parts takes the reader quadratic time, and a key cannot span lines.
    for number, row in enumerate(text.split("\n"), 1):
        if len(row) > MAX_LINE:
            raise TomlFault(f"has a line of more than {MAX_LINE} characters", number)
    reader = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        value = reader.loads(text)
    except RecursionError:
        raise TomlFault(f"is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as broken:  # TOMLDecodeError, and a number of thousands of digits
        at = _AT_LINE.search(str(broken))
        reason = printable(_AT_LINE.sub("", str(broken)).strip(), 200)
        line = int(at[1]) if at else (text.count("\n") + 1 if "end of document" in reason else 0)
        raise TomlFault(f"is not TOML: {reason}", line) from None
    if _depth(value) > MAX_DEPTH:
        raise TomlFault(f"is nested deeper than {MAX_DEPTH} levels")
    return TomlDocument(value, _Scanner(text).scan())


def _depth(value: Mapping[str, Any]) -> int:
    level: list[Any] = [value]
    depth = 0
    while level and depth <= MAX_DEPTH:
        depth += 1
        held = [
            item for holder in level for item in (holder.values() if isinstance(holder, dict) else holder)
        ]
        level = [item for item in held if isinstance(item, (dict, list))]
    return depth


class _LostError(Exception):
    """The scanner does not understand what the reader took."""


class _Scanner:
    """Walks a valid document once, from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._counted, self._line = 0, 1
        self._lines: dict[Place, int] = {}
        self._tables: dict[Place, int] = {}  # arrays of tables: how many they hold so far

    def scan(self) -> dict[Place, int]:
        """Places and lines; those up to a form that only a later TOML has, where the reader takes one."""
        with suppress(IndexError, _LostError):
            self._document()
        return self._lines

    def _document(self) -> None:
        base: Place = ()
        while True:
            self._skip(_BETWEEN)
            if self._at >= len(self._text):
                return
            base = self._header() if self._text[self._at] == "[" else self._pair(base)

    def _header(self) -> Place:
        line = self._here()
        array = self._text.startswith("[[", self._at)
        self._at += 2 if array else 1
        parts = self._key()
        self._at += 2 if array else 1
        place: Place = ()
        for part in parts[:-1]:
            place = self._latest((*place, part))
            self._lines.setdefault(place, line)
        last = (*place, parts[-1])
        if array:
            self._tables[last] = self._tables.get(last, 0) + 1
            self._lines.setdefault(last, line)
            place = self._latest(last)
        else:
            place = self._latest(last)
        self._lines[place] = line
        return place

    def _latest(self, place: Place) -> Place:
        """The last table of an array of tables, any other place as it is."""
        count = self._tables.get(place, 0)
        return (*place, count - 1) if count else place

    def _pair(self, base: Place) -> Place:
        line = self._here()
        place = base
        for part in self._key():
            place = (*place, part)
            self._lines.setdefault(place, line)
        if self._text[self._at] != "=":
            raise _LostError
        self._at += 1
        self._value(place)
        return base

    def _value(self, place: Place) -> None:
        self._skip(_BLANK)
        first = self._text[self._at]
        if first in "\"'":
            self._string()
        elif first == "[":
            self._list(place)
        elif first == "{":
            self._inline(place)
        else:
            self._skip(_SCALAR)

    def _list(self, place: Place) -> None:
        self._at += 1
        position = 0
        while True:
            self._skip(_BETWEEN)
            if self._text[self._at] == "]":
                break
            item: Place = (*place, position)
            self._lines[item] = self._here()
            self._value(item)
            position += 1
            self._separator("]")
        self._at += 1

    def _inline(self, place: Place) -> None:
        self._at += 1
        while True:
            self._skip(_BETWEEN)
            if self._text[self._at] == "}":
                break
            self._pair(place)
            self._separator("}")
        self._at += 1

    def _separator(self, end: str) -> None:
        self._skip(_BETWEEN)
        if self._text[self._at] == ",":
            self._at += 1
        elif self._text[self._at] != end:
            raise _LostError

    def _key(self) -> list[str]:
        """A dotted key, up to the sign after it."""
        parts = []
        while True:
            self._skip(_BLANK)
            if self._text[self._at] in "\"'":
                parts.append(self._string())
            else:
                start = self._at
                self._skip(_BARE)
                parts.append(self._text[start : self._at])
            self._skip(_BLANK)
            if self._text[self._at] != ".":
                return parts
            self._at += 1

    def _string(self) -> str:
        quote = self._text[self._at]
        fence = quote * 3 if self._text.startswith(quote * 3, self._at) else quote
        start = end = self._at + len(fence)
        while not self._text.startswith(fence, end):
            if end >= len(self._text):
                raise _LostError
            end += 2 if quote == '"' and self._text[end] == "\\" else 1
        self._at = end + len(fence)
        while len(fence) == 3 and self._text.startswith(quote, self._at):  # quotes before the closing fence
            self._at += 1
        content = self._text[start:end]
        return _ESCAPE.sub(_unescaped, content) if quote == '"' else content

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self._text, self._at)
        self._at = match.end() if match else self._at

    def _here(self) -> int:
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._line


def _unescaped(match: re.Match[str]) -> str:
    digits = match[1] or match[2]
    return chr(int(digits, 16)) if digits else _ESCAPED.get(match[3], match[3])
