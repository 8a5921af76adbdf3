"""The journal of a run: what was measured, one JSON object a line, each durable before the next begins.

It is append-only. A run that is killed leaves at most one line cut short, which the next run drops;
all before it stands. One process at a time holds a journal.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetune.domain.errors import InputError, MoetuneError, OutputError
from moetune.domain.identity import fingerprint, identity
from moetune.domain.safe_json import JsonLimits, load_json_object
from moetune.domain.server_kernel import OWN
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moetune.domain.problem import Problem

SCHEMA = "moetune.journal/1"
MAX_BYTES = 512 << 20
"""An exhaustive run of 22 m writes some 30 MB."""
_LINE_LIMITS = JsonLimits(max_bytes=1 << 20, max_depth=16)
_NAME = "journal.jsonl"
_OWN_KERNELS = ("kernels.py", "dequantizing_kernel.py", "between.py")
"""Files of the measuring layer whose kernels are timed."""


class JournalBusyError(MoetuneError):
    """Another process measures the same problem on the same GPU."""


def state_root(given: str | Path | None, environ: Mapping[str, str]) -> Path:
    """The directory of runs: what is given, else MOETUNE_STATE, else the XDG state directory."""
    if given is not None:
        return Path(given)
    if environ.get("MOETUNE_STATE"):
        return Path(environ["MOETUNE_STATE"])
    base = environ.get("XDG_STATE_HOME", "")
    # A relative path in it is to be ignored (XDG base directory specification).
    home = (
        Path(base) if base.startswith("/") else Path(environ.get("HOME", "~")).expanduser() / ".local/state"
    )
    return home / "moetune"


@cache
def own_kernel() -> str:
    """A short name of moetune's own kernels: another one when their text changes."""
    texts = [files("moetune.measure").joinpath(name).read_bytes() for name in _OWN_KERNELS]
    return f"moetune {hashlib.sha256(b''.join(texts)).hexdigest()[:12]}"


def timed_kernel(problem: Problem) -> str:
    """Whose kernel the times of a problem are of, down to its text."""
    return own_kernel() if problem.kernel_source == OWN else problem.kernel_source


def run_folder(root: Path, problem: Problem, gpu_uuid: str) -> Path:
    """The folder of the run of a problem on one GPU, with one kernel."""
    board = hashlib.sha256(f"{gpu_uuid} {timed_kernel(problem)}".encode()).hexdigest()[:8]
    return root / "runs" / f"{fingerprint(problem)}-{board}"


@dataclass(slots=True)
class Journal:
    """An open journal. Use it as a context manager.

    Attributes:
        folder: where it lies; the compile cache is beside it.
        lines: what it held when it was opened, the header left out.
        dropped: it ended in the middle of a line, which was dropped.
    """

    folder: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    dropped: bool = False
    _descriptor: int = -1
    _length: int = 0

    @classmethod
    def open(cls, root: Path, problem: Problem, gpu_uuid: str) -> Journal:
        """Open the journal of a problem on a GPU, or begin one, and lock it.

        Raises:
            JournalBusyError: when another process holds it.
            OutputError: when it cannot be written.
            InputError: when what is there is no journal of that problem.
        """
        header = {
            "fingerprint": fingerprint(problem),
            "gpu_uuid": gpu_uuid,
            "kernel": timed_kernel(problem),
            "identity": identity(problem),
        }
        return cls.open_in(
            run_folder(root, problem, gpu_uuid),
            {"schema": SCHEMA, **header},
            busy="another moetune measures this on this GPU",
            other="is no journal of this problem on this GPU",
        )

    @classmethod
    def open_in(cls, folder: Path, header: Mapping[str, Any], *, busy: str, other: str) -> Journal:
        """Open the journal of a folder, or begin one, and lock it.

        Args:
            folder: where it lies; made when it is missing.
            header: JSON values of its first line, which say what it is a journal of.
            busy: what it means that another process holds it.
            other: what to say of one with another header.

        Raises:
            JournalBusyError: when another process holds it.
            OutputError: when it cannot be written.
            InputError: when what is there has another header, or is none.
        """
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(folder)
            descriptor = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise OutputError(
                f"{printable(str(folder), 400)} cannot hold a journal: {error.strerror}",
                "give another place with --state DIR",
            ) from error
        journal = cls(folder, _descriptor=descriptor)
        try:
            journal._lock(busy)
            journal._read(header, other)
        except BaseException:
            journal.close()
            raise
        return journal

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / _NAME

    @property
    def cache(self) -> Path:
        """The private folder of compiled kernels."""
        return self.folder / "cache"

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give it back."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def append(self, kind: str, *, durable: bool = True, **values: Any) -> None:  # noqa: ANN401 - JSON values
        """Write a line, and return when it is on the disk.

        Args:
            kind: what the line says.
            durable: wait for the disk; what says less than a measurement may wait for the next line.
            values: JSON values.

        Raises:
            OutputError: when it cannot be written; the lines before it stand.
        """
        line = json.dumps({"kind": kind, **values}, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            self._write(line, durable)
        except OSError as error:
            # What was written of the line would be dropped by the next run anyway.
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._length)
            raise OutputError(
                f"{printable(str(self.path), 400)} cannot be written: {error.strerror}",
                "what was measured so far is kept: make room and run the same command again",
            ) from error
        self._length += len(line)

    def _write(self, data: bytes, durable: bool) -> None:
        written = 0
        while written < len(data):
            written += os.pwrite(self._descriptor, data[written:], self._length + written)
        if durable:
            os.fsync(self._descriptor)

    def _lock(self, busy: str) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise JournalBusyError(
                f"{busy}: it holds {printable(str(self.path), 400)}",
                "wait for it, or end it; then run the same command again",
            ) from error

    def _read(self, header: Mapping[str, Any], other: str) -> None:
        size = os.fstat(self._descriptor).st_size
        if size > MAX_BYTES:
            raise self._broken(f"is larger than {MAX_BYTES >> 20} MiB")
        content = b""
        while len(content) < size and (part := os.pread(self._descriptor, size, len(content))):
            content += part
        whole, newline, rest = content.rpartition(b"\n")
        self.dropped = bool(rest)
        lines = whole.split(b"\n") if newline else []
        self._length = len(whole) + len(newline)
        if self.dropped:
            os.ftruncate(self._descriptor, self._length)
            os.fsync(self._descriptor)
        documents = [self._parse(number, line) for number, line in enumerate(lines, 1)]
        if not documents:
            self.append("header", **header)
            self._sync_folder()
            return
        if any(documents[0].get(name) != value for name, value in header.items()):
            raise self._broken(other)
        self.lines = documents[1:]

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            document: dict[str, Any] = load_json_object(line, f"{self.path}, line {number}", _LINE_LIMITS)
        except InputError as error:
            raise self._broken(f"is broken in line {number}") from error
        return document

    def _broken(self, reason: str) -> InputError:
        return InputError(
            f"{printable(str(self.path), 400)} {reason}", "move it away and run the same command again"
        )

    def _sync_folder(self) -> None:
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _check_owner(folder: Path) -> None:
    """Refuse a folder that someone else can write: compiled kernels are loaded from it."""
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OutputError(
            f"{printable(str(folder), 400)} belongs to, or can be written by, someone else",
            "give another place with --state DIR",
        )
