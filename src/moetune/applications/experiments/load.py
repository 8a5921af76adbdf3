"""One pass of the load: a generator runs as a process, and what it measured is checked before it counts.

A generator's exit status says little: all three end with 0 when every request failed. So its numbers
stand only when every request was answered and, with fixed lengths, every token is there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from moetune.applications.experiments.generators import (
    Generator,
    Target,
    check_arguments,
    command_of,
    fixed_output_tokens,
    generator_of,
    load_of_pass,
)
from moetune.applications.experiments.load_documents import MAX_RESULT_BYTES
from moetune.applications.experiments.load_errors import LoadCancelledError, LoadError, LoadResultError
from moetune.applications.experiments.log_file import BoundedLog, LogLimits, last_lines
from moetune.applications.experiments.processes import (
    KEEP_ENVIRONMENT,
    MARK,
    Process,
    all_processes,
    descendants,
    die_with_parent,
    end_processes,
    marked,
    read_process,
)
from moetune.applications.experiments.redaction import Redactor, redacted_arguments, redacted_variables
from moetune.domain.errors import OutputError
from moetune.domain.experiment import LoadResult
from moetune.domain.experiment_plan import LoadPlan
from moetune.domain.text import printable

LOG_LIMITS = LogLimits(head_bytes=1 << 20, tail_bytes=1 << 20)
_POLL_S = 0.05
_STOP_S = 5.0
_READ_REST_S = 5.0
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def run_pass(
    load: LoadPlan,
    url: str,
    model: str,
    folder: Path,
    name: str,
    cancelled: Callable[[], bool] = lambda: False,
) -> LoadResult:
    """Run the generator of a plan once and take its numbers.

    Its log is `NAME.log` in the folder, its document `NAME.json` or `NAME.jsonl`; what lies there is
    replaced. The seed is the one in `load`: see `load_of_pass`.

    Args:
        load: what to send.
        url: of the server.
        model: as the server is asked for it.
        folder: for log and document; it exists.
        name: of the pass, a plain file name.
        cancelled: asked often; once it says yes the generator is ended.

    Raises:
        LoadCancelledError: when the pass was to end.
        LoadError: with the reason why it gives no numbers.
        OutputError: when nothing can be written into the folder.
    """
    check_arguments(load)
    generator = generator_of(load)
    result = (folder / f"{name}{generator.suffix}").absolute()
    log = folder / f"{name}.log"
    _remove(result)
    command = command_of(load, Target(url, model, str(result)))
    _run(load, generator, command, log, cancelled)
    text = _read(result, generator, log)
    try:
        found = generator.read(text, load)
    except LoadResultError as error:
        raise LoadResultError(error.message, error.hint or _see(log)) from None
    _check(load, found, log)
    return found


def measure(
    load: LoadPlan,
    url: str,
    model: str,
    folder: Path,
    name: str,
    cancelled: Callable[[], bool] = lambda: False,
) -> tuple[LoadResult, ...]:
    """Run a whole pass that does not count, then those that do.

    The first pass meets what a server does only once: kernels compiled for shapes that no warm-up request
    of a generator has. The arguments and errors are those of `run_pass`.
    """
    results = [
        run_pass(load_of_pass(load, number), url, model, folder, f"{name}-pass{number}", cancelled)
        for number in range(load.passes + 1)
    ]
    return tuple(results[1:])


def _run(
    load: LoadPlan,
    generator: Generator,
    command: tuple[str, ...],
    log: Path,
    cancelled: Callable[[], bool],
) -> None:
    """Run the process to its end, and end it at the limit or when it is told to."""
    mark = f"load-{os.getpid()}-{secrets.token_hex(8)}"
    environment = {**os.environ, **KEEP_ENVIRONMENT, **load.environment, MARK: mark}
    _check_executable(load, generator, command, environment)
    hidden = Redactor.of_command(command, environment).secrets
    try:
        written = BoundedLog(log, LOG_LIMITS, [os.fsencode(secret) for secret in hidden])
    except OSError as error:
        raise OutputError(
            f"{printable(str(log))} cannot be written: {error.strerror}", "make room, or name another --state"
        ) from None
    try:
        written.write(_head(command, load.environment))
        process = _start(generator, command, environment, load.folder)
        copier = threading.Thread(target=_copy, args=(process, written), daemon=True)
        copier.start()
        try:
            _wait(load, process, cancelled, log)
        finally:
            _end(process, mark)
            # Whoever holds the pipe is dead by now; the limit is for one that could not be killed.
            copier.join(_READ_REST_S)
    finally:
        written.close()
    if process.returncode != 0:
        raise LoadError(f"{_named(generator)} {_how(process.returncode)}{_last_words(log)}", _see(log))


def _start(
    generator: Generator,
    command: tuple[str, ...],
    environment: Mapping[str, str],
    folder: str,
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder or None,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LoadError(
            f"{_named(generator)} could not be started: {printable(command[0], 200)}: {printable(reason)}",
            generator.install,
        ) from None


def _wait(load: LoadPlan, process: subprocess.Popen[bytes], cancelled: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + load.limit_s
    while process.poll() is None:
        if cancelled():
            raise LoadCancelledError("the load was ended before it was over")
        if time.monotonic() >= deadline:
            raise LoadError(
                f"the load took longer than its limit of {load.limit_s:g} s{_last_words(log)}",
                "raise load.limit_s, or send fewer requests; " + _see(log),
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End the generator and all that it started.

    A child that left its session carries the mark; one without that is a descendant as long as its parents
    live, and is remembered for when they are gone.
    """
    seen: dict[int, Process] = {}

    def of_this_pass() -> list[Process]:
        table = all_processes()
        seen.update((one.pid, one) for one in descendants(process.pid, table))
        seen.update((one.pid, one) for one in marked(mark, table))
        seen.update((one.pid, one) for one in table.values() if one.session == process.pid)
        now = [table[pid] for pid in seen if pid in table]
        return [one for one in now if one.started == seen[one.pid].started]

    def ask() -> None:
        process.poll()  # so that it does not stay as a process that nobody asked

    main = read_process(process.pid) if process.poll() is None else None
    end_processes(of_this_pass, main, _STOP_S, ask)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)


