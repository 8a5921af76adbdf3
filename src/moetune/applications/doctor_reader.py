"""Logs as a stream: files, standard input and gzip, in constant memory, only lines that may say something.

A log of an ordinary day is requests and batches. One expression passes over such lines a record at a
time, another looks for the few words that every line of interest holds; only around those is
anything decoded.
"""

from __future__ import annotations

import codecs
import os
import re
import stat
import sys
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING

from moetune.domain.errors import InputError
from moetune.domain.log_lines import LogLine, read_line
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

CHUNK = 1 << 20
OVERLAP = 1 << 18
"""Bytes after a line that are at hand to join it with what continues it."""
LONGEST_LINE = 1 << 19
MAX_EXPANDED = 4 << 30
"""Bytes that a gzip file may expand to."""
MAX_RATIO = 600
"""Times that it may expand, once it gave more than a few chunks: logs reach 100."""

_BEHIND = 1 << 14
_LONGEST_NEEDLE = 64
_PIECE = 1 << 13
_LINES_BEFORE = 4
_LINES_AFTER = 8
_MAX_PARTS = 64  # pieces of 16 KiB into which a container engine cuts one line
_SAMPLE = 1 << 16
# Requests and batches of both servers: no line that any grammar reads. Each alternative is bounded
# and begins with what only such lines have.
_ORDINARY = re.compile(
    rb"(?:(?:[A-Za-z0-9][\w.-]{0,60} {0,40}\| )?"
    rb"(?:\[[0-9][^\]\n]{9,60}\] (?:Decode|Prefill) batch[ ,\[][^\n]*\n"
    rb"|\[[0-9][^\]\n]{9,40}\] INFO:     [^\n]*\n"
    rb"|(?:\([A-Za-z][\w .=-]{0,40}\) )?INFO:     [0-9][^\n]*\n"
    rb"|(?:\([A-Za-z][\w .=-]{0,40}\) )?INFO [0-9][^\n\[]{10,20}\[loggers\.py:\d{1,5}\] Engine \d[^\n]*\n"
    rb"|\n{1,4096})){1,4000}"
)
_MAGIC = {
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -dc"),
    b"\xfd7zXZ\x00": ("xz", "xz -dc"),
    b"BZh": ("bzip2", "bzip2 -dc"),
    b"PK\x03\x04": ("zip", "unzip -p"),
}
_GZIP = b"\x1f\x8b"
_UTF16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
_CONTROL = frozenset(range(32)) - {9, 10, 12, 13, 27} | {127}


@dataclass(slots=True)
class LogSource:
    """How a log was read.

    Attributes:
        name: as the user gave it, `-` for standard input.
        lines: that were read.
        size_bytes: of the text, expanded.
        problems: why it was not read to its end, in sentences.
    """

    name: str
    lines: int = 0
    size_bytes: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Hit:
    """A line that may say something.

    Attributes:
        line: without its prefixes.
        number: of the line in its log, from 1.
        source: the log.
    """

    line: LogLine
    number: int
    source: LogSource
    _buffer: bytes = field(repr=False)
    _start: int
    _end: int

    @property
    def where(self) -> str:
        """File and line."""
        return f"{printable(self.source.name, 200)}:{self.number}"

    @cached_property
    def before(self) -> tuple[LogLine, ...]:
        """Lines before it that may begin the record that it continues, nearest last."""
        return tuple(_lines_before(self._buffer, self._start, _LINES_BEFORE))

    @cached_property
    def after(self) -> tuple[LogLine, ...]:
        """Lines after it that may continue it."""
        return tuple(_lines_after(self._buffer, self._end, _LINES_AFTER))


