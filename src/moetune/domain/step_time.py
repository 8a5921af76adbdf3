"""How much of a server's step the MoE kernels take: unions of intervals over the step's wall time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_LONGEST_GAP = 1.0
"""Times its busy span that the wait for the next step may be and still belong to the step. A longer
one is a server without requests; leaving it out can only raise the share, so that a bound stays one."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step on one GPU, microseconds.

    Attributes:
        begin_us: of its first kernel.
        wall_us: until the next step's first kernel, or until its last kernel's end before a long wait.
        busy_us: union of all its kernels.
        up_us: union of the up kernels; with `down_us` None where the two cannot be told apart.
        down_us: union of the down kernels.
        moe_us: union of the up and down kernels.
        moe_kernels: launches of them.
    """

    begin_us: float
    wall_us: float
    busy_us: float
    up_us: float | None
    down_us: float | None
    moe_us: float
    moe_kernels: int

    @property
    def share(self) -> float:
        """Of the wall time, what the MoE kernels take."""
        return self.moe_us / self.wall_us if self.wall_us else 0.0


def union_us(begin_us: Floats, end_us: Floats) -> float:
    """Length of a union of intervals.

    Args:
        begin_us: `[n]`, in any order.
        end_us: `[n]`, no smaller than the beginnings.
    """
    if not len(begin_us):
        return 0.0
    order = np.argsort(begin_us, kind="stable")
    begin, end = begin_us[order], end_us[order]
    reached = np.maximum.accumulate(end)
    covered_until = np.concatenate([begin[:1], reached[:-1]])
    return float(np.sum(np.maximum(0.0, end - np.maximum(begin, covered_until))))


def step_times(steps: Sequence[tuple[Floats, Floats, NDArray[np.bool_]]]) -> tuple[StepTime, ...]:
    """Times of steps.

    Args:
        steps: of each the kernels' beginnings `[n]` and ends `[n]` in microseconds and whether each is
            an up or a down kernel `[n]`; steps without a kernel are left out.

    Returns:
        In the order of their first kernels.
    """
    found = sorted((step for step in steps if len(step[0])), key=lambda step: float(step[0].min()))
    begins = [float(begin.min()) for begin, _, _ in found]
    times = []
    for index, (begin, end, moe) in enumerate(found):
        span = float(end.max()) - begins[index]
        wall = span
        if index + 1 < len(found):
            period = begins[index + 1] - begins[index]
            if span <= period <= span * (1.0 + _LONGEST_GAP):
                wall = period
        times.append(_step_time(begin, end, moe, begins[index], wall))
    return tuple(times)


def _step_time(begin: Floats, end: Floats, moe: NDArray[np.bool_], first: float, wall: float) -> StepTime:
    order = np.argsort(begin[moe], kind="stable")
    moe_begin, moe_end = begin[moe][order], end[moe][order]
    up = down = None
    # A layer launches up, then down: in the order of their beginnings they alternate.
    if len(moe_begin) and len(moe_begin) % 2 == 0:
        up = union_us(moe_begin[0::2], moe_end[0::2])
        down = union_us(moe_begin[1::2], moe_end[1::2])
    return StepTime(
        begin_us=first,
        wall_us=wall,
        busy_us=union_us(begin, end),
        up_us=up,
        down_us=down,
        moe_us=union_us(moe_begin, moe_end),
        moe_kernels=len(moe_begin),
    )


def time_saved(share: float, speedup: float) -> float:
    """Part of a step's time that a kernel's speedup saves, by Amdahl's law.

    Args:
        share: of the step's wall time that the kernel takes, 0 to 1.
        speedup: of the kernel; infinity: as if it took no time.
    """
    return share * (1.0 - 1.0 / speedup)


def throughput_gain(saved: float) -> float:
    """What a step that takes `saved` (0 to 1) less of its time gives in throughput, as a factor."""
    return 1.0 / (1.0 - saved) if saved < 1.0 else float("inf")
