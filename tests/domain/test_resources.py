"""Shared memory in closed form: limits, published cases, and what an H200 allocated."""

from __future__ import annotations

import csv
import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.config import KernelConfig
from moetune.domain.errors import UnknownGpuError
from moetune.domain.landscape import read_landscape
from moetune.domain.launch import Launch
from moetune.domain.resources import (
    ARCHITECTURES,
    DotPath,
    accumulators_per_thread,
    dot_path,
    lds_bytes,
    lds_limit_bytes,
    register_limit,
    shared_memory_bytes,
    shared_memory_is_exact,
    smem_limit_bytes,
    wgmma_registers,
)
from moetune.servers.registry import open_server

RECORDED = sorted((Path(__file__).parents[2] / "training" / "landscapes").glob("*.csv.gz"))
LANDSCAPES = [path for path in RECORDED if "own-kernel" not in path.name]
"""Of SGLang's kernel."""
OWN = [path for path in RECORDED if "own-kernel" in path.name]
"""Of moetune's kernel, in every format."""


_CONFIG_COLUMNS = (
    "block_size_m",
    "block_size_n",
    "block_size_k",
    "group_size_m",
    "num_warps",
    "num_stages",
)


def launch(
    m: int, n: int, k: int, warps: int, stages: int, *, bits: int = 16, block: int = 0, swap: bool = False
) -> Launch:
    return Launch("up", KernelConfig(m, n, k, 1, warps, stages), bits, bits, block, swap_ab=swap)


@pytest.mark.parametrize(
    ("capability", "limit"),
    [
        ((8, 0), 166_912),
        ((8, 6), 101_376),
        ((8, 7), 166_912),
        ((8, 9), 101_376),
        ((9, 0), 232_448),
        ((10, 0), 232_448),
        ((10, 3), 232_448),
        ((11, 0), 232_448),
        ((12, 0), 101_376),
        ((12, 1), 101_376),
    ],
)
def test_the_limit_of_each_compute_capability(capability: tuple[int, int], limit: int) -> None:
    assert smem_limit_bytes(capability) == limit


@pytest.mark.parametrize("capability", [(7, 5), (8, 1), (13, 0)])
def test_an_unknown_compute_capability_is_an_error_that_names_the_known_ones(
    capability: tuple[int, int],
) -> None:
    with pytest.raises(UnknownGpuError, match=f"{capability[0]}.{capability[1]}") as caught:
        shared_memory_bytes(launch(64, 64, 64, 4, 3), capability)
    assert caught.value.hint is not None
    assert "12.0" in caught.value.hint


def test_case_26_128x256x128_with_4_stages_fp8() -> None:
    four, three = (launch(128, 256, 128, 8, stages, bits=8) for stages in (4, 3))
    for capability in ((8, 9), (12, 0), (12, 1)):
        assert shared_memory_bytes(four, capability) == 147_456 > smem_limit_bytes(capability)
        assert shared_memory_bytes(three, capability) == 98_304 <= smem_limit_bytes(capability)


def test_case_26_lds_of_64x128x128_fp8_on_rocm() -> None:
    limit = lds_limit_bytes("gfx942")
    assert limit == 65_536
    assert lds_bytes(launch(64, 128, 128, 4, 3, bits=8)) == 73_728 > limit
    assert lds_bytes(launch(64, 128, 128, 4, 2, bits=8)) == 49_152 <= limit
    assert lds_limit_bytes("gfx950") == 163_840
    assert lds_limit_bytes("gfx000") is None


