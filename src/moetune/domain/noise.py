"""What the starts of one server differ by, and values that no start should have."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise
from statistics import NormalDist, median

from moetune.domain.experiment import Ending, StartResult

TYPICAL = math.sqrt(2) * NormalDist().inv_cdf(0.75)
"""Median difference between two starts, in standard deviations of one: 0.954 for normal noise."""


def start_value(result: StartResult, metric: str) -> float | None:
    """The value of one start: the median of its measured passes, one slow pass does not move it.

    Args:
        result: a start that is over.
        metric: field of `LoadResult`.

    Returns:
        The value; None for a start that did not end well, or with a pass that lacks the metric.
    """
    if result.ending is not Ending.DONE:
        return None
    values = pass_values(result, metric)
    return median(values) if values else None


def pass_values(result: StartResult, metric: str) -> tuple[float, ...]:
    """The metric of each measured pass; none when a pass lacks it or it is no positive number."""
    values = [getattr(one, metric) for one in result.passes]
    if any(value is None or not 0 < value < math.inf for value in values):
        return ()
    return tuple(values)


def noise_of(baseline: Sequence[StartResult], metric: str) -> float | None:
    """Coefficient of variation between starts of the baseline.

    From the differences between starts of the same block, so that a machine that slowly changes does
    not count as noise, and their median, so that one slow start does not. With one start in each block:
    between neighbouring blocks.

    Args:
        baseline: its starts.
        metric: field of `LoadResult`.

    Returns:
        The noise; None below two starts.
    """
    by_block: dict[int, list[float]] = defaultdict(list)
    for one in sorted(baseline, key=lambda result: (result.start.block, result.start.position)):
        value = start_value(one, metric)
        if value is not None:
            by_block[one.start.block].append(math.log(value))
    within = [abs(a - b) for values in by_block.values() for a, b in combinations(values, 2)]
    if within:
        return noise_of_differences(within)
    firsts = [values[0] for _, values in sorted(by_block.items())]
    return noise_of_differences([abs(a - b) for a, b in pairwise(firsts)])


def noise_of_differences(sizes: Iterable[float]) -> float | None:
    """Standard deviation of one start from the sizes of differences between two; None without any."""
    known = list(sizes)
    return median(known) / TYPICAL if known else None
