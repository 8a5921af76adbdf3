"""The measuring processes: one a GPU, each in a process group of its own, with a limit on each answer.

A process that hangs, dies or loses its CUDA context is ended with its whole group and started anew;
what it was working on is named. A thread a GPU waits for its answers, so that a hang on one GPU holds
up nobody else.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import moetune
from moetune.applications.child_environment import without_tritons_own
from moetune.applications.compiling import exit_text
from moetune.domain.codec import from_json
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.text import printable
from moetune.measure.protocol import (
    PROTOCOL,
    DeviceFacts,
    Failure,
    FailureKind,
    Opened,
    TimeTask,
    Workload,
    read_answer,
    request_json,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import IO

WORKER = ("-m", "moetune.measure.worker")
"""Arguments of the interpreter that start a worker."""

_MAX_ANSWER_BYTES = 16 << 20
_STDERR_BYTES = 4096
_STARTS = 2
"""How often a worker is started in a row before the GPU is given up."""


class GpuLostError(MoetuneError):
    """A GPU does not answer any more, or has no room: what was measured is kept."""


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """How workers are started and how long they may take.

    Attributes:
        python: the interpreter, whose environment has torch and Triton.
        arguments: what starts a worker; the GPU's UUID comes after it.
        variables: environment variables beyond this process's own.
        start_seconds: to import torch and say hello.
        open_seconds: to allocate and fill the weights.
        answer_seconds: for one candidate: a hang is found after that.
        long_seconds: for an answer about several candidates.
    """

    python: str = sys.executable
    arguments: Sequence[str] = WORKER
    variables: Mapping[str, str] = field(default_factory=dict)
    start_seconds: float = 120.0
    open_seconds: float = 180.0
    answer_seconds: float = 20.0
    long_seconds: float = 120.0


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker that ended in the middle of a request.

    Attributes:
        reason: in words.
        hung: it did not answer in time.
    """

    reason: str
    hung: bool = False


def import_path(folder: Path) -> str:
    """A folder in which only moetune can be found, for another interpreter's PYTHONPATH.

    That of our own environment would bring our torch into the server's.
    """
    place = folder / "python"
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    link, package = place / "moetune", Path(moetune.__file__).resolve().parent
    if not link.is_symlink() or link.resolve() != package:
        with contextlib.suppress(FileNotFoundError):
            link.unlink()
        link.symlink_to(package, target_is_directory=True)
    return str(place)


class WorkerProcess:
    """One measuring process; `greet` waits until it is there.

    Args:
        command: how it is started.
        uuid: the GPU.
        cache: the folder of compiled kernels.
    """

    def __init__(self, command: WorkerCommand, uuid: str, cache: Path) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in end()
        self._process = subprocess.Popen(
            [command.python, *command.arguments, uuid],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=_environment(command, uuid, cache),
            start_new_session=True,
        )
        self._unread = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stdout, selectors.EVENT_READ)

    def greet(self, seconds: float) -> DeviceFacts:
        """Wait for its hello.

        Raises:
            GpuLostError: when it does not say it, or cannot measure.
        """
        hello = self._read(seconds)
        if isinstance(hello, Lost):
            raise GpuLostError(f"the measuring process did not start: {hello.reason}")
        if "failure" in hello:
            failure = from_json(Failure, hello["failure"], "the worker's hello")
            raise GpuLostError(
                f"the measuring process cannot measure here: {printable(failure.message, 300)}",
                "give the interpreter of an environment with torch and Triton with --python",
            )
        facts = from_json(DeviceFacts, hello.get("hello"), "the worker's hello")
        if facts.protocol != PROTOCOL:
            raise GpuLostError(
                f"the measuring process speaks protocol {facts.protocol}, not {PROTOCOL}",
                "install the same release of moetune in both environments",
            )
        return facts

    @property
    def pid(self) -> int:
        """Its process id, which is that of its group."""
        return self._process.pid

    @property
    def _stdout(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def ask(self, body: object, seconds: float) -> object:
        """The answer to a request: what its operation gives, a Failure, or Lost."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request_json(body)).encode() + b"\n")
            self._process.stdin.flush()
        answer = self._read(seconds)
        if isinstance(answer, Lost):
            return answer
        try:
            return read_answer(body, answer)
        except InputError as error:
            return Lost(f"answered what is no answer: {error.message}")

    def _read(self, seconds: float) -> dict[str, Any] | Lost:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._unread:
            if not self._selector.select(max(deadline - time.monotonic(), 0.0)):
                return Lost(f"no answer within {seconds:g} s", hung=True)
            data = os.read(self._stdout.fileno(), 1 << 16)
            self._unread += data
            if not data or len(self._unread) > _MAX_ANSWER_BYTES:
                return Lost(self._last_words())
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            document = json.loads(line)
        except ValueError:
            return Lost("answered what is no JSON")
        return document if isinstance(document, dict) else Lost("answered what is no object")

    def _last_words(self) -> str:
        """How it ended, and the last line that it printed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2)
        code = self._process.poll()
        ended = "closed its output" if code is None else f"ended with {exit_text(code)}"
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(size - _STDERR_BYTES, 0))
        lines = [
            line.strip()
            for line in self._stderr.read().decode("utf-8", "replace").splitlines()
            # Python's own dump of frames says less than the line before it.
            if line.strip() and not line.startswith((" ", "Current thread", "Extension modules"))
        ]
        return printable(ended + (f": {lines[-1]}" if lines else ""), 300)

    def end(self) -> None:
        """Kill the process and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # A process inside the driver may take a while to die; one that never does must not hold us up.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._selector.close()


def _environment(command: WorkerCommand, uuid: str, cache: Path) -> dict[str, str]:
    return {
        **without_tritons_own(),
        "CUDA_VISIBLE_DEVICES": uuid,
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONSAFEPATH": "1",
        "PYTHONFAULTHANDLER": "1",
        **command.variables,
    }


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that has come to an end.

    Attributes:
        device: place of the GPU in the pool.
        tag: what was handed over with the request.
        answer: what the operation gives, or a Failure: CONFIG names a culprit, also one that took
            its worker with it.
        restarted: the worker had to be started again.
        pid: of the worker that was asked.
    """

    device: int
    tag: object
    answer: object
    restarted: bool = False
    pid: int = 0


