"""Compiles beside the measuring: tasks go in at any time, results come out as events.

The processes have no CUDA context. They fill a private Triton cache from which the measuring process
loads. One that aborts, hangs or leaks costs the task it worked on; the next gets a fresh one.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import selectors
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetune.applications.compiling import CompilePool, CompileProcess, exit_text, longest_first
from moetune.domain.compilation import CompileResult, CompileStatus, CompileTask
from moetune.domain.errors import MoetuneError, OutputError
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from moetune.domain.config import KernelConfig
    from moetune.domain.problem import Kernel

_STARTS = 3
"""Processes in a row that may die before they say hello."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A task that has come to an end."""

    task: CompileTask
    result: CompileResult


@dataclass(frozen=True, slots=True)
class CompileBroken:
    """No compiling process starts any more, or none can write what it compiles."""

    error: MoetuneError


class CompileService:
    """Compiling processes, held by a thread of their own.

    Args:
        pool: interpreter, variables, number of processes, limit of one task; its budget is not used.
        cache: the folder that they fill, made with 0700.
        report: called with each event, from the thread.
    """

    def __init__(
        self, pool: CompilePool, cache: Path, report: Callable[[Compiled | CompileBroken], None]
    ) -> None:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._pool, self._cache, self._report = pool, cache, report
        self._lock = threading.Lock()
        self._heap: list[tuple[int, tuple[int, str], CompileTask]] = []
        self._known: set[CompileTask] = set()
        self._processes: set[CompileProcess] = set()
        self._failed_starts = 0
        self._closing = False
        self._wake_out, self._wake_in = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        self._most = pool.workers or os.cpu_count() or 1
        self._thread = threading.Thread(target=self._run, name="moetune-compile", daemon=True)
        self._thread.start()

    def submit(self, tasks: Iterable[CompileTask], priority: int = 0) -> None:
        """Compile tasks that were not submitted before: low priorities first, then the longest."""
        with self._lock:
            for task in tasks:
                if task not in self._known:
                    self._known.add(task)
                    heapq.heappush(self._heap, (priority, longest_first(task), task))
        self._wake()

    def drop(self, kernel: Kernel, config: KernelConfig) -> None:
        """Forget what waits of a config: what broke the compiler once would break it for other m too."""
        with self._lock:
            self._heap = [
                item
                for item in self._heap
                if (item[2].launch.kernel, item[2].launch.config) != (kernel, config)
            ]
            heapq.heapify(self._heap)

    @property
    def cores(self) -> int:
        """How many tasks are compiled at a time."""
        return self._most

    def close(self) -> None:
        """End the processes, whatever they do."""
        self._closing = True
        self._wake()
        self._thread.join()
        os.close(self._wake_in)
        os.close(self._wake_out)

    def _wake(self) -> None:
        os.write(self._wake_in, b".")

    def _run(self) -> None:
        try:
            while not self._closing:
                self._start()
                for key, _ in self._selector.select(self._patience()):
                    if key.data is None:
                        os.read(self._wake_out, 4096)
                    else:
                        self._hear(key.data)
                self._kill_overdue()
        except Exception as error:  # noqa: BLE001 - a thread that dies silently would leave the run waiting
            text = printable(f"{type(error).__name__}: {error}", 300)
            self._report(CompileBroken(MoetuneError(f"compiling failed: {text}")))
        finally:
            for process in self._processes:
                process.end()
            self._selector.close()

    def _start(self) -> None:
        with self._lock:
            waiting = len(self._heap)
        if self._failed_starts >= _STARTS:
            self._report(
                CompileBroken(
                    MoetuneError(
                        "the compiling process does not start: Triton is missing or broken in "
                        f"{printable(self._pool.python, 200)}",
                        "give the interpreter of the server's environment with --python",
                    )
                )
            )
            self._failed_starts = 0
            with self._lock:
                self._heap.clear()
            return
        idle = [process for process in self._processes if process.greeted and process.task is None]
        for process in idle:
            self._give(process)
        starting = sum(not process.greeted for process in self._processes)
        for _ in range(min(self._most - len(self._processes), waiting - len(idle) - starting)):
            process = CompileProcess(self._pool, str(self._cache))
            self._processes.add(process)
            self._selector.register(process.stdout, selectors.EVENT_READ, process)

    def _give(self, process: CompileProcess) -> None:
        with self._lock:
            task = heapq.heappop(self._heap)[2] if self._heap else None
        if task is None:
            process.deadline = float("inf")
        else:
            process.give(task, self._pool.depth, self._pool.seconds_each)

    def _patience(self) -> float | None:
        soonest = min((process.deadline for process in self._processes), default=float("inf"))
        return None if soonest == float("inf") else max(soonest - time.monotonic(), 0.0)

    def _hear(self, process: CompileProcess) -> None:
        messages = process.read()
        if messages is None:
            self._lose(process, CompileStatus.CRASHED)
            return
        for message in messages:
            if not process.greeted:
                process.greeted = True
                self._failed_starts = 0
            elif process.task is not None:
                task, process.task = process.task, None
                self._end(task, CompileResult.from_json(message["result"]))
            self._give(process)

    def _end(self, task: CompileTask, result: CompileResult) -> None:
        if result.status is not CompileStatus.NO_ROOM:
            self._report(Compiled(task, result))
            return
        with self._lock:
            self._heap.clear()
        self._report(
            CompileBroken(
                OutputError(
                    f"compiled kernels cannot be written to {printable(str(self._cache), 400)}: "
                    f"{result.message}",
                    "what was measured so far is kept: make room and run the same command again",
                )
            )
        )

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for process in [process for process in self._processes if process.deadline <= now]:
            self._lose(process, CompileStatus.TIMED_OUT)

    def _lose(self, process: CompileProcess, status: CompileStatus) -> None:
        self._selector.unregister(process.stdout)
        self._processes.remove(process)
        if status is CompileStatus.CRASHED:
            # One that closed its output is about to be gone: its exit status says why.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.process.wait(timeout=1)
        code = process.end()
        if process.task is None:
            self._failed_starts += not process.greeted
            return
        limit = self._pool.seconds_each
        timed_out = status is CompileStatus.TIMED_OUT
        message = (
            f"still compiling after {limit:g} s"
            if timed_out
            else f"the compiling process ended with {exit_text(code)}"
        )
        self._report(
            Compiled(
                process.task, CompileResult(status, seconds=limit if timed_out else 0.0, message=message)
            )
        )
