"""Which experts tokens go to: uniform, or skewed by Zipf's law, new for each launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moetune.measure.alignment import ELSEWHERE

if TYPE_CHECKING:
    from moetune.domain.problem import Problem

_ROWS = 1 << 15


def draw(problem: Problem, m: int, skew: float, generator: torch.Generator) -> torch.Tensor:
    """Draw a routing.

    The experts of a token differ from one another. Fused shared experts take every token; experts of
    other ranks become ELSEWHERE.

    Args:
        problem: E, experts over all ranks, topk and fused shared experts.
        m: tokens.
        skew: Zipf's exponent; 0 is uniform. Which experts are popular is drawn too.
        generator: decides, and says on which device.

    Returns:
        `[m, topk]` int64, experts of this rank by number.
    """
    device = generator.device
    shared, here = problem.fused_shared_experts, problem.routed_experts
    everywhere = max(problem.global_experts, here)
    chosen = problem.topk - shared
    rank = torch.randperm(everywhere, generator=generator, device=device) + 1
    popularity = -skew * rank.double().log().float()
    parts = []
    for start in range(0, m, _ROWS):
        rows = min(_ROWS, m - start)
        # Gumbel noise: the largest few are a draw without replacement by the weights.
        uniform = torch.rand(rows, everywhere, generator=generator, device=device).clamp_(1e-9, 1 - 1e-7)
        scores = popularity - (-uniform.log_()).log_()
        parts.append(scores.topk(chosen, dim=1).indices)
    ids = torch.cat(parts)
    ids = torch.where(ids < here, ids, ELSEWHERE)
    if shared:
        own = torch.arange(here, here + shared, device=device).expand(m, shared)
        ids = torch.cat([ids, own], dim=1)
    return ids