class HitReader:
    """Reads logs and yields the lines that hold one of the needles.

    Args:
        needles: words of which every line of interest holds one.
    """

    def __init__(self, needles: Iterable[bytes]) -> None:
        unique = sorted(set(needles))
        self._needle = re.compile(b"|".join(map(re.escape, unique)))

    def read(self, name: str, stream: IO[bytes] | None = None) -> Iterator[tuple[LogSource, Hit | None]]:
        """Yield the hits of a log, and at its end the source with None.

        Args:
            name: a path, or `-` for standard input.
            stream: read this instead of opening the name.

        Raises:
            InputError: for what cannot be opened, or is no text.
        """
        source = LogSource(name)
        opened = stream or _open(name)
        try:
            for hit in self._scan(source, _text(source, opened)):
                yield source, hit
        except OSError as error:
            raise InputError(f"{printable(name)} cannot be read: {error.strerror}") from None
        finally:
            if stream is None and name != "-":
                opened.close()
        yield source, None

    def _scan(self, source: LogSource, chunks: Iterator[bytes]) -> Iterator[Hit]:
        buffer, start, number = b"", 0, 1
        for chunk in chunks:
            buffer = buffer[max(0, start - _BEHIND) :] + chunk
            start = min(start, _BEHIND)
            end = buffer.rfind(b"\n", start, len(buffer) - OVERLAP) + 1 if len(buffer) > OVERLAP else 0
            endless = end == 0 and len(buffer) - start > LONGEST_LINE + OVERLAP
            if endless:
                end = len(buffer) - OVERLAP  # piece by piece
            if end > start:
                start, number = yield from self._scan_part(source, buffer, start, end, number)
                # A needle that the cut went through is found from here on.
                start -= _LONGEST_NEEDLE if endless else 0
        start, number = yield from self._scan_part(source, buffer, start, len(buffer), number)
        source.lines = number - (0 if len(buffer) > 0 and not buffer.endswith(b"\n") else 1)

    def _scan_part(
        self, source: LogSource, buffer: bytes, start: int, end: int, number: int
    ) -> Generator[Hit, None, tuple[int, int]]:
        """Scan a part of the buffer; gives the place and the line number to go on from."""
        search, ordinary, position, counted = self._needle.search, _ORDINARY.match, start, start
        while position < end:
            skipped = ordinary(buffer, position, end)
            if skipped is not None:
                position = skipped.end()
                continue
            stop = min(end, position + 4096)
            found = search(buffer, position, stop)
            if found is None:
                # Go on at the beginning of a line, so that no needle is cut.
                newline = buffer.rfind(b"\n", position, stop)
                position = end if stop == end else newline + 1 if newline >= 0 else stop - _LONGEST_NEEDLE
                continue
            line_start = max(buffer.rfind(b"\n", 0, found.start()) + 1, found.start() - LONGEST_LINE, 0)
            line_end = buffer.find(b"\n", found.start())
            line_end = len(buffer) if line_end < 0 else line_end
            if line_end - line_start > LONGEST_LINE:  # only what stands around the word
                line_start, line_end = (
                    max(line_start, found.start() - 8192),
                    min(line_end, found.end() + 65536),
                )
            number += buffer.count(b"\n", counted, line_start)
            counted = line_start
            hit, consumed = _hit(source, buffer, line_start, line_end, number)
            yield hit
            position = max(consumed + 1, found.end())
        position = max(position, end)
        number += buffer.count(b"\n", counted, min(position, len(buffer)))
        return min(position, len(buffer)), number


def _hit(source: LogSource, buffer: bytes, start: int, end: int, number: int) -> tuple[Hit, int]:
    line, first = read_line(buffer[start:end]), start
    if not line.wrapped_by:
        return Hit(line, number, source, buffer, first, end), end
    parts = [line.text]
    for earlier in reversed(_lines_before(buffer, start, _LINES_BEFORE)):
        if not earlier.continues:
            break
        parts.insert(0, earlier.text)
    joined = line
    while joined.continues and end < len(buffer) and len(parts) < _MAX_PARTS:
        start, end = end + 1, buffer.find(b"\n", end + 1)
        end = len(buffer) if end < 0 else end
        joined = read_line(buffer[start:end])
        parts.append(joined.text)
    if len(parts) > 1:
        line = LogLine("".join(parts), line.rank, True)
    return Hit(line, number, source, buffer, first, end), end


def _lines_before(buffer: bytes, start: int, count: int) -> list[LogLine]:
    lines: list[LogLine] = []
    while start > 0 and len(lines) < count:
        previous = buffer.rfind(b"\n", 0, start - 1) + 1
        if start - previous > 1 << 17:
            break
        lines.append(read_line(buffer[previous : start - 1]))
        start = previous
    return lines[::-1]


def _lines_after(buffer: bytes, end: int, count: int) -> Iterator[LogLine]:
    for _ in range(count):
        if end >= len(buffer):
            return
        start, end = end + 1, buffer.find(b"\n", end + 1)
        end = len(buffer) if end < 0 else end
        if end - start > 1 << 14:
            return
        yield read_line(buffer[start:end])


def whole_text(source: LogSource) -> Iterator[bytes]:
    """The text of a file in chunks, gzip expanded to a limit, for what has no lines of interest.

    Args:
        source: its name; takes what went wrong.

    Raises:
        InputError: for what cannot be opened, or is no text.
    """
    opened = _open(source.name)
    try:
        yield from _text(source, opened)
    except OSError as error:
        raise InputError(f"{printable(source.name)} cannot be read: {error.strerror}") from None
    finally:
        if source.name != "-":
            opened.close()


# --- bytes ------------------------------------------------------------------------------------------


