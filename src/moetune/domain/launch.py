"""A launch of the fused-MoE kernel, as data: what resources, compiling and prediction need to know.

A server's module makes one from a problem and a config, with that server's clamps and overrides
applied, so that nothing below the servers layer knows a server.
"""

from __future__ import annotations

from dataclasses import dataclass

from moetune.domain.config import KernelConfig
from moetune.domain.problem import Kernel


@dataclass(frozen=True, slots=True)
class Launch:
    """One config of one kernel as the server would really launch it.

    Attributes:
        kernel: `up` or `down`.
        config: after the server's clamps (vLLM: BLOCK_SIZE_K) and overrides (SGLang: the down
            BLOCK_SIZE_M follows the up config).
        a_bits: bits of an activation in the dot.
        b_bits: bits of a weight as loaded from memory.
        block_k: quantization group along K, 0 without block scales.
        swap_ab: the dot is computed transposed (SGLang, fp8 on sm_90, BLOCK_SIZE_M < 64 and
            BLOCK_SIZE_N >= 64).
        per_channel: one weight scale for each output channel.
        pdl: launched with programmatic dependent launch.
        integers: the operands of the dot are integers (int8 w8a8).
        grouped: weights have a scale for each group along K, and another kernel converts them
            (`fused_moe_kernel_gptq_awq` of both servers).
        single_step: the tile is as long as K, and the kernel knows K when it is compiled, as the one for
            groups does: there is no loop, and nothing is copied ahead.
        sum_topk: experts a token goes to where the kernel adds their results into one row of an output of
            zeros, by atomic additions; 0: each slot has a row of its own.
        weights_by_tma: tiles of the weights are loaded through a tensor descriptor.
        sorted_input: activations lie in the order of the sorted and padded slots, and their tiles are
            loaded through a tensor descriptor.
        sorted_output: rows are written in that order.
        skips_padding: with sorted_input, what stands between the kernels leaves out the rows that are
            padding.
        scales_by_column: with block scales, each column of a tile loads and applies its weight's scale, also
            where one scale is that of the whole tile.
        wrong_numbers: why the server computes wrong numbers with this launch; empty: it does not.
    """

    kernel: Kernel
    config: KernelConfig
    a_bits: int = 16
    b_bits: int = 16
    block_k: int = 0
    swap_ab: bool = False
    per_channel: bool = False
    pdl: bool = False
    integers: bool = False
    grouped: bool = False
    single_step: bool = False
    sum_topk: int = 0
    weights_by_tma: bool = False
    sorted_input: bool = False
    sorted_output: bool = False
    skips_padding: bool = False
    scales_by_column: bool = False
    wrong_numbers: str = ""


@dataclass(frozen=True, slots=True)
class LaunchClass:
    """What makes another binary of the same config: constexprs and divisibility classes.

    Attributes:
        kernel: `up` or `down`.
        padded_length_divisible_by: 16, or the smaller power of two that is known to divide it.
        num_valid_tokens_divisible_by_16: of `M * topk`.
        num_valid_tokens_is_one: Triton specialises the value 1.
        constexprs: names and values that follow from m, sorted (`GDC_EARLY`, ...).
        ms: the m of the request that launch this class.
    """

    kernel: Kernel
    padded_length_divisible_by: int
    num_valid_tokens_divisible_by_16: bool
    num_valid_tokens_is_one: bool = False
    constexprs: tuple[tuple[str, int | bool], ...] = ()
    ms: tuple[int, ...] = ()


def is_single_step(k: int, config: KernelConfig) -> bool:
    """Whether one tile holds all of K: a kernel that knows K when it is compiled has no loop then.

    Args:
        k: of the grouped GEMM; 0: not known, as where a file's name is all there is.
        config: the tile.
    """
    return 0 < k <= config.block_size_k
