"""The comparison of Triton's releases: what machine code says, and how it is launched, with no GPU."""

from __future__ import annotations

import ctypes
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from benchmarks.h200 import triton_versions
from benchmarks.h200.common import PROBLEMS, binary
from benchmarks.h200.cubin_launch import Driver, DriverError, LaunchAttribute, LaunchConfig
from benchmarks.h200.cubins import (
    Binary,
    compile_with,
    key_of,
    parameter_sizes,
    read_archive,
    section,
    write_archive,
)

from moetune.domain.config import KernelConfig
from moetune.domain.landscape import read_landscape
from moetune.measure import layer, timing
from moetune.measure.protocol import Workload
from tests.measure.cpu_backend import CpuBackend, RunNow

if TYPE_CHECKING:
    from pathlib import Path

    from moetune.domain.problem import Problem

SMALL = replace(PROBLEMS["seed"], E=4, global_experts=4, K=128, N=64, file_n=64, topk=2)
CONFIGS = [KernelConfig(16, 64, 64, 1, 4, 3), KernelConfig(32, 32, 64, 16, 4, 2)]
M = 8


def test_what_machine_code_says_of_its_parameters_is_what_it_is_launched_with(tmp_path: Path) -> None:
    """The kernel's own parameters and the two pointers behind them, for both directions and block fp8."""
    tasks = [
        binary(PROBLEMS["seed"], "up", 8, CONFIGS[0]),
        binary(PROBLEMS["qwen3.5-35b-fp8"], "down", 8, CONFIGS[0]),
    ]
    found = compile_with(None, tasks, workers=2)
    for task in tasks:
        one = found[task]
        assert one.binary is not None
        assert parameter_sizes(one.cubin, one.binary.name) == one.binary.sizes
        assert one.binary.sizes[-2:] == [8, 8]
        assert one.binary.scratch_bytes == (0, 0)
        assert one.binary.shared_bytes == one.result.shared_bytes
        assert one.binary.threads == 128
        named = dict(one.binary.parameters)
        assert named["x_ptr"] == "*bf16" if task is tasks[0] else named["x_ptr"] == "*fp8e4nv"
        assert ("x_scale_ptr" in named) == (task is tasks[1])
        assert section(one.cubin, f".text.{one.binary.name}")
        with pytest.raises(ValueError, match="no section"):
            section(one.cubin, ".text.another")
    files = {f"3.6.0/{key_of(task)}.cubin": found[task].cubin for task in tasks}
    write_archive(tmp_path / "archive", files)
    assert read_archive(tmp_path / "archive") == files


def test_a_release_whose_kernels_take_other_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Binary, "sizes", [8])
    with pytest.raises(ValueError, match=r"3\.\d+\.\d+: parameters"):
        compile_with(None, [binary(PROBLEMS["seed"], "up", 8, CONFIGS[0])], workers=1)


