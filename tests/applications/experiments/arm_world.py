"""Plans with the small server, and what is left of processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moetune.applications.experiments.arm_server import ArmServer
from moetune.applications.experiments.command_line import arm_command
from moetune.applications.experiments.processes import all_processes, read_process
from moetune.applications.experiments.start_record import read_records
from moetune.applications.experiments.starting import Machine
from moetune.applications.nvml import Detected
from moetune.domain.experiment_plan import ServerPlan

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SERVER = (sys.executable, "-S", str(HERE / "small_server.py"), "--port", "{port}")
NO_GPUS = Machine(detect=Detected)


def first_port() -> int:
    """A port for this test process, so that several can run side by side."""
    return 20000 + os.getpid() * 37 % 11000


def plan_of(*arguments: str, faults: tuple[str, ...] = (), **fields: Any) -> ServerPlan:
    """The small server with some faults."""
    words = [word for fault in faults for word in ("--fault", fault)]
    values: dict[str, Any] = {"port": first_port(), "ready_s": 20.0, "stop_s": 5.0} | fields
    return ServerPlan("other", (*SERVER, *arguments, *words), **values)


def begin(plan: ServerPlan, folder: Path, name: str = "one", machine: Machine = NO_GPUS) -> ArmServer:
    """A start of a plan's baseline."""
    return ArmServer.start(plan, arm_command(plan, ()), folder, name=name, machine=machine)


def running(folder: Path) -> list[str]:
    """Commands of the processes that mention a folder or carry a start's mark of it, as text."""
    found = []
    for pid in all_processes():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if pid != os.getpid() and f"WORLD={folder}\0".encode() in environment + b"\0":
            found.append(f"{pid} {command!r}")
    return found


def until(condition: Callable[[], object], seconds: float = 20.0) -> bool:
    """Whether something becomes true in a time that is far longer than it needs."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def get(url: str, seconds: float = 5.0) -> int:
    """Status of an answer, 0 when there is none."""
    try:
        with urllib.request.urlopen(url, timeout=seconds) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@contextlib.contextmanager
def held(*command: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the test, however that ends."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def alive(pid: int) -> bool:
    """Whether a process runs."""
    process = read_process(pid)
    return process is not None and process.runs


def names_of_records(folder: Path) -> list[str]:
    """Starts that may still run, as written down."""
    return [record.name for record in read_records(folder)]
