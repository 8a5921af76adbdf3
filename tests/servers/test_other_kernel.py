"""vLLM before 0.27 runs grouped int4 with a CUDA kernel where few rows meet an expert.

A table must make it do there what it does without a file, and its entries must not end that kernel.
"""

from __future__ import annotations

import json
import random
import re
import zipfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.config import ConfigTable, KernelConfig
from moetune.domain.problem import KERNELS, Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.servers.other_kernel import (
    cuda_kernel_fault,
    cuda_kernel_text,
    cuda_kernel_until,
    own_entries,
    with_own_entries,
)
from moetune.servers.protocol import Server
from moetune.servers.registry import open_server
from moetune.servers.vllm import open_vllm
from tests.servers.vllm_cases import Case, every_version, fill
from tests.servers.vllm_loader import real
from tests.servers.vllm_problems import A100, H200, MI300X, layer, sharded
from tests.wheels import wheel

INT4 = Quantization(Dtype.INT4_W4A16, method="gptq", group_size=128)
TRITON = KernelConfig(64, 128, 64, 8, 4, 3)


def problem_of(version: str, experts: int = 64, topk: int = 8, group: int = 128) -> tuple[Server, Problem]:
    quantization = replace(INT4, group_size=group)
    return sharded(layer(experts, 1024, topk, quantization=quantization), version=version)


@pytest.mark.parametrize(
    ("experts", "topk", "last"),
    [(64, 8, 48), (256, 8, 192), (8, 2, 24), (60, 4, 90), (128, 1, 768), (16, 6, 16)],
)
def test_the_kernel_runs_up_to_six_rows_an_expert(experts: int, topk: int, last: int) -> None:
    server, problem = problem_of("0.12.0", experts, topk)
    assert cuda_kernel_until(server, problem) == last
    assert f"1 to {last}: vllm 0.12.0" in cuda_kernel_text(server, problem)


def test_who_has_no_such_kernel() -> None:
    old, problem = problem_of("0.26.0")
    assert cuda_kernel_until(old, problem) == 48
    none = [
        problem_of("0.27.0"),
        problem_of("0.12.0", group=256),
        (old, replace(problem, quantization=Quantization(Dtype.INT8_W8A16, "gptq", group_size=128))),
        (old, replace(problem, quantization=Quantization(Dtype.FP8_W8A8, "fp8", block_shape=(128, 128)))),
        (old, replace(problem, gpu=MI300X)),
        (open_server("sglang", "0.5.23"), replace(problem, server="sglang", server_version="0.5.23")),
    ]
    for server, other in none:
        assert cuda_kernel_until(server, other) == 0
        assert cuda_kernel_text(server, other) == ""
        assert own_entries(server, other) == ()
        table = ConfigTable(((1, TRITON),))
        assert with_own_entries(server, other, table) is table
        assert cuda_kernel_fault(server, other, 1, TRITON) == ""
    assert cuda_kernel_until(old, replace(problem, gpu=A100)) == 48


def test_own_entries_stand_where_the_block_size_m_changes_and_at_powers_of_two() -> None:
    server, problem = problem_of("0.12.0")
    entries = own_entries(server, problem)
    assert [m for m, _ in entries] == [1, 2, 3, 4, 5, 8, 9, 16, 32, 48]
    assert [config.block_size_m for _, config in entries] == [1, 2, 4, 4, 8, 8, 16, 16, 16, 16]
    few = own_entries(*problem_of("0.12.0", experts=8, topk=8))
    assert [(m, config.block_size_m) for m, config in few] == [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (6, 8)]


def test_what_was_chosen_for_such_m_gives_way_and_the_rest_stays() -> None:
    server, problem = problem_of("0.12.0")
    table = with_own_entries(server, problem, ConfigTable(((16, TRITON), (49, TRITON), (8192, TRITON))))
    assert dict(table.entries)[16] == dict(own_entries(server, problem))[16]
    assert [m for m, config in table.entries if config == TRITON] == [49, 8192]


def test_own_entries_leave_their_tile_to_vllm_in_the_file_and_are_read_back() -> None:
    for version in ("0.10.2", "0.12.0", "0.26.0"):
        server, problem = problem_of(version)
        table = with_own_entries(server, problem, ConfigTable(((49, TRITON), (8192, TRITON))))
        text = server.render_table(problem, table)
        document = json.loads(text)
        split_k = {} if version == "0.10.2" else {"SPLIT_K": 1}
        assert document["3"] == {"BLOCK_SIZE_M": 4, "GROUP_SIZE_M": 1, **split_k}
        assert document["49"]["BLOCK_SIZE_N"] == 128
        read = server.read_table(text, "file", problem)
        assert server.render_table(problem, read) == text
        assert dict(read.entries)[48] == server.default_config(problem, "up", 48)


@pytest.mark.parametrize("newer", ["0.27.0", "0.33.0"])
def test_a_release_without_that_kernel_does_not_die_of_the_file(newer: str) -> None:
    server, problem = problem_of("0.26.0")
    text = server.render_table(
        problem, with_own_entries(server, problem, ConfigTable(((49, TRITON), (8192, TRITON))))
    )
    later, same = problem_of(newer)
    for m, config in later.read_table(text, "file", same).entries:
        assert config.block_size_m & (config.block_size_m - 1) == 0
        if m <= 16:
            assert config.block_size_m == later.default_config(same, "up", m).block_size_m


