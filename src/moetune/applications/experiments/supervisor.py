"""Watches over one server: run as a process of its own, it ends the server when moetune is gone.

It is told what to start on its standard input and ends everything when that closes, which the kernel
sees to however moetune ends. It adopts what the server's processes leave behind, so that it finds all
of them; it writes the server's log; it says on its standard output what happens.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from moetune.applications.experiments.log_file import BoundedLog
from moetune.applications.experiments.order import BEAT, STOP, Order
from moetune.applications.experiments.ports import listens
from moetune.applications.experiments.processes import (
    Process,
    adopt_orphans,
    all_processes,
    descendants,
    die_with_parent,
    end_processes,
    read_process,
)
from moetune.applications.experiments.start_record import (
    ProcessId,
    remove_record,
    write_record,
)
from moetune.domain.codec import from_json
from moetune.domain.errors import MoetuneError

_LOOK_S = 1.0
_PIPE_BYTES = 1 << 20
_FOLLOW_AGAIN_S = (0.5, 1.0, 2.0, 5.0)
_CONNECTION_S = 30.0
"""What the far end may take beyond the time for an orderly stop."""


def say(event: str, **values: object) -> None:
    """Tell moetune what happens; nobody may listen any more."""
    with contextlib.suppress(OSError):
        os.write(1, json.dumps({"event": event, **values}).encode() + b"\n")


class Supervisor:
    """One server from its start to its end.

    Args:
        order: what to start.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._environment = dict(order.environment)
        secrets = [os.fsencode(secret) for secret in order.secrets]
        self._log = BoundedLog(Path(order.log), order.limits, secrets)
        self._command_log = self._log
        if order.command_log:
            self._command_log = BoundedLog(Path(order.command_log), order.limits, secrets)
        self._parent = os.getppid()
        self._helpers: set[subprocess.Popen[bytes]] = set()
        self._threads: list[threading.Thread] = []
        self._server: Process | None = None
        self._status: int | None = None
        self._far_end_said, self._far_fault = False, ""
        self._input = self._pipe = -1
        self._ending = threading.Event()
        self._asked = False

    def run(self) -> None:
        """Start the server, wait until it is to end, end it."""
        signal.signal(signal.SIGTERM, self._on_signal)
        wake, self._wake = os.pipe()
        for descriptor in (wake, self._wake):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        adopt_orphans()
        if not self._start():
            return
        if self._order.logs and not self._order.script:
            self._thread(self._follow)
        self._wait(wake)
        self._end()

    def _on_signal(self, *_: object) -> None:
        self._asked = True

    # Starting

    def _start(self) -> bool:
        """Start the server; it begins only when its ids are on the disk."""
        if self._order.pipe:
            # One that a killed run left may lie there; no other file does in this private folder.
            Path(self._order.pipe).unlink(missing_ok=True)
            os.mkfifo(self._order.pipe, 0o600)
            # Held open for both: whoever writes never waits for it to be opened, nor is it ever at its end.
            self._pipe = os.open(self._order.pipe, os.O_RDWR | os.O_CLOEXEC)
        reads, writes = zip(*(os.pipe() for _ in range(5)), strict=True)
        gate, failure, output, errors, server_input = range(5)
        pid = os.fork()
        if not pid:
            with contextlib.suppress(BaseException):
                inputs = reads[server_input] if self._order.script else os.open(os.devnull, os.O_RDONLY)
                error_output = writes[errors if self._order.script else output]
                # Its own hold of the gate would keep it open when the supervisor is killed.
                os.close(writes[gate])
                self._become(reads[gate], writes[failure], (inputs, writes[output], error_output))
            os._exit(127)
        for descriptor in (reads[gate], writes[failure], writes[output], writes[errors], reads[server_input]):
            os.close(descriptor)
        self._input = writes[server_input]
        with contextlib.suppress(OSError, AttributeError):
            # A server that prints much at once does not wait for this process to be scheduled.
            fcntl.fcntl(reads[output], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            # A script has room before ssh begins to read it.
            fcntl.fcntl(self._input, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._server = read_process(pid) or Process(pid, 0)
        me = read_process(os.getpid())
        record = replace(
            self._order.record,
            server=ProcessId(pid, self._server.started),
            supervisor=ProcessId(os.getpid(), me.started) if me is not None else None,
        )
        try:
            write_record(Path(self._order.run), record)
            os.write(writes[gate], b"g")
            reason = _whole(reads[failure]).decode("utf-8", "replace")
        except MoetuneError as error:
            reason = error.message
        for descriptor in (writes[gate], reads[failure]):
            os.close(descriptor)
        if reason:
            os.waitpid(pid, 0)
            remove_record(Path(self._order.run), record.name)
            say("failed", reason=reason)
            return False
        if self._order.script:
            # What the far end prints is the log; its command's own output comes by the other stream.
            self._thread(self._log.copy, reads[output])
            self._thread(self._hear, reads[errors])
            self._tell(self._order.script.encode())
        else:
            self._thread(self._command_log.copy, reads[output])
            os.close(reads[errors])
        if self._order.pipe:
            self._thread(self._log.copy, self._pipe)
        say("started", pid=pid, started=self._server.started)
        return True

    def _become(self, gate: int, failure: int, streams: tuple[int, int, int]) -> NoReturn:
        """Turn this new process into the server, once the gate opens."""
        what = "the process"
        try:
            os.setsid()
            die_with_parent()
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            for descriptor, stream in enumerate(streams):
                os.dup2(stream, descriptor)
            what = self._order.folder
            # An empty answer: the supervisor is gone.
            if os.read(gate, 1):
                if self._order.folder:
                    os.chdir(self._order.folder)
                what = self._order.arguments[0]
                os.execvpe(what, self._order.arguments, self._environment)
        except OSError as error:
            os.write(failure, f"{what}: {error.strerror}".encode())
        except ValueError as error:
            os.write(failure, str(error).encode())
        os._exit(127)

    def _thread(self, function: Any, *arguments: object) -> None:  # noqa: ANN401 - any callable
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    # Watching

    def _wait(self, wake: int) -> None:
        """Wait until moetune asks for the end or is gone."""
        sources = [0, wake]
        beaten = time.monotonic()
        while not self._asked and os.getppid() == self._parent:
            ready, _, _ = select.select(sources, [], [], _LOOK_S)
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
            if 0 in ready and os.read(0, 4096) in (b"", STOP):
                return
            self._look()
            if self._order.script and time.monotonic() - beaten >= self._order.beat_s:
                beaten = time.monotonic()
                self._tell(BEAT)

    def _look(self) -> None:
        """Take notice of processes that have ended, the adopted ones too."""
        seen: set[int] = set()
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid in seen:
                return
            seen.add(ended.si_pid)
            for helper in tuple(self._helpers):
                if helper.pid == ended.si_pid:
                    helper.poll()
                    break
            else:
                _, status = os.waitpid(ended.si_pid, 0)
                if self._server is not None and ended.si_pid == self._server.pid:
                    self._status = os.waitstatus_to_exitcode(status)
                    if not self._far_end_said:
                        say("exited", code=self._status, connection=bool(self._order.script))

    def _follow(self) -> None:
        """Have a command print the log, again when it ends: a connection to a log does not last."""
        pauses = iter(_FOLLOW_AGAIN_S)
        pause = 0.0
        while not self._ending.wait(pause):
            try:
                helper = self._helper(self._order.logs, subprocess.PIPE)
            except OSError as error:
                self._log.write(f"[moetune: the logs command cannot run: {error.strerror}]\n".encode())
                return
            assert helper.stdout is not None
            self._log.copy(helper.stdout.fileno())
            code = helper.wait()
            helper.stdout.close()
            self._helpers.discard(helper)
            pause = next(pauses, _FOLLOW_AGAIN_S[-1])
            if not self._ending.is_set():
                note = f"[moetune: the logs command ended with {code} and runs again; lines may repeat]\n"
                self._log.write(note.encode())

    def _helper(self, arguments: tuple[str, ...], output: int) -> subprocess.Popen[bytes]:
        helper = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=self._environment,
            cwd=self._order.folder or None,
            start_new_session=True,
        )
        self._helpers.add(helper)
        return helper

    # The far end of an ssh connection

    def _tell(self, text: bytes) -> None:
        with contextlib.suppress(OSError):
            while text:
                text = text[os.write(self._input, text) :]

    def _hear(self, source: int) -> None:
        """Read what the far end says of itself; all else that comes this way is of ssh or the command."""
        rest = b""
        prefix = self._order.nonce.encode() + b" "
        while data := os.read(source, 1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[-(1 << 16) :]
            for line in lines:
                if line.startswith(prefix):
                    self._take(*line[len(prefix) :].decode("utf-8", "replace").partition(" ")[::2])
                else:
                    self._command_log.write(line + b"\n")
        self._command_log.write(rest)

    def _take(self, what: str, value: str) -> None:
        if what == "exited" and value.isdigit():
            self._far_end_said = True
            say("exited", code=int(value), connection=False)
        elif what in ("left", "failed"):
            self._far_fault = f"process {value} is left" if what == "left" else value
            say("far failed", value=self._far_fault)

    # Ending

    def _end(self) -> None:
        """End the server and say what became of it."""
        self._ending.set()
        failed = self._stop_far_end() if self._order.script else self._run_stop()
        orderly, left = end_processes(
            self._found,
            None if self._status is not None else self._server,
            self._order.record.stop_s,
            self._look,
        )
        for helper in tuple(self._helpers):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(helper.pid, signal.SIGKILL)
        if self._order.pipe:
            os.set_blocking(self._pipe, False)  # its reader ends when it is empty
            with contextlib.suppress(OSError):
                os.write(self._pipe, b"\n")
                Path(self._order.pipe).unlink()
        for thread in self._threads:
            thread.join(1.0)
        self._log.close()
        if self._command_log is not self._log:
            self._command_log.close()
        record = self._order.record
        kept = not record.host and record.port and listens(record.port)
        if not left and not failed and not kept:
            with contextlib.suppress(MoetuneError):
                remove_record(Path(self._order.run), record.name)
        say("stopped", orderly=orderly, left=[process.pid for process in left], failed=failed)

    def _found(self) -> list[Process]:
        """All processes of the server: what descends from this one and is no helper of it."""
        table = all_processes()
        helpers: set[int] = set()
        for helper in tuple(self._helpers):
            helpers |= {helper.pid} | {process.pid for process in descendants(helper.pid, table)}
        return [process for process in descendants(os.getpid(), table) if process.pid not in helpers]

    def _run_stop(self) -> str:
        """Run the command that stops the server; what went wrong, or nothing."""
        if not self._order.stop:
            return ""
        try:
            helper = self._helper(self._order.stop, subprocess.PIPE)
        except OSError as error:
            return f"the stop command cannot run: {error.strerror}"
        assert helper.stdout is not None
        self._thread(self._command_log.copy, helper.stdout.fileno())
        deadline = time.monotonic() + self._order.record.stop_s + _CONNECTION_S
        while helper.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
            self._look()
        if helper.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(helper.pid, signal.SIGKILL)
            return "the stop command did not end in time"
        self._helpers.discard(helper)
        return f"the stop command ended with {helper.returncode}" if helper.returncode else ""

    def _stop_far_end(self) -> str:
        """Ask the far end to end the server; closing the connection asks it too."""
        self._tell(STOP)
        deadline = time.monotonic() + 2 * self._order.record.stop_s + _CONNECTION_S
        while self._status is None and time.monotonic() < deadline:
            time.sleep(0.05)
            self._look()
        with contextlib.suppress(OSError):
            os.close(self._input)
        return self._far_fault or ("" if self._status == 0 else f"ssh ended with {self._status}")


def _whole(source: int) -> bytes:
    data = b""
    while part := os.read(source, 4096):
        data += part
    return data


def main() -> None:
    """Read the order, carry it out."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    text = b""
    while b"\n" not in text:
        part = os.read(0, 1 << 16)
        if not part:
            return
        text += part
    line, _, more = text.partition(b"\n")
    if more:  # it is to end already
        return
    try:
        Supervisor(from_json(Order, json.loads(line), "the order")).run()
    except (MoetuneError, OSError) as error:
        say("failed", reason=getattr(error, "message", "") or str(error))


if __name__ == "__main__":
    main()
