"""The closed form of shared memory, held to what Triton allocates: moetune's kernel and the servers' own."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from moetune.applications.compiling import CompilePool
from moetune.domain.compilation import CompileResult, CompileStatus, CompileTask, Depth
from moetune.domain.config import KernelConfig
from moetune.domain.gpu import Gpu
from moetune.domain.launch import Launch
from moetune.domain.resources import shared_memory_bytes, smem_limit_bytes
from moetune.domain.space import WGMMA_REGISTERS, can_run, violations
from moetune.measure.compile import allocated_shared_bytes
from tests.measure.server_kernels import load_kernel, server_source

if TYPE_CHECKING:
    from pathlib import Path

    from moetune.domain.problem import Kernel

TRITON = (3, 6, 0)
SEED = 20261201
SAMPLE = 504
"""Configs of each set."""
FULL_SAMPLE = 8
"""Configs of each set that are compiled to the end as well."""
SERVER_SAMPLE = 40
WRONGLY_REFUSED = 0.01

Capability = tuple[int, int]
SETS = [
    pytest.param(capability, bits, id=f"sm_{capability[0]}{capability[1]}-{'bf16' if bits == 16 else 'fp8'}")
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0))
    for bits in (16, 8)
]
GROUP = 128


def _gpu(capability: Capability) -> Gpu:
    return Gpu("a GPU", compute_capability=capability)


def _launch(choose: random.Random, capability: Capability, bits: int) -> Launch:
    kernel: Kernel = choose.choice(("up", "down"))
    config = KernelConfig(
        block_size_m=choose.choice((16, 32, 64, 128, 256)),
        block_size_n=choose.choice((16, 32, 64, 128, 256, 512)),
        block_size_k=choose.choice((32, 64, 128, 256) if bits == 16 else (32, 64, 128)),
        group_size_m=choose.choice((1, 8)),
        num_warps=choose.choice((2, 4, 4, 8, 8, 16)),
        num_stages=choose.choice((1, 2, 3, 4, 5, 6, 7, 8)),
    )
    # As SGLang swaps, on sm_90 only; half of them, so that both kinds of dot are met.
    may_swap = bits == 8 and config.block_size_m < 64 and config.block_size_n >= 64
    swap = may_swap and capability == (9, 0) and choose.random() < 0.5
    return Launch(kernel, config, bits, bits, GROUP if bits == 8 else 0, swap_ab=swap)


def _task(launch: Launch, capability: Capability) -> CompileTask:
    up = launch.kernel == "up"
    return CompileTask(
        launch=launch,
        arch=10 * capability[0] + capability[1],
        operand_type="bf16" if launch.a_bits == 16 else "fp8e4nv",
        output_type="bf16",
        n=1024 if up else 2048,
        k=2048 if up else 512,
        top_k=8 if up else 1,
        block_n=GROUP if launch.block_k else 0,
    )


def _sample(capability: Capability, bits: int, size: int) -> list[Launch]:
    """Different launches, half of them from around the limit, where the form decides.

    What spills thousands of registers takes minutes to compile and is left out.
    """
    choose = random.Random(f"{SEED} {capability} {bits}")
    limit = smem_limit_bytes(capability)
    found: dict[Launch, None] = {}
    while len(found) < size:
        launch = _launch(choose, capability, bits)
        config = launch.config
        if config.block_size_m * config.block_size_n > 512 * 32 * config.num_warps:
            continue
        near = 0.7 <= shared_memory_bytes(launch, capability) / limit <= 1.4
        if near or len(found) < size // 2:
            found[launch] = None
    return list(found)


def _compiled(capability: Capability, bits: int) -> dict[Launch, CompileResult]:
    tasks = {_task(launch, capability): launch for launch in _sample(capability, bits, SAMPLE)}
    results = CompilePool(workers=2, seconds_each=120).compile(tasks)
    return {tasks[task]: result for task, result in results.items()}


@pytest.mark.parametrize(("capability", "bits"), SETS)
def test_what_is_called_runnable_fits_and_little_that_fits_is_refused(
    capability: Capability, bits: int
) -> None:
    """One test for each set, so that it is compiled once however tests are spread over processes."""
    compiled = _compiled(capability, bits)
    assert len(compiled) >= 500
    _check_verdicts(compiled, capability)
    _check_numbers(compiled, capability, bits)
    _check_with_the_whole_compiler(compiled, capability)


def _check_verdicts(compiled: dict[Launch, CompileResult], capability: Capability) -> None:
    gpu, limit = _gpu(capability), smem_limit_bytes(capability)
    fits = {
        launch
        for launch, result in compiled.items()
        if result.status is CompileStatus.OK and (result.shared_bytes or 0) <= limit
    }
    runnable = {launch for launch in compiled if can_run(launch, gpu, TRITON)}
    fits -= _that_the_whole_compiler_refuses(fits - runnable, capability)
    assert not runnable - fits, [(str(x.config), compiled[x]) for x in sorted(runnable - fits, key=str)[:5]]
    refused = fits - runnable
    reasons = [(str(x.config), violations(x, gpu, TRITON)[0].text) for x in sorted(refused, key=str)[:5]]
    assert len(refused) <= WRONGLY_REFUSED * len(fits), reasons
    # The set decides something only if both kinds are in it.
    assert len(fits) >= 150
    assert len(compiled) - len(fits) >= 50


def _that_the_whole_compiler_refuses(launches: set[Launch], capability: Capability) -> set[Launch]:
    """Launches refused for registers: that shows only after the allocation, in ptxas."""
    gpu = _gpu(capability)
    tasks = {
        _task(launch, capability): launch
        for launch in launches
        if violations(launch, gpu, TRITON)[0].constraint is WGMMA_REGISTERS
    }
    results = CompilePool(depth=Depth.BINARY, workers=2, seconds_each=120).compile(tasks)
    return {
        tasks[task]
        for task, result in results.items()
        if result.status is CompileStatus.COMPILER_FAILURE and "registers" in result.message
    }


def _check_numbers(compiled: dict[Launch, CompileResult], capability: Capability, bits: int) -> None:
    """The form is the number that Triton allocates, but for bounds of what follows the loop and of scales."""
    over = [
        shared_memory_bytes(launch, capability) - (result.shared_bytes or 0)
        for launch, result in compiled.items()
        if result.status is CompileStatus.OK
    ]
    assert min(over) >= 0
    # The scratch for two vectors of scales: 4 bytes for each of 256 rows and 512 columns.
    exact = 0 if bits == 16 else 4 * (256 + 512)
    assert sum(excess <= exact for excess in over) >= 0.95 * len(over)


def _check_with_the_whole_compiler(compiled: dict[Launch, CompileResult], capability: Capability) -> None:
    """The passes up to the allocation give what a full compilation gives."""
    cheap = [
        launch
        for launch, result in compiled.items()
        if result.status is CompileStatus.OK
        and launch.config.block_size_m * launch.config.block_size_n <= 64 * 32 * launch.config.num_warps
    ]
    tasks = {_task(launch, capability): launch for launch in random.Random(SEED).sample(cheap, FULL_SAMPLE)}
    whole = CompilePool(depth=Depth.BINARY, workers=2, seconds_each=120).compile(tasks)
    for task, launch in tasks.items():
        assert whole[task].status is CompileStatus.OK, whole[task]
        assert whole[task].shared_bytes == compiled[launch].shared_bytes, launch
        assert 0 < (whole[task].registers or 0) <= 255


@pytest.mark.parametrize(("package", "version"), [("sglang", "0.5.23"), ("vllm", "0.33.0")])
@pytest.mark.parametrize(("capability", "bits"), SETS)
def test_the_servers_own_kernels_need_no_more(
    package: str,
    version: str,
    capability: Capability,
    bits: int,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    kernel = load_kernel(package, version, tmp_path)
    gpu, limit = _gpu(capability), smem_limit_bytes(capability)
    wrong: list[str] = []
    fitting = 0
    for launch in _sample(capability, bits, SAMPLE)[-SERVER_SAMPLE:]:
        if any(found.constraint is WGMMA_REGISTERS for found in violations(launch, gpu, TRITON)):
            continue  # shows in ptxas only
        task = _task(launch, capability)
        config = launch.config
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        try:
            allocated = allocated_shared_bytes(server_source(kernel, task), task.arch, options)
        except RuntimeError:
            allocated = None
        fits = allocated is not None and allocated <= limit
        fitting += fits
        if fits != can_run(launch, gpu, TRITON) or (
            allocated is not None and allocated > shared_memory_bytes(launch, capability)
        ):
            wrong.append(f"{config}: {allocated}, expected {shared_memory_bytes(launch, capability)}")
    capfd.readouterr()
    assert not wrong, wrong[:5]
    assert fitting >= 10


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 7), (10, 3), (11, 0), (12, 1)])
def test_the_other_architectures_follow_the_form_too(capability: Capability) -> None:
    bits = (16,) if capability < (8, 9) else (16, 8)
    tasks = {_task(launch, capability): launch for b in bits for launch in _sample(capability, b, 24)}
    gpu, limit = _gpu(capability), smem_limit_bytes(capability)
    for task, result in CompilePool(workers=2, seconds_each=120).compile(tasks).items():
        launch = tasks[task]
        if can_run(launch, gpu, TRITON):
            assert result.status is CompileStatus.OK, (launch, result)
            assert (result.shared_bytes or 0) <= limit, (launch, result)
        if result.status is CompileStatus.OK:
            assert (result.shared_bytes or 0) <= shared_memory_bytes(launch, capability), (launch, result)


def test_up_and_down_differ_in_nothing_that_matters_here() -> None:
    """What lets one number stand for both kernels, and for every GROUP_SIZE_M."""
    capability = (9, 0)
    for launch in _sample(capability, 16, 40)[:20]:
        other = replace(launch, kernel="down" if launch.kernel == "up" else "up")
        grouped = replace(launch, config=replace(launch.config, group_size_m=64))
        needed = shared_memory_bytes(launch, capability)
        assert shared_memory_bytes(other, capability) == needed
        assert shared_memory_bytes(grouped, capability) == needed
