"""The closed form of shared memory for descriptors and sorted rows, held to what Triton allocates."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from moetune.applications.compiling import CompilePool
from moetune.domain.compilation import CompileResult, CompileStatus, CompileTask, Depth, compile_task
from moetune.domain.config import KernelConfig
from moetune.domain.gpu import Gpu
from moetune.domain.problem import Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.domain.resources import shared_memory_bytes, shared_memory_is_exact, smem_limit_bytes
from moetune.domain.space import WGMMA_REGISTERS, can_run, violations
from moetune.measure.compile import compile_launch
from moetune.servers.registry import open_server
from tests.measure.server_files import kernel_file
from tests.measure.test_shared_memory_formats import TRITON, Capability

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moetune.domain.launch import Launch

SEED = 20261203
SAMPLE = 6
"""Configs of each format, architecture and kernel; 40 of each, once, found nothing else."""
FORMATS = {
    "bf16": Quantization(),
    "fp8 by block": Quantization(Dtype.FP8_W8A8, "made", (128, 128), dynamic_activation=True),
    "fp8 by tensor, static": Quantization(Dtype.FP8_W8A8, "made", dynamic_activation=False),
    "int8 by block": Quantization(Dtype.INT8_W8A8, "made", (128, 128), dynamic_activation=True),
    "int8 weights by channel": Quantization(Dtype.INT8_W8A16, "made", per_channel=True),
}
KINDS = ("down", "up", "up for sorted rows")
"""Both operands by descriptor; the weights alone; none, rows written in sorted order."""
SETS = [(name, capability) for name in FORMATS for capability in ((9, 0), (10, 0), (12, 0))]
POINTERS = [(name, (8, 9)) for name in ("bf16", "fp8 by block")]
"""Where Triton turns descriptors into pointers."""


def _problem(name: str, capability: Capability) -> Problem:
    gpu = Gpu("a GPU", vendor="NVIDIA", compute_capability=capability)
    return Problem(8, 8, 8, 2048, 512, 512, gpu, "sglang", "0.5.23", "3.6.0", quantization=FORMATS[name])


def _configs(choose: random.Random, name: str) -> Iterator[KernelConfig]:
    ks = (32, 64, 128) if FORMATS[name].block_shape else (32, 64, 128, 256)
    while True:
        config = KernelConfig(
            block_size_m=choose.choice((16, 32, 64, 128, 256)),
            block_size_n=choose.choice((32, 64, 128, 256)),
            block_size_k=choose.choice(ks),
            group_size_m=1,
            num_warps=choose.choice((4, 4, 8)),
            num_stages=choose.choice((2, 3, 4, 5, 6)),
        )
        # What spills takes long to compile.
        if config.block_size_m * config.block_size_n <= 256 * 32 * config.num_warps:
            yield config


def _sample(name: str, capability: Capability, kind: str) -> dict[CompileTask, Launch]:
    """Different launches, half of them from around the limit, where the form decides."""
    problem, server = _problem(name, capability), open_server("sglang", "0.5.23", "3.6.0")
    choose, limit = random.Random(f"{SEED} {name} {capability} {kind}"), smem_limit_bytes(capability)
    found: dict[CompileTask, Launch] = {}
    for config in _configs(choose, name):
        tma = replace(config, use_tma=True)
        if kind == "up for sorted rows":
            launch = server.launch(problem, "up", config, None, tma)
        else:
            launch = server.launch(problem, "down" if kind == "down" else "up", tma)
        launch = replace(launch, pdl=False)
        near = 0.7 <= shared_memory_bytes(launch, capability) / limit <= 1.4
        if near or len(found) < SAMPLE // 2:
            task = compile_task(launch, problem)
            assert isinstance(task, CompileTask)
            found[task] = launch
        if len(found) == SAMPLE:
            return found
    raise AssertionError


def _samples(sets: list[tuple[str, Capability]]) -> dict[CompileTask, Launch]:
    found: dict[CompileTask, Launch] = {}
    for name, capability in sets:
        for kind in KINDS:
            found |= _sample(name, capability, kind)
    return found


@pytest.fixture(scope="module")
def compiled() -> dict[CompileTask, CompileResult]:
    return CompilePool(workers=2, seconds_each=120).compile(list(_samples([*SETS, *POINTERS])))


def _fits(allocated: int | None, capability: Capability) -> bool:
    return allocated is not None and allocated <= smem_limit_bytes(capability)


@pytest.mark.parametrize(("name", "capability"), SETS)
def test_what_is_called_runnable_fits_and_what_fits_is_not_refused(
    name: str, capability: Capability, compiled: dict[CompileTask, CompileResult]
) -> None:
    gpu, excesses = Gpu("a GPU", vendor="NVIDIA", compute_capability=capability), []
    for kind in KINDS:
        for task, launch in _sample(name, capability, kind).items():
            result = compiled[task]
            said = violations(launch, gpu, TRITON)
            if any(one.constraint is WGMMA_REGISTERS for one in said):
                continue  # shows in ptxas only
            assert shared_memory_is_exact(launch, capability)
            assert can_run(launch, gpu, TRITON) == _fits(result.shared_bytes, capability), (
                kind,
                launch,
                result,
                said,
            )
            if result.status is CompileStatus.OK:
                excesses.append(shared_memory_bytes(launch, capability) - (result.shared_bytes or 0))
    assert min(excesses) >= 0
    # Barriers are bounded: 8 bytes for each stage of each operand. Scratch for scales as everywhere.
    bound = 8 * (2 * 6 + 1) + (4 * (256 + 256) if FORMATS[name].block_shape else 0)
    assert sum(excess <= bound for excess in excesses) >= 0.7 * len(excesses)


@pytest.mark.parametrize(("name", "capability"), POINTERS)
def test_before_descriptors_what_fits_is_not_refused(
    name: str, capability: Capability, compiled: dict[CompileTask, CompileResult]
) -> None:
    gpu, smaller = Gpu("a GPU", vendor="NVIDIA", compute_capability=capability), 0
    for kind in ("down", "up"):
        for task, launch in _sample(name, capability, kind).items():
            assert not shared_memory_is_exact(launch, capability)
            allocated = compiled[task].shared_bytes
            if _fits(allocated, capability):
                assert can_run(launch, gpu, TRITON), launch
            smaller += allocated is not None and allocated < shared_memory_bytes(launch, capability)
    assert smaller, "the form would have been the number: it need not be called a bound"


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("fp8 by block", KernelConfig(16, 256, 32, 1, 8, 6)),
        ("fp8 by tensor, static", KernelConfig(64, 16, 32, 1, 8, 3)),
    ],
)
def test_small_tiles_by_descriptor_are_copied_ahead_all_the_same(name: str, config: KernelConfig) -> None:
    """Fewer bytes than 4 a thread: other copies would not be asynchronous, and there would be one of them."""
    problem, server = _problem(name, (9, 0)), open_server("sglang", "0.5.23", "3.6.0")
    down = replace(server.launch(problem, "down", replace(config, use_tma=True)), pdl=False)
    plain = replace(server.launch(problem, "down", config), pdl=False)
    task = compile_task(down, problem)
    assert isinstance(task, CompileTask)
    allocated = compile_launch(task, Depth.ALLOCATION).shared_bytes or 0
    assert 0 <= shared_memory_bytes(down, (9, 0)) - allocated <= 8 * (2 * config.num_stages + 1)
    assert shared_memory_bytes(plain, (9, 0)) < allocated


def test_both_verdicts_are_met(compiled: dict[CompileTask, CompileResult]) -> None:
    fits = [_fits(result.shared_bytes, divmod(task.arch, 10)) for task, result in compiled.items()]
    assert min(fits.count(True), fits.count(False)) >= 0.2 * len(fits)


def test_sglangs_own_kernel_needs_no_more(tmp_path: Path, compiled: dict[CompileTask, CompileResult]) -> None:
    file = kernel_file("sglang", "0.5.23", tmp_path)
    wrong, exact, seen = [], 0, 0
    for name, capability in SETS:
        gpu = Gpu("a GPU", vendor="NVIDIA", compute_capability=capability)
        for kind in KINDS:
            for task, launch in list(_sample(name, capability, kind).items())[-2:]:
                if any(one.constraint is WGMMA_REGISTERS for one in violations(launch, gpu, TRITON)):
                    continue
                theirs = compile_launch(replace(task, kernel_file=file), Depth.ALLOCATION)
                allocated = theirs.shared_bytes
                seen, exact = seen + 1, exact + (allocated == compiled[task].shared_bytes)
                form = shared_memory_bytes(launch, capability)
                if can_run(launch, gpu, TRITON) != _fits(allocated, capability) or form < (allocated or 0):
                    wrong.append(f"{name} {capability} {kind} {launch.config}: {allocated}, not {form}")
    assert not wrong, wrong[:5]
    assert exact >= 0.9 * seen > 60