def _copy(process: subprocess.Popen[bytes], log: BoundedLog) -> None:
    if process.stdout is not None:
        with process.stdout as pipe:
            log.copy(pipe.fileno())


def _check_executable(
    load: LoadPlan, generator: Generator, command: tuple[str, ...], environment: Mapping[str, str]
) -> None:
    if not command or not command[0]:
        raise LoadError("the plan has no command for its load", generator.install)
    folder = Path(load.folder)
    if not folder.is_dir():
        raise LoadError(f"{printable(load.folder, 200)}, the load's folder, is no directory")
    # A path with a slash is looked up from the folder that the process begins in.
    program = str(folder.absolute() / command[0]) if "/" in command[0] else command[0]
    if shutil.which(program, path=environment.get("PATH")) is None:
        raise LoadError(
            f"{printable(command[0], 200)}, which starts {_named(generator)}, is not there or cannot be run",
            generator.install,
        )


def _remove(path: Path) -> None:
    """Take an older document away: what is read is of this pass or not there."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{printable(str(path))} cannot be replaced: {error.strerror}") from None


def _read(path: Path, generator: Generator, log: Path) -> bytes:
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError as error:
        raise LoadResultError(
            f"{_named(generator)} ended well and wrote no result that can be read"
            f" ({error.strerror}){_last_words(log)}",
            _see(log),
        ) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise LoadResultError(f"{_named(generator)} wrote no plain file: {printable(str(path))}", _see(log))
    with os.fdopen(descriptor, "rb") as file:
        text = file.read(MAX_RESULT_BYTES + 1)
    if len(text) > MAX_RESULT_BYTES:
        raise LoadResultError(
            f"{_named(generator)} wrote more than {MAX_RESULT_BYTES >> 20} MiB of results",
            "leave out arguments that have it keep each request's details, or send fewer requests",
        )
    return text


def _check(load: LoadPlan, result: LoadResult, log: Path) -> None:
    """Refuse numbers of other work than was asked for."""
    if result.requested != load.requests and fixed_output_tokens(load) is not None:
        raise LoadError(
            f"the generator sent {result.requested} requests where the plan says {load.requests}", _see(log)
        )
    if result.completed != result.requested:
        raise LoadError(
            f"{result.completed} of {result.requested} requests were answered{_last_words(log)}", _see(log)
        )
    if not result.output_tokens:
        raise LoadError("every request was answered, and not one token came back", _see(log))
    expected = fixed_output_tokens(load)
    if expected is not None and result.output_tokens != expected:
        raise LoadError(
            f"{expected} tokens were asked for and {result.output_tokens} counted: answers end early or run"
            " on, and starts would not do the same work",
            "a server that does not know `ignore_eos`, or too short a context; " + _see(log),
        )


def _head(command: tuple[str, ...], environment: Mapping[str, str]) -> bytes:
    """What was started, as the first lines of the log; secrets are not in it."""
    words = [f"{name}={value}" for name, value in sorted(redacted_variables(environment).items())]
    line = " ".join(printable(word, 4096) for word in (*words, *redacted_arguments(command)))
    return f"[moetune: {line}]\n".encode()


def _how(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"failed with exit status {status}"


def _named(generator: Generator) -> str:
    return "the load command" if generator.name == "command" else generator.name


def _last_words(log: Path) -> str:
    lines = last_lines(log, 1)
    return f": {lines[0]}" if lines and not lines[0].startswith("[moetune: ") else ""


def _see(log: Path) -> str:
    return f"read {printable(str(log), 400)}"
