"""The GPUs of this machine, through NVML: no torch, no CUDA context."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moetune.domain.gpu import Gpu, find_gpu, load_targets
from moetune.domain.gpu_names import parse_mig
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that computes on a GPU.

    Attributes:
        memory_bytes: what it holds of the GPU's memory, None when the driver does not say.
    """

    pid: int
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU of this machine, or one MIG slice of it.

    Attributes:
        index: of the whole GPU, in the order of the driver.
        name: as torch gives it.
        compute_capability: `9.0`; of a slice, that of its GPU.
        uuid: of this GPU or slice; what CUDA_VISIBLE_DEVICES takes.
        memory_total_bytes: None where the driver does not say (memory shared with the CPU).
        memory_used_bytes: likewise.
        sm_count: multiprocessors, None where the driver does not say.
        processes: what computes on it now; of a slice, on that slice.
    """

    index: int
    name: str
    compute_capability: str
    uuid: str
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    sm_count: int | None = None
    processes: tuple[GpuProcess, ...] = ()

    @property
    def gpu(self) -> Gpu:
        """The kind of GPU that this is.

        Raises:
            InputError: for a name that cannot stand in a file name.
            UnknownGpuError: for an architecture whose limits are not known.
        """
        return find_gpu(self.name, compute_capability=self.compute_capability, sm_count=self.sm_count)


@dataclass(frozen=True, slots=True)
class Detected:
    """What NVML says of this machine.

    Attributes:
        devices: what can be computed on: whole GPUs, and slices of those in MIG mode.
        driver: version of the driver, empty without.
        reasons: why there are no devices, or fewer than the machine has.
    """

    devices: tuple[Device, ...] = ()
    driver: str = ""
    reasons: tuple[str, ...] = ()


def detect_gpus(nvml: ModuleType | None = None) -> Detected:
    """List the GPUs of this machine. A machine without a driver has none, and a reason.

    Args:
        nvml: the module `pynvml` or what stands for it; None imports it.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return Detected(reasons=("nvidia-ml-py is not installed",))
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Detected(reasons=(f"no NVIDIA driver answers: {printable(str(error))}",))
    driver = _Driver(nvml)
    try:
        return driver.detect()
    except nvml.NVMLError as error:
        return Detected(reasons=(f"the NVIDIA driver fails: {printable(str(error))}",))
    finally:
        driver.ask("nvmlShutdown")


def kinds(devices: Sequence[Device]) -> dict[str, tuple[Device, ...]]:
    """The devices of each name, in the order of the first: each name is a problem of its own."""
    names = dict.fromkeys(device.name for device in devices)
    return {name: tuple(device for device in devices if device.name == name) for name in names}


class _Driver:
    """A driver that answers."""

    def __init__(self, nvml: ModuleType) -> None:
        self._nvml = nvml

    def ask(self, function: str, *arguments: object) -> Any:  # noqa: ANN401 - the binding has no types
        """What a function answers; None where this GPU, driver or binding does not know it."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None

    def detect(self) -> Detected:
        """The devices. What every GPU must answer is called without `ask`."""
        devices: list[Device] = []
        reasons: list[str] = []
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                found, reason = self._devices(index, self._nvml.nvmlDeviceGetHandleByIndex(index))
            except self._nvml.NVMLError as error:
                found, reason = [], f"GPU {index} does not answer: {printable(str(error))}"
            devices.extend(found)
            reasons.extend([reason] if reason else [])
        if not devices and not reasons:
            reasons.append("the NVIDIA driver reports no GPU")
        return Detected(tuple(devices), _text(self.ask("nvmlSystemGetDriverVersion")), tuple(reasons))

    def _devices(self, index: int, handle: object) -> tuple[list[Device], str]:
        """The GPU itself; in MIG mode its slices, since nothing computes on the whole then."""
        name = _text(self._nvml.nvmlDeviceGetName(handle))
        capability = "{}.{}".format(*self._nvml.nvmlDeviceGetCudaComputeCapability(handle))
        mig_mode, _pending = self.ask("nvmlDeviceGetMigMode", handle) or (0, 0)
        if not mig_mode:
            return [self._device(index, handle, name, capability, self._sm_count(handle, capability))], ""
        slices = []
        for position in range(self.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            part = self.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, position)
            if part is not None:
                attributes = self.ask("nvmlDeviceGetAttributes", part)
                part_name = _slice_name(name, _text(self.ask("nvmlDeviceGetName", part)), attributes)
                sm_count = getattr(attributes, "multiprocessorCount", None)
                slices.append(self._device(index, part, part_name, capability, sm_count))
        return slices, "" if slices else f"GPU {index} ({name}) is in MIG mode and has no slice"

    def _sm_count(self, handle: object, capability: str) -> int | None:
        """Multiprocessors from the number of cores, the only one that NVML gives of a whole GPU."""
        target = load_targets().get(capability)
        cores = self.ask("nvmlDeviceGetNumGpuCores", handle) or 0
        return cores // target.cores_per_sm or None if target is not None and target.cores_per_sm else None

    def _device(self, index: int, handle: object, name: str, capability: str, sm_count: int | None) -> Device:
        memory = self.ask("nvmlDeviceGetMemoryInfo", handle)
        running = self.ask("nvmlDeviceGetComputeRunningProcesses", handle) or ()
        return Device(
            index=index,
            name=name,
            compute_capability=capability,
            uuid=_text(self._nvml.nvmlDeviceGetUUID(handle)),
            memory_total_bytes=getattr(memory, "total", None),
            memory_used_bytes=getattr(memory, "used", None),
            sm_count=sm_count,
            processes=tuple(GpuProcess(process.pid, process.usedGpuMemory) for process in running),
        )


def _slice_name(whole: str, reported: str, attributes: Any) -> str:  # noqa: ANN401 - a ctypes structure
    """Name of a slice as torch gives it; some drivers report the whole GPU's name for it."""
    if parse_mig(reported) is not None:
        return reported
    if attributes is None:
        return f"{whole} MIG"
    # A profile's memory is rounded up: 1g.10gb has 9.5 GiB.
    memory_gb = math.ceil(attributes.memorySizeMB / 1024)
    return f"{whole} MIG {attributes.gpuInstanceSliceCount}g.{memory_gb}gb"


def _text(value: str | bytes | None) -> str:
    """Text of the driver, which older bindings give as bytes."""
    return printable(value.decode("utf-8", "replace") if isinstance(value, bytes) else value or "")
