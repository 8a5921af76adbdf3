"""Dimensionless features of a launch, from physics: what carries over to other shapes and GPUs.

Every feature is a ratio or the logarithm of one: times over the roofline floor, tiles over what
the GPU holds at once, bytes in flight over what the memory needs to be kept busy, block sizes over
rows for each expert. Sizes of the problem and rates of the GPU enter through them only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from moetune.domain.gpu import FilledGpu
from moetune.domain.launch import Launch
from moetune.domain.problem import Kernel, Problem
from moetune.domain.resources import DotPath, dot_path, shared_memory_bytes

FloatArray = NDArray[np.float64]

MEMORY_LATENCY_US = 0.8
"""Loaded latency of device memory on Ampere to Blackwell, rounded; it only scales one feature."""
KERNEL_OVERHEAD_US = 2.0
"""A kernel in a graph that does nothing takes about this on an H200; it keeps the floor off zero."""
REGISTERS_PER_SM = 65536
RESIDENT = {
    (8, 0): (64, 32), (8, 6): (48, 16), (8, 7): (48, 16), (8, 9): (48, 24), (9, 0): (64, 32),
    (10, 0): (64, 32), (10, 3): (64, 32), (11, 0): (48, 24), (12, 0): (48, 24), (12, 1): (48, 24),
}  # fmt: skip
"""Warps and blocks that one multiprocessor holds (CUDA programming guide, technical specifications)."""
LANES_PER_SM, CLOCK_MHZ = 128, 1700.0
"""Rate of the arithmetic beside the tensor cores (Ampere to Blackwell, rounded); scales two features."""
_NO_WORK = 2.0**-6
"""Share of the floor that stands for no such arithmetic."""
_PATHS = {DotPath.MMA_SYNC: 0, DotPath.WGMMA: 1, DotPath.TCGEN05: 2}


@dataclass(frozen=True, slots=True)
class LaunchArrays:
    """The launches of one kernel as columns, each of shape `[n]`; independent of m.

    Attributes:
        tensor_core_path: 0 mma.sync, 1 wgmma, 2 tcgen05.
        smem_bytes: shared memory of a block as compiled.
    """

    block_m: FloatArray
    block_n: FloatArray
    block_k: FloatArray
    group_m: FloatArray
    num_warps: FloatArray
    num_stages: FloatArray
    swap_ab: FloatArray
    tensor_core_path: FloatArray
    smem_bytes: FloatArray
    a_bytes: float
    b_bytes: float
    scale_group: float
    integers: bool
    grouped: bool
    pdl: bool

    def __len__(self) -> int:
        return len(self.block_m)


def launch_arrays(launches: Sequence[Launch], compute_capability: tuple[int, int]) -> LaunchArrays:
    """Turn the launches of one kernel into columns."""
    rows = [
        (
            launch.config.block_size_m,
            launch.config.block_size_n,
            launch.config.block_size_k,
            launch.config.group_size_m,
            launch.config.num_warps,
            launch.config.num_stages,
            launch.swap_ab,
            _PATHS[dot_path(launch, compute_capability)],
            shared_memory_bytes(launch, compute_capability),
        )
        for launch in launches
    ]
    columns = np.asarray(rows, dtype=np.float64).reshape(len(rows), 9).T
    first = launches[0]
    block_m, block_n, block_k, group_m, num_warps, num_stages, swap_ab, path, smem_bytes = columns
    return LaunchArrays(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        group_m=group_m,
        num_warps=num_warps,
        num_stages=num_stages,
        swap_ab=swap_ab,
        tensor_core_path=path,
        smem_bytes=smem_bytes,
        a_bytes=first.a_bits / 8,
        b_bytes=first.b_bits / 8,
        scale_group=float(first.block_k),
        integers=first.integers,
        grouped=first.grouped,
        pdl=first.pdl,
    )


@lru_cache(maxsize=512)
def _row_distribution(m: int, share: float) -> FloatArray:
    """Probability that more than j of m tokens go to one expert, `[m + 1]`, each with probability `share`."""
    share = min(max(share, 1e-12), 1.0)
    if share >= 1.0:
        return np.concatenate([np.ones(m), np.zeros(1)])
    counts = np.arange(m + 1, dtype=np.float64)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, m + 1, dtype=np.float64)))])
    log_choose = log_factorial[m] - log_factorial - log_factorial[::-1]
    probability = np.exp(log_choose + counts * np.log(share) + (m - counts) * np.log1p(-share))
    beyond: FloatArray = np.clip(1.0 - np.cumsum(probability), 0.0, 1.0)
    return beyond


@lru_cache(maxsize=4096)
def expected_blocks(m: int, share: float, block_m: int) -> float:
    """Expected blocks of `block_m` rows that one expert fills under uniform routing.

    The rows of an expert are binomial: m tokens, each with probability `share` (topk over all
    experts). A block more is needed whenever another `block_m` rows are exceeded.
    """
    return float(_row_distribution(m, share)[::block_m].sum())


@dataclass(frozen=True, slots=True)
class Work:
    """What one call must do, whatever the config.

    Attributes:
        rows: rows over all experts of this rank, `m * topk` without expert parallelism.
        active_experts: experts with at least one row.
        share: probability that a token goes to one given routed expert.
        memory_us: time to move each byte once.
        compute_us: time of the useful arithmetic at the GPU's dense rate.
        floor_us: the roofline floor: the larger of the two, plus the overhead of a kernel.
    """

    rows: float
    active_experts: float
    share: float
    memory_us: float
    compute_us: float
    floor_us: float


def dense_tflops(gpu: FilledGpu, a_bytes: float) -> float:
    """Dense tensor-core rate for operands of `a_bytes`."""
    return gpu.fp8_dense_tflops if a_bytes <= 1 else gpu.bf16_dense_tflops


def work(problem: Problem, kernel: Kernel, m: int, gpu: FilledGpu, a_bytes: float, b_bytes: float) -> Work:
    """Count rows, bytes and operations of one call under uniform routing."""
    gemm = problem.gemm(kernel)
    shared = problem.fused_shared_experts
    share = (problem.topk - shared) / problem.global_experts
    rows = m * share * problem.routed_experts + m * shared
    active = problem.routed_experts * (1.0 - (1.0 - min(share, 1.0)) ** m) + shared
    input_rows = min(m, rows) if kernel == "up" else rows
    moved_bytes = active * gemm.n * gemm.k * b_bytes + input_rows * gemm.k * a_bytes + rows * gemm.n * 2.0
    memory_us = moved_bytes / gpu.mem_bw_gbps * 1e-3
    compute_us = 2.0 * rows * gemm.n * gemm.k / dense_tflops(gpu, a_bytes) * 1e-6
    return Work(rows, active, share, memory_us, compute_us, max(memory_us, compute_us) + KERNEL_OVERHEAD_US)


FEATURES = (
    "log_block_m", "log_block_n", "log_block_k", "log_group_m", "log_warps", "stages",
    "swap_ab", "group_mma", "tcgen05", "is_down", "a_bytes", "b_bytes", "scaled",
    "compute_over_memory", "floor_over_overhead", "rows_per_expert", "block_m_over_rows",
    "row_padding", "column_padding", "k_padding", "padded_compute_over_floor", "l2_traffic_over_floor",
    "k_iterations", "stages_over_iterations", "accumulators", "smem_share", "occupancy", "warps_per_sm",
    "tiles_per_sm", "waves", "wave_tail", "bytes_in_flight", "latency_over_floor", "idle_blocks",
    "tile_intensity", "m_tiles_per_expert", "group_over_m_tiles", "n_tiles", "active_share",
    "weights_over_l2", "balance", "bandwidth_per_sm",
    "converted", "grouped", "zero_point", "integers", "pdl", "conversion_over_floor", "scaling_over_floor",
    "block_k_over_scale_group",
)  # fmt: skip


def _log(values: FloatArray | float) -> FloatArray:
    logs: FloatArray = np.log2(np.maximum(np.asarray(values, dtype=np.float64), 1e-9))
    return logs


def features(
    problem: Problem, kernel: Kernel, m: int, launches: LaunchArrays, gpu: FilledGpu
) -> tuple[FloatArray, Work]:
    """Features of n launches of one kernel at one m.

    Args:
        problem: the problem.
        kernel: `up` or `down`.
        m: tokens in the call.
        launches: columns of shape `[n]`.
        gpu: the GPU, with every number that the features need.

    Returns:
        `[n, len(FEATURES)]` and what the call must do at least.
    """
    a = launches
    done = work(problem, kernel, m, gpu, a.a_bytes, a.b_bytes)
    gemm = problem.gemm(kernel)
    n, k = float(gemm.n), float(gemm.k)
    shared = problem.fused_shared_experts
    routed = problem.routed_experts

    per_block_m = {
        int(bm): routed * expected_blocks(m, done.share, int(bm)) + shared * np.ceil(m / bm)
        for bm in np.unique(a.block_m)
    }
    m_tiles = np.asarray([per_block_m[int(bm)] for bm in a.block_m])
    n_tiles = np.ceil(n / a.block_n)
    iterations = np.ceil(k / a.block_k)
    tiles = np.maximum(m_tiles * n_tiles, 1.0)
    pairs = m * problem.topk
    padded = np.where(pairs < problem.E + 1, pairs * a.block_m, pairs + (problem.E + 1) * (a.block_m - 1))
    launched = np.ceil(padded / a.block_m) * n_tiles

    max_warps, max_blocks = RESIDENT.get(gpu.gpu.compute_capability or (0, 0), (48, 24))
    threads = 32.0 * a.num_warps
    is_block_scaled = a.scale_group > 0 and not a.grouped
    # With block scales each K tile has a result of its own, which is scaled before it is added.
    accumulators = a.block_m * a.block_n / threads * (2.0 if is_block_scaled else 1.0)
    registers = np.minimum(accumulators * 1.25 + 48.0, 255.0)
    occupancy = np.minimum.reduce(
        [
            np.floor(gpu.smem_per_sm_bytes / (a.smem_bytes + 1024.0)),
            np.floor(REGISTERS_PER_SM / (registers * threads)),
            np.floor(max_warps / a.num_warps),
            np.full(len(a), float(max_blocks)),
        ]
    )
    occupancy = np.maximum(occupancy, 1.0)
    tiles_per_sm = tiles / gpu.sm_count
    resident = np.minimum(occupancy, np.maximum(tiles_per_sm, 1.0 / gpu.sm_count))
    waves = tiles_per_sm / occupancy
    rate = dense_tflops(gpu, a.a_bytes)
    padded_us = 2.0 * tiles * a.block_m * a.block_n * iterations * a.block_k / rate * 1e-6
    # The last level that every tile reads through: about three times the memory's rate on all of them.
    tile_bytes = (a.block_m * a.a_bytes + a.block_n * a.b_bytes) * a.block_k
    l2_us = tiles * iterations * tile_bytes / (3.0 * gpu.mem_bw_gbps) * 1e-3
    needed_in_flight = gpu.mem_bw_gbps * 1e3 * MEMORY_LATENCY_US / gpu.sm_count
    in_flight = resident * np.maximum(a.num_stages - 1.0, 1.0) * tile_bytes
    rounds = np.ceil(np.maximum(waves, 1e-9))
    latency_us = rounds * (iterations / np.maximum(a.num_stages - 1.0, 1.0) + 1.0) * MEMORY_LATENCY_US
    lanes_per_us = gpu.sm_count * LANES_PER_SM * CLOCK_MHZ
    is_converted = a.a_bytes != a.b_bytes
    conversion_us = tiles * iterations * a.block_n * a.block_k / lanes_per_us * is_converted
    # With scales by group each weight of the tile has its own load of a scale, and of a zero point.
    scaled = a.block_k * (1.0 + problem.quantization.zero_point) if a.grouped else a.block_m * is_block_scaled
    scaling_us = tiles * iterations * a.block_n * scaled / lanes_per_us
    rows_per_expert = done.rows / max(done.active_experts, 1e-9)
    expert_bytes = n * k * a.b_bytes

    scale_group = problem.quantization.group_size or 0 if a.grouped else a.scale_group

    ones = np.ones(len(a))
    columns = [
        _log(a.block_m), _log(a.block_n), _log(a.block_k), _log(a.group_m), _log(a.num_warps), a.num_stages,
        a.swap_ab, (a.tensor_core_path >= 1) * 1.0, (a.tensor_core_path == 2) * 1.0,
        ones * (kernel == "down"), ones * a.a_bytes, ones * a.b_bytes, ones * (a.scale_group > 0),
        ones * _log(done.compute_us / done.memory_us), ones * _log(done.floor_us / KERNEL_OVERHEAD_US),
        ones * _log(rows_per_expert), _log(a.block_m / rows_per_expert),
        _log(tiles / n_tiles * a.block_m / max(done.rows, 1e-9)), _log(n_tiles * a.block_n / n),
        _log(iterations * a.block_k / k), _log(padded_us / done.floor_us), _log(l2_us / done.floor_us),
        _log(iterations), a.num_stages / iterations, _log(accumulators), a.smem_bytes / gpu.smem_per_sm_bytes,
        _log(occupancy), _log(resident * a.num_warps),
        _log(tiles_per_sm), _log(waves),
        np.where(waves > 12, 0.0, _log(rounds / np.maximum(waves, 1e-9)).clip(0, 4)),
        _log(in_flight / needed_in_flight), _log(latency_us / done.floor_us), _log(launched / tiles),
        _log(a.block_m * a.block_n / (a.block_m + a.block_n)), _log(m_tiles / done.active_experts),
        _log(np.minimum(a.group_m, m_tiles) / np.maximum(m_tiles / done.active_experts, 1.0)),
        _log(n_tiles), ones * _log(done.active_experts / problem.E),
        ones * _log(done.active_experts * expert_bytes / gpu.l2_bytes),
        ones * _log(rate * 1e3 / gpu.mem_bw_gbps), ones * _log(gpu.mem_bw_gbps / gpu.sm_count),
        ones * is_converted, ones * a.grouped, ones * problem.quantization.zero_point, ones * a.integers,
        ones * a.pdl, _log(conversion_us / done.floor_us + _NO_WORK),
        _log(scaling_us / done.floor_us + _NO_WORK),
        _log(a.block_k / scale_group).clip(-3, 3) if scale_group > 0 else 0.0 * ones,
    ]  # fmt: skip
    return np.stack(columns, axis=1), done
