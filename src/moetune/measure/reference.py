"""The fused-MoE computation in fp32, slow and plain: what every kernel is checked against."""

from __future__ import annotations

import torch

from moetune.measure.alignment import ELSEWHERE


def dequantize_blocks(
    values: torch.Tensor, scales: torch.Tensor, block_shape: tuple[int, int]
) -> torch.Tensor:
    """Multiply each block of the last two dimensions by its scale, in fp32.

    Args:
        values: `[..., rows, columns]` quantized values.
        scales: `[..., ceil(rows / block_rows), ceil(columns / block_columns)]`.
        block_shape: `(block_rows, block_columns)`.
    """
    rows, columns = values.shape[-2:]
    wide = scales.float().repeat_interleave(block_shape[0], dim=-2).repeat_interleave(block_shape[1], dim=-1)
    return values.float() * wide[..., :rows, :columns]


def dequantize(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply values by scales that are as many or one for all in each of the last two dimensions."""
    return values.float() * scales.float()


def unpack_halves(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """Two numbers of 4 bits for each byte along a dimension, the one in the low half first.

    Args:
        packed: bytes.
        dim: counted from the end, below zero.
    """
    both = torch.stack((packed & 15, packed >> 4), dim=packed.dim() + 1 + dim)
    return both.flatten(packed.dim() + dim, packed.dim() + dim + 1)


def dequantize_groups(
    weights: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    *,
    bits: int,
    group_size: int,
) -> torch.Tensor:
    """Weights with a scale, and perhaps a zero point, for each group along their last dimension, in fp32.

    Args:
        weights: bytes `[..., N, K]`, or `[..., N, K / 2]` with 4 bits.
        scales: `[..., N, ceil(K / group_size)]`.
        zeros: bytes `[..., N, ceil(K / group_size)]`, `[..., ceil(N / 2), ...]` with 4 bits; None for the
            middle of the range.
        bits: 4 or 8.
        group_size: weights along K that share a scale.
    """
    if bits == 4:
        weights = unpack_halves(weights, -1)
        zeros = None if zeros is None else unpack_halves(zeros, -2)
    columns, k = weights.shape[-2:]
    middle = torch.full_like(scales, float(1 << (bits - 1)))
    offsets = middle if zeros is None else zeros[..., :columns, :]
    group_of = torch.arange(k, device=weights.device) // group_size
    return (weights.float() - offsets[..., group_of].float()) * scales[..., group_of].float()


def grouped_gemm(
    x: torch.Tensor,
    weights: torch.Tensor,
    expert_of_slot: torch.Tensor,
    top_k: int,
    *,
    slot_weights: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    x_scales: torch.Tensor | None = None,
    weight_scales: torch.Tensor | None = None,
    block_shape: tuple[int, int] | None = None,
) -> torch.Tensor:
    """The grouped GEMM in fp32.

    Args:
        x: `[R, K]` activations; slot s reads row `s // top_k`.
        weights: `[E, N, K]`.
        expert_of_slot: `[S]`, in any shape; slots of an expert ELSEWHERE give zeros.
        top_k: slots that share a row: topk for the up kernel, 1 for the down kernel.
        slot_weights: `[S]` routing weights to multiply with, None for none.
        bias: `[E, N]`, added before the routing weight.
        x_scales: `[R, ceil(K / block_k)]`; without blocks `[R, 1]` or `[1, 1]`.
        weight_scales: `[E, ceil(N / block_n), ceil(K / block_k)]`; without blocks `[E, N, 1]` or `[E, 1, 1]`.
        block_shape: `(block_n, block_k)` of block scales.

    Returns:
        `[S, N]` in fp32.
    """
    experts = expert_of_slot.reshape(-1).long()
    if block_shape is not None and x_scales is not None and weight_scales is not None:
        x = dequantize_blocks(x, x_scales, (1, block_shape[1]))
        weights = dequantize_blocks(weights, weight_scales, block_shape)
    else:
        x = x if x_scales is None else dequantize(x, x_scales)
        weights = weights if weight_scales is None else dequantize(weights, weight_scales)
    result = torch.zeros(experts.numel(), weights.shape[1], device=x.device)
    # By expert, so that a product of a few rows is all that is held at a time.
    for expert in experts.unique().tolist():
        if expert == ELSEWHERE:
            continue
        slots = (experts == expert).nonzero().squeeze(1)
        product = x[slots // top_k].float() @ weights[expert].float().T
        result[slots] = product if bias is None else product + bias[expert].float()
    if slot_weights is not None:
        result *= slot_weights.reshape(-1, 1).float()
    return result


def summed(result: torch.Tensor, topk: int) -> torch.Tensor:
    """The results of each token's topk slots added up: `[S, N]` to `[S / topk, N]`."""
    return result.view(-1, topk, result.shape[1]).sum(1)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected; NaN in the result stays NaN."""
    difference = (result.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))
