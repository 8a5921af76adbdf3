"""In which order the server is started: blocks of every arm beside the baseline, random, then reversed.

The order of a block depends on the seed, the number of the block and the arms in it, never on what was
run: a killed experiment finds the same schedule again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from moetune.domain.experiment import Arm, ScheduledStart
from moetune.domain.experiment_plan import BASELINE, Plan

BASELINE_STARTS = 2
"""Starts of the baseline in every block.

Two cost less than one: all arms of a block share them, a relabelled block has three ways instead of
two, so that fewer blocks can decide, and each block measures the baseline against itself. Numbers:
docs/experiment-statistics.md.
"""


def block_of(
    arms: Sequence[str], block: int, seed: int, baseline_starts: int = BASELINE_STARTS
) -> tuple[ScheduledStart, ...]:
    """The starts of one block, in the order in which they run.

    The order is random; every second block is the reverse of the one before it (ABBA, for any number of
    arms), so that a machine that gets steadily slower or faster favours no arm. An arm that is decided and
    drops out leaves the order of the others as it was.

    Args:
        arms: names of the arms that are still open, in any order, without the baseline; none: the
            baseline is measured against itself alone.
        block: its number, from 0.
        seed: of the plan.
        baseline_starts: how often the baseline is started in it.
    """
    names = sorted({arm for arm in arms if arm != BASELINE})
    tickets = [(name, 0) for name in names] + [(BASELINE, copy) for copy in range(baseline_starts)]
    tickets.sort(key=lambda ticket: _draw(seed, block // 2, *ticket))
    if block % 2:
        tickets.reverse()
    return tuple(ScheduledStart(block, position, name) for position, (name, _) in enumerate(tickets))


def arms_of(plan: Plan) -> tuple[Arm, ...]:
    """The baseline, then each intervention alone, in the order of the plan."""
    alone = (Arm(one.name, (one.name,)) for one in plan.interventions)
    return (Arm(BASELINE), *alone)


def _draw(seed: int, pair: int, name: str, copy: int) -> bytes:
    """A random number for one start of a pair of blocks: the same on every machine and version."""
    return hashlib.sha256(f"{seed}\n{pair}\n{copy}\n{name}".encode()).digest()
