"""GPUs through NVML: every answer of a driver, and none, becomes data or a reason."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from moetune.applications.nvml import GpuProcess, detect_gpus, kinds
from moetune.domain.errors import UnknownGpuError


class FakeError(Exception):
    """Stands for `pynvml.NVMLError`."""


@dataclass
class Board:
    """A GPU or a slice as the fake driver knows it; an answer that is None is not supported."""

    name: str | bytes = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    uuid: str | bytes = "GPU-1"
    cores: int | None = 16896
    memory: tuple[int, int] | None = (150_000_000_000, 1_000_000_000)
    mig: tuple[int, int] | None = None
    slices: list[Any] = field(default_factory=list)
    attributes: Any = None
    processes: list[Any] | None = field(default_factory=list)
    lost: bool = False


def supported(value: Any) -> Any:
    if value is None:
        raise FakeError("Not Supported")
    return value


def fake(boards: list[Board]) -> ModuleType:
    """A module with the functions of pynvml that are used, over some boards."""
    module = ModuleType("pynvml")
    calls: list[str] = []

    def handle(index: int) -> Board:
        if boards[index].lost:
            raise FakeError("GPU is lost")
        return boards[index]

    def memory(board: Board) -> SimpleNamespace:
        total, used = supported(board.memory)
        return SimpleNamespace(total=total, used=used)

    functions = {
        "nvmlInit": lambda: calls.append("init"),
        "nvmlShutdown": lambda: calls.append("shutdown"),
        "nvmlSystemGetDriverVersion": lambda: "580.65.06",
        "nvmlDeviceGetCount": lambda: len(boards),
        "nvmlDeviceGetHandleByIndex": handle,
        "nvmlDeviceGetName": lambda board: board.name,
        "nvmlDeviceGetUUID": lambda board: board.uuid,
        "nvmlDeviceGetCudaComputeCapability": lambda board: board.capability,
        "nvmlDeviceGetNumGpuCores": lambda board: supported(board.cores),
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetMigMode": lambda board: supported(board.mig),
        "nvmlDeviceGetMaxMigDeviceCount": lambda _board: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": lambda board, at: supported((board.slices + [None] * 7)[at]),
        "nvmlDeviceGetAttributes": lambda board: supported(board.attributes),
        "nvmlDeviceGetComputeRunningProcesses": lambda board: supported(board.processes),
    }
    vars(module).update(functions, NVMLError=FakeError, calls=calls)
    return module


RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"


def test_a_whole_gpu_is_reported_with_all_that_the_driver_says() -> None:
    running = [SimpleNamespace(pid=77, usedGpuMemory=5), SimpleNamespace(pid=78, usedGpuMemory=None)]
    module = fake([Board(processes=running)])
    found = detect_gpus(module)
    assert found.driver == "580.65.06"
    assert found.reasons == ()
    (device,) = found.devices
    assert (device.index, device.name, device.compute_capability, device.uuid) == (
        0,
        "NVIDIA H200",
        "9.0",
        "GPU-1",
    )
    assert (device.memory_total_bytes, device.memory_used_bytes) == (150_000_000_000, 1_000_000_000)
    assert device.sm_count == 132
    assert device.processes == (GpuProcess(77, 5), GpuProcess(78, None))
    assert device.gpu.torch_name == "NVIDIA H200"
    assert device.gpu.smem_optin_bytes == 232448
    assert module.calls == ["init", "shutdown"]


def test_cores_are_counted_by_architecture() -> None:
    (device,) = detect_gpus(fake([Board("NVIDIA A100-SXM4-80GB", (8, 0), cores=6912)])).devices
    assert device.sm_count == 108


def test_what_the_driver_does_not_support_is_unknown_not_an_error() -> None:
    module = fake([Board("NVIDIA GB10", (12, 1), cores=None, memory=None, processes=None)])
    del module.nvmlSystemGetDriverVersion
    found = detect_gpus(module)
    (device,) = found.devices
    assert (device.memory_total_bytes, device.sm_count, device.processes) == (None, None, ())
    # The registry still knows it.
    assert device.gpu.sm_count == 48
    assert found.driver == ""


def test_bytes_and_control_characters_of_a_driver_become_plain_text() -> None:
    (device,) = detect_gpus(fake([Board(b"NVIDIA H200", uuid=b"GPU-\x1b[31m1")])).devices
    assert device.name == "NVIDIA H200"
    assert device.uuid.isprintable()


def test_case_56_two_kinds_of_gpu_are_two_problems() -> None:
    boards = [
        Board(uuid="GPU-1"),
        Board(RTX, (12, 0), "GPU-2", cores=24064),
        Board(uuid="GPU-3"),
    ]
    by_name = kinds(detect_gpus(fake(boards)).devices)
    assert {name: [device.uuid for device in devices] for name, devices in by_name.items()} == {
        "NVIDIA H200": ["GPU-1", "GPU-3"],
        RTX: ["GPU-2"],
    }
    first, second = (devices[0].gpu for devices in by_name.values())
    assert first.smem_optin_bytes != second.smem_optin_bytes


def test_in_mig_mode_the_slices_are_the_devices() -> None:
    attributes = SimpleNamespace(multiprocessorCount=16, memorySizeMB=9856, gpuInstanceSliceCount=1)
    parts = [
        Board("NVIDIA H100 80GB HBM3 MIG 1g.10gb", uuid="MIG-1", attributes=attributes, memory=(10, 1)),
        # A driver that reports the whole GPU's name for a slice.
        Board("NVIDIA H100 80GB HBM3", uuid="MIG-2", attributes=attributes, memory=(10, 1)),
        Board("NVIDIA H100 80GB HBM3", uuid="MIG-3", attributes=None),
    ]
    whole = Board("NVIDIA H100 80GB HBM3", uuid="GPU-1", mig=(1, 1), slices=parts)
    found = detect_gpus(fake([whole, Board("NVIDIA H100 80GB HBM3", uuid="GPU-2", mig=(0, 0))]))
    assert [device.uuid for device in found.devices] == ["MIG-1", "MIG-2", "MIG-3", "GPU-2"]
    first, second, third, last = found.devices
    assert first.name == second.name == "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    assert first.gpu.mig_slice == "1g.10gb"
    assert first.gpu.sm_count == 16
    assert third.name != last.name
    assert third.gpu.sm_count is None
    assert last.gpu.sm_count == 132


def test_mig_mode_without_slices_is_a_reason() -> None:
    found = detect_gpus(fake([Board(mig=(1, 1))]))
    assert found.devices == ()
    assert "MIG mode" in found.reasons[0]


def test_a_lost_gpu_does_not_hide_the_others() -> None:
    found = detect_gpus(fake([Board(lost=True), Board(uuid="GPU-2")]))
    assert [device.uuid for device in found.devices] == ["GPU-2"]
    assert found.reasons == ("GPU 0 does not answer: GPU is lost",)


def test_a_driver_without_gpus_says_so() -> None:
    assert detect_gpus(fake([])).reasons == ("the NVIDIA driver reports no GPU",)


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount"])
def test_a_driver_that_fails_is_a_reason_never_an_exception(function: str) -> None:
    module = fake([Board()])

    def fail() -> None:
        raise FakeError("Driver/library version mismatch \x1b[31m")

    setattr(module, function, fail)
    found = detect_gpus(module)
    assert found.devices == ()
    assert "Driver/library version mismatch" in found.reasons[0]
    assert found.reasons[0].isprintable()


def test_an_architecture_that_is_not_supported_is_found_and_says_what_it_lacks() -> None:
    (device,) = detect_gpus(fake([Board("Tesla T4", (7, 5), cores=2560)])).devices
    assert device.sm_count is None
    with pytest.raises(UnknownGpuError, match=r"7\.5"):
        _ = device.gpu


def test_a_machine_without_the_binding_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert detect_gpus().reasons == ("nvidia-ml-py is not installed",)


def test_the_real_binding_answers_with_devices_or_a_reason() -> None:
    found = detect_gpus()
    assert found.devices or found.reasons
    for device in found.devices:
        assert device.name
        assert device.uuid


@pytest.mark.gpu
def test_nvml_agrees_with_torch_on_a_real_gpu() -> None:
    import torch

    device = detect_gpus().devices[0]
    properties = torch.cuda.get_device_properties(0)
    assert device.name == torch.cuda.get_device_name(0) == properties.name
    assert device.compute_capability == f"{properties.major}.{properties.minor}"
    assert device.sm_count == properties.multi_processor_count
    assert device.gpu.smem_optin_bytes == properties.shared_memory_per_block_optin
    if device.gpu.l2_bytes is not None:
        assert device.gpu.l2_bytes == properties.L2_cache_size