@pytest.mark.parametrize(
    ("capability", "given_launch", "expected"),
    [
        # One stage less where mma.sync reads registers; every stage for wgmma.
        ((8, 9), launch(64, 64, 64, 4, 4), 3 * 128 * 64 * 2),
        ((12, 0), launch(64, 64, 64, 4, 4), 3 * 128 * 64 * 2),
        ((9, 0), launch(64, 64, 64, 4, 4), 4 * 128 * 64 * 2),
        ((9, 0), launch(32, 64, 64, 4, 4), 3 * 96 * 64 * 2),
        ((9, 0), launch(64, 64, 64, 2, 4), 3 * 128 * 64 * 2),
        # tcgen05: 4 or 8 warps, and 16 bytes of barriers.
        ((10, 0), launch(64, 64, 64, 8, 4), 4 * 128 * 64 * 2 + 16),
        ((10, 0), launch(64, 64, 64, 16, 4), 3 * 128 * 64 * 2),
        ((10, 3), launch(32, 64, 64, 4, 4), 3 * 96 * 64 * 2),
        ((11, 0), launch(64, 64, 64, 4, 4), 3 * 128 * 64 * 2),
        # Swapped, the columns are the rows of the dot.
        ((9, 0), launch(16, 64, 128, 4, 3, bits=8, block=128, swap=True), 3 * 80 * 128 + 256),
        ((9, 0), launch(16, 64, 128, 4, 3, bits=8, block=128), 2 * 80 * 128 + 256),
        # One stage is loaded at least.
        ((8, 0), launch(64, 64, 64, 4, 1), 128 * 64 * 2),
        # 16x32 in 16 bits gives 512 threads 2 bytes each: not copied asynchronously, so not pipelined.
        ((8, 9), launch(32, 16, 32, 16, 6), 5 * 32 * 32 * 2 + 16 * 32 * 2),
        # The result changes its layout through more than one small stage.
        ((8, 9), launch(256, 128, 32, 8, 2), 65_536),
    ],
)
def test_what_makes_up_the_shared_memory(
    capability: tuple[int, int], given_launch: Launch, expected: int
) -> None:
    assert shared_memory_bytes(given_launch, capability) == expected


def test_a_wgmma_needs_registers_for_its_accumulators() -> None:
    """As ptxas says: 154 are needed for 128x512 and 256x256 with 16 warps, 90 with 32."""
    for m, n, warps, needed, limit in (
        (128, 512, 16, 154, 128),
        (256, 256, 16, 154, 128),
        (256, 256, 32, 90, 64),
        (128, 512, 32, 90, 64),
        (64, 512, 16, 90, 128),
        (64, 512, 32, 58, 64),
        (128, 256, 16, 90, 128),
        (256, 256, 8, 154, 255),
    ):
        tile = launch(m, n, 64, warps, 2)
        assert (wgmma_registers(tile), register_limit(tile)) == (needed, limit), (m, n, warps)


def test_converted_weights_of_a_kernel_that_is_not_known_are_bounded_from_above() -> None:
    config = KernelConfig(64, 128, 64, 1, 4, 3)
    converted = Launch("up", config, 16, 4)
    assert not shared_memory_is_exact(converted)
    assert shared_memory_is_exact(Launch("up", config))
    for capability in ARCHITECTURES:
        # Activations, weights of a byte each, and one tile of converted weights have room in it.
        copies = 3 if dot_path(converted, capability) is not DotPath.MMA_SYNC else 2
        least = copies * (64 * 2 + 128) * 64 + 128 * 64 * 2
        assert shared_memory_bytes(converted, capability) >= least


A, W = 64 * 64 * 2, 128 * 64
"""Bytes of a tile of 64x64 activations and of one of 128x64 weights, a byte each."""


@pytest.mark.parametrize(
    ("capability", "b_bits", "grouped", "expected"),
    [
        # The pipeline of both operands, converted in registers.
        ((8, 0), 8, False, 2 * A + 2 * W),
        # What wgmma reads is the converted tile.
        ((9, 0), 8, False, 3 * A + 2 * W + 2 * W),
        ((8, 0), 8, True, 2 * A + 2 * W + 2 * W),
        ((9, 0), 8, True, 3 * A + 2 * W + 2 * W),
        # Two weights in a byte are not copied ahead.
        ((8, 0), 4, True, 2 * A + 2 * W),
        ((9, 0), 4, True, 3 * A + 2 * W),
        ((10, 0), 4, True, 3 * A + 2 * W + 16),
    ],
)
def test_converted_weights_have_a_buffer_where_the_dot_or_the_kernel_wants_one(
    capability: tuple[int, int], b_bits: int, grouped: bool, expected: int
) -> None:
    converted = Launch("up", KernelConfig(64, 128, 64, 1, 4, 3), 16, b_bits, grouped=grouped)
    assert shared_memory_is_exact(converted)
    assert shared_memory_bytes(converted, capability) == expected


