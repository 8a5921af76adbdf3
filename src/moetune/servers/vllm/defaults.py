"""The configs that vLLM uses where it finds no file.

Sources: `fused_moe.py:get_default_config`, `get_moe_wna16_block_config`, `_ensure_block_size_k_divisible`,
`should_moe_wna16_use_cuda` (paths as in rules.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moetune.domain.config import KernelConfig
from moetune.domain.problem import KERNELS
from moetune.domain.quantization import Dtype
from moetune.servers.vllm.rules import BATCH_INVARIANT_VARIABLE, Change, has

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moetune.domain.problem import Kernel, Problem
    from moetune.domain.version import Release

_GROUPED = frozenset({Dtype.INT4_W4A16, Dtype.INT8_W8A16})
# Groups for which the grouped int4 kernel exists in CUDA, and the rows per expert up to which it is used.
_CUDA_GROUPS = frozenset({32, 64, 128})
_CUDA_ROWS_PER_EXPERT = 6
# (last m, value): the first step that holds an m gives the value; the last value holds for all above.
_Steps = tuple[tuple[int, int], ...]
_GROUPED_BLOCK_M: _Steps = ((20, 16), (40, 32))
_BLOCK_M: _Steps = ((32, 16), (96, 32), (512, 64))
# Above this many tokens per expert neighbouring row blocks share their weights in L2.
_GROUPED_ABOVE_TOKENS_PER_EXPERT = 128


def is_grouped(problem: Problem) -> bool:
    """Whether the grouped w4a16 or w8a16 kernel runs the experts."""
    return problem.quantization.dtype in _GROUPED and (problem.quantization.group_size or 0) > 0


def runs_cuda_kernel(release: Release, problem: Problem, m: int) -> bool:
    """Whether a CUDA kernel, and not Triton's, runs grouped int4 weights at that m."""
    return not has(release, Change.WNA16_TRITON_ONLY) and is_grouped(problem) and _few_rows(problem, m)


def cuda_kernel_until(release: Release, problem: Problem) -> int:
    """The last m at which the CUDA kernel runs, as at every m below it; 0 where it never does."""
    last = _CUDA_ROWS_PER_EXPERT * problem.E // problem.topk
    return last if last and runs_cuda_kernel(release, problem, last) else 0


def cuda_kernel_entry(release: Release, problem: Problem, m: int) -> KernelConfig:
    """The entry with which the CUDA kernel does at an m what it does without a file.

    Its BLOCK_SIZE_M is the default's, min(16, m), rounded up to a power of two: no expert gets more rows
    than m, so that the blocks and the work in them are the same, and a release without that kernel, to
    which the file may come by an upgrade, does not die of it.
    """
    default = default_config(release, problem, "up", m)
    block_m = 1 << max(default.block_size_m - 1, 0).bit_length()
    block_n, block_k = filled_tile(release, problem, m, block_m)
    return replace(default, block_size_m=block_m, block_size_n=block_n, block_size_k=block_k)


def filled_tile(release: Release, problem: Problem, m: int, block_size_m: int) -> tuple[int, int]:
    """BLOCK_SIZE_N and BLOCK_SIZE_K of the up kernel for an entry that leaves them to the launch."""
    return _grouped_tile(release, problem, "up", m, block_size_m)


def needs_split_k(release: Release, problem: Problem) -> bool:
    """Whether the kernel that runs has SPLIT_K as a parameter that nothing but the config fills."""
    return has(release, Change.SPLIT_K) and is_grouped(problem)


def default_config(release: Release, problem: Problem, kernel: Kernel, m: int) -> KernelConfig:
    """What this release uses for m when it finds no file.

    Where its default leaves `num_warps` and `num_stages` out they are Triton's own for the GPU's vendor.
    """
    rocm = problem.gpu.vendor == "AMD"
    stages = 2 if rocm else 3  # of Triton's HIPOptions and CUDAOptions
    if BATCH_INVARIANT_VARIABLE in problem.flags:
        return KernelConfig(64, 64, 32, 8, num_stages=stages, extra=_split_k(release, problem))
    block = problem.quantization.block_shape
    scaled = has(release, Change.DEFAULTS_SCALE_WITH_M)
    if problem.quantization.dtype is Dtype.FP8_W8A8 and block is not None:
        return _fp8_block(release, block, m, rocm=rocm) if scaled else KernelConfig(64, *block, 32, 4, stages)
    if is_grouped(problem):
        return _grouped(release, problem, kernel, m, stages)
    if scaled:
        return _scaled(problem, m, rocm=rocm)
    if m <= problem.E:
        return KernelConfig(16, 32, 64, 1, num_stages=stages)
    return KernelConfig(64, 64, 32, 8, num_stages=stages)


def default_switches(release: Release, problem: Problem) -> tuple[int, ...]:
    """The m at which the default of either kernel changes: each is the last one of its regime."""

    def both(m: int) -> Sequence[KernelConfig]:
        return [default_config(release, problem, kernel, m) for kernel in KERNELS]

    return tuple(m for m in _possible_switches(problem) if both(m) != both(m + 1))


