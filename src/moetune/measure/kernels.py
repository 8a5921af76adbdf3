"""The fused-MoE grouped GEMM of moetune itself, for when no server is installed.

Written from the algorithm, with the meaning of the servers' config keys, so that a config found
with it is a config of theirs. Imports Triton only: compiling needs no torch.

Symbols: a *slot* is one token at one of its topk experts, number `token * topk + choice`; the
slots of an expert stand together in `slot_ids`, padded to a multiple of BLOCK_SIZE_M with the
number of slots, which is no slot. `R` rows of activations, `E` experts, `S` slots, `N` output
columns, `K` columns of the activations, `P` the padded length.
"""

# Kernel parameters are Triton's tensors and constants: they have no Python types.
# ruff: noqa: ANN001, ANN201, SIM108
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    import torch

    from moetune.domain.launch import Launch
    from moetune.measure.alignment import Alignment


@triton.jit
def tile_of_program(
    program,
    row_tiles,
    column_tiles,
    GROUP_SIZE_M: tl.constexpr,
):
    """Walk the tiles in bands of GROUP_SIZE_M row tiles, down each band's columns first.

    Programs that run together then share weights of one column tile and activations of one band.
    """
    programs_of_band = GROUP_SIZE_M * column_tiles
    band = program // programs_of_band
    within = program % programs_of_band
    first_row_tile = band * GROUP_SIZE_M
    # The last band may be lower.
    height = min(row_tiles - first_row_tile, GROUP_SIZE_M)
    return first_row_tile + within % height, within // height