def _open(name: str) -> IO[bytes]:
    if name == "-":
        return sys.stdin.buffer
    shown = printable(name, 400)
    try:
        descriptor = os.open(name, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{shown} cannot be read: {reason}", "moetune doctor server.log") from None
    mode = os.fstat(descriptor).st_mode
    # A pipe is what `<(kubectl logs ...)` gives; devices never end.
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        os.close(descriptor)
        kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
        hint = f"name the logs in it: moetune doctor {Path(name)}/*.log" if stat.S_ISDIR(mode) else None
        raise InputError(f"{shown} is {kind}", printable(hint, 400) if hint else None)
    return open(descriptor, "rb", buffering=0)  # noqa: PTH123 - the caller closes it


def _text(source: LogSource, stream: IO[bytes]) -> Iterator[bytes]:
    """The text of a log as UTF-8, in chunks."""
    raw = _raw(source, stream)
    first = next(raw, b"")
    name = printable(source.name, 200)
    for magic, (kind, command) in _MAGIC.items():
        if first.startswith(magic):
            raise InputError(f"{name} is compressed with {kind}", f"{command} {name} | moetune doctor -")
    chunks = _chain(first, raw)
    if first.startswith(_GZIP):
        chunks = _expanded(source, chunks)
        first = next(chunks, b"")
        chunks = _chain(first, chunks)
    for bom, encoding in _UTF16.items():
        if first.startswith(bom):
            chunks = _recoded(chunks, encoding)
            first = next(chunks, b"")
            chunks = _chain(first, chunks)
    _refuse_binary(name, first[:_SAMPLE])
    empty = True
    for chunk in chunks:
        empty = empty and not chunk.strip()
        source.size_bytes += len(chunk)
        yield chunk
    if empty and not source.problems:
        raise InputError(f"{name} is empty", "give the log of a server: moetune doctor server.log")


def _raw(source: LogSource, stream: IO[bytes]) -> Iterator[bytes]:
    """What stands in a file when it is opened: what is added while it is read is not waited for."""
    try:
        status = os.fstat(stream.fileno())
        left = status.st_size if stat.S_ISREG(status.st_mode) else None
    except (OSError, ValueError, AttributeError):
        left = None
    while left is None or left > 0:
        chunk = stream.read(CHUNK if left is None else min(CHUNK, left))
        if not chunk:
            if left is not None:
                source.problems.append("it became shorter while it was read")
            return
        if left is not None:
            left -= len(chunk)
        yield chunk


def _chain(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    if first:
        yield first
    yield from rest


def _expanded(source: LogSource, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Expand gzip, of several members too, to a limit; damage ends it and is told."""
    expander = zlib.decompressobj(wbits=31)
    given = taken = 0
    for piece in _pieces(chunks):
        taken += len(piece)
        data = piece
        while data:
            try:
                text = expander.decompress(data, CHUNK)
            except zlib.error:
                source.problems.append("its gzip data is damaged")
                return
            given += len(text)
            if text:
                yield text
            if given > MAX_EXPANDED or (given > 64 * CHUNK and given > MAX_RATIO * taken):
                source.problems.append(f"its gzip data expands to more than {given >> 20} MiB")
                return
            data = expander.unconsumed_tail
            if expander.eof:
                data = expander.unused_data.lstrip(b"\0")
                if data[:1] and not _GZIP.startswith(data[:2]):
                    source.problems.append("something that is no gzip data follows its gzip data")
                    return
                expander = zlib.decompressobj(wbits=31)
                fresh = not data
            else:
                fresh = False
    if taken and not (expander.eof or fresh):
        source.problems.append("its gzip data is cut off")


def _pieces(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Small ones: of a damaged piece nothing is given."""
    for chunk in chunks:
        for start in range(0, len(chunk), _PIECE):
            yield chunk[start : start + _PIECE]


def _recoded(chunks: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    for chunk in chunks:
        yield decoder.decode(chunk).lstrip("\ufeff").encode("utf-8", "replace")
    yield decoder.decode(b"", True).encode("utf-8", "replace")


def _refuse_binary(name: str, sample: bytes) -> None:
    # A log rotated by copytruncate begins with a hole of zero bytes.
    text = sample.replace(b"\0", b"")
    if sample and not text:
        raise InputError(f"{name} begins with {len(sample)} zero bytes and no text", "is it a log?")
    odd = sum(text.count(code) for code in _CONTROL)
    replaced = text.decode("utf-8", "replace").count("\ufffd")
    if 10 * (odd + replaced) > len(text) and len(text) > 8:
        raise InputError(f"{name} is no text but binary data", "give the log of a server")