def _possible_switches(problem: Problem) -> list[int]:
    last_ungrouped = (_GROUPED_ABOVE_TOKENS_PER_EXPERT + 1) * problem.E - 1
    fixed = {1, 4, 8, 16, 20, 32, 40, 64, 96, 128, 512, problem.E, last_ungrouped}
    # The heuristic of the grouped kernel has no closed form in m; it ends where the rows are many.
    few = range(1, _CUDA_ROWS_PER_EXPERT * problem.E // problem.topk + 2) if is_grouped(problem) else ()
    return sorted(fixed | set(few))


def _split_k(release: Release, problem: Problem) -> tuple[tuple[str, int], ...]:
    return (("SPLIT_K", 1),) if needs_split_k(release, problem) else ()


def _step(steps: _Steps, above: int, m: int) -> int:
    return next((value for last, value in steps if m <= last), above)


def _fp8_block(release: Release, block: tuple[int, int], m: int, *, rocm: bool) -> KernelConfig:
    block_n, stages = block[0], 2 if rocm else 3
    narrow = has(release, Change.NARROW_FP8_BLOCK_DEFAULT) and not rocm and m <= 8 and block[0] % 64 == 0
    if narrow:
        block_n, stages = 64, 4 if m <= 4 else 3
    return KernelConfig(16 if m <= 64 else 64, block_n, block[1], 1 if m <= 16 else 32, 4, stages)


def _scaled(problem: Problem, m: int, *, rocm: bool) -> KernelConfig:
    deep = problem.quantization.dtype is Dtype.FP8_W8A8 or m <= 64
    crowded = m // max(problem.E, 1) > _GROUPED_ABOVE_TOKENS_PER_EXPERT
    return KernelConfig(
        block_size_m=_step(_BLOCK_M, 128, m),
        block_size_n=64 if m <= 64 else 128,
        block_size_k=128 if deep else 64,
        group_size_m=16 if crowded else 1,
        num_warps=4 if m <= 128 else 8,
        num_stages=2 if rocm else (4 if m <= 32 else 3),
    )


def _few_rows(problem: Problem, m: int) -> bool:
    """The test for vLLM's CUDA kernel; its default BLOCK_SIZE_M follows it on Triton too."""
    return (
        problem.gpu.vendor == "NVIDIA"
        and problem.quantization.dtype is Dtype.INT4_W4A16
        and problem.quantization.group_size in _CUDA_GROUPS
        and m * problem.topk / problem.E <= _CUDA_ROWS_PER_EXPERT
    )


def _grouped(release: Release, problem: Problem, kernel: Kernel, m: int, stages: int) -> KernelConfig:
    if _few_rows(problem, m):
        ceiling = 1 << max(m - 1, 0).bit_length() if has(release, Change.WNA16_POWER_OF_TWO) else m
        block_m = min(16, ceiling)
    else:
        block_m = _step(_GROUPED_BLOCK_M, 64, m)
    block_n, block_k = _grouped_tile(release, problem, kernel, m, block_m)
    return KernelConfig(block_m, block_n, block_k, 1, num_stages=stages, extra=_split_k(release, problem))


def _grouped_tile(
    release: Release, problem: Problem, kernel: Kernel, m: int, block_m: int
) -> tuple[int, int]:
    """What a launch of the grouped kernels fills in for a config without BLOCK_SIZE_N and BLOCK_SIZE_K."""
    topk = problem.topk if kernel == "up" else 1
    rows = m * problem.topk
    if runs_cuda_kernel(release, problem, m):
        return _cuda_tile(release, problem, kernel, rows, topk, block_m)
    return (32, 64) if rows // topk == 1 else (64, 32)


def _cuda_tile(
    release: Release, problem: Problem, kernel: Kernel, rows: int, topk: int, block_m: int
) -> tuple[int, int]:
    """BLOCK_SIZE_N and BLOCK_SIZE_K of the CUDA kernel.

    vLLM hands the output columns in as the number of experts and swaps the counts of N and K blocks;
    both are kept, since they decide the result.
    """
    gemm = problem.gemm(kernel)
    group = problem.quantization.group_size or 0
    block_n, block_k = 128, max(128, group)
    blocks_n, blocks_k = gemm.k // block_k, gemm.n // block_k
    blocks_m: float = (rows + block_m - 1) / block_m + gemm.n
    if rows // topk <= block_m:
        blocks_m = min(blocks_m, rows)
    blocks = blocks_m * blocks_n * blocks_k
    if gemm.k % 256 == 0 and blocks >= 256 and block_k < 256:
        # The division by 256 // 256 that follows in vLLM changes nothing but floors.
        block_k, blocks = 256, blocks // 1
    if blocks_m <= 16 and gemm.k % (block_k * 2) == 0 and block_k <= 512 and blocks >= 512:
        block_k, blocks = block_k * 2, blocks // 2
    if blocks > 1024:
        block_n, blocks = 256, blocks // 2
    if gemm.n <= 1024 and blocks >= 1024:
        block_n = 1024
    if has(release, Change.WNA16_K_DIVIDES):
        block_k = _dividing(gemm.k, block_k, group)
    return block_n, block_k


def _dividing(size: int, block: int, group: int) -> int:
    """The largest multiple of the group up to `block` that divides `size`; `size` itself without one."""
    if size % block == 0 and block % group == 0:
        return block
    start = block // group * group
    return next((c for c in range(start, group - 1, -group) if size % c == 0), size)
