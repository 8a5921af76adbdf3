"""When an experiment may decide, and how much of its probability of error each of those looks may use.

Looking at the numbers after every block and stopping at the first that pleases finds an effect in nothing
sooner or later. So the looks are fixed before the first start, each has its own part of the plan's alpha,
and the parts add up to it: whatever the looks have to do with each other, all together are wrong no more
often than alpha (Bonferroni). The same over the arms: each has an equal part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from moetune.domain.schedule import BASELINE_STARTS

_LOOKS = ((0.25, 0.1), (0.6, 0.2), (1.0, 0.7))
"""Share of the planned blocks after which a look is taken, and its part of alpha.

Found by simulation among one to three looks (docs/experiment-statistics.md): the fewest starts for a 3%
effect at 2% noise. With few blocks the first comes too early to show anything, and its part goes to
the second.
"""

HELPS_PART = 0.15
"""Of alpha, for claims that an arm helps.

What helps stays in place, what hurts is taken back as everything else is: the first error is worse. The limit
is a fifth (1% of 5%); what is left of it keeps a count over 1,000 experiments below it too.
"""

HURTS_PART = 0.75
"""Of alpha, for claims that an arm hurts; the tenth that is left is for the same reason."""

STOP_LEVEL = 0.05
"""One-sided level at which the smallest effect is excluded, both ways: then more starts are not worth it.

It stops an arm without a claim, so it needs no part of alpha. A true effect of that size is lost to it
in about 1 of 40 experiments; the proposed number of blocks allows for them.
"""


@dataclass(frozen=True, slots=True)
class Look:
    """One time at which an arm may be decided.

    Attributes:
        blocks: that it comes after.
        helps: largest p-value with which the arm is said to help.
        hurts: largest p-value with which it is said to hurt.
        interval: one-sided level of each end of the interval that has to lie within the margin.
        last: nothing comes after it.
    """

    blocks: int
    helps: float
    hurts: float
    interval: float
    last: bool


@lru_cache(maxsize=1024)
def looks_of(planned: int, arms: int, alpha: float) -> tuple[Look, ...]:
    """The looks at one arm.

    Args:
        planned: most blocks.
        arms: how many arms share alpha.
        alpha: most probability of a wrong claim over the whole experiment.
    """
    own = alpha / arms
    looks = []
    kept = 0.0
    for share, part in _LOOKS:
        blocks = math.ceil(share * planned - 1e-9)
        kept += part
        if share < 1 and (blocks >= planned or least_p(blocks) > own * kept * HELPS_PART):
            continue
        looks.append(_look(blocks, own * kept, last=blocks >= planned))
        kept = 0.0
    return tuple(looks)


def look_at(blocks: int, planned: int, arms: int, alpha: float) -> tuple[Look, bool]:
    """What may be claimed after so many blocks.

    Args:
        blocks: with a pair.
        planned: most blocks.
        arms: how many arms share alpha.
        alpha: most probability of a wrong claim over the whole experiment.

    Returns:
        The look that is due, else the next one, and whether it is due.
    """
    looks = looks_of(max(planned, 1), arms, alpha)
    look = next((one for one in looks if one.blocks >= blocks), looks[-1])
    return look, look.blocks <= blocks


def look_at_end(blocks: int, planned: int, arms: int, alpha: float) -> Look:
    """The look at an arm that ends before its planned blocks, for a reason that its numbers do not know.

    What the looks that did not come would have used is used now. An arm that was stopped by its own numbers
    has no such look: it would be a second chance.

    Args:
        blocks: with a pair.
        planned: most blocks.
        arms: how many arms share alpha.
        alpha: most probability of a wrong claim over the whole experiment.
    """
    looks = looks_of(max(planned, 1), arms, alpha)
    left = [one for one in looks if one.blocks >= blocks] or [looks[-1]]
    return _look(blocks, math.fsum(one.interval for one in left), last=True)


def _look(blocks: int, own: float, *, last: bool) -> Look:
    return Look(blocks, own * HELPS_PART, own * HURTS_PART, own, last)


def least_p(blocks: int) -> float:
    """Smallest p-value that so many blocks can have."""
    return float(1 + BASELINE_STARTS) ** -blocks
