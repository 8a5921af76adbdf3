"""What is left of starts whose moetune is gone: found by what was written down, named, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from moetune.applications.experiments import remote
from moetune.applications.experiments.arm_errors import (
    ArmError,
    CannotStartError,
    CannotStopError,
    PortKeptError,
)
from moetune.applications.experiments.ports import listeners, listens
from moetune.applications.experiments.processes import (
    Process,
    all_processes,
    boot_id,
    command_of,
    descendants,
    end_processes,
    marked,
    send,
)
from moetune.applications.experiments.start_record import (
    ProcessId,
    StartRecord,
    read_records,
    remove_record,
)
from moetune.domain.text import printable

STILL_THERE = "a process inside a driver may take minutes to die; one of another user needs server.stop"
_SUPERVISOR_S = 45.0
"""What a supervisor may take beyond twice the time for an orderly stop."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """What is left of one start.

    Attributes:
        folder: of the run.
        record: what was written down of it.
        processes: that are left on this machine.
        far: what the host on which it runs says, empty when it runs here.
    """

    folder: Path
    record: StartRecord
    processes: tuple[Process, ...] = ()
    far: str = ""

    def describe(self) -> str:
        """It in a sentence."""
        record = self.record
        command = printable(" ".join(record.command), 120)
        if record.host:
            return f"start {record.name} on {record.host} ({command}): {self.far}"
        if self.processes:
            named = [f"{process.pid} ({command_of(process.pid) or '?'})" for process in self.processes[:5]]
            more = f" and {len(self.processes) - 5} more" if len(self.processes) > 5 else ""
            return (
                f"start {record.name} on port {record.port}: still runs as process {', '.join(named)}{more}"
            )
        holders = ", ".join(f"{pid} ({command_of(pid)})" for pid in listeners(record.port))
        return (
            f"start {record.name} ({command}): its processes are gone and something listens on its port"
            f" {record.port}{': process ' + holders if holders else ''}"
        )

    def stop(self) -> None:
        """End it.

        Raises:
            CannotStopError: when something of it is left.
        """
        record = self.record
        stopped = self._stop_supervisor()
        if record.host:
            self._stop_far_end()
        elif record.stop and not stopped:
            self._run_stop()
        main = _same(record.server, all_processes())
        _, left = end_processes(lambda: find(record), main, record.stop_s, lambda: None)
        if left:
            pids = ", ".join(str(process.pid) for process in left)
            raise CannotStopError(
                f"start {record.name} cannot be ended: process {pids} is left",
                STILL_THERE,
            )
        if record.port and not record.host and record.stop and _taken(record.port):
            raise PortKeptError(
                f"start {record.name} was stopped and something still listens on its port {record.port}",
                f"look at it by hand; its stop command: {printable(' '.join(record.stop), 200)}",
            )
        remove_record(self.folder, record.name)

    def _stop_supervisor(self) -> bool:
        """Have a supervisor that is still there do its work; whether there was one."""
        record = self.record
        supervisor = _same(record.supervisor, all_processes())
        if supervisor is None:
            return False
        send(supervisor, signal.SIGTERM)
        deadline = time.monotonic() + 2 * record.stop_s + _SUPERVISOR_S
        while _same(record.supervisor, all_processes()) is not None and time.monotonic() < deadline:
            time.sleep(0.1)
        return True

    def _stop_far_end(self) -> None:
        record = self.record
        try:
            remote.stop_marked(record.host, record.mark, self._stop_command(), record.stop_s)
        except CannotStartError as error:
            raise CannotStopError(
                f"whether start {record.name} still runs on {record.host} is not known: {error.message}",
                error.hint,
            ) from error

    def _stop_command(self) -> tuple[str, ...]:
        if self.record.stop_redacted:
            raise CannotStopError(
                f"start {self.record.name} is ended by a command with a secret, which was not written down",
                f"run it yourself: {printable(' '.join(self.record.stop), 200)}",
            )
        return self.record.stop

    def _run_stop(self) -> None:
        record = self.record
        try:
            done = subprocess.run(
                self._stop_command(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=record.stop_s + _SUPERVISOR_S,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise CannotStopError(
                f"the stop command of start {record.name} cannot run: {printable(str(error), 200)}"
            ) from error
        if done.returncode and listens(record.port):
            text = printable(done.stderr.decode("utf-8", "replace").strip(), 200)
            raise CannotStopError(
                f"the stop command of start {record.name} ended with {done.returncode}: {text}"
            )


def leftovers(folder: Path) -> tuple[Leftover, ...]:
    """What is left of the starts of a run. Records of starts of which nothing is left are removed.

    Args:
        folder: of the run.

    Raises:
        OutputError: when the folder cannot be read or written.
    """
    found = []
    for record in list(read_records(folder)):
        leftover = _look(folder, record)
        if leftover is not None:
            found.append(leftover)
        else:
            remove_record(folder, record.name)
    return tuple(found)


def _look(folder: Path, record: StartRecord) -> Leftover | None:
    if record.boot and record.boot != boot_id() and not record.host:
        return None
    processes = find(record)
    if record.host:
        try:
            pids = remote.marked_processes(record.host, record.mark)
        except ArmError as error:
            return Leftover(folder, record, processes, f"whether it still runs is not known: {error.message}")
        text = (
            f"still runs as process {', '.join(map(str, pids))}" if pids else "its connection is still held"
        )
        return Leftover(folder, record, processes, text) if pids or processes else None
    if processes or (record.stop and record.port and listens(record.port)):
        return Leftover(folder, record, processes)
    return None


def find(record: StartRecord) -> tuple[Process, ...]:
    """The processes of a start that are left on this machine; never one that only has an id of theirs."""
    table = all_processes()
    found = {process.pid: process for process in marked(record.mark, table)}
    server, supervisor = _same(record.server, table), _same(record.supervisor, table)
    for first in (server, supervisor):
        if first is not None:
            found[first.pid] = first
    if server is not None:
        found |= {process.pid: process for process in table.values() if process.session == server.pid}
    for pid in tuple(found):
        found |= {process.pid: process for process in descendants(pid, table)}
    found.pop(os.getpid(), None)
    return tuple(found[pid] for pid in sorted(found) if found[pid].runs)


def _same(known: ProcessId | None, table: dict[int, Process]) -> Process | None:
    """A process that was written down, if it is the same that has this id now."""
    process = table.get(known.pid) if known is not None else None
    if known is None or process is None or process.started != known.started or not process.runs:
        return None
    return process


def _taken(port: int, seconds: float = 10.0) -> bool:
    """Whether a port is still in use after a while."""
    deadline = time.monotonic() + seconds
    while listens(port):
        if time.monotonic() > deadline:
            return True
        with contextlib.suppress(InterruptedError):
            time.sleep(0.2)
    return False
