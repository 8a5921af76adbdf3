"""This end of a supervisor: starts it, hears what it says, asks it for the end."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import moetune
from moetune.applications.experiments.order import STOP
from moetune.domain.codec import to_json

if TYPE_CHECKING:
    from moetune.applications.experiments.order import Order

_MODULE = "moetune.applications.experiments.supervisor"
_MAX_BYTES = 1 << 20


class Supervised:
    """One server and the process that watches it.

    Args:
        order: what to start.
    """

    def __init__(self, order: Order) -> None:
        package = str(Path(moetune.__file__).resolve().parents[1])
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # From a folder where nobody can have put a module that shadows one of Python's.
            cwd="/",
            env={**kept, "PYTHONPATH": package, "PYTHONSAFEPATH": "1"},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._lock = threading.Lock()
        self._events: dict[str, dict[str, Any]] = {}
        self._unread = b""
        self._over = False
        with contextlib.suppress(BrokenPipeError):
            self._input.write(json.dumps(to_json(order)).encode() + b"\n")
            self._input.flush()

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        return self._process.pid

    def event(self, name: str) -> dict[str, Any] | None:
        """What was said last of one kind; None when nothing was."""
        with self._lock:
            self._read(0.0)
            return self._events.get(name)

    def wait(self, names: tuple[str, ...], seconds: float) -> dict[str, Any] | None:
        """What is said of one of some kinds; None when nothing is in time, or the supervisor is gone."""
        deadline = time.monotonic() + seconds
        while True:
            with self._lock:
                for name in names:
                    if name in self._events:
                        return self._events[name]
                left = deadline - time.monotonic()
                if self._over or left <= 0:
                    return None
                self._read(min(left, 0.5))

    @property
    def gone(self) -> bool:
        """Whether the supervisor has ended."""
        with self._lock:
            self._read(0.0)
        return self._process.poll() is not None

    def ask_for_end(self) -> None:
        """Ask for the end; it comes also when this process dies."""
        with contextlib.suppress(OSError, ValueError):
            self._input.write(STOP)
            self._input.flush()

    def close(self) -> None:
        """Let go of it: what it still does it does alone."""
        for pipe in (self._input, self._output):
            with contextlib.suppress(OSError, ValueError):
                pipe.close()
        self._over = True
        self._process.poll()

    def wait_until_gone(self, seconds: float) -> bool:
        """Whether it ends in time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None

    def _read(self, seconds: float) -> None:
        """Take in what it says within a time."""
        if self._over:
            return
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            while selector.select(seconds):
                seconds = 0.0
                data = os.read(self._output.fileno(), 1 << 16)
                self._unread += data
                if not data or len(self._unread) > _MAX_BYTES:
                    self._over = True
                    break
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                event = json.loads(line)
                self._events[str(event["event"])] = event
