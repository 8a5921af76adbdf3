"""How many blocks and starts an experiment has: what its smallest effect needs, as far as the budget goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetune.domain.decision import proposed_blocks
from moetune.domain.errors import InputError
from moetune.domain.schedule import BASELINE_STARTS

if TYPE_CHECKING:
    from moetune.domain.experiment_plan import Plan


@dataclass(frozen=True, slots=True)
class Size:
    """How large an experiment is.

    Attributes:
        proposed: blocks that the smallest effect of the plan needs.
        planned: blocks that the budget allows of them.
        arms: interventions that are tried alone.
    """

    proposed: int
    planned: int
    arms: int

    @property
    def most_starts(self) -> int:
        """Starts when nothing is decided early, the last arm included, preparing ones left out."""
        return self.planned * self.of_a_block

    @property
    def of_a_block(self) -> int:
        """Starts of a block of single arms, and of one of the last arm."""
        return self.arms + BASELINE_STARTS + (1 + BASELINE_STARTS if self.arms > 1 else 0)


def preparing_starts(arms: int, *, caches: bool) -> int:
    """Starts that only fill caches: one of the baseline, of each arm, and of the last arm.

    One that fails is tried again, and takes its arm out of the blocks.

    Args:
        arms: interventions that are tried alone.
        caches: whether caches of them are, or were, to be filled.
    """
    return 1 + arms + (arms > 1) if caches and arms else 0


def size_of(plan: Plan, arms: int, preparing: int) -> Size:
    """How many blocks an experiment has.

    Args:
        plan: the experiment.
        arms: interventions that are tried alone.
        preparing: starts that only fill caches.

    Raises:
        InputError: when the budget does not reach for one block.
    """
    if not arms:
        return Size(0, 0, 0)
    proposed = proposed_blocks(plan.decision, arms)
    if not plan.budget.starts:
        return Size(proposed, proposed, arms)
    wanted = Size(proposed, proposed, arms)
    left = plan.budget.starts - preparing
    if left < wanted.of_a_block:
        raise InputError(
            f"a budget of {plan.budget.starts} starts does not reach for one of each arm: that takes "
            f"{wanted.of_a_block + preparing}, {preparing} of them to fill caches",
            f"raise budget.starts; {wanted.most_starts + preparing} are proposed",
        )
    return Size(proposed, min(proposed, left // wanted.of_a_block), arms)
