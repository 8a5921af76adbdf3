"""Compiling for a GPU that is not here: what a launch needs, and why one does not compile."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton
from hypothesis import given
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget

from moetune.domain.compilation import CompileStatus, CompileTask, Depth
from moetune.domain.config import KernelConfig
from moetune.domain.launch import Launch
from moetune.measure.compile import compile_launch, kernel_source
from moetune.measure.cubin import cubin_resources
from moetune.measure.kernels import moe_grouped_gemm
from tests.domain.test_resources import LANDSCAPES, recorded_launches

ARCHITECTURES = (80, 86, 89, 90, 100, 103, 120, 121)


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def task(launch: Launch, arch: int) -> CompileTask:
    scaled = launch.block_k > 0
    return CompileTask(
        launch=launch,
        arch=arch,
        operand_type="fp8e4nv" if launch.a_bits == 8 else "bf16",
        output_type="bf16",
        n=1024,
        k=2048,
        top_k=8 if launch.kernel == "up" else 1,
        block_n=128 if scaled else 0,
    )


def bf16(m: int, n: int, k: int, warps: int, stages: int) -> Launch:
    return Launch("up", KernelConfig(m, n, k, 8, warps, stages))


def fp8(m: int, n: int, k: int, warps: int, stages: int) -> Launch:
    return Launch("down", KernelConfig(m, n, k, 8, warps, stages), 8, 8, 128)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_binary_for_each_architecture_with_the_same_shared_memory_at_either_depth(arch: int) -> None:
    launch = bf16(32, 64, 64, 4, 3)
    whole = compile_launch(task(launch, arch), Depth.BINARY)
    assert whole.status is CompileStatus.OK, whole
    assert 32 <= (whole.registers or 0) <= 255
    assert whole.stack_bytes == 0
    cheap = compile_launch(task(launch, arch), Depth.ALLOCATION)
    assert (cheap.status, cheap.registers) == (CompileStatus.OK, None)
    assert cheap.shared_bytes == whole.shared_bytes == 2 * (32 + 64) * 64 * 2


def test_registers_and_stack_are_what_cuobjdump_says(tmp_path: Path) -> None:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    seen_spilling = False
    for launch in (bf16(16, 32, 64, 4, 2), bf16(64, 256, 32, 2, 2)):
        kernel = triton.compile(
            kernel_source(task(launch, 90)),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": launch.config.num_warps, "num_stages": launch.config.num_stages},
        )
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        text = subprocess.run(
            [tool, "--dump-resource-usage", cubin], check=True, capture_output=True, text=True
        ).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+)", text)
        assert found is not None
        used = cubin_resources(kernel.asm["cubin"])
        assert (used.registers, used.stack_bytes) == (int(found[1]), int(found[2]))
        seen_spilling |= used.stack_bytes > 0
    assert seen_spilling


@given(st.binary(max_size=400))
def test_bytes_that_are_no_cubin_are_an_error(data: bytes) -> None:
    for text in (data, b"\x7fELF\x02" + data):
        with pytest.raises(ValueError, match="cubin"):
            cubin_resources(text)


@pytest.mark.parametrize("depth", list(Depth))
@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_case_40_a_pass_of_triton_that_fails_is_one_result_and_prints_nothing(
    arch: int, depth: Depth, capfd: pytest.CaptureFixture[str]
) -> None:
    result = compile_launch(task(bf16(256, 64, 64, 4, 2), arch), depth)
    assert result.status is CompileStatus.COMPILER_FAILURE
    assert "PassManager" in result.message
    assert "TritonGPURemoveLayoutConversions" in result.noise
    assert len(result.noise) <= 600
    assert capfd.readouterr() == ("", "")


def test_ptxas_says_why_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    result = compile_launch(task(bf16(256, 256, 32, 16, 2), 90), Depth.BINARY)
    assert result.status is CompileStatus.COMPILER_FAILURE
    assert "Insufficient registers (128)" in result.message
    assert capfd.readouterr() == ("", "")


def test_a_compiler_that_cannot_write_blames_no_config(tmp_path: Path) -> None:
    request = {"number": 0, "depth": "binary", "task": task(bf16(16, 32, 64, 4, 2), 90).to_json()}
    done = subprocess.run(
        [sys.executable, "-m", "moetune.measure.compile"],
        input=json.dumps(request) + "\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)),
    )
    _, answer = map(json.loads, done.stdout.splitlines())
    assert answer["result"]["status"] == "no room"
    assert answer["result"]["message"] == "File too large"


def test_a_binary_that_a_full_disk_cut_short_is_not_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = compile_launch(task(bf16(16, 32, 64, 4, 2), 90), Depth.BINARY)
    cubin = next((tmp_path / "cache").rglob("*.cubin"))
    size = cubin.stat().st_size
    os.truncate(cubin, size // 2)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=0, f_frsize=4096))
    cut = compile_launch(task(bf16(16, 32, 64, 4, 2), 90), Depth.BINARY)
    assert (cut.status, cut.message) == (CompileStatus.NO_ROOM, "No space left on device")
    monkeypatch.undo()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    again = compile_launch(task(bf16(16, 32, 64, 4, 2), 90), Depth.BINARY)
    assert (again.status, again.registers) == (CompileStatus.OK, whole.registers)
    assert cubin.stat().st_size == size


@pytest.mark.parametrize(
    ("launch", "arch", "reason"),
    [
        (bf16(48, 64, 64, 4, 2), 90, "power of 2"),
        (bf16(64, 64, 64, 3, 2), 90, "power of 2"),
        (bf16(64, 64, 8, 4, 2), 90, "K >= 16"),
        (fp8(64, 64, 64, 4, 2), 80, "fp8e4nv"),
    ],
)
def test_a_config_that_the_front_end_refuses_says_why(launch: Launch, arch: int, reason: str) -> None:
    result = compile_launch(task(launch, arch), Depth.ALLOCATION)
    assert result.status is CompileStatus.REFUSED
    assert reason in result.message


def test_more_accumulators_than_tensor_memory_do_not_compile() -> None:
    result = compile_launch(task(bf16(256, 512, 32, 8, 2), 100), Depth.ALLOCATION)
    assert result.status is CompileStatus.COMPILER_FAILURE


def test_every_argument_of_the_kernel_is_given_and_specialised_as_triton_would() -> None:
    source = kernel_source(replace(task(fp8(64, 64, 64, 4, 3), 90), bias=True))
    names = moe_grouped_gemm.arg_names
    assert list(source.signature) == names
    assert source.signature["bias_ptr"] == "*bf16"
    assert source.signature["padded_length"] == "i32"

    def divisible(name: str) -> bool:
        return bool(source.attrs[names.index(name),])

    assert all(divisible(name) for name in ("x_ptr", "N", "K", "x_stride", "x_scale_stride", "num_slots"))
    assert not divisible("padded_length"), "the servers round it to 4"
    small = kernel_source(replace(task(fp8(64, 64, 64, 4, 3), 90), k=1920, num_slots_is_one=True))
    assert small.signature["num_slots"] == "constexpr"
    assert not small.attrs[names.index("x_scale_stride"),]  # 15 groups
    large = kernel_source(replace(task(bf16(64, 64, 64, 4, 3), 90), n=65_536, k=65_536))
    assert large.signature["w_stride_expert"] == "i64"


def test_pdl_waits_for_the_kernel_before_and_lets_the_next_one_start() -> None:
    launch = bf16(16, 32, 64, 4, 2)
    ptx = {}
    for name, early in (("late", False), ("early", True)):
        source = kernel_source(replace(task(replace(launch, pdl=True), 90), pdl_early=early))
        options = {"num_warps": 4, "num_stages": 2, "launch_pdl": True}
        ptx[name] = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    for text in ptx.values():
        assert "griddepcontrol.wait" in text
        assert "griddepcontrol.launch_dependents" in text
    mma = "mma.sync"
    assert ptx["early"].index("launch_dependents") < ptx["early"].index(mma)
    assert ptx["late"].rindex("launch_dependents") > ptx["late"].rindex(mma)


@pytest.mark.parametrize("pdl", [True, False])
def test_the_launch_attribute_of_pdl_is_part_of_the_binary(pdl: bool, tmp_path: Path) -> None:
    launch = replace(bf16(16, 32, 64, 4, 2), pdl=pdl)
    assert compile_launch(task(launch, 90), Depth.BINARY).status is CompileStatus.OK
    (metadata,) = (tmp_path / "cache").glob("*/moe_grouped_gemm.json")
    assert json.loads(metadata.read_text())["launch_pdl"] is pdl


@pytest.mark.parametrize(
    "path",
    [path for path in LANDSCAPES if "qwen3.5-35b-a3b" in path.name],
    ids=lambda path: path.name.removesuffix(".csv.gz"),
)
def test_our_kernel_allocates_what_sglangs_kernel_did_on_an_h200(path: Path) -> None:
    _, recorded = recorded_launches(path)
    ran = [(launch, shared) for launch, (shared, error) in recorded.items() if not error]
    sample = random.Random(5).sample(ran, 20)
    equal = sum(
        compile_launch(task(launch, 90), Depth.ALLOCATION).shared_bytes == shared for launch, shared in sample
    )
    assert equal >= 19


def test_tasks_and_results_survive_json() -> None:
    original = task(
        Launch("down", KernelConfig(16, 32, 64, 8, 4, 3, extra=(("num_ctas", 1),)), 8, 8, 128), 90
    )
    assert CompileTask.from_json(original.to_json()) == original
    result = compile_launch(original, Depth.ALLOCATION)
    assert type(result).from_json(result.to_json()) == result
