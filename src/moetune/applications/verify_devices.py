"""Which GPUs of this machine measure which files, and why none does."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from moetune.applications.measuring_devices import refuse_busy
from moetune.domain.errors import InputError, MoetuneError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moetune.applications.nvml import Device
    from moetune.applications.verify_answer import Looked, VerifyRequest


class WrongGpuError(MoetuneError):
    """The GPUs here are not those that the files are for."""


def gpus_for(
    request: VerifyRequest, looked: Looked, here: Sequence[Device] | None
) -> tuple[Device, ...] | str:
    """The GPUs that measure a pair of files, or why none does.

    Args:
        request: what is asked.
        looked: the files.
        here: the GPUs of this machine; None asks the driver.

    Raises:
        WrongGpuError: when this machine has GPUs, and not of that kind.
        GpuBusyError: when something else computes on them.
    """
    why = _why_not(request, looked)
    if why:
        return why
    reasons: tuple[str, ...] = ()
    if here is None:
        from moetune.applications.nvml import detect_gpus

        detected = detect_gpus()
        here, reasons = detected.devices, detected.reasons
    if not here:
        return f"this machine has no GPU ({'; '.join(reasons) or 'none was found'})"
    missing = "" if request.python else _missing_packages()
    if missing:
        return f"{missing} cannot be imported here: give the server's interpreter with --python"
    devices = _of_kind(request, looked, here)
    if not request.share_gpu:
        refuse_busy(devices, "or add --share-gpu or --lookup-only")
    return devices


def _why_not(request: VerifyRequest, looked: Looked) -> str:
    if request.lookup_only:
        return "--lookup-only"
    if looked.problem is None:
        return "the file's name does not say what it is for"
    if not looked.picks:
        return "there are no entries that can be measured"
    if not looked.complete:
        return looked.note
    if looked.problem.gpu.vendor != "NVIDIA":
        return f"for GPUs of {looked.problem.gpu.vendor} moetune knows names and lookups only"
    return ""


def _missing_packages() -> str:
    return " and ".join(name for name in ("torch", "triton") if importlib.util.find_spec(name) is None)


def _of_kind(request: VerifyRequest, looked: Looked, here: Sequence[Device]) -> tuple[Device, ...]:
    """The GPUs whose files these are, by the name under which the server looks for them."""
    assert looked.problem is not None
    wanted = looked.server.device_name(looked.problem.gpu)

    def fits(device: Device) -> bool:
        return looked.server.device_name(device.gpu) == wanted

    if request.devices and max(request.devices) >= len(here):
        raise InputError(f"this machine has {len(here)} GPUs, not one with the number {max(request.devices)}")
    chosen = [here[number] for number in request.devices] or [one for one in here if fits(one)][:1]
    wrong = [device.name for device in chosen or here if not fits(device)]
    if wrong:
        named = ", ".join(dict.fromkeys(wrong))
        raise WrongGpuError(
            f"the file is for {looked.problem.gpu.torch_name}, and this GPU is {named}",
            "run it on that GPU, or add --lookup-only for what needs none",
        )
    return tuple(chosen)