@dataclass(frozen=True, slots=True)
class DeviceGone:
    """A GPU that is given up, and the request that was not answered (None: it never opened)."""

    device: int
    tag: object
    error: MoetuneError


@dataclass(frozen=True, slots=True)
class DeviceReady:
    """A GPU whose worker holds the problem."""

    device: int
    facts: DeviceFacts
    opened: Opened


class Device:
    """One GPU: its worker, and the thread that waits for it.

    Args:
        number: place in the pool.
        uuid: the GPU.
        command: how workers are started.
        cache: the folder of compiled kernels.
        workload: what the worker holds.
        report: called with each event, from the thread.
    """

    def __init__(
        self,
        number: int,
        uuid: str,
        command: WorkerCommand,
        cache: Path,
        workload: Workload,
        report: Callable[[Answered | DeviceGone | DeviceReady], None],
    ) -> None:
        self.number = number
        self._uuid, self._command, self._cache = uuid, command, cache
        self._workload, self._report = workload, report
        self._requests: queue.SimpleQueue[tuple[object, object] | None] = queue.SimpleQueue()
        self._process: WorkerProcess | None = None
        self._closing = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"moetune-gpu-{number}", daemon=True)
        self._thread.start()

    def submit(self, tag: object, body: object) -> None:
        """Ask the worker; the answer comes as an event with the tag."""
        self._requests.put((tag, body))

    def close(self) -> None:
        """End the worker, whatever it does."""
        with self._lock:
            self._closing = True
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
        self._requests.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            try:
                facts, opened = self._start()
            except MoetuneError as error:
                self._report(DeviceGone(self.number, None, error))
                return
            self._report(DeviceReady(self.number, facts, opened))
            while (item := self._requests.get()) is not None:
                if not self._answer(*item):
                    return
        except Exception as error:  # noqa: BLE001 - a thread that dies silently would leave the run waiting
            text = printable(f"{type(error).__name__}: {error}", 300)
            self._report(
                DeviceGone(self.number, None, GpuLostError(f"measuring on {self._uuid} failed: {text}"))
            )
        finally:
            if self._process is not None:
                self._process.end()

    def _start(self) -> tuple[DeviceFacts, Opened]:
        """Start a worker that holds the problem.

        Raises:
            GpuLostError: when none starts, or the problem has no room.
        """
        error: MoetuneError = GpuLostError("the run is over")
        for _ in range(_STARTS):
            if self._process is not None:
                self._process.end()
                self._process = None
            process = WorkerProcess(self._command, self._uuid, self._cache)
            with self._lock:
                # From here on `close` ends it, also while it imports torch.
                self._process = process
                if self._closing:
                    break
            try:
                facts = process.greet(self._command.start_seconds)
            except MoetuneError as lost:
                error = lost
                continue
            opened = process.ask(self._workload, self._command.open_seconds)
            if isinstance(opened, Opened):
                return facts, opened
            reason = opened.message if isinstance(opened, Failure) else getattr(opened, "reason", "")
            hint = None
            if isinstance(opened, Failure) and opened.kind is FailureKind.MEMORY:
                hint = "end what else holds the GPU's memory"
            error = GpuLostError(f"the GPU {self._uuid} cannot hold the problem: {reason}", hint)
        raise error

    def _answer(self, tag: object, body: object) -> bool:
        """Have one request answered; False when the GPU is given up."""
        assert self._process is not None
        is_one = isinstance(body, TimeTask)
        seconds = self._command.answer_seconds if is_one else self._command.long_seconds
        pid = self._process.pid
        answer = self._process.ask(body, seconds)
        if self._closing:
            return False
        lost = isinstance(answer, Lost) or (
            isinstance(answer, Failure) and answer.kind in (FailureKind.DEVICE, FailureKind.MEMORY)
        )
        if not lost:
            self._report(Answered(self.number, tag, answer, pid=pid))
            return True
        # Only a GPU that still works proves that the candidate was at fault.
        try:
            self._start()
        except MoetuneError as error:
            if not self._closing:
                self._report(DeviceGone(self.number, tag, error))
            return False
        if isinstance(answer, Failure) and answer.kind is FailureKind.MEMORY:
            again = self._process.ask(body, seconds)
            if isinstance(again, Failure) and again.kind is FailureKind.MEMORY:
                short = GpuLostError(
                    f"the GPU {self._uuid} has no memory left: {again.message}",
                    "end what else holds the GPU's memory",
                )
                self._report(DeviceGone(self.number, tag, short))
                return False
            if isinstance(again, (Lost, Failure)):
                again = _blamed(again)
                with contextlib.suppress(MoetuneError):
                    self._start()
            self._report(Answered(self.number, tag, again, restarted=True, pid=pid))
            return True
        self._report(Answered(self.number, tag, _blamed(answer), restarted=True, pid=pid))
        return True


def _blamed(answer: object) -> Failure:
    """The failure of a candidate that took its worker with it."""
    if isinstance(answer, Lost):
        verb = "hung the worker" if answer.hung else "killed the worker"
        return Failure(FailureKind.CONFIG, f"{verb}: {answer.reason}")
    assert isinstance(answer, Failure)
    return Failure(FailureKind.CONFIG, f"lost the CUDA context: {answer.message}")
