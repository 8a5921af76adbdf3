"""One start of the server of an arm: from a free port and free GPUs to a free port and free GPUs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from moetune.applications.experiments.arm_errors import (
    CannotStartError,
    CannotStopError,
    NeverReadyError,
    PortKeptError,
    StartCancelledError,
)
from moetune.applications.experiments.caches import make_private, mark_prepared
from moetune.applications.experiments.command_line import ArmCommand
from moetune.applications.experiments.endings import ending_text, memory_kills, with_last_lines
from moetune.applications.experiments.gpu_room import GpuRoom
from moetune.applications.experiments.leftovers import STILL_THERE, Leftover, find, leftovers
from moetune.applications.experiments.log_file import last_lines
from moetune.applications.experiments.order import Order
from moetune.applications.experiments.ports import is_free, listeners, listens
from moetune.applications.experiments.processes import (
    PROC,
    all_processes,
    command_of,
    descendants,
)
from moetune.applications.experiments.readiness import Readiness, wait_until_ready
from moetune.applications.experiments.redaction import Redactor
from moetune.applications.experiments.start_record import remove_record, write_record
from moetune.applications.experiments.starting import (
    Machine,
    order_of,
    port_of,
    port_taken,
    room_of,
    secrets_of,
)
from moetune.applications.experiments.supervised import Supervised
from moetune.domain.text import printable

if TYPE_CHECKING:
    from moetune.domain.experiment_plan import ServerPlan

_START_S = 60.0
"""For the supervisor to be there; the server's own time comes after."""
_STOP_EXTRA_S = 60.0
_PORT_FREE_S = 10.0
_SUPERVISOR_GONE_S = 5.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}")


