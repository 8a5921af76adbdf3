"""Where an experiment is: what its live view shows, and how long it may still take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from moetune.domain.experiment import Ending, ScheduledStart

if TYPE_CHECKING:
    from moetune.applications.experiments.record import Finished
    from moetune.domain.experiment import Judgement
    from moetune.domain.experiment_plan import Plan


@dataclass(frozen=True, slots=True)
class Progress:
    """A moment of an experiment.

    Attributes:
        said: what happens, for a person.
        start: the start that is under way, None between two of them.
        begins: a start begins with it, or ends: worth a line where there is no live view.
        finished: starts that are over.
        most_left: starts that there may still be.
        seconds_left: how long those may take; None before any start shows it.
        known: what is known of the arms so far.
    """

    said: str
    start: ScheduledStart | None = None
    begins: bool = False
    finished: int = 0
    most_left: int = 0
    seconds_left: float | None = None
    known: tuple[Judgement, ...] = ()


@dataclass(frozen=True, slots=True)
class Duration:
    """How long a start takes.

    Attributes:
        ready_s: until the server takes requests.
        start_s: of the whole start.
        measured: from starts that were; else from the limits of the plan, which are the most it can be.
    """

    ready_s: float
    start_s: float
    measured: bool


def duration_of(plan: Plan, finished: Sequence[Finished]) -> Duration:
    """How long a start takes, from those that ended well, else from the plan's limits."""
    good = [one.result for one in finished if one.result.passes and not one.preparing]
    if good:
        return Duration(median(one.ready_s for one in good), median(one.took_s for one in good), True)
    filled = [one.result for one in finished if one.preparing and one.result.ending is Ending.DONE]
    if filled:
        # Such a start has one pass of the load, a measured one has the discarded pass and its own.
        ready_s = median(one.ready_s for one in filled)
        rest_s = median(one.took_s - one.ready_s for one in filled)
        return Duration(ready_s, ready_s + rest_s * (1 + plan.load.passes), True)
    load = (plan.load.passes + 1) * plan.load.limit_s
    return Duration(plan.server.ready_s, plan.server.ready_s + load + plan.server.stop_s, False)


def spoken(seconds: float) -> str:
    """A duration for a person: `0.4 s`, `40 s`, `12 min`, `3 h 20 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"
