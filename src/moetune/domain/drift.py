"""What people should know beside a verdict: drift within a start, drift of the machine, slow starts.

None of it enters a verdict. Drift within a start is in both arms, and its value is a median of passes;
drift of the machine is taken out by blocks whose order is reversed every second time; a slow start is
clipped by the test.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from statistics import median

from moetune.domain.experiment import StartResult
from moetune.domain.noise import pass_values, start_value

_FEWEST_WITHIN = 3  # starts with two passes or more
_SAME_WAY = 0.75  # share of them that have to change the same way
_FEWEST_OVER = 6  # starts of the baseline
_TREND_LIMIT = 2.576  # two-sided 1% of Mann and Kendall's statistic, normal approximation
_FAR = 5.0  # standard deviations of a start
_LEAST_FAR = 0.005  # and no less than this, where starts hardly differ


def drift_notes(name: str, starts: Sequence[StartResult], metric: str, margin: float) -> Iterator[str]:
    """Says when the passes of a start go one way.

    Args:
        name: of the arm.
        starts: its starts.
        metric: field of `LoadResult`.
        margin: changes within it are not told.
    """
    passes = [values for one in starts if len(values := pass_values(one, metric)) > 1]
    changes = [math.log(values[-1] / values[0]) for values in passes]
    if len(changes) < _FEWEST_WITHIN:
        return
    change = median(changes)
    same = sum(one * change > 0 for one in changes)
    if abs(change) > math.log1p(margin) and same >= _SAME_WAY * len(changes):
        yield (
            f"within a start of {name}, {metric} {_goes(change)} from the first measured pass to the last "
            f"({same} of {len(changes)} starts): its starts do not settle in one pass"
        )


def trend_notes(baseline: Sequence[StartResult], metric: str, margin: float) -> Iterator[str]:
    """Says when the baseline gets steadily better or worse over the experiment.

    By the slope of Theil and Sen, tested as Mann and Kendall do.

    Args:
        baseline: its starts.
        metric: field of `LoadResult`.
        margin: changes within it are not told.
    """
    ordered = sorted(baseline, key=lambda one: (one.start.block, one.start.position))
    values = [math.log(value) for one in ordered if (value := start_value(one, metric)) is not None]
    count = len(values)
    if count < _FEWEST_OVER:
        return
    pairs = list(combinations(range(count), 2))
    score = sum((values[b] > values[a]) - (values[b] < values[a]) for a, b in pairs)
    limit = _TREND_LIMIT * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    change = median((values[b] - values[a]) / (b - a) for a, b in pairs) * (count - 1)
    if abs(score) > limit and abs(change) > math.log1p(margin):
        yield (
            f"{metric} of the baseline {_goes(change)} over the experiment: arms are compared within blocks, "
            f"in an order that is reversed every second time, so that it favours none"
        )


def outlier_notes(
    baseline: Sequence[StartResult], starts: Sequence[StartResult], metric: str, effect: float, noise: float
) -> Iterator[str]:
    """Names starts that are far from the others of their block.

    Args:
        baseline: starts of the baseline.
        starts: starts of the arm, in the same blocks.
        metric: field of `LoadResult`.
        effect: of the arm, as a logarithm; it is taken off first.
        noise: standard deviation between starts.
    """
    blocks: dict[int, list[tuple[float, StartResult]]] = defaultdict(list)
    for group, shift in ((baseline, 0.0), (starts, effect)):
        for one in group:
            value = start_value(one, metric)
            if value is not None:
                blocks[one.start.block].append((math.log(value) - shift, one))
    limit = max(_FAR * noise, _LEAST_FAR)
    for block, members in sorted(blocks.items()):
        far = (
            [
                (value - median(other for other, its in members if its is not one), one)
                for value, one in members
            ]
            if len(members) > 1
            else []
        )
        if not far:
            continue
        distance, one = max(far, key=lambda pair: abs(pair[0]))
        if abs(distance) <= limit:
            continue
        if len(members) == 2:
            yield f"the two starts of block {block} are {_percent(-abs(distance))} apart in {metric}"
        else:
            where = "above" if distance > 0 else "below"
            yield (
                f"{metric} of start {one.start.position + 1} of block {block} ({one.start.arm}) is "
                f"{_percent(distance)} {where} the others of its block: its size is not counted in full"
            )


def _goes(change: float) -> str:
    return f"goes {'up' if change > 0 else 'down'} by {_percent(change)}"


def _percent(change: float) -> str:
    return f"{abs(math.expm1(change)):.1%}"
