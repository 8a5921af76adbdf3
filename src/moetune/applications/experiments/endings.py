"""How a server ended, for people: exit status, signal, killed for memory, its last lines."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

_VMSTAT = Path("/proc/vmstat")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_KILLS = "oom_kill"
_NOT_FOUND = 127


def memory_kills() -> dict[str, int]:
    """How many processes the kernel has killed for memory so far, by the file that counts them."""
    return counted([_VMSTAT, *_cgroup_files()])


def counted(files: Sequence[Path]) -> dict[str, int]:
    """The counters of those files that can be read."""
    found = {}
    for file in files:
        with contextlib.suppress(OSError, ValueError):
            for line in file.read_text("ascii").splitlines():
                name, _, value = line.partition(" ")
                if name == _KILLS:
                    found[str(file)] = int(value)
    return found


def _cgroup_files() -> list[Path]:
    """The counters of this process's own group, which what it starts belongs to."""
    files = []
    with contextlib.suppress(OSError, ValueError):
        for line in _OWN_CGROUP.read_text("utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                files.append(_CGROUPS / path.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                files.append(_CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control")
    return files


def ending_text(code: int | None, before: dict[str, int], after: dict[str, int]) -> str:
    """How a process ended.

    Args:
        code: its exit status, or the negative number of the signal; None: it is not known.
        before: kills for memory counted before it began.
        after: those counted after it ended.
    """
    if code is None:
        text = "it ended, and how is not known"
    elif code < 0:
        text = f"it was ended by {_signal_name(-code)}"
    elif code == _NOT_FOUND:
        text = "it ended with exit status 127: a shell says so of a command that it does not find"
    elif code > 128 and _signal_name(code - 128):
        text = f"it ended with exit status {code}, as a shell does after {_signal_name(code - 128)}"
    else:
        text = f"it ended with exit status {code}"
    kills = [name for name, count in after.items() if count > before.get(name, count)]
    if kills:
        return f"{text}; the kernel killed a process for memory meanwhile ({kills[0]}): host memory ran out"
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return f"{text}, as the kernel does when memory runs out; it counted no such kill here"
    return text


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


def with_last_lines(text: str, lines: Sequence[str]) -> str:
    """A text with the last lines of a log behind it."""
    if not lines:
        return f"{text}; it printed nothing"
    return f"{text}; its last lines: " + " | ".join(printable(line, 300) for line in lines)
