"""The log of a start: what a server prints, of a limited size, its head and its tail kept."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.applications.environment import REDACTED
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

_CHUNK_BYTES = 1 << 16
_LINE_BYTES = 1 << 16
_EXCERPT_BYTES = 1 << 16
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class LogLimits:
    """How much of a log is kept.

    Attributes:
        head_bytes: from its beginning: versions, arguments, sizes.
        tail_bytes: at least that much from its end; up to twice as much lies there for a while.
    """

    head_bytes: int = 16 << 20
    tail_bytes: int = 16 << 20


LIMITS = LogLimits()


class BoundedLog:
    """A log that is written. A disk that is full loses lines; whoever prints them does not wait for it.

    Args:
        path: the file; what lies there is replaced.
        limits: of its size.
        secrets: values that are replaced wherever they stand.
    """

    def __init__(self, path: Path, limits: LogLimits, secrets: Sequence[bytes] = ()) -> None:
        self._path, self._limits, self._secrets = path, limits, tuple(secrets)
        self._lock = threading.Lock()
        self._left_out = 0
        self._tail_start = 0
        """Where the tail begins in the file; 0: nothing was left out so far."""
        self._note_bytes = 0
        self._descriptor = os.open(path, _FLAGS, 0o600)
        self._size = 0

    def write(self, data: bytes) -> None:
        """Add to it."""
        for secret in self._secrets:
            data = data.replace(secret, REDACTED.encode())
        with self._lock:
            try:
                self._append(data)
                if self._size > (self._tail_start or self._limits.head_bytes) + 2 * self._limits.tail_bytes:
                    self._cut()
            except OSError:
                # What a failed write left of a line goes too.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self._size)

    def copy(self, source: int) -> None:
        """Add what comes out of a pipe until nobody holds its other end, whole lines at a time."""
        rest = b""
        while data := _read(source):
            whole, newline, rest = (rest + data).rpartition(b"\n")
            self.write(whole + newline)
            if len(rest) > _LINE_BYTES:
                self.write(rest)
                rest = b""
        self.write(rest)

    def close(self) -> None:
        """Close it."""
        with self._lock, contextlib.suppress(OSError):
            os.close(self._descriptor)

    def _append(self, data: bytes) -> None:
        _write_at(self._descriptor, data, self._size)
        self._size += len(data)

    def _cut(self) -> None:
        """Take out the middle and leave a line that says so.

        The file is replaced in one step: who reads it meanwhile has the old one or the new one. A disk
        that has no room for both has it cut in place.
        """
        if not self._tail_start:
            head = os.pread(self._descriptor, self._limits.head_bytes, 0)
            self._tail_start = len(_to_last_line(head))
        kept = self._limits.tail_bytes
        tail = _from_first_line(os.pread(self._descriptor, kept, self._size - kept))
        self._left_out += self._size - self._tail_start - self._note_bytes - len(tail)
        note = f"[moetune: {self._left_out} bytes of this log are left out here]\n".encode()
        self._note_bytes = len(note)
        head = os.pread(self._descriptor, self._tail_start, 0)
        temporary = self._path.with_name(f".{self._path.name}.cut")
        descriptor = -1
        try:
            descriptor = os.open(temporary, _FLAGS, 0o600)
            _write_at(descriptor, head + note + tail, 0)
            temporary.replace(self._path)
            descriptor, self._descriptor = self._descriptor, descriptor
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            _write_at(self._descriptor, note + tail, self._tail_start)
            os.ftruncate(self._descriptor, self._tail_start + len(note) + len(tail))
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        self._size = self._tail_start + len(note) + len(tail)


def _write_at(descriptor: int, data: bytes, place: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], place + written)


def _read(source: int) -> bytes:
    try:
        return os.read(source, _CHUNK_BYTES)
    except OSError:
        return b""


def _to_last_line(data: bytes) -> bytes:
    whole, newline, _ = data.rpartition(b"\n")
    return whole + newline or data


def _from_first_line(data: bytes) -> bytes:
    _, newline, rest = data.partition(b"\n")
    return rest if newline else data


def last_lines(path: Path, count: int = 6, limit: int = 300) -> tuple[str, ...]:
    """The last lines of a log, fit for a message; none when there is no log."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ()
    with os.fdopen(descriptor, "rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - _EXCERPT_BYTES, 0))
        text = file.read(_EXCERPT_BYTES).decode("utf-8", "replace")
    # A progress bar is one line that writes over itself.
    lines = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")]
    return tuple(printable(line.strip(), limit) for line in lines if line.strip())[-count:]


class TextSearch:
    """Looks for a text in a log that grows, and reads each part of it once.

    Args:
        path: of the log.
        text: what is looked for.
    """

    def __init__(self, path: Path, text: str) -> None:
        self._path, self._wanted = path, text.encode()
        self._place = self._inode = 0
        self._rest = b""
        self._found = not text

    def found(self) -> bool:
        """Whether it stands there by now."""
        if self._found:
            return True
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            # A log that was cut is another file.
            if status.st_ino != self._inode or status.st_size < self._place:
                self._inode, self._place, self._rest = status.st_ino, 0, b""
            file.seek(self._place)
            while data := file.read(_CHUNK_BYTES):
                self._place += len(data)
                self._rest += data
                if self._wanted in self._rest:
                    self._found = True
                    return True
                self._rest = self._rest[-(len(self._wanted) - 1) :] if len(self._wanted) > 1 else b""
        return False
