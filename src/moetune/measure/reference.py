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
        x_scales: `[R, ceil(K / block_k)]`.
        weight_scales: `[E, ceil(N / block_n), ceil(K / block_k)]`.
        block_shape: `(block_n, block_k)` of the scales.

    Returns:
        `[S, N]` in fp32.
    """
    experts = expert_of_slot.reshape(-1).long()
    if block_shape is not None and x_scales is not None and weight_scales is not None:
        x = dequantize_blocks(x, x_scales, (1, block_shape[1]))
        weights = dequantize_blocks(weights, weight_scales, block_shape)
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


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected; NaN in the result stays NaN."""
    difference = (result.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))