class Library:
    """Stands for the driver: remembers what is loaded, decodes what is launched, and computes it.

    Args:
        wrong: machine code whose results are off.
    """

    def __init__(self, wrong: bytes = b"") -> None:
        self.wrong, self.backend = wrong, None
        self.modules: list[bytes] = []
        self.shared: dict[int, int] = {}
        self.launches: list[dict[str, Any]] = []
        self.binaries: dict[bytes, Binary] = {}
        self.status = 0

    def cuModuleLoadData(self, module: Any, image: Any) -> int:  # noqa: N802
        self.modules.append(image.value)
        module._obj.value = len(self.modules)
        return self.status

    def cuModuleGetFunction(self, function: Any, module: Any, name: Any) -> int:  # noqa: N802
        assert name.value == b"kernel"
        function._obj.value = module.value
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: Any, value: Any) -> int:  # noqa: N802
        assert attribute.value == 8
        self.shared[function.value] = value.value
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: Any, extra: Any) -> int:  # noqa: N802
        assert extra is None
        about, code = config._obj, self.modules[function.value - 1]
        kinds = [kind for _, kind in self.binaries[code].parameters] + ["*", "*"]
        names = [name for name, _ in self.binaries[code].parameters] + ["first", "second"]
        assert len(pointers) == len(names)
        values = {
            name: ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int32 if kind == "i32" else ctypes.c_uint64))[
                0
            ]
            for name, kind, pointer in zip(names, kinds, pointers, strict=True)
        }
        attributes = [
            (about.attributes[place].id, about.attributes[place].value)
            for place in range(about.attribute_count)
        ]
        self.launches.append(
            {
                "grid": (about.grid_x, about.grid_y, about.grid_z),
                "block": (about.block_x, about.block_y, about.block_z),
                "shared": (about.shared_bytes, self.shared[function.value]),
                "stream": about.stream,
                "attributes": attributes,
                "values": values,
            }
        )
        self._compute(values, off=code == self.wrong)
        return 0

    def _compute(self, values: dict[str, int], *, off: bool) -> None:
        """What the kernel would write, where it would write it."""
        backend: Any = self.backend
        data = backend._opened()
        kernel = next(k for k, out in data.outputs.items() if out.data_ptr() == values["y_ptr"])
        task = binary(SMALL, kernel, M, CONFIGS[0])
        copy = [weights.values.data_ptr() for weights in data.weights[kernel]].index(values["w_ptr"])
        if copy == 0:
            experts = backend._routing(kernel, M).experts[0]
            data.outputs[kernel][: M * 2] = data.reference(task, M, experts) * (1.1 if off else 1.0)


