"""Servers on another machine, through `ssh HOST`: started, asked, ended with the care of a local one."""

from __future__ import annotations

import hashlib
import re
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from moetune.applications.experiments.arm_errors import ArmError, CannotStartError, CannotStopError
from moetune.applications.experiments.ports import first_free
from moetune.applications.experiments.remote_script import (
    BOOT,
    FarServer,
    framed,
    gpu_script,
    marked_script,
    port_script,
    put_script,
    remove_script,
    server_script,
    stop_script,
)
from moetune.applications.nvml import Detected, Device, GpuProcess
from moetune.applications.output import check_path
from moetune.domain.errors import InputError
from moetune.domain.text import printable

if TYPE_CHECKING:
    from moetune.applications.experiments.order import Order
    from moetune.domain.experiment_plan import ServerPlan

_SSH = (
    *("ssh", "-T", "-a", "-x"),
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=15"),
    # A connection that is dead is noticed after a minute, on this side.
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),
    *("-o", "ExitOnForwardFailure=yes"),
    # A connection that others share would outlive this one, with its forwarded port.
    *("-o", "ControlMaster=no", "-o", "ControlPath=none"),
    *("-o", "PermitLocalCommand=no", "-o", "RemoteCommand=none", "-o", "LogLevel=ERROR"),
)
_HOST = re.compile(r"[A-Za-z0-9_\[:][A-Za-z0-9_.@:%\[\]-]{0,254}", re.A)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.A)
_FOLDER = re.compile(r"/[A-Za-z0-9/._+-]{0,400}/moetune-files\.[A-Za-z0-9]{6,}", re.A)
_CALL_S = 60.0
_PORTS_TRIED = 200
_MAX_FILES, _MAX_BYTES = 200, 4 << 20


def ssh_command(host: str, *options: str) -> tuple[str, ...]:
    """The arguments of ssh for a host; its command reads a script.

    Raises:
        InputError: for what is no host.
    """
    if not _HOST.fullmatch(host):
        raise InputError(
            f"{printable(host, 80)!r} is no host for ssh", "name it as in ~/.ssh/config; none begins with -"
        )
    return (*_SSH, *options, "--", host, BOOT)


def far_order(order: Order, plan: ServerPlan, variables: Mapping[str, str], cache: str) -> Order:
    """The order of a local server as one for a server at the far end of a connection.

    Args:
        order: what was to run here.
        plan: the known-good server.
        variables: that differ from the login's own.
        cache: names the compiled kernels, empty: the server's own place for them.

    Raises:
        InputError: for variables that a shell cannot set.
    """
    for name in variables:
        if not _VARIABLE.fullmatch(name):
            raise InputError(f"{printable(name, 80)!r} is no name of a variable for the shell of {plan.host}")
    nonce = "moetune-" + secrets.token_hex(16)
    far = FarServer(
        arguments=order.arguments,
        variables=variables,
        folder=plan.folder,
        cache=cache,
        stop=order.stop,
        logs=order.logs,
        stop_s=plan.stop_s,
        beat_s=order.beat_s,
    )
    port = order.record.port
    return replace(
        order,
        arguments=ssh_command(plan.host, "-L", f"127.0.0.1:{port}:127.0.0.1:{port}"),
        folder="",
        stop=(),
        logs=(),
        script=framed(server_script(far, nonce, far_mark(order.record.mark))),
        nonce=nonce,
    )


def cache_name(caches: str, kernels: str) -> str:
    """Name of the folder of compiled kernels on a host: of this run and command."""
    return f"{hashlib.sha256(caches.encode()).hexdigest()[:12]}-{kernels}"