@triton.jit
def store_tile(y_ptr, tile, slot, is_slot, column, N, y_stride):
    """Scatter the rows of a tile to their slots; a function, so that nothing of it lives over the K loop."""
    y_ptrs = y_ptr + slot[:, None] * y_stride + column[None, :]
    mask = is_slot[:, None] & (column < N)[None, :]
    tl.store(y_ptrs, tile.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_tile(y_ptr, tile, row, is_slot, column, N, y_stride):
    """Add the rows of a tile to rows that other tiles add to as well, rounded to the output's type before."""
    y_ptrs = y_ptr + row[:, None] * y_stride + column[None, :]
    mask = is_slot[:, None] & (column < N)[None, :]
    tl.atomic_add(y_ptrs, tile.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def moe_grouped_gemm(
    x_ptr,  # [R, K] activations; R is M for up (top_k slots share a row), S for down (top_k 1)
    x_desc,  # descriptor of [P, K] activations in the order of slot_ids, in the place of x_ptr; None
    w_ptr,  # [E, N, K] weights
    w_desc,  # descriptor of the weights, in the place of w_ptr; None
    y_ptr,  # [S, N] output, in the order of the slots; [P, N] sorted; [S / sum_topk, N] zeros to add to
    bias_ptr,  # [E, N], or None
    x_scale_ptr,  # fp32: [R, K / block_k] block scales, [R] by row, [1] for all; None: not quantized
    w_scale_ptr,  # fp32: [E, N / block_n, K / block_k] block scales, [E, N] by channel, [E]; None
    slot_weight_ptr,  # [S] fp32 routing weights
    slot_ids_ptr,  # [P] int32
    tile_expert_ptr,  # [P / BLOCK_SIZE_M] int32, -1: an expert of another rank
    used_length_ptr,  # [1] int32, how much of P this routing fills
    N,
    K,
    padded_length,
    num_slots,
    x_stride,
    w_stride_expert,
    w_stride_column,
    bias_stride,
    y_stride,
    x_scale_stride,
    w_scale_stride_expert,
    w_scale_stride_column,
    # What the problem fixes.
    top_k: tl.constexpr,
    block_n: tl.constexpr,  # columns that share a weight scale, 0 without block scales
    block_k: tl.constexpr,  # columns of the activations that share a scale, 0 without
    scales_by_column: tl.constexpr,  # each column of a tile loads a block scale, be it one for all or not
    channel_scales: tl.constexpr,  # without block scales: a scale for each row and each column, not for all
    multiply_slot_weight: tl.constexpr,
    sorted_output: tl.constexpr,  # rows are written in the order of slot_ids, padding between them
    sum_topk: tl.constexpr,  # slots that are added into one row of the output; 0: each has its own
    even_k: tl.constexpr,  # K is a multiple of BLOCK_SIZE_K
    swap_ab: tl.constexpr,  # compute the transposed dot: weights as the left operand
    pdl: tl.constexpr,  # launched with programmatic dependent launch
    pdl_early: tl.constexpr,  # let the next kernel start at once instead of at the end
    # The config.
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):
    """Multiply the rows of each slot with the weights of its expert.

    `y[s, n] = slot_weight[s] * (sum over k of x[s // top_k, k] * w[expert(s), n, k] + bias[expert(s), n])`

    With block scales the sum over each K tile is multiplied by one activation scale a row and one
    weight scale a column: BLOCK_SIZE_K has to divide block_k, or the scales of all but the first
    group of a tile are not applied. That is the servers' behaviour too, so it is not asserted here.

    With `x_desc` the activations lie in the order of `slot_ids`; their padding may hold anything. A scale by
    row is then read at the slot's place, which is another row's, and only block scales are right: that too
    is the servers' behaviour.

    With `sum_topk` the rows of a token's slots are added up in the output, in any order.

    Other scales come after the sum. They are loaded before it, and 8-bit floats and converted weights are
    added within the dot, integers outside of it, as the servers do: it decides about registers and speed.
    """
    if pdl:
        tl.extra.cuda.gdc_wait()
        if pdl_early:
            tl.extra.cuda.gdc_launch_dependents()

    row_tile, column_tile = tile_of_program(
        tl.program_id(0), tl.cdiv(padded_length, BLOCK_SIZE_M), tl.cdiv(N, BLOCK_SIZE_N), GROUP_SIZE_M
    )
    # The grid covers the longest padding that any routing can need.
    if row_tile * BLOCK_SIZE_M >= tl.load(used_length_ptr):
        return

    position = row_tile * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M).to(tl.int64)
    # 64 bits: slot * N and expert * N * K pass 2^31 at sizes that are served.
    slot = tl.load(slot_ids_ptr + position).to(tl.int64)
    is_slot = slot < num_slots
    column = column_tile * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N).to(tl.int64)

    expert_number = tl.load(tile_expert_ptr + row_tile)
    expert = expert_number.to(tl.int64)
    if expert == -1:
        # The sum over the experts of a token reads every slot, where it is not made here. Rows in sorted
        # order are read only by this expert's tiles.
        if sum_topk == 0 and not sorted_output:
            zeros = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)
            store_tile(y_ptr, zeros, slot, is_slot, column, N, y_stride)
        return

    # Columns past N wrap around instead of being masked: no predicate in the loop.
    w_column = column % N
    k = tl.arange(0, BLOCK_SIZE_K)
    x_row = slot // top_k
    if x_desc is None:
        x_ptrs = x_ptr + x_row[:, None] * x_stride + k[None, :]
    if w_desc is None:
        w_ptrs = w_ptr + expert * w_stride_expert + k[:, None] + w_column[None, :] * w_stride_column

    if block_k > 0:
        if x_desc is None:
            x_scale_ptrs = x_scale_ptr + x_row * x_scale_stride
        else:
            x_scale_ptrs = x_scale_ptr + position * x_scale_stride
        # One scale for the whole tile where the tile lies inside one scale's columns, unless the server loads
        # one for each column: that takes half as many registers again, and so half the blocks at a time.
        if scales_by_column:
            w_scale_column = w_column // block_n
        else:
            w_scale_column = column_tile * BLOCK_SIZE_N // block_n
        w_scale_ptrs = w_scale_ptr + expert * w_scale_stride_expert + w_scale_column * w_scale_stride_column
    elif w_scale_ptr is not None:
        w_scale_ptrs = w_scale_ptr + expert * w_scale_stride_expert
        if channel_scales:
            w_scale = tl.load(w_scale_ptrs + w_column * w_scale_stride_column)[None, :]
        else:
            w_scale = tl.load(w_scale_ptrs)
        if x_scale_ptr is not None:
            if channel_scales:
                x_scale = tl.load(x_scale_ptr + x_row * x_scale_stride, mask=is_slot, other=0.0)[:, None]
            else:
                x_scale = tl.load(x_scale_ptr)

    if swap_ab:
        total = tl.zeros((BLOCK_SIZE_N, BLOCK_SIZE_M), tl.float32)
    else:
        total = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)

    for k_start in range(0, K, BLOCK_SIZE_K):
        # A descriptor gives zeros past K and past N.
        if x_desc is not None:
            x = x_desc.load([row_tile * BLOCK_SIZE_M, k_start])
        elif even_k:
            x = tl.load(x_ptrs, mask=is_slot[:, None], other=0.0)
        else:
            x = tl.load(x_ptrs, mask=is_slot[:, None] & (k < K - k_start)[None, :], other=0.0)
        if w_desc is not None:
            w_tile = w_desc.load([expert_number, column_tile * BLOCK_SIZE_N, k_start])
            w = w_tile.reshape(BLOCK_SIZE_N, BLOCK_SIZE_K).T
        elif even_k:
            w = tl.load(w_ptrs)
        else:
            w = tl.load(w_ptrs, mask=(k < K - k_start)[:, None], other=0.0)

        if block_k > 0:
            group = k_start // block_k
            x_scale = tl.load(x_scale_ptrs + group, mask=is_slot, other=0.0)
            w_scale = tl.load(w_scale_ptrs + group)
            if swap_ab:
                product = tl.dot(tl.trans(w), tl.trans(x))
                if scales_by_column:
                    total += product * w_scale[:, None] * x_scale[None, :]
                else:
                    total += product * (w_scale * x_scale[None, :])
            else:
                product = tl.dot(x, w)
                if scales_by_column:
                    total += product * x_scale[:, None] * w_scale[None, :]
                else:
                    total += product * (x_scale[:, None] * w_scale)
        elif w_scale_ptr is not None and not x_ptr.dtype.element_ty.is_int():
            if swap_ab:
                total = tl.dot(tl.trans(w), tl.trans(x), acc=total)
            else:
                total = tl.dot(x, w.to(x.dtype), acc=total)
        elif swap_ab:
            total += tl.dot(tl.trans(w), tl.trans(x))
        else:
            # Not `acc=total`: added as the servers add it, so that what Triton's passes cannot compile
            # there fails here too (256x64x64 with 4 warps in Triton 3.6, see compiler_failures.json).
            total += tl.dot(x, w)

        if x_desc is None:
            x_ptrs += BLOCK_SIZE_K
        if w_desc is None:
            w_ptrs += BLOCK_SIZE_K

    if swap_ab:
        total = tl.trans(total)
    if block_k == 0 and w_scale_ptr is not None:
        if x_scale_ptr is not None:
            total *= x_scale * w_scale
        else:
            total *= w_scale
    if bias_ptr is not None:
        total += tl.load(bias_ptr + expert * bias_stride + w_column)[None, :].to(tl.float32)
    if multiply_slot_weight:
        total *= tl.load(slot_weight_ptr + slot, mask=is_slot, other=0.0)[:, None]
    if sum_topk > 0:
        add_tile(y_ptr, total, slot // sum_topk, is_slot, column, N, y_stride)
    elif sorted_output:
        store_tile(y_ptr, total, position, is_slot, column, N, y_stride)
    else:
        store_tile(y_ptr, total, slot, is_slot, column, N, y_stride)

    if pdl and not pdl_early:
        tl.extra.cuda.gdc_launch_dependents()


def run_grouped_gemm(
    launch: Launch,
    x: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    alignment: Alignment,
    *,
    top_k: int,
    slot_weights: torch.Tensor,
    bias: torch.Tensor | None = None,
    x_scales: torch.Tensor | None = None,
    weight_scales: torch.Tensor | None = None,
    block_n: int = 0,
    channel_scales: bool = False,
    pdl_early: bool = False,
) -> None:
    """Launch the kernel on tensors whose last dimension is contiguous.

    Args:
        launch: config, kernel (`down` multiplies by the routing weights), block scales, swap_ab, PDL.
        x: `[R, K]` activations; `[P, K]` where the launch takes them sorted.
        weights: `[E, N, K]`.
        out: `[S, N]`; where the launch sums over topk `[S / topk, N]` of zeros; sorted `[P, N]`.
        alignment: slots sorted by expert for the config's BLOCK_SIZE_M.
        top_k: slots that share a row of x.
        slot_weights: `[S]` fp32 routing weights, for up too: they say how many slots there are.
        bias: `[E, N]`.
        x_scales: fp32, `[R, ceil(K / block_k)]` with block scales, `[R, 1]` by row, `[1, 1]` for all.
        weight_scales: fp32, `[E, ceil(N / block_n), ceil(K / block_k)]`, `[E, N, 1]`, `[E, 1, 1]`.
        block_n: columns that share a weight scale.
        channel_scales: scales by row and by channel.
        pdl_early: with PDL, let the next kernel start at once.
    """
    config = launch.config
    columns, k = weights.shape[1:]
    tiles = triton.cdiv(alignment.padded_length, config.block_size_m)
    options: dict[str, int | bool] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if launch.pdl:
        options["launch_pdl"] = True
    x_desc = described(x, config.block_size_m, config.block_size_k) if launch.sorted_input else None
    w_desc = (
        described(weights, 1, config.block_size_n, config.block_size_k) if launch.weights_by_tma else None
    )
    moe_grouped_gemm[(tiles * triton.cdiv(columns, config.block_size_n),)](
        x,
        x_desc,
        weights,
        w_desc,
        out,
        bias,
        x_scales,
        weight_scales,
        slot_weights,
        alignment.slot_ids,
        alignment.tile_experts,
        alignment.used_length,
        columns,
        k,
        alignment.padded_length,
        slot_weights.numel(),
        x.stride(0),
        weights.stride(0),
        weights.stride(1),
        bias.stride(0) if bias is not None else 0,
        out.stride(0),
        x_scales.stride(0) if x_scales is not None else 0,
        weight_scales.stride(0) if weight_scales is not None else 0,
        weight_scales.stride(1) if weight_scales is not None else 0,
        **kernel_constants(
            launch,
            top_k=top_k,
            k=k,
            block_n=block_n,
            channel_scales=channel_scales,
            pdl_early=pdl_early,
        ),
        **options,
    )


def described(values: torch.Tensor, *tile: int) -> TensorDescriptor:
    """A descriptor that loads tiles of a tensor."""
    return TensorDescriptor(values, list(values.shape), list(values.stride()), list(tile))


def kernel_constants(
    launch: Launch,
    *,
    top_k: int,
    k: int,
    block_n: int,
    channel_scales: bool = False,
    pdl_early: bool = False,
) -> dict[str, int | bool]:
    """The compile-time constants of a launch: what `moe_grouped_gemm` declares as constexpr."""
    config = launch.config
    return {
        "top_k": top_k,
        "block_n": block_n if launch.block_k else 0,
        "block_k": launch.block_k,
        "scales_by_column": launch.block_k > 0 and (launch.scales_by_column or config.block_size_n > block_n),
        "channel_scales": channel_scales,
        "multiply_slot_weight": launch.kernel == "down",
        "sorted_output": launch.sorted_output,
        "sum_topk": launch.sum_topk,
        "even_k": k % config.block_size_k == 0,
        "swap_ab": launch.swap_ab,
        "pdl": launch.pdl,
        "pdl_early": launch.pdl and pdl_early,
        "BLOCK_SIZE_M": config.block_size_m,
        "BLOCK_SIZE_N": config.block_size_n,
        "BLOCK_SIZE_K": config.block_size_k,
        "GROUP_SIZE_M": config.group_size_m,
    }
