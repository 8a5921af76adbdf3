"""The search space, and why a config is out of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from moetune.domain.compiler_failures import compiler_failures
from moetune.domain.config import KernelConfig
from moetune.domain.gpu import Gpu
from moetune.domain.launch import Launch
from moetune.domain.quantization import Dtype
from moetune.domain.resources import accumulators_per_thread
from moetune.domain.space import (
    COMPILER_FAILURE,
    CONSTRAINTS,
    DOT_SIZE,
    FP8_DOT,
    IDLE_WARPS,
    MAYBE_SHARED_MEMORY,
    POSITIVE,
    POWER_OF_TWO,
    REGISTERS,
    SCALE_GROUP,
    SGLANG_AXES,
    SHARED_MEMORY,
    TENSOR_MEMORY,
    TENSOR_SIZE,
    THREADS,
    WGMMA_REGISTERS,
    WIDER_AXES,
    Constraint,
    Kind,
    can_run,
    dtype_violation,
    search_axes,
    sglang_grid,
    violations,
    worth_trying,
)
from tests.domain.test_resources import LANDSCAPES, recorded_launches
from tests.wheels import read_member

if TYPE_CHECKING:
    from pathlib import Path

TRITON = (3, 6, 0)
H200 = Gpu("NVIDIA H200", compute_capability=(9, 0))
B200 = Gpu("NVIDIA B200", compute_capability=(10, 0))
RTX = Gpu("NVIDIA RTX PRO 6000", compute_capability=(12, 0))
A100 = Gpu("NVIDIA A100", compute_capability=(8, 0))
MI300X = Gpu("AMD Instinct MI300X", vendor="AMD", gfx="gfx942")


def bf16(m: int, n: int, k: int, group: int, warps: int = 4, stages: int = 3) -> Launch:
    return Launch("up", KernelConfig(m, n, k, group, warps, stages))


def fp8(m: int, n: int, k: int, group: int, warps: int = 4, stages: int = 3) -> Launch:
    return Launch("up", KernelConfig(m, n, k, group, warps, stages), 8, 8, 128)


def test_sglangs_grid_is_its_tuners() -> None:
    grid = list(sglang_grid())
    assert len(grid) == len(set(grid)) == 1920
    assert {config.block_size_k for config in grid} == {64, 128, 256}
    assert {config.group_size_m for config in grid} == {1, 16, 32, 64}


def test_the_wider_space_holds_the_grid_and_more() -> None:
    wider = set(search_axes(H200).grid())
    assert wider > set(sglang_grid())
    assert {2, 4, 8} <= {config.group_size_m for config in wider}
    assert min(config.num_warps for config in wider) == 2
    assert search_axes(H200) == WIDER_AXES
    assert 32 not in WIDER_AXES.block_size_k
    assert 32 in search_axes(RTX).block_size_k
    assert SGLANG_AXES.block_size_k == WIDER_AXES.block_size_k


def test_the_limit_of_the_gpu_itself_wins() -> None:
    half = replace(H200, smem_optin_bytes=100_000)
    assert 32 in search_axes(half).block_size_k
    assert can_run(bf16(128, 128, 64, 1, 8, 4), H200, TRITON)
    assert not can_run(bf16(128, 128, 64, 1, 8, 4), half, TRITON)


@pytest.mark.parametrize(
    ("constraint", "gpu", "bad", "good"),
    [
        (POWER_OF_TWO, H200, bf16(48, 64, 64, 1), bf16(32, 64, 64, 1)),
        (POWER_OF_TWO, H200, bf16(64, 64, 64, 1, 3), bf16(64, 64, 64, 1, 4)),
        (POWER_OF_TWO, H200, bf16(0, 64, 64, 1), bf16(16, 64, 64, 1)),
        (POSITIVE, H200, bf16(64, 64, 64, 0), bf16(64, 64, 64, 1)),
        (POSITIVE, H200, bf16(64, 64, 64, 1, 4, 0), bf16(64, 64, 64, 1, 4, 1)),
        (DOT_SIZE, H200, bf16(64, 64, 8, 1), bf16(64, 64, 16, 1)),
        (DOT_SIZE, H200, fp8(64, 64, 16, 1), fp8(64, 64, 32, 1)),
        (TENSOR_SIZE, H200, bf16(2048, 1024, 16, 1, 8), bf16(256, 256, 16, 1, 8)),
        (THREADS, H200, bf16(64, 64, 64, 1, 64), bf16(64, 64, 64, 1, 32)),
        (SHARED_MEMORY, H200, bf16(128, 256, 64, 1, 8, 5), bf16(128, 256, 64, 1, 8, 4)),
        (SHARED_MEMORY, RTX, bf16(128, 256, 64, 1, 8, 4), bf16(128, 256, 64, 1, 8, 3)),
        (TENSOR_MEMORY, B200, bf16(256, 512, 32, 1, 8, 2), bf16(256, 256, 32, 1, 8, 2)),
        (WGMMA_REGISTERS, H200, bf16(256, 256, 64, 1, 16, 2), bf16(256, 128, 64, 1, 16, 2)),
        (COMPILER_FAILURE, H200, bf16(256, 64, 64, 1, 4, 2), bf16(256, 64, 64, 1, 8, 2)),
        (COMPILER_FAILURE, A100, bf16(256, 64, 64, 1, 4, 2), bf16(128, 64, 64, 1, 4, 2)),
        (COMPILER_FAILURE, B200, bf16(256, 128, 128, 1, 4, 2), bf16(256, 128, 64, 1, 4, 2)),
        (COMPILER_FAILURE, RTX, bf16(256, 128, 128, 1, 4, 2), fp8(256, 128, 128, 1, 4, 2)),
        (SCALE_GROUP, H200, fp8(64, 128, 256, 1), fp8(64, 128, 128, 1)),
        (REGISTERS, H200, bf16(128, 256, 64, 1, 4, 2), bf16(128, 256, 64, 1, 8, 2)),
        (REGISTERS, B200, fp8(128, 256, 64, 1, 4, 2), bf16(128, 256, 64, 1, 4, 2)),
        (IDLE_WARPS, H200, bf16(16, 32, 64, 1, 8), bf16(16, 64, 64, 1, 8)),
        (
            MAYBE_SHARED_MEMORY,
            RTX,
            Launch("up", KernelConfig(64, 256, 128, 1, 8, 3), 16, 4),
            Launch("up", KernelConfig(64, 64, 64, 1, 4, 3), 16, 4),
        ),
        (SHARED_MEMORY, MI300X, fp8(64, 128, 128, 1, 4, 3), fp8(64, 128, 128, 1, 4, 2)),
    ],
)
def test_each_constraint_has_a_case_on_either_side(
    constraint: Constraint, gpu: Gpu, bad: Launch, good: Launch
) -> None:
    found = {violation.constraint: violation.text for violation in violations(bad, gpu, TRITON)}
    assert constraint in found
    assert any(character.isdigit() for character in found[constraint])
    assert constraint not in {violation.constraint for violation in violations(good, gpu, TRITON)}
    assert can_run(bad, gpu, TRITON) == (constraint.kind is Kind.NOT_WORTH_TRYING)
    assert not worth_trying(bad, gpu, TRITON)


def test_every_constraint_is_named_once_and_says_why() -> None:
    assert len({constraint.name for constraint in CONSTRAINTS}) == len(CONSTRAINTS)
    assert all(len(constraint.reason) > 40 for constraint in CONSTRAINTS)


def test_small_sides_of_a_dot_are_padded_from_triton_3_5_on() -> None:
    small = bf16(8, 64, 64, 1)
    assert [found.constraint for found in violations(small, H200, (3, 4, 0))] == [DOT_SIZE]
    assert can_run(small, H200, (3, 5, 1))


@pytest.mark.parametrize(
    ("triton", "fails"),
    [
        ((3, 3, 1), False),
        ((3, 4, 0), True),
        ((3, 5, 0), True),
        ((3, 5, 1), True),
        ((3, 6, 0), True),
        ((3, 7, 1), False),
        ((3, 8, 0), False),
    ],
)
def test_a_defect_of_triton_counts_for_the_releases_that_have_it(
    triton: tuple[int, ...], fails: bool
) -> None:
    assert can_run(bf16(256, 64, 64, 1, 4, 2), H200, triton) is not fails


def test_the_data_of_compiler_failures_name_their_evidence() -> None:
    assert len(compiler_failures()) >= 1
    for failure in compiler_failures():
        assert failure.seen
        assert not set(failure.seen) & set(failure.absent)


def test_fp8_needs_tensor_cores_for_it() -> None:
    found = dtype_violation(Dtype.FP8_W8A8, A100)
    assert found is not None
    assert found.constraint is FP8_DOT
    assert dtype_violation(Dtype.FP8_W8A8, Gpu("NVIDIA L40S", compute_capability=(8, 9))) is None
    assert dtype_violation(Dtype.BF16, A100) is None
    assert dtype_violation(Dtype.INT8_W8A8, A100) is None


def test_case_27_vllms_b200_file_on_servers_that_clamp_and_that_do_not() -> None:
    name = "E=128,N=768,device_name=NVIDIA_B200,dtype=fp8_w8a8,block_shape=[128,128].json"
    table = json.loads(read_member("vllm", "0.33.0", f"vllm/model_executor/layers/fused_moe/configs/{name}"))
    raw, clamped = {}, {}
    for m, entry in table.items():
        if not m.isdigit():
            continue
        m_size, n_size, k_size = (int(entry[f"BLOCK_SIZE_{axis}"]) for axis in "MNK")
        config = KernelConfig(
            m_size, n_size, k_size, entry["GROUP_SIZE_M"], entry["num_warps"], entry["num_stages"]
        )
        raw[int(m)] = Launch("up", config, 8, 8, 128)
        clamped[int(m)] = replace(
            raw[int(m)], config=replace(config, block_size_k=min(config.block_size_k, 128))
        )
    assert len(raw) == 18

    def having(constraint: Constraint, launches: dict[int, Launch]) -> list[int]:
        return [
            m
            for m, launch in launches.items()
            if constraint in {found.constraint for found in violations(launch, RTX, TRITON)}
        ]

    assert len(having(SCALE_GROUP, raw)) == 8
    assert having(SHARED_MEMORY, raw) == [32, 48, 64, 96, 2048, 3072, 4096]
    assert having(SCALE_GROUP, clamped) == having(SHARED_MEMORY, clamped) == []


@pytest.mark.parametrize("path", LANDSCAPES, ids=lambda path: path.name.removesuffix(".csv.gz"))
def test_what_ran_on_an_h200_can_run_and_what_did_not_cannot(path: Path) -> None:
    _, recorded = recorded_launches(path)
    for launch, (_, error) in recorded.items():
        found = violations(launch, H200, TRITON)
        cannot = [violation for violation in found if violation.constraint.kind is not Kind.NOT_WORTH_TRYING]
        assert bool(cannot) == bool(error), (str(launch.config), error, cannot)


def test_the_runnable_grid_is_what_ran_when_all_of_it_was_tried() -> None:
    """Both landscapes whose whole grid was compiled: all but what a plain limit had excluded."""
    for stem in ("qwen3.5-122b-a10b_tp4_bf16_h200", "qwen3.5-35b-a3b_tp1_bf16_h200"):
        (path,) = (path for path in LANDSCAPES if path.name == f"{stem}.csv.gz")
        ran = {launch.config for launch, (_, error) in recorded_launches(path)[1].items() if not error}
        runnable = {
            config
            for config in sglang_grid()
            if can_run(Launch("up", config), H200, TRITON)
            and accumulators_per_thread(Launch("up", config)) <= 256
        }
        assert runnable == ran & set(sglang_grid())
        assert len(runnable) == 1276


def test_where_nothing_was_measured_only_values_that_published_files_hold_are_searched() -> None:
    unmeasured, wider = search_axes(RTX, measured=False), search_axes(RTX)
    assert set(unmeasured.num_warps) == {4, 8}
    assert set(wider.num_warps) > set(unmeasured.num_warps)
    assert set(unmeasured.grid()) < set(wider.grid())
    assert 32 in unmeasured.block_size_k
    assert 32 not in search_axes(H200, measured=False).block_size_k