def test_integers_do_without_tcgen05() -> None:
    tile = Launch("up", KernelConfig(128, 128, 64, 1, 4, 3), 8, 8)
    assert dot_path(tile, (10, 0)) is DotPath.TCGEN05
    assert dot_path(replace(tile, integers=True), (10, 0)) is DotPath.MMA_SYNC
    assert dot_path(replace(tile, integers=True), (9, 0)) is DotPath.WGMMA


SIZES = st.sampled_from((16, 32, 64, 128, 256))
CAPABILITIES = st.sampled_from(sorted(ARCHITECTURES))


@given(SIZES, SIZES, SIZES, st.sampled_from((1, 2, 4, 8, 16)), st.integers(1, 8), CAPABILITIES)
def test_more_of_anything_never_needs_less(
    m: int, n: int, k: int, warps: int, stages: int, capability: tuple[int, int]
) -> None:
    needed = shared_memory_bytes(launch(m, n, k, warps, stages), capability)
    assert needed > 0
    assert shared_memory_bytes(launch(m, n, k, warps, stages + 1), capability) >= needed
    assert shared_memory_bytes(launch(m, n, 2 * k, warps, stages), capability) >= needed
    scaled = shared_memory_bytes(launch(m, n, k, warps, stages, bits=8, block=128), capability)
    assert scaled >= shared_memory_bytes(launch(m, n, k, warps, stages, bits=8), capability)


def recorded_launches(path: Path) -> tuple[dict[str, object], dict[Launch, tuple[int, str]]]:
    """Problem and, by launch, the shared memory as compiled and the error."""
    problem = json.loads(path.with_name(path.name.replace(".csv.gz", ".json")).read_text())
    scaled = problem["block_shape"] is not None
    found: dict[Launch, tuple[int, str]] = {}
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            m, n, k, group, warps, stages = (int(row[key]) for key in _CONFIG_COLUMNS)
            config = KernelConfig(m, n, k, group, warps, stages)
            # As SGLang does on sm_90.
            swap = scaled and config.block_size_m < 64 and config.block_size_n >= 64
            bits = 8 if scaled else 16
            key = Launch(
                "up" if row["kernel"] == "up" else "down", config, bits, bits, 128 if scaled else 0, swap
            )
            found[key] = (int(row["shared_bytes"]), row["error"])
    return problem, found


@pytest.mark.parametrize("path", LANDSCAPES, ids=lambda path: path.name.removesuffix(".csv.gz"))
def test_what_sglangs_kernel_allocated_on_an_h200(path: Path) -> None:
    problem, recorded = recorded_launches(path)
    excess = [
        shared_memory_bytes(key, (9, 0)) - shared for key, (shared, error) in recorded.items() if not error
    ]
    assert len(excess) > 400
    assert min(excess) >= 0
    if problem["block_shape"] is None:
        assert sum(one == 0 for one in excess) >= len(excess) - 1
    else:  # the scratch of the scales; a few in a hundred have the epilogue's bound
        assert sum(one <= 1024 for one in excess) >= 0.98 * len(excess)


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name.removesuffix(".csv.gz"))
def test_what_our_kernel_allocated_on_an_h200(path: Path) -> None:
    problem = read_landscape(path).problem
    server = open_server(problem.server, problem.server_version, problem.triton_version)
    excess = []
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            if row["error"] or not row["shared_bytes"]:
                continue
            m, n, k, group, warps, stages = (int(row[key]) for key in _CONFIG_COLUMNS)
            config = KernelConfig(m, n, k, group, warps, stages)
            launch = server.launch(problem, "up" if row["kernel"] == "up" else "down", config)
            excess.append(shared_memory_bytes(launch, (9, 0)) - int(row["shared_bytes"]))
    assert len(excess) > 400
    assert min(excess) >= 0
    assert sum(one <= 1024 for one in excess) >= 0.98 * len(excess)


def test_there_are_landscapes_to_compare_with() -> None:
    assert len(LANDSCAPES) >= 4


def test_accumulators_of_a_thread() -> None:
    assert accumulators_per_thread(launch(128, 128, 64, 4, 3)) == 128