def archive(wrong: str) -> tuple[dict[str, bytes], Library]:
    """Machine code in name only, and a driver that runs it; one config fails in one release."""
    files: dict[str, bytes] = {}
    index, library = {}, Library(wrong.encode())
    for place, config in enumerate(CONFIGS):
        task = binary(SMALL, "up", M, config)
        index[f"small up {M} {config}"] = key_of(task)
        for release in ("3.6.0", "3.9.0"):
            if (release, place) == ("3.9.0", 1):
                continue
            names = ("x_ptr", "w_ptr", "y_ptr", "N", "K", "num_slots", "y_stride")
            kinds = ("*bf16", "*bf16", "*bf16", "i32", "i32", "i32", "i32")
            about = Binary(
                "kernel", 128, 1000 + place, tuple(zip(names, kinds, strict=True)), (0, 0), "", release
            )
            code = f"{release} {place}".encode()
            library.binaries[code] = about
            files[f"{release}/{key_of(task)}.json"] = json.dumps(about.to_json()).encode()
            files[f"{release}/{key_of(task)}.cubin"] = code
    files[triton_versions.INDEX] = json.dumps(index).encode()
    return files, library


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> CpuBackend:
    """The measuring backend on the CPU with a small problem."""

    class Stream:
        cuda_stream = 77

    for name, value in (("synchronize", lambda: None), ("empty_cache", lambda: None)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 40, 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(layer, "least_launches", lambda *_: 2)
    monkeypatch.setattr(timing, "wake", lambda: None)
    monkeypatch.setattr(timing, "capture", RunNow)
    problems: dict[str, Problem] = {"small": SMALL}
    monkeypatch.setattr(triton_versions, "PROBLEMS", problems)
    monkeypatch.setattr(triton_versions, "contestants", lambda *_: CONFIGS)
    made = CpuBackend()
    made.open(Workload(SMALL, (M,)))
    return made


def test_a_cell_is_measured_release_by_release(backend: CpuBackend) -> None:
    """Machine code gets the tensors and numbers of the launch; who computes wrong is named."""
    files, library = archive(wrong="3.9.0 0")
    library.backend = backend  # type: ignore[assignment]
    rows = triton_versions.measure_cell(backend, Driver(library), files, "small", "up", M)
    assert [row["config"] for row in rows] == [[16, 64, 64, 1, 4, 3], [32, 32, 64, 16, 4, 2]]
    assert rows[0]["right"] == {"3.6.0": True, "3.9.0": False, "3.6.0 again": True}
    assert rows[1]["right"] == {"3.6.0": True, "3.6.0 again": True}
    assert {name: len(times) for name, times in rows[0]["us"].items()} == dict.fromkeys(
        ("3.6.0", "3.9.0", "3.6.0 again"), triton_versions.ROUNDS
    )
    assert library.modules == [b"3.6.0 0", b"3.9.0 0", b"3.6.0 0", b"3.6.0 1", b"3.6.0 1"]
    first, data = library.launches[0], backend._opened()
    assert first["values"] == {
        "x_ptr": data.inputs["up"].values.data_ptr(),
        "w_ptr": data.weights["up"][0].values.data_ptr(),
        "y_ptr": data.outputs["up"].data_ptr(),
        "N": 128,
        "K": 128,
        "num_slots": M * 2,
        "y_stride": 128,
        "first": 0,
        "second": 0,
    }
    # At most E + 1 groups of slots are padded to 16 rows, in two tiles of 64 columns each.
    assert first["grid"] == (-(-(M * 2 + 5 * 15) // 16) * 2, 1, 1)
    assert first["block"] == (128, 1, 1)
    assert first["shared"] == (1000, 1000)
    assert first["stream"] == 77
    assert first["attributes"] == [(6, 1)]


def test_without_pdl_a_launch_has_no_attribute(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    files, library = archive(wrong="")
    library.backend = backend  # type: ignore[assignment]

    def plain(*arguments: Any) -> Any:
        task = binary(*arguments)
        return replace(task, launch=replace(task.launch, pdl=False), pdl_early=False)

    monkeypatch.setattr(triton_versions, "binary", plain)
    triton_versions.measure_cell(backend, Driver(library), files, "small", "up", M)
    assert all(launch["attributes"] == [] for launch in library.launches)


def test_a_driver_that_refuses_is_heard() -> None:
    library = Library()
    library.status = 218
    with pytest.raises(DriverError, match="cuModuleLoadData answers 218"):
        Driver(library).load(b"code", "kernel", 0)


def test_structures_lie_in_memory_as_in_cuda_h() -> None:
    """Sizes and offsets that a C compiler prints for cuda.h 12.8 (of Triton 3.6.0's wheel)."""
    config = (
        LaunchConfig.shared_bytes,
        LaunchConfig.stream,
        LaunchConfig.attributes,
        LaunchConfig.attribute_count,
    )
    assert ctypes.sizeof(LaunchConfig) == 56
    assert [field.offset for field in config] == [24, 32, 40, 48]
    assert ctypes.sizeof(LaunchAttribute) == 72
    assert [LaunchAttribute.id.offset, LaunchAttribute.value.offset] == [0, 8]


def test_what_is_timed_holds_the_fastest_and_both_defaults() -> None:
    configs = triton_versions.contestants("seed", "up", 1024)
    assert len(configs) == len(set(configs))
    assert KernelConfig(64, 64, 32, 8, 4, 3) in configs  # SGLang's default over E tokens
    times = read_landscape(triton_versions.RESULTS / f"{triton_versions.LANDSCAPES['seed']}.csv.gz").times_us[
        "up", 1024
    ]
    order = sorted((us, config.sort_key(), config) for config, us in times.items() if us is not None)
    assert [config for _, _, config in order[: triton_versions.FASTEST]] == configs[: triton_versions.FASTEST]


def test_what_triton_3_6_fails_at_is_compiled_too() -> None:
    configs = triton_versions.sampled(PROBLEMS["seed"], "seed", "up")
    assert KernelConfig(256, 64, 64, 1, 4, 3) in configs
    assert len(configs) > triton_versions.WIDE
