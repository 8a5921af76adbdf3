"""How vLLM launches its fused-MoE Triton kernel: clamps, the transposed dot, and launch classes.

Sources: `fused_moe.py:invoke_fused_moe_triton_kernel` (before 0.14: `invoke_fused_moe_kernel`),
`invoke_fused_moe_wna16_triton_kernel`, `_prepare_expert_assignment`,
`moe_align_block_size.py:moe_align_block_size`, `utils.py:enable_swap_ab` (paths as in rules.py).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from moetune.domain.launch import Launch, LaunchClass, is_single_step
from moetune.domain.quantization import Dtype
from moetune.servers.vllm.defaults import is_grouped, needs_split_k, runs_cuda_kernel
from moetune.servers.vllm.rules import Change, has

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from moetune.domain.config import KernelConfig
    from moetune.domain.problem import Kernel, Problem
    from moetune.domain.version import Release

# Bits of activations and weights in the launch where they are not those of the checkpoint: emulated
# weights are dequantized to the activations' type before the kernel runs.
_EMULATED = frozenset({Dtype.MXFP4, Dtype.MXFP8})
_UNQUANTIZED = frozenset({Dtype.BF16, Dtype.FP16, Dtype.FP32})
# With these, few rows skip the alignment since fused_experts() did, and not since TritonExperts did.
_FUNCTIONAL = frozenset({Dtype.INT8_W8A8})
_ROWS_PER_EXPERT_WITHOUT_ALIGNMENT = 4
_SPECIALIZED_DIVISOR = 16


def launch(release: Release, problem: Problem, kernel: Kernel, config: KernelConfig) -> Launch:
    """The launch of a config as this release makes it.

    `SPLIT_K` leaves the config where the server overwrites it: configs that differ by it alone are one
    launch.
    """
    quantization = problem.quantization
    a_bits, b_bits = _bits(problem)
    block = None if is_grouped(problem) else quantization.block_shape
    if quantization.dtype in _EMULATED | _UNQUANTIZED:
        block = None
    if block is not None:
        config = replace(config, block_size_k=min(config.block_size_k, *block))
    if not needs_split_k(release, problem):
        config = replace(config, extra=tuple(item for item in config.extra if item[0] != "SPLIT_K"))
    scaled = quantization.dtype in (Dtype.FP8_W8A8, Dtype.INT8_W8A8)
    return Launch(
        kernel=kernel,
        config=config,
        a_bits=a_bits,
        b_bits=b_bits,
        # The grouped int4/int8 kernel loads a scale for each weight, whatever BLOCK_SIZE_K is.
        block_k=block[1] if scaled and block is not None else 0,
        swap_ab=_swaps(release, problem, config),
        per_channel=scaled and quantization.per_channel,
        integers=quantization.dtype is Dtype.INT8_W8A8,
        grouped=is_grouped(problem),
        single_step=is_grouped(problem) and is_single_step(problem.gemm(kernel).k, config),
        # fused_moe_kernel: `offs_bsn = offs_bn // group_n` for any BLOCK_SIZE_N (vllm 0.10.2 to 0.33.0).
        scales_by_column=scaled and block is not None,
    )


def launch_classes(
    release: Release, problem: Problem, kernel: Kernel, ms: Sequence[int], block_size_m: int
) -> tuple[LaunchClass, ...]:
    """The binaries of one config that those m use, in the order in which the m first need them.

    An m at which a CUDA kernel runs grouped int4 weights is in none of them.
    """
    lengths: defaultdict[tuple[bool, bool, bool, bool], list[tuple[int, int]]] = defaultdict(list)
    for m in ms:
        if m < 1 or runs_cuda_kernel(release, problem, m):
            continue
        naive = skips_alignment(release, problem, m)
        rows = m * problem.topk
        length = padded_length(release, problem, kernel, m, block_size_m)
        divisor = _SPECIALIZED_DIVISOR
        lengths[length % divisor == 0, rows % divisor == 0, rows == 1, naive].append((m, length))
    has_parameter = has(release, Change.NAIVE_FUNCTIONAL) and not is_grouped(problem)
    return tuple(
        LaunchClass(
            kernel=kernel,
            padded_length_divisible_by=min(_common_power_of_two(length for _, length in found), 16),
            num_valid_tokens_divisible_by_16=rows_divide,
            num_valid_tokens_is_one=is_one,
            constexprs=(("naive_block_assignment", naive),) if has_parameter else (),
            ms=tuple(dict.fromkeys(m for m, _ in found)),
        )
        for (_, rows_divide, is_one, naive), found in lengths.items()
    )


def skips_alignment(release: Release, problem: Problem, m: int) -> bool:
    """Whether every row is a block of its own at that m: no sorting, and no other row in its block."""
    functional = problem.quantization.dtype in _FUNCTIONAL
    since = Change.NAIVE_FUNCTIONAL if functional else Change.NAIVE_MODULAR
    return (
        has(release, since)
        and problem.ep == 1
        and not is_grouped(problem)
        and m * problem.topk * _ROWS_PER_EXPERT_WITHOUT_ALIGNMENT <= problem.global_experts
    )


def padded_length(release: Release, problem: Problem, kernel: Kernel, m: int, block_size_m: int) -> int:
    """Rows that the grid of a kernel covers (`EM`), padding of every expert included."""
    rows = m * problem.topk
    if skips_alignment(release, problem, m):
        return rows * block_size_m
    length = rows + problem.global_experts * (block_size_m - 1)
    if has(release, Change.ALIGNED_LENGTH_CAPPED) and rows < problem.global_experts:
        length = min(rows * block_size_m, length)
    # The down kernel has one row for each token and expert, the up kernel one for each token.
    if (m if kernel == "up" else rows) < block_size_m:
        length = min(length, rows * block_size_m)
    return length


def _bits(problem: Problem) -> tuple[int, int]:
    dtype, activation = problem.quantization.dtype, problem.activation_dtype
    if dtype in _EMULATED:
        return activation.activation_bits, activation.activation_bits
    if dtype in _UNQUANTIZED:
        bits = max(dtype.weight_bits, activation.activation_bits)
        return bits, bits
    return dtype.activation_bits, dtype.weight_bits


def _swaps(release: Release, problem: Problem, config: KernelConfig) -> bool:
    return (
        has(release, Change.SWAP_AB)
        and problem.quantization.dtype is Dtype.FP8_W8A8
        and problem.gpu.compute_capability == (9, 0)
        and config.block_size_m < 64
        and config.block_size_n >= 64
    )


def _common_power_of_two(lengths: Iterable[int]) -> int:
    joined = 0
    for length in lengths:
        joined |= length
    return joined & -joined
