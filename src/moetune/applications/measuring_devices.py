"""Which GPUs and which Triton measure."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from moetune.applications.environment import find_installed
from moetune.domain.errors import InputError, MoetuneError, UnknownGpuError
from moetune.domain.text import printable
from moetune.domain.version import parse_release, release_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moetune.applications.measure_request import MeasureRequest
    from moetune.applications.nvml import Device as GpuDevice


class GpuBusyError(MoetuneError):
    """Something else computes on the GPU: times would be of both."""


def chosen_devices(request: MeasureRequest, gpus: Sequence[GpuDevice] | None) -> list[GpuDevice]:
    """The GPUs that are meant, of one kind and free.

    Args:
        request: names them, or leaves them open.
        gpus: those of this machine; None asks the driver.

    Raises:
        MoetuneError: for GPUs that are not there, of another kind, or busy.
    """
    if gpus is None:
        from moetune.applications.nvml import detect_gpus

        detected = detect_gpus()
        gpus = detected.devices
        if not gpus:
            why = "; ".join(detected.reasons) or "none was found"
            raise UnknownGpuError(
                f"nothing can be measured: this machine has no GPU ({why})",
                'add --effort predict, and --gpu "NVIDIA H200" or another name',
            )
    wanted = request.devices or (0,)
    if max(wanted) >= len(gpus):
        raise InputError(f"this machine has {len(gpus)} GPUs, not one with the number {max(wanted)}")
    devices = [gpus[number] for number in wanted]
    names = dict.fromkeys(device.name for device in devices)
    if len(names) > 1:
        raise InputError(f"the GPUs are of different kinds: {', '.join(names)}", "tune each kind on its own")
    if request.gpu_names and devices[0].gpu.torch_name not in request.gpu_names:
        raise InputError(
            f"this GPU is {devices[0].name}, not {', '.join(request.gpu_names)}",
            "leave --gpu out, or add --effort predict",
        )
    if not request.share_gpu:
        refuse_busy(devices)
    return devices


def refuse_busy(devices: Sequence[GpuDevice], ways_out: str = "or add --share-gpu") -> None:
    """Refuse GPUs that other processes compute on.

    Args:
        devices: that are to measure.
        ways_out: options of the verb that help, as the end of a sentence.

    Raises:
        GpuBusyError: with the processes.
    """
    for device in devices:
        others = [process for process in device.processes if process.pid != os.getpid()]
        if others:
            pids = ", ".join(str(process.pid) for process in others[:8])
            raise GpuBusyError(
                f"GPU {device.index} is in use by other processes ({pids}): times would be of both",
                f"end them, choose another GPU with --devices, {ways_out}",
            )


def triton_of(python: str) -> str | None:
    """The version of Triton that an interpreter has; None where it has none."""
    if python == sys.executable:
        found = find_installed("triton")
        return None if found is None else found.version
    code = "from importlib.metadata import version; print(version('triton'))"
    try:
        done = subprocess.run(
            [python, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        return release_text(parse_release(done.stdout))
    except (OSError, subprocess.SubprocessError, MoetuneError) as error:
        raise InputError(
            f"{printable(python, 200)} is no interpreter with Triton",
            "give that of the server's environment with --python",
        ) from error