def call(host: str, script: str, nonce: str, limit_s: float = _CALL_S) -> list[tuple[str, str]]:
    """Run a script on a host; what it says, as (word, rest of the line).

    Raises:
        CannotStartError: when the host cannot be reached.
    """
    try:
        done = subprocess.run(
            ssh_command(host),
            input=framed(script).encode(),
            capture_output=True,
            timeout=limit_s,
            check=False,
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise CannotStartError("there is no ssh on this machine", "install an ssh client") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotStartError(
            f"{host} gives no answer within {limit_s:g} s through ssh",
            f"try: ssh -o BatchMode=yes -- {host} true",
        ) from error
    lines = done.stderr.decode("utf-8", "replace").splitlines()
    said = [line[len(nonce) + 1 :].partition(" ") for line in lines if line.startswith(nonce + " ")]
    if done.returncode:
        others = [printable(line, 200) for line in lines if not line.startswith(nonce)]
        raise CannotStartError(
            f"ssh {host} ended with {done.returncode}: {others[-1] if others else 'it says nothing'}",
            f"try: ssh -o BatchMode=yes -- {host} true",
        )
    return [(word, rest) for word, _, rest in said]


def _nonce() -> str:
    return "moetune-" + secrets.token_hex(16)


def far_mark(mark: str) -> str:
    """The mark of what runs at the far end: not that of ssh here, as the host may be this very machine."""
    return f"{mark}-far"


def free_port(host: str, port: int) -> int | None:
    """A port that is free here and on a host, from one on; None when there is none near it."""
    end = port + _PORTS_TRIED
    candidate: int | None = port
    while candidate is not None and candidate < end:
        candidate = first_free(candidate)
        if candidate is None:
            break
        nonce = _nonce()
        said = dict(call(host, port_script(nonce, candidate, _PORTS_TRIED), nonce))
        there = int(said["port"]) if said.get("port", "").isdigit() else candidate
        if there == candidate:
            return candidate
        candidate = there
    return None


def detect_gpus(host: str) -> Detected:
    """The GPUs of a host as its nvidia-smi lists them; none where it has no such command."""
    nonce = _nonce()
    said = call(host, gpu_script(nonce), nonce)
    running: dict[str, list[GpuProcess]] = {}
    for word, rest in said:
        fields = [field.strip() for field in rest.split(",", 3)]
        if word == "process" and len(fields) == 4 and fields[1].isdigit():
            running.setdefault(fields[0], []).append(GpuProcess(int(fields[1]), _mebibytes(fields[2])))
    devices = []
    for word, rest in said:
        fields = [field.strip() for field in rest.split(",", 4)]
        if word == "gpu" and len(fields) == 5 and fields[0].isdigit():
            index, uuid, used, total, name = fields
            devices.append(
                Device(
                    index=int(index),
                    name=printable(name, 80),
                    compute_capability="",
                    uuid=uuid,
                    memory_total_bytes=_mebibytes(total),
                    memory_used_bytes=_mebibytes(used),
                    processes=tuple(running.get(uuid, ())),
                )
            )
    return Detected(tuple(devices))


def _mebibytes(text: str) -> int | None:
    return int(text) << 20 if text.isdigit() else None


def marked_processes(host: str, mark: str) -> tuple[int, ...]:
    """Ids of the processes on a host that carry a mark.

    Raises:
        ArmError: when the host cannot be asked.
    """
    nonce = _nonce()
    said = dict(call(host, marked_script(nonce, far_mark(mark)), nonce))
    if "pids" not in said:
        raise ArmError(f"{host} does not say which processes it has")
    return tuple(int(word) for word in said["pids"].split() if word.isdigit())


def stop_marked(host: str, mark: str, stop: Sequence[str], stop_s: float) -> None:
    """End the processes on a host that carry a mark.

    Raises:
        ArmError: when the host cannot be asked, or some are left.
    """
    nonce = _nonce()
    said = dict(call(host, stop_script(nonce, far_mark(mark), stop, stop_s), nonce, 2 * stop_s + 2 * _CALL_S))
    if "left" in said or "failed" in said:
        left = f"process {said['left']} is left" if "left" in said else said["failed"]
        raise CannotStopError(f"the server on {host} cannot be ended: {printable(left, 200)}")


def put_files(host: str, files: Mapping[str, bytes]) -> str:
    """Write config files into a new folder of a host, readable by its user only.

    Args:
        host: for ssh.
        files: path below the folder to content; names of config files, as the servers look for them.

    Returns:
        The folder.

    Raises:
        InputError: for a name of another kind, or too much.
        ArmError: when it cannot be written.
    """
    if len(files) > _MAX_FILES or sum(map(len, files.values())) > _MAX_BYTES:
        raise InputError(f"more than {_MAX_FILES} files or {_MAX_BYTES >> 20} MiB for {printable(host, 80)}")
    texts = {}
    for name, content in sorted(files.items()):
        check_path(name)
        try:
            texts[name] = content.decode("utf-8")
        except UnicodeDecodeError:
            raise InputError(f"{printable(name, 200)} is not UTF-8 text") from None
        if "\0" in texts[name]:
            raise InputError(f"{printable(name, 200)} holds a byte that no JSON file does")
    nonce = _nonce()
    folder = dict(call(host, put_script(nonce, texts), nonce)).get("folder", "")
    if not _FOLDER.fullmatch(folder):
        raise ArmError(f"{host} does not say where it wrote the config files")
    return folder


def remove_files(host: str, folder: str) -> None:
    """Remove what `put_files` wrote.

    Raises:
        InputError: for another folder.
        ArmError: when it cannot be removed.
    """
    if not _FOLDER.fullmatch(folder) or "/../" in folder:
        raise InputError(f"{printable(folder, 200)} is no folder that moetune made")
    nonce = _nonce()
    call(host, remove_script(nonce, folder), nonce)
