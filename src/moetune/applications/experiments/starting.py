"""What a start needs before anything runs: a free port, free GPUs, and the order for its supervisor."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.applications.experiments import remote
from moetune.applications.experiments.arm_errors import CannotStartError
from moetune.applications.experiments.caches import VARIABLE as CACHE_VARIABLE
from moetune.applications.experiments.caches import cache_folder, kernels_name, make_private
from moetune.applications.experiments.command_line import ArmCommand, fill
from moetune.applications.experiments.gpu_room import FREED_S, GpuRoom
from moetune.applications.experiments.log_file import LIMITS, LogLimits
from moetune.applications.experiments.order import Order
from moetune.applications.experiments.ports import first_free, listeners
from moetune.applications.experiments.processes import KEEP_ENVIRONMENT, MARK, boot_id, command_of
from moetune.applications.experiments.redaction import is_secret_name, redacted_arguments
from moetune.applications.experiments.start_record import StartRecord
from moetune.applications.nvml import detect_gpus
from moetune.domain.errors import InputError
from moetune.domain.text import printable

if TYPE_CHECKING:
    from moetune.applications.nvml import Detected
    from moetune.domain.experiment_plan import ServerPlan

_SHORTEST_SECRET = 6
_DIGIT = re.compile(r"[0-9]")


@dataclass(frozen=True, slots=True)
class Machine:
    """What a start takes from the machine around it.

    Attributes:
        detect: asks the driver for the GPUs.
        limits: of a log.
        freed_s: time in which GPU memory has to be free again.
        environ: moetune's own variables, None: those of this process.
        beat_s: time between two signs of life to a server on another machine.
    """

    detect: Callable[[], Detected] = detect_gpus
    limits: LogLimits = LIMITS
    freed_s: float = FREED_S
    environ: Mapping[str, str] | None = None
    beat_s: float = 15.0

    @property
    def variables(self) -> dict[str, str]:
        """Variables that a server inherits."""
        return dict(os.environ if self.environ is None else self.environ)


def room_of(plan: ServerPlan, machine: Machine) -> GpuRoom:
    """The GPUs of a start as they are before it.

    Raises:
        ForeignProcessError: when somebody else's process computes on one of them.
    """
    if not plan.host:
        return GpuRoom.take(plan.gpus, machine.detect)
    there = f"on {plan.host}"
    return GpuRoom.take(plan.gpus, lambda: remote.detect_gpus(plan.host), lambda _: there)


def port_of(plan: ServerPlan, command: ArmCommand) -> int:
    """The port of a start.

    Raises:
        CannotStartError: when there is none.
    """
    if not command.mentions("port"):
        return plan.port
    port = remote.free_port(plan.host, plan.port) if plan.host else first_free(plan.port)
    if port is None:
        raise CannotStartError(f"no port from {plan.port} on is free", "give another server.port in the plan")
    return port


def port_taken(port: int) -> CannotStartError:
    """What to say of a port that somebody holds."""
    pids = listeners(port)
    holder = f"process {pids[0]} ({command_of(pids[0])})" if pids else "somebody not seen from here"
    return CannotStartError(
        f"port {port} is held by {holder}",
        "end it, or write {port} into server.command: a free one is then taken",
    )


def order_of(
    plan: ServerPlan,
    command: ArmCommand,
    folder: Path,
    name: str,
    caches: Path | None,
    machine: Machine,
    port: int,
) -> Order:
    """What the supervisor is told."""
    log = folder / f"{name}.log"
    # A server that writes its log itself writes into a pipe, so that this log has a limit too; where a
    # command of the plan prints it, it is a file.
    pipe = str(folder / f"{name}.pipe") if command.mentions("log") and not plan.logs else ""
    written = pipe or str(folder / f"{name}.server.log")
    cache = make_private(cache_folder(caches, command)) if caches is not None and not plan.host else None
    values = {"port": str(port), "log": written, **({"cache": str(cache)} if cache is not None else {})}
    filled = command.filled(values)
    mark = secrets.token_hex(16)
    stop, logs = fill(plan.stop, values), fill(plan.logs, values)
    record = StartRecord(
        name=name,
        mark=mark,
        boot=boot_id(),
        command=redacted_arguments(filled.arguments),
        host=plan.host,
        port=port,
        stop=redacted_arguments(stop),
        stop_redacted=redacted_arguments(stop) != stop,
        stop_s=plan.stop_s,
    )
    own = {CACHE_VARIABLE: str(cache)} if cache is not None else {}
    changes = {**own, **KEEP_ENVIRONMENT, **filled.environment, MARK: mark}
    environment = {
        variable: value
        for variable, value in {**machine.variables, **changes}.items()
        if value or variable not in changes
    }
    order = Order(
        run=str(folder),
        record=record,
        arguments=filled.arguments,
        environment=tuple(environment.items()),
        folder=str(Path(plan.folder).absolute()),
        log=str(log),
        command_log=str(folder / f"{name}.command.log") if plan.logs or pipe else "",
        pipe=pipe,
        limits=machine.limits,
        beat_s=machine.beat_s,
        stop=stop,
        logs=logs,
        secrets=tuple(filter(_is_unlike_a_word, secrets_of(environment, filled.arguments))),
    )
    if not plan.host:
        return order
    if command.mentions("log"):
        raise InputError(
            f"{{log}} is a file of this machine and the server runs on {printable(plan.host, 80)}",
            "leave it out: what the server prints there is its log",
        )
    far_changes = {variable: value for variable, value in changes.items() if variable != MARK}
    own_place = caches is None or CACHE_VARIABLE in command.environment
    far_cache = "" if own_place else remote.cache_name(str(caches), kernels_name(command))
    return remote.far_order(order, plan, far_changes, far_cache)


def _is_unlike_a_word(secret: str) -> bool:
    """Whether a value can be replaced in a log: one that is a word stands in lines that have to be read."""
    return (
        not secret.startswith("/") and len(secret) >= 8 and (len(secret) >= 20 or bool(_DIGIT.search(secret)))
    )


def secrets_of(environment: Mapping[str, str], arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Values that must not stand in a log."""
    values = [value for name, value in environment.items() if is_secret_name(name)]
    for given, shown in zip(arguments, redacted_arguments(arguments), strict=True):
        if given != shown:
            flag, equals, value = given.partition("=")
            values.append(value if equals and shown.startswith(flag) else given)
    return tuple(sorted({value for value in values if len(value) >= _SHORTEST_SECRET}))
