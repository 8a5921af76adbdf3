"""What a time means: bytes and operations a second, and how much of the GPU's measured peak that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetune.domain.problem import KERNELS
from moetune.measure.workload import expert_bytes

if TYPE_CHECKING:
    from moetune.domain.problem import Problem
    from moetune.measure.protocol import Peaks

_OUTPUT_BYTES = 2  # fp16 or bf16


@dataclass(frozen=True, slots=True)
class Rate:
    """Rates of the up and down kernel together.

    Attributes:
        gbps: 10^9 bytes a second, each byte that has to be moved counted once.
        tflops: 10^12 operations a second, padding not counted.
        share: of the peak of what limits more; None where no peak was measured.
        limit: `memory` or `tensor cores`.
    """

    gbps: float
    tflops: float
    share: float | None
    limit: str


def needed_work(problem: Problem, m: int) -> tuple[float, float]:
    """Bytes and operations of both kernels at m under a uniform routing, each byte moved once."""
    routed = problem.topk - problem.fused_shared_experts
    everywhere = max(problem.global_experts, problem.routed_experts)
    here = problem.routed_experts / everywhere
    slots = m * (routed * here + problem.fused_shared_experts)
    touched = problem.routed_experts * (1 - (1 - routed / everywhere) ** m) + problem.fused_shared_experts
    operand = problem.quantization.dtype.activation_bits / 8
    moved = operations = 0.0
    for kernel in KERNELS:
        gemm = problem.gemm(kernel)
        rows = m if kernel == "up" else slots
        moved += touched * expert_bytes(problem, kernel)
        moved += rows * gemm.k * operand + slots * gemm.n * _OUTPUT_BYTES
        operations += 2 * slots * gemm.n * gemm.k
    return moved, operations


def rate(problem: Problem, m: int, time_us: float, peaks: Peaks | None) -> Rate:
    """The rates of a time of both kernels."""
    moved, operations = needed_work(problem, m)
    gbps, tflops = moved / time_us / 1e3, operations / time_us / 1e6
    if peaks is None:
        return Rate(gbps, tflops, None, "memory")
    # The peak was measured in bf16; tensor cores take operands of half the bits twice as fast.
    peak = peaks.tflops * 16 / problem.quantization.dtype.activation_bits
    of_memory, of_cores = gbps / peaks.gbps, tflops / peak
    if of_memory >= of_cores:
        return Rate(gbps, tflops, of_memory, "memory")
    return Rate(gbps, tflops, of_cores, "tensor cores")
