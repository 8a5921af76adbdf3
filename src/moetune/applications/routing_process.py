"""The processes that touch `.pt` files: started, limited, and ended when they do not keep to it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from moetune.applications.compiling import exit_text
from moetune.applications.worker_pool import import_path
from moetune.domain.errors import InputError, MoetuneError, OutputError
from moetune.domain.text import printable
from moetune.measure.routing_frames import MAX_LINE, Frame, frame_bytes, read_frame

if TYPE_CHECKING:
    from moetune.domain.recording import IdArray

READER = ("-m", "moetune.measure.routing_reader")
WRITER = ("-m", "moetune.measure.routing_writer")
AT_A_TIME = 256
"""Files of one process."""
_START_SECONDS = 120.0
_SECONDS_PER_BYTE = 60.0 / (1 << 30)
_MEMORY_BYTES = 512 << 20
_NO_TORCH = "give the interpreter of an environment with torch 2.6 or newer: --python PATH"


class NoTorchError(MoetuneError):
    """`.pt` files are read and written by torch alone."""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file of someone else, open for reading.

    Attributes:
        name: as it is shown.
        descriptor: of it.
        size: in bytes.
    """

    name: str
    descriptor: int
    size: int


def read_files(
    files: Sequence[OpenFile],
    room: dict[str, int],
    python: str | None = None,
    *,
    wall_seconds: float = _START_SECONDS,
) -> Iterator[Frame]:
    """Yield the arrays of some files, read in a process that can do nothing else.

    Args:
        files: the files, AT_A_TIME at most, which stay open.
        room: how many numbers of `ids` and of `counts` may still come; what comes is taken off.
        python: the interpreter, of an environment with torch; None takes this one.
        wall_seconds: in which everything of small files must have come; large ones get more.

    Raises:
        InputError: naming the file that is refused, and why.
        NoTorchError: where there is no torch, or one that is too old.
    """
    memory = _MEMORY_BYTES + 4 * max(file.size for file in files)
    descriptors = [file.descriptor for file in files]
    seconds = wall_seconds + _SECONDS_PER_BYTE * sum(file.size for file in files)
    with _Started(python, [*READER, str(memory), *map(str, descriptors)], descriptors) as process:
        yield from _Answers(process, seconds, files).frames(room)


def write_files(folder: int, files: Iterable[tuple[str, IdArray]], python: str | None = None) -> None:
    """Write tensors into a directory.

    Args:
        folder: its descriptor.
        files: names and ids.
        python: the interpreter, of an environment with torch; None takes this one.

    Raises:
        NoTorchError: where there is none.
        OutputError: when they cannot be written.
    """
    with _Started(python, [*WRITER, str(folder)], [folder], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            for name, ids in files:
                process.stdin.write(json.dumps({"name": name}).encode() + b"\n")
                process.stdin.write(frame_bytes(Frame(0, "ids", ids)))
            process.stdin.close()
        answers = _Answers(process, _START_SECONDS, ())
        note = answers.note()
        if note.get("note") == "torch":
            raise NoTorchError(printable(str(note.get("why")), 200), _NO_TORCH)
        if note.get("note") != "done":
            raise OutputError("the files cannot be written: is there room, and is it your directory?")


class _Answers:
    """What a process says, within a time."""

    def __init__(self, process: subprocess.Popen[bytes], seconds: float, files: Sequence[OpenFile]) -> None:
        assert process.stdout is not None
        self._process, self._files, self._seconds = process, files, seconds
        self._deadline = time.monotonic() + seconds
        self._descriptor = process.stdout.fileno()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._descriptor, selectors.EVENT_READ)
        self._unread = bytearray()

    def frames(self, room: dict[str, int]) -> Iterator[Frame]:
        """Yield the frames until all files are done."""
        while True:
            head = self.note()
            note = head.get("note")
            if note == "done":
                return
            if note == "torch":
                raise NoTorchError(
                    f"recordings are read by torch: {printable(str(head.get('why')), 200)}", _NO_TORCH
                )
            if note == "refused":
                self._refuse(head.get("file"), str(head.get("why")))
            counted = "counts" if head.get("kind") in ("pass", "stat") else "ids"
            try:
                frame = read_frame(head, self._read, len(self._files), room[counted])
            except ValueError as error:
                self._refuse(head.get("file"), str(error))
            room[counted] -= frame.data.size
            yield frame

    def note(self) -> dict[str, Any]:
        """A line."""
        while b"\n" not in self._unread:
            if len(self._unread) > MAX_LINE or not self._more():
                return self._ended()
        line, _, rest = self._unread.partition(b"\n")
        self._unread = rest
        try:
            head = json.loads(line)
        except ValueError:
            return self._ended()
        return head if isinstance(head, dict) else self._ended()

    def _read(self, count: int) -> bytes:
        while len(self._unread) < count:
            if not self._more():
                self._ended()
        data = bytes(self._unread[:count])
        del self._unread[:count]
        return data

    def _more(self) -> bool:
        if not self._selector.select(max(self._deadline - time.monotonic(), 0.0)):
            raise InputError(
                f"reading {self._shown()} took more than {self._seconds:.0f} s", "give fewer files at a time"
            )
        data = os.read(self._descriptor, 1 << 20)
        self._unread += data
        return bool(data)

    def _ended(self) -> NoReturn:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2)
        code = self._process.poll()
        reason = "ended without an answer" if code is None else f"ended with {exit_text(code)}"
        if code == -signal.SIGXCPU:
            reason = "took too much processor time"
        raise InputError(f"the process that handles {self._shown()} {reason}")

    def _refuse(self, number: object, why: str) -> NoReturn:
        name = self._shown()
        if type(number) is int and 0 <= number < len(self._files):
            name = printable(self._files[number].name, 400)
        raise InputError(f"{name} is refused: {printable(why, 300)}")

    def _shown(self) -> str:
        names = [file.name for file in self._files]
        return printable(names[0] if len(names) == 1 else f"{len(names)} files" if names else "files", 400)


class _Started:
    """A process in a group of its own, which does not outlive the block."""

    def __init__(
        self,
        python: str | None,
        arguments: Sequence[str],
        descriptors: Sequence[int],
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        self._command = [python or sys.executable, *arguments]
        self._descriptors, self._stdin = tuple(descriptors), stdin

    def __enter__(self) -> subprocess.Popen[bytes]:
        self._folder = tempfile.TemporaryDirectory(prefix="moetune-")
        variables = {
            **os.environ,
            "PYTHONPATH": import_path(Path(self._folder.name)),
            "PYTHONSAFEPATH": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=self._stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=self._descriptors,
                # Before 3.11 `-m` looks into the working directory: it must not be somebody's.
                cwd=self._folder.name,
                env=variables,
                start_new_session=True,
            )
        except OSError as error:
            self._folder.cleanup()
            raise InputError(
                f"{printable(self._command[0], 200)} cannot be started: {error.strerror}", _NO_TORCH
            ) from error
        return self._process

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._folder.cleanup()
