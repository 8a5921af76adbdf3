"""Compiling launches in worker processes, so that a bad candidate costs one candidate.

The workers need no GPU and share nothing with this process: a compiler that aborts, hangs or prints
a novel ends its worker or fills its result, and the next task gets a fresh worker.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from moetune.applications.child_environment import without_tritons_own
from moetune.domain.compilation import CompileResult, CompileStatus, CompileTask, Depth, compile_task
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import IO

    from moetune.domain.launch import Launch
    from moetune.domain.problem import Problem

WORKER = ("-m", "moetune.measure.compile")
"""Arguments of the interpreter that start a worker."""

NO_TRITON = "no Triton here"
_START_SECONDS = 60.0
_LAST_SECONDS = 5.0
_MAX_ANSWER_BYTES = 1 << 20
_STARTS = 2
"""Workers in a row that may die before they say hello."""


@dataclass(frozen=True, slots=True)
class CompilePool:
    """How launches are compiled.

    Attributes:
        depth: how far to compile.
        budget_seconds: all tasks together, None without a limit; what is left then is not checked.
        seconds_each: one task; the worker is killed after that.
        workers: processes, None for one on each core.
        python: the interpreter, whose environment has the Triton that counts.
        worker: arguments of the interpreter that start a worker.
        variables: environment variables of the workers beyond this process's own.
    """

    depth: Depth = Depth.ALLOCATION
    budget_seconds: float | None = None
    seconds_each: float = 30.0
    workers: int | None = None
    python: str = sys.executable
    worker: Sequence[str] = WORKER
    variables: Mapping[str, str] = field(default_factory=dict)

    def check(self, launches: Iterable[Launch], problem: Problem) -> dict[Launch, CompileResult]:
        """Compile launches of a problem for its GPU, each different binary once.

        GROUP_SIZE_M is only the order in which programs take tiles: launches that differ in nothing
        else need the same resources and share one compilation.
        """
        results: dict[Launch, CompileResult] = {}
        tasks: dict[CompileTask, list[Launch]] = {}
        for launch in launches:
            task = compile_task(launch, problem)
            if isinstance(task, str):
                results[launch] = _not_checked(task)
            else:
                tasks.setdefault(_without_group(task), []).append(launch)
        for task, result in self.compile(tasks).items():
            results.update(dict.fromkeys(tasks[task], result))
        return results

    def compile(self, tasks: Iterable[CompileTask]) -> dict[CompileTask, CompileResult]:
        """Compile tasks, the largest tiles first, since they take longest."""
        ordered = sorted(set(tasks), key=longest_first)
        if not ordered:
            return {}
        if self.python == sys.executable and importlib.util.find_spec("triton") is None:
            return dict.fromkeys(ordered, _not_checked(NO_TRITON))
        # A private, empty folder (0700): Triton's cache, a place for the PTX that it leaves behind when
        # ptxas fails, and a working directory in which no file can pass for a module.
        with tempfile.TemporaryDirectory(prefix="moetune-compile-") as folder:
            return _Run(self, ordered, folder).results()


def _without_group(task: CompileTask) -> CompileTask:
    config = replace(task.launch.config, group_size_m=min(task.launch.config.group_size_m, 2))
    return replace(task, launch=replace(task.launch, config=config))


def longest_first(task: CompileTask) -> tuple[int, str]:
    """Orders tasks by the size of their tiles, which decides how long they take."""
    config = task.launch.config
    return -config.block_size_m * config.block_size_n * config.block_size_k, repr(task)


def _not_checked(reason: str) -> CompileResult:
    return CompileResult(CompileStatus.NOT_CHECKED, message=reason)


def _worker_environment(folder: str, variables: Mapping[str, str]) -> dict[str, str]:
    return {
        **without_tritons_own(),
        "TRITON_CACHE_DIR": folder,
        # What is launched: the stages before it are as much again to write and to read ten times over.
        "TRITON_STORE_BINARY_ONLY": "1",
        "TMPDIR": folder,
        "PYTHONSAFEPATH": "1",
        **variables,
    }


class CompileProcess:
    """One process and the task it works on."""

    def __init__(self, pool: CompilePool, folder: str) -> None:
        self.process = subprocess.Popen(
            [pool.python, *pool.worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=_worker_environment(folder, pool.variables),
        )
        self.greeted = False
        self.task: CompileTask | None = None
        self.deadline = time.monotonic() + _START_SECONDS
        self._unread = b""

    @property
    def stdout(self) -> IO[bytes]:
        """Where its answers come."""
        assert self.process.stdout is not None
        return self.process.stdout

    def give(self, task: CompileTask, depth: Depth, seconds: float) -> None:
        """Hand a task over; a worker that is gone already is found out when its answer is read."""
        self.task = task
        self.deadline = time.monotonic() + seconds
        request = {"number": 0, "depth": depth.value, "task": task.to_json()}
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()

    def read(self) -> list[dict[str, Any]] | None:
        """The messages that have come, None when there will be no more."""
        data = os.read(self.stdout.fileno(), 1 << 16)
        self._unread += data
        if not data or len(self._unread) > _MAX_ANSWER_BYTES:
            return None
        *lines, self._unread = self._unread.split(b"\n")
        try:
            return [json.loads(line) for line in lines]
        except ValueError:
            return None

    def end(self) -> int:
        """Kill it, and say how it ended."""
        self.process.kill()
        code = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        return code


class _Run:
    """One list of tasks on its way through the workers."""

    def __init__(self, pool: CompilePool, tasks: list[CompileTask], folder: str) -> None:
        self._pool = pool
        self._folder = folder
        self._waiting = deque(tasks)
        self._found: dict[CompileTask, CompileResult] = {}
        self._count = len(tasks)
        self._selector = selectors.DefaultSelector()
        self._workers: set[CompileProcess] = set()
        self._failed_starts = 0
        budget = pool.budget_seconds
        self._end = time.monotonic() + budget if budget is not None else None

    def results(self) -> dict[CompileTask, CompileResult]:
        """Run to the end, to the budget's end, or until no worker starts."""
        try:
            while len(self._found) < self._count and not self._given_up():
                self._start_workers()
                for key, _ in self._selector.select(self._patience()):
                    self._hear(key.data)
                self._kill_overdue()
        finally:
            for worker in self._workers:
                worker.end()
            self._selector.close()
        return self._found

    def _given_up(self) -> bool:
        if self._failed_starts >= _STARTS:
            self._leave("the compiling process does not start: is Triton broken here?")
        elif self._end is not None and time.monotonic() >= self._end:
            self._leave(f"not reached within {self._pool.budget_seconds:g} s")
        return len(self._found) == self._count

    def _leave(self, reason: str) -> None:
        working = [worker.task for worker in self._workers if worker.task is not None]
        for task in (*working, *self._waiting):
            self._found[task] = _not_checked(reason)
        self._waiting.clear()

    def _start_workers(self) -> None:
        idle = sum(worker.task is None for worker in self._workers)
        most = self._pool.workers or os.cpu_count() or 1
        for _ in range(min(most - len(self._workers), len(self._waiting) - idle)):
            worker = CompileProcess(self._pool, self._folder)
            self._workers.add(worker)
            self._selector.register(worker.stdout, selectors.EVENT_READ, worker)

    def _patience(self) -> float:
        ends = [worker.deadline for worker in self._workers]
        if self._end is not None:
            ends.append(self._end)
        return max(min(ends) - time.monotonic(), 0.0)

    def _hear(self, worker: CompileProcess) -> None:
        messages = worker.read()
        if messages is None:
            self._lose(worker, CompileStatus.CRASHED)
            return
        for message in messages:
            if not worker.greeted:
                worker.greeted = True
                self._failed_starts = 0
            elif worker.task is not None:
                result = CompileResult.from_json(message["result"])
                if result.status is CompileStatus.NO_ROOM:
                    result = _not_checked(f"the compiler cannot write to {self._folder}: {result.message}")
                self._found[worker.task] = result
                worker.task = None
            if self._waiting:
                worker.give(self._waiting.popleft(), self._pool.depth, self._pool.seconds_each)
            else:
                worker.deadline = float("inf")

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.deadline <= now]:
            self._lose(worker, CompileStatus.TIMED_OUT)

    def _lose(self, worker: CompileProcess, status: CompileStatus) -> None:
        self._selector.unregister(worker.stdout)
        self._workers.remove(worker)
        # One that closed its output is about to be gone: let it, or its exit status would be ours.
        if status is CompileStatus.CRASHED:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(timeout=_LAST_SECONDS)
        code = worker.end()
        if worker.task is None:
            self._failed_starts += not worker.greeted
            return
        self._found[worker.task] = CompileResult(
            status,
            seconds=self._pool.seconds_each if status is CompileStatus.TIMED_OUT else 0.0,
            message=(
                f"still compiling after {self._pool.seconds_each:g} s"
                if status is CompileStatus.TIMED_OUT
                else printable(f"the compiling process ended with {exit_text(code)}")
            ),
        )


def exit_text(code: int) -> str:
    """How a process ended, in words."""
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def compile_check(
    launches: Iterable[Launch], problem: Problem, pool: CompilePool | None = None
) -> dict[Launch, CompileResult]:
    """Compile launches of a problem for its GPU before they are written: what comes of each."""
    return (pool or CompilePool()).check(launches, problem)
