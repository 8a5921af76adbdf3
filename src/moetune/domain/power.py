"""How many starts an effect needs, and which effect so many starts could have found."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

from moetune.domain.experiment_plan import DecisionPlan
from moetune.domain.looks import least_p, looks_of
from moetune.domain.schedule import BASELINE_STARTS

CHANCE = 0.8
"""Probability with which the smallest effect has to be found."""

_ALLOWANCE = 1.04
"""What the clipped permutation test needs beyond a t-test of the same starts, as a share of the effect.

By simulation (docs/experiment-statistics.md): it pays for clipping, whole labellings, and arms that are
stopped before their effect shows.
"""

_MOST_BLOCKS = 5000
_NORMAL = NormalDist()


def smallest_effect(noise: float, blocks: int, arms: int, decision: DecisionPlan) -> float:
    """The true improvement that so many blocks find with 80% probability, as a share (0.03: 3%).

    From the power of a t-test on the starts of a block less the block's mean, at the level of the last
    look, with an allowance for what the exact test costs beyond it.

    Args:
        noise: coefficient of variation between starts.
        blocks: that the arm and the baseline share.
        arms: how many arms share alpha.
        decision: gives alpha.

    Returns:
        The effect; infinity where so few blocks cannot show any.
    """
    if blocks < 1:
        return math.inf
    level = looks_of(blocks, arms, decision.alpha)[-1].helps
    if least_p(blocks) > level:
        return math.inf
    freedom = blocks * BASELINE_STARTS - 1
    limit = _student(level, freedom)
    needed = limit + _NORMAL.inv_cdf(CHANCE) * math.sqrt(1 + limit**2 / (2 * freedom))
    error = noise * math.sqrt((1 + 1 / BASELINE_STARTS) / blocks)
    return math.expm1(needed * error * _ALLOWANCE)


@lru_cache(maxsize=256)
def proposed_blocks(decision: DecisionPlan, arms: int) -> int:
    """Fewest blocks that find the plan's smallest effect, at its noise, with 80% probability.

    Each block is one start of each arm and `BASELINE_STARTS` of the baseline.

    Args:
        decision: the effect, the noise and alpha.
        arms: how many interventions are tried alone. The last arm counts for nothing here: it is
            reached by way of those that helped, and takes over their part of alpha (`arms_of_last`).
    """
    for blocks in range(1, _MOST_BLOCKS):
        if smallest_effect(decision.noise, blocks, arms, decision) <= decision.smallest_effect:
            return blocks
    return _MOST_BLOCKS


def arms_of_last(tried: int, helped: int) -> int:
    """By how many arms alpha is divided for the last arm, all that helped together.

    Those that were rightly said to help no longer need their parts of alpha: the last arm takes them over
    (Bretz, Maurer, Brannath and Posch 2009, A graphical approach to sequentially rejective multiple test
    procedures). It has blocks of its own, so that it is judged on new starts.

    Args:
        tried: interventions that were tried alone.
        helped: of them, those that helped.
    """
    return math.ceil(tried / helped) if helped else tried


def _student(level: float, freedom: int) -> float:
    """Upper quantile of Student's t, by its Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5)."""
    z = _NORMAL.inv_cdf(1 - level)
    terms: tuple[float, ...] = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))