@every_version
def test_with_our_file_the_wheel_runs_there_what_it_runs_without(version: str, tmp_path: Path) -> None:
    functions, rng = real(version), random.Random(version)
    server = open_vllm(version, None)
    for number in range(6):
        experts, topk = rng.choice(((64, 8), (256, 8), (8, 2), (60, 4), (16, 6)))
        _, problem = problem_of(version, experts, topk, rng.choice((32, 64, 128)))
        # Of some shapes the two kernels have different tiles: no entry that says one could do for both.
        columns = rng.choice(((4096, 1024), (7168, 256), (2048, 768)))
        problem = replace(problem, K=columns[0], N=columns[1], file_n=columns[1])
        until = cuda_kernel_until(server, problem)
        table = with_own_entries(server, problem, ConfigTable(((until + 1, TRITON), (8192, TRITON))))
        with_file, without = tmp_path / f"{number}a", tmp_path / f"{number}b"
        (with_file / "configs").mkdir(parents=True)
        (without / "configs").mkdir(parents=True)
        name = server.file_name(problem, "up")
        (with_file / "configs" / name).write_text(server.render_table(problem, table))
        w1, w2 = Case(problem, 1).shapes(version)
        block = [0, problem.quantization.group_size or 0]
        ms = range(1, until + 40)
        found: dict[Path, list[dict[str, int]]] = {}
        for module in (with_file, without):
            with functions.world(H200.torch_name, module=module):
                picked = [
                    functions.try_get_optimal_moe_config(w1, w2, topk, "int4_w4a16", m, block) for m in ms
                ]
                if until:
                    is_cuda = [
                        functions.should_moe_wna16_use_cuda(m * topk, block[1], problem.E, 4) for m in ms
                    ]
                    assert is_cuda == [m <= until for m in ms]
                found[module] = [
                    fill(functions, version, Case(problem, m), kernel, dict(picked[m - 1]))
                    for m in range(1, until + 1)
                    for kernel in KERNELS
                ]
            if module is with_file:
                assert all(config["BLOCK_SIZE_M"] == 64 for config in picked[until:])
        for here, there in zip(found[with_file], found[without], strict=True):
            for size in ("BLOCK_SIZE_N", "BLOCK_SIZE_K"):
                assert here[size] == there[size], (problem, there)
            # No expert has more rows than m: in a block of at least m rows they are one block.
            assert here["BLOCK_SIZE_M"] == 1 << (there["BLOCK_SIZE_M"] - 1).bit_length()


def test_the_checks_are_those_of_the_wheels_library() -> None:
    library = zipfile.ZipFile(wheel("vllm", "0.20.0")).read("vllm/_moe_C.abi3.so")
    for text in (
        b"size_k must divisible by BLOCK_SIZE_K",
        b"BLOCK_SIZE_K must divisible by group_size",
        b"BLOCK_SIZE_M must less or equal to 64",
        b"BLOCK_SIZE_K // group_size must be one of [1, 2, 4, 8]",
    ):
        assert text in library, text


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (KernelConfig(16, 128, 256, 1), ""),
        (KernelConfig(64, 1024, 128, 1), ""),
        (KernelConfig(16, 128, 64, 1), "no multiple of the group of 128"),
        (KernelConfig(16, 128, 4096, 1), "1024 columns are no multiple of BLOCK_SIZE_K 4096"),
        (KernelConfig(128, 128, 128, 1), "BLOCK_SIZE_M 128 is more than 64"),
        (KernelConfig(16, 2048, 128, 1), "2048 is more than 1024 threads"),
        (KernelConfig(64, 128, 512, 1), "65536 bytes of shared memory, 49152 are there"),
    ],
)
def test_what_the_kernel_does_not_take(config: KernelConfig, reason: str) -> None:
    server, problem = problem_of("0.12.0")
    assert re.search(reason, cuda_kernel_fault(server, problem, 32, config))
    assert bool(cuda_kernel_fault(server, problem, 32, config)) == bool(reason)


def test_groups_of_a_block_are_a_power_of_two() -> None:
    server, problem = problem_of("0.12.0", group=32)
    wide = replace(problem, K=3072, N=384)
    assert "holds 3 groups" in cuda_kernel_fault(server, wide, 32, KernelConfig(16, 128, 96, 1))


@given(
    experts=st.integers(1, 512),
    topk=st.integers(1, 16),
    version=st.sampled_from(["0.10.2", "0.12.0", "0.26.0"]),
)
def test_every_m_up_to_the_last_picks_an_entry_with_its_own_block_size_m(
    experts: int, topk: int, version: str
) -> None:
    server, problem = problem_of(version, experts, min(topk, experts))
    until = cuda_kernel_until(server, problem)
    table = with_own_entries(server, problem, ConfigTable(((until + 1, TRITON), (1 << 20, TRITON))))
    keys = [*range(1, 18), until // 2, until - 1, until]
    for m in (m for m in keys if 1 <= m <= until):
        picked = server.config_for(table, m).block_size_m
        assert min(m, 16) <= picked < 2 * min(m, 16)
    assert server.config_for(table, until + 1) == TRITON
    assert all(a < b for a, b in pairwise(table.keys()))
