"""The grouped GEMM with weights of 4 or 8 bits that are turned into activations' type on the way to the dot.

The servers have a kernel of its own for these weights (`fused_moe_kernel_gptq_awq` of the sglang 0.5.23
and vllm 0.33.0 wheels), with other habits: sizes are compile-time constants, each weight loads its own
scale, there is no bias and no programmatic dependent launch. So has moetune. Imports Triton only.

Symbols as in kernels.py. Layout of the weights, as the servers keep checkpoints of GPTQ and AWQ: bytes
`[E, N, K]`, or `[E, N, K / 2]` with the even one of two weights along K in the low half of a byte; scales
`[E, N, G]`; zero points `[E, N, G]`, or `[E, N / 2, G]` with the even one of two columns in the low half;
G groups of `group_size` weights along K. Without zero points the middle of the range is zero.
"""

# Kernel parameters are Triton's tensors and constants: they have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from moetune.measure.kernels import store_tile, tile_of_program

if TYPE_CHECKING:
    import torch

    from moetune.domain.launch import Launch
    from moetune.measure.alignment import Alignment


@triton.jit
def moe_dequantizing_gemm(
    x_ptr,  # [R, K] activations
    w_ptr,  # [E, N, K] bytes, or [E, N, K / 2]
    y_ptr,  # [S, N] output, in the order of the slots
    w_scale_ptr,  # [E, N, G]
    w_zero_ptr,  # [E, N, G], or [E, N / 2, G]; None: the middle of the range
    slot_weight_ptr,  # [S] fp32 routing weights
    slot_ids_ptr,  # [P] int32
    tile_expert_ptr,  # [P / BLOCK_SIZE_M] int32, -1: an expert of another rank
    used_length_ptr,  # [1] int32, how much of P this routing fills
    padded_length,
    num_slots,
    x_stride,
    w_stride_expert,
    w_stride_column,
    y_stride,
    w_scale_stride_expert,
    w_scale_stride_column,
    w_zero_stride_expert,
    w_zero_stride_column,
    # What the problem fixes.
    N: tl.constexpr,
    K: tl.constexpr,
    group_size: tl.constexpr,  # weights along K that share a scale
    bits: tl.constexpr,  # of a weight: 4 or 8
    top_k: tl.constexpr,
    multiply_slot_weight: tl.constexpr,
    even_k: tl.constexpr,  # K is a multiple of BLOCK_SIZE_K
    # The config.
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):
    """Multiply the rows of each slot with the dequantized weights of its expert.

    `y[s, n] = slot_weight[s] * sum over k of x[s // top_k, k] * (w[n, k] - zero[n, g]) * scale[n, g]` with w,
    zero and scale of the expert of s and `g = k // group_size`. BLOCK_SIZE_K may be groups or a part of one.
    """
    row_tile, column_tile = tile_of_program(
        tl.program_id(0), tl.cdiv(padded_length, BLOCK_SIZE_M), tl.cdiv(N, BLOCK_SIZE_N), GROUP_SIZE_M
    )
    # The grid covers the longest padding that any routing can need.
    if row_tile * BLOCK_SIZE_M >= tl.load(used_length_ptr):
        return

    position = row_tile * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M).to(tl.int64)
    slot = tl.load(slot_ids_ptr + position).to(tl.int64)
    is_slot = slot < num_slots
    column = column_tile * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N).to(tl.int64)

    expert = tl.load(tile_expert_ptr + row_tile).to(tl.int64)
    if expert == -1:
        zeros = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)
        store_tile(y_ptr, zeros, slot, is_slot, column, N, y_stride)
        return

    # Columns past N wrap around instead of being masked.
    w_column = (column % N)[None, :]
    k = tl.arange(0, BLOCK_SIZE_K)
    x_ptrs = x_ptr + (slot // top_k)[:, None] * x_stride + k[None, :]
    per_byte: tl.constexpr = 8 // bits
    mask_of_bits: tl.constexpr = (1 << bits) - 1
    w_ptrs = w_ptr + expert * w_stride_expert + (k // per_byte)[:, None] + w_column * w_stride_column
    w_shift = (k % per_byte * bits)[:, None]
    w_scale_ptrs = w_scale_ptr + expert * w_scale_stride_expert + w_column * w_scale_stride_column
    if w_zero_ptr is not None:
        w_zero_ptrs = w_zero_ptr + expert * w_zero_stride_expert + w_column // per_byte * w_zero_stride_column
        w_zero_shift = w_column % per_byte * bits

    total = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)
    for k_start in range(0, K, BLOCK_SIZE_K):
        x = tl.load(x_ptrs, mask=is_slot[:, None] & (k < K - k_start)[None, :], other=0.0)
        group = ((k + k_start) // group_size)[:, None]
        if even_k:
            w = tl.load(w_ptrs)
            w_scale = tl.load(w_scale_ptrs + group)
        else:
            inside = (k < K - k_start)[:, None]
            w = tl.load(w_ptrs, mask=inside, other=0)
            w_scale = tl.load(w_scale_ptrs + group, mask=inside, other=0.0)
        if bits == 4:
            w = (w >> w_shift) & mask_of_bits

        if w_zero_ptr is not None:
            if even_k:
                w_zero = tl.load(w_zero_ptrs + group)
            else:
                w_zero = tl.load(w_zero_ptrs + group, mask=inside, other=0)
            if bits == 4:
                w_zero = (w_zero >> w_zero_shift) & mask_of_bits
            w_value = w.to(tl.float32) - w_zero.to(tl.float32)
        else:
            w_value = w.to(tl.float32) - (1 << (bits - 1))
        total = tl.dot(x, (w_value * w_scale.to(tl.float32)).to(x.dtype), acc=total)

        x_ptrs += BLOCK_SIZE_K
        w_ptrs += BLOCK_SIZE_K // per_byte

    if multiply_slot_weight:
        total *= tl.load(slot_weight_ptr + slot, mask=is_slot, other=0.0)[:, None]
    store_tile(y_ptr, total, slot, is_slot, column, N, y_stride)


def run_dequantizing_gemm(
    launch: Launch,
    x: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    alignment: Alignment,
    *,
    top_k: int,
    slot_weights: torch.Tensor,
    weight_scales: torch.Tensor,
    weight_zeros: torch.Tensor | None,
    group_size: int,
) -> None:
    """Launch the kernel on tensors whose last dimension is contiguous.

    Args:
        launch: config, kernel (`down` multiplies by the routing weights), bits of a weight.
        x: `[R, K]` activations.
        weights: `[E, N, K]` bytes, `[E, N, K / 2]` for 4 bits.
        out: `[S, N]`.
        alignment: slots sorted by expert for the config's BLOCK_SIZE_M.
        top_k: slots that share a row of x.
        slot_weights: `[S]` fp32 routing weights.
        weight_scales: `[E, N, ceil(K / group_size)]`.
        weight_zeros: bytes `[E, N, ceil(K / group_size)]`, `[E, ceil(N / 2), ...]` for 4 bits.
        group_size: weights along K that share a scale.
    """
    config = launch.config
    columns, k = weights.shape[1], x.shape[1]
    tiles = triton.cdiv(alignment.padded_length, config.block_size_m)
    moe_dequantizing_gemm[(tiles * triton.cdiv(columns, config.block_size_n),)](
        x,
        weights,
        out,
        weight_scales,
        weight_zeros,
        slot_weights,
        alignment.slot_ids,
        alignment.tile_experts,
        alignment.used_length,
        alignment.padded_length,
        out.shape[0],
        x.stride(0),
        weights.stride(0),
        weights.stride(1),
        out.stride(0),
        weight_scales.stride(0),
        weight_scales.stride(1),
        weight_zeros.stride(0) if weight_zeros is not None else 0,
        weight_zeros.stride(1) if weight_zeros is not None else 0,
        **dequantizing_constants(launch, n=columns, k=k, top_k=top_k, group_size=group_size),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def dequantizing_constants(
    launch: Launch, *, n: int, k: int, top_k: int, group_size: int
) -> dict[str, int | bool]:
    """The compile-time constants of a launch: what `moe_dequantizing_gemm` declares as constexpr."""
    config = launch.config
    return {
        "N": n,
        "K": k,
        "group_size": group_size,
        "bits": launch.b_bits,
        "top_k": top_k,
        "multiply_slot_weight": launch.kernel == "down",
        "even_k": k % config.block_size_k == 0,
        "BLOCK_SIZE_M": config.block_size_m,
        "BLOCK_SIZE_N": config.block_size_n,
        "BLOCK_SIZE_K": config.block_size_k,
        "GROUP_SIZE_M": config.group_size_m,
    }
