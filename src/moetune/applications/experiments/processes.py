"""Processes of this machine as /proc shows them: who descends from whom, and an end for all of them.

A process id is used again by the kernel; with the time at which its process began it names one process
only. What was started for an arm is found in three ways: by descent (the supervisor adopts what its
descendants leave behind), by session, and by a variable in the environment, which also a process that
left its parents and its session still carries.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from moetune.applications.experiments.redaction import redacted_arguments
from moetune.domain.text import printable

PROC = Path("/proc")
MARK = "MOETUNE_START"
"""Variable that every process of a start carries."""
KEEP_ENVIRONMENT = {"SPT_NOENV": "1"}
"""What makes the setproctitle package, which both servers use, leave the environment readable."""

_SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)
_SET_CHILD_SUBREAPER = 36
_GONE = frozenset("ZX")
_POLL_S, _LONGEST_POLL_S = 0.05, 0.5
_KILL_S = 10.0
_CHILDREN_S = 2.0


@dataclass(frozen=True, slots=True)
class Process:
    """One process, no other that had or will have its id.

    Attributes:
        pid: its id.
        started: when, in clock ticks since the machine booted (`/proc/PID/stat`, field 22).
        parent: id of its parent.
        session: id of its session.
        state: a letter; `Z`: it has ended and its parent has not asked.
    """

    pid: int
    started: int
    parent: int = 0
    session: int = 0
    state: str = "?"

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self.state not in _GONE


def read_process(pid: int) -> Process | None:
    """A process; None when there is none with that id."""
    try:
        text = (PROC / str(pid) / "stat").read_text("utf-8", "replace")
    except (OSError, ValueError):
        return None
    # The name stands in parentheses and may hold any character, also `) `.
    fields = text.rpartition(")")[2].split()
    try:
        return Process(pid, int(fields[19]), int(fields[1]), int(fields[3]), fields[0])
    except (IndexError, ValueError):
        return None


def all_processes() -> dict[int, Process]:
    """Every process of this machine, by id."""
    pids = (int(entry) for entry in os.listdir(PROC) if entry.isdigit())  # noqa: PTH208 - 5 times as fast
    return {pid: found for pid in pids if (found := read_process(pid)) is not None}


def descendants(pid: int, table: Mapping[int, Process]) -> tuple[Process, ...]:
    """The processes that descend from one, itself left out."""
    children: dict[int, list[Process]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    level = children.get(pid, [])
    while level:
        found += level
        level = [child for process in level for child in children.get(process.pid, ())]
    return tuple(found)


def marked(mark: str, table: Mapping[int, Process]) -> tuple[Process, ...]:
    """The processes that carry a mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    return tuple(process for process in table.values() if wanted in _environment(process.pid))


def _environment(pid: int) -> list[bytes]:
    try:
        return (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # somebody else's, or it has just ended
        return []


def command_of(pid: int, limit: int = 120) -> str:
    """The command of a process, for people; empty when it cannot be read."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes()[:65536].decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    return printable(" ".join(redacted_arguments([word for word in words if word])), limit)


def boot_id() -> str:
    """Which boot of this machine this is; ids and times of another one mean nothing."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text("ascii").strip()
    except (OSError, ValueError):
        return ""


def send(process: Process, number: signal.Signals) -> None:
    """Send a signal to a process, and to no other that has its id by now."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except (OSError, AttributeError):
        descriptor = -1
    try:
        found = read_process(process.pid)
        # With the descriptor held, what was found by the id is what gets the signal.
        if found is None or found.started != process.started:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if descriptor >= 0:
                signal.pidfd_send_signal(descriptor, number)
            else:
                os.kill(process.pid, number)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def end_processes(
    find: Callable[[], Iterable[Process]], main: Process | None, stop_s: float, between: Callable[[], None]
) -> tuple[bool, tuple[Process, ...]]:
    """End processes: the first is asked, then all that are left, then all are killed.

    The first alone is asked first, as `docker stop` does: it ends its children in the order that it
    needs. A shell around a server dies of the signal and leaves the server, which is asked next.

    Args:
        find: those that are to end, looked up anew each time, since they start others.
        main: the first.
        stop_s: time for an orderly end.
        between: called while waiting.

    Returns:
        Whether the end was an orderly one, and what could not be killed.
    """

    def left() -> list[Process]:
        between()
        return [process for process in find() if process.runs]

    def wait(seconds: float, until: Callable[[list[Process]], bool]) -> list[Process]:
        deadline = time.monotonic() + seconds
        pause = _POLL_S
        while (found := left()) and not until(found) and (rest := deadline - time.monotonic()) > 0:
            time.sleep(min(pause, rest))
            # A machine with thousands of processes is not looked through all the time.
            pause = min(pause * 1.3, _LONGEST_POLL_S)
        return found

    began = time.monotonic()
    found = left()
    if main is not None and main.pid in {process.pid for process in found}:
        send(main, signal.SIGTERM)
        found = wait(stop_s, lambda now: main.pid not in {process.pid for process in now})
        if main.pid not in {process.pid for process in found}:
            # Children that end by themselves when the first one is gone.
            found = wait(_CHILDREN_S, lambda _: False)
    if found and time.monotonic() - began < stop_s:
        for process in found:
            send(process, signal.SIGTERM)
        found = wait(stop_s - (time.monotonic() - began), lambda _: False)
    orderly = not found
    deadline = time.monotonic() + _KILL_S
    while found and time.monotonic() < deadline:
        for process in found:
            send(process, signal.SIGKILL)
        found = wait(0.2, lambda _: False)
    return orderly, tuple(found)


def adopt_orphans() -> None:
    """Become the parent of what descendants leave behind, so that none of them gets lost."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have this process killed when the thread that started it ends."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