class ArmServer:
    """A server that was started. Use it as a context manager: it is stopped at the end."""

    def __init__(
        self,
        plan: ServerPlan,
        folder: Path,
        supervised: Supervised,
        order: Order,
        room: GpuRoom,
        machine: Machine,
    ) -> None:
        self._plan, self._folder, self._supervised = plan, folder, supervised
        self._order, self._room, self._machine = order, room, machine
        self._kills = memory_kills()
        self._redactor = Redactor()
        self._ready = self._stopped = False
        self._prepared: Callable[[], None] = lambda: None

    @classmethod
    def start(
        cls,
        plan: ServerPlan,
        command: ArmCommand,
        folder: Path,
        *,
        name: str,
        caches: Path | None = None,
        machine: Machine | None = None,
    ) -> ArmServer:
        """Start a server.

        Args:
            plan: the known-good server.
            command: of the arm.
            folder: of the run: logs and records lie in it.
            name: of this start, new in this run: letters, digits, dots, dashes.
            caches: folder of compiled kernels, None: the server's own.
            machine: what is around it.

        Raises:
            CannotStartError: when it cannot be started.
            ForeignProcessError: when somebody else's process computes on its GPUs.
            OutputError: when its record or log cannot be written.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a start")
        if not PROC.joinpath("self", "stat").exists():
            raise CannotStartError("experiments need Linux: its /proc says which processes a server has")
        machine = machine or Machine()
        make_private(folder)
        for left in leftovers(folder):
            raise CannotStartError(
                f"an earlier start is not over: {left.describe()}",
                "run the same command again: it ends that first",
            )
        room = room_of(plan, machine)
        port = command.port or port_of(plan, command)
        if not is_free(port):
            raise port_taken(port)
        order = order_of(plan, command, folder, name, caches, machine, port)
        write_record(folder, order.record)
        supervised = Supervised(order)
        server = cls(plan, folder, supervised, order, room, machine)
        known = secrets_of({**machine.variables, **command.environment}, command.arguments)
        server._redactor = Redactor(tuple(sorted(known, key=len, reverse=True)))
        if caches is not None:
            server._prepared = lambda: mark_prepared(command, caches)
        try:
            server._wait_for_start()
        except BaseException:
            supervised.ask_for_end()
            supervised.close()
            raise
        return server

    def _wait_for_start(self) -> None:
        said = self._supervised.wait(("started", "failed"), _START_S)
        if said is None or said["event"] == "failed":
            reason = said["reason"] if said else "the process that watches it did not start"
            raise CannotStartError(
                f"the server cannot be started: {printable(str(reason), 300)}",
                "try server.command of the plan by hand",
            )

    @property
    def port(self) -> int:
        """On which it is asked, on this machine."""
        return self._order.record.port

    @property
    def url(self) -> str:
        """Where it is asked, on this machine."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        """What it prints, of a limited size."""
        return Path(self._order.log)

    def __enter__(self) -> ArmServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        except CannotStopError:
            # The reason why the arm is left says more; what is left is found by the next start.
            if error is None:
                raise

    def wait_ready(self, cancelled: Callable[[], bool] = lambda: False) -> float:
        """Wait until it takes requests.

        Args:
            cancelled: asked again and again; true ends the waiting.

        Returns:
            How long it took, in seconds.

        Raises:
            CannotStartError: when it died.
            NeverReadyError: when it is not ready in time.
            StartCancelledError: when the waiting was cancelled.
        """
        readiness = Readiness(self.url, self._plan.ready_path, self.log, self._plan.ready_log)
        seconds = wait_until_ready(readiness, self._plan.ready_s, lambda: cancelled() or not self.alive())
        if seconds is not None:
            self._check_own_port()
            self._ready = True
            return seconds
        if not self.alive():
            raise CannotStartError(
                f"the server died before it was ready: {self.ending()}",
                f"its log: {printable(str(self.log), 400)}",
            )
        if cancelled():
            raise StartCancelledError("the start was cancelled before the server was ready")
        raise NeverReadyError(
            with_last_lines(
                f"the server was not ready within {self._plan.ready_s:g} s: {readiness.last}",
                self._last_lines(),
            ),
            "give it more time (server.ready_s), or another sign (server.ready_path, server.ready_log)",
        )

    def alive(self) -> bool:
        """Whether it still runs."""
        if self._stopped or self._supervised.gone:
            return False
        ended = self._supervised.event("exited")
        if ended is None:
            return True
        # A command that only starts a container is over at once; its stop command is for the container.
        detached = bool(self._plan.stop) and ended["code"] == 0 and not ended["connection"]
        return detached and (not self._ready or bool(self._plan.host) or listens(self.port))

    def ending(self) -> str:
        """How it ended, for people."""
        ended = self._supervised.event("exited")
        if ended is None:
            text = "it still runs" if self.alive() else ending_text(None, {}, {})
        elif far_failed := self._supervised.event("far failed"):
            text = (
                f"{printable(self._plan.host, 80)} cannot run it: {printable(str(far_failed['value']), 200)}"
            )
        elif ended["connection"]:
            text = f"the connection to {printable(self._plan.host, 80)} ended (ssh: {ended['code']})"
        else:
            code = int(ended["code"])
            kills = {} if self._plan.host else memory_kills()
            text = ending_text(code, self._kills, kills)
            if code == 0 and not self._plan.stop:
                text += " by itself: a command that leaves its server in the background needs server.stop"
        return with_last_lines(text, self._last_lines())

    def mark_prepared(self) -> None:
        """Note that this arm has run under load: what it compiles is there now."""
        self._prepared()

    def stop(self) -> None:
        """End it, and return when its port and its GPUs are free.

        Raises:
            CannotStopError: when something of it is left.
            PortKeptError: when its port is not free again.
        """
        if self._stopped:
            return
        self._stopped = True
        plan = self._plan
        try:
            self._supervised.ask_for_end()
            limit_s = (4 if plan.host or plan.stop else 2) * plan.stop_s + _STOP_EXTRA_S
            said = self._supervised.wait(("stopped",), limit_s)
        finally:
            # Also when this is interrupted: the supervisor does the rest alone.
            self._supervised.close()
        record = self._order.record
        self._supervised.wait_until_gone(_SUPERVISOR_GONE_S)
        if said is None or (plan.host and said["failed"]):
            # Nobody is left who knows what became of it.
            Leftover(self._folder, record, find(record)).stop()
        elif said["left"]:
            pids = ", ".join(f"{pid} ({command_of(int(pid))})" for pid in said["left"][:8])
            raise CannotStopError(
                f"the server cannot be ended: process {pids} is left",
                STILL_THERE,
            )
        self._wait_for_port(printable(str(said["failed"]), 200) if said else "")
        self._room.wait_until_freed(self._machine.freed_s)
        remove_record(self._folder, record.name)

    def _wait_for_port(self, failed: str) -> None:
        deadline = time.monotonic() + _PORT_FREE_S
        while not is_free(self.port):
            if time.monotonic() > deadline:
                pids = listeners(self.port)
                holders = (
                    ", ".join(f"{pid} ({command_of(pid)})" for pid in pids) or "somebody not seen from here"
                )
                why = f" ({failed})" if failed else ""
                raise PortKeptError(
                    f"port {self.port} is still held after the server was stopped{why}: by process {holders}",
                    "a server in a container needs server.stop (docker stop NAME); end it by hand now",
                )
            time.sleep(0.1)

    def _check_own_port(self) -> None:
        """Refuse the answer of somebody else's server."""
        if self._plan.host or self._plan.stop:
            return
        holders = listeners(self.port)
        own = {process.pid for process in descendants(self._supervised.pid, all_processes())}
        if holders and own and own.isdisjoint(holders):
            raise CannotStartError(
                f"port {self.port} is answered by another server: process {holders[0]}"
                f" ({command_of(holders[0])})",
                "does server.command use {port}? a server in a container needs server.stop",
            )

    def _last_lines(self) -> tuple[str, ...]:
        lines = last_lines(self.log)
        if not lines and self._order.command_log:
            lines = last_lines(Path(self._order.command_log))
        return tuple(self._redactor.text(line) for line in lines)
