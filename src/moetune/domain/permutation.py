"""The exact test: how often would chance alone, by relabelling the starts of each block, do as well.

A block holds one start of the arm and one or more of the baseline. Where the intervention does nothing,
each start of a block could as well have been the arm's. So the arm's label is moved through every
start of every block, and the share of labellings that look at least as good as the real one is the
probability of the result by chance: exact for any number of blocks and any noise, with no normal
distribution assumed (Fisher 1935, The Design of Experiments; Pitman 1937). With one start of the baseline
in a block this is the sign-flip test of paired differences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from moetune.domain.noise import TYPICAL

if TYPE_CHECKING:
    from numpy.typing import NDArray

CLIP = 2.0
"""Differences count up to this many typical ones: one slow start cannot outweigh all others.

The typical difference is the median of all differences within blocks, 0.95 standard deviations
of a start for normal noise. Labellings leave it as it is, so that the test stays exact (Huber 1964 for the
clipping).
"""

ROUNDING = 1 + 1e-9
"""Probabilities are sums of floating point numbers: one that equals a limit is not above it."""

_EXACTNESS = 1e-6
"""Of an estimate or a limit, as a logarithm of the ratio."""

_NONE = 1e-6
"""A statistic this near to zero is zero: where it is so over a range, the estimate is the middle."""

_STEPS = 50
"""Parts of a typical difference that scores are rounded to: whole numbers can be counted, not sampled."""


class Blocks:
    """The blocks that an arm and the baseline share, as logarithms of their values.

    Args:
        arm: value of the arm's start of each block.
        baseline: values of the baseline's starts of each block, at least one each.
    """

    def __init__(self, arm: Sequence[float], baseline: Sequence[Sequence[float]]) -> None:
        width = 1 + max((len(one) for one in baseline), default=1)
        values = np.full((len(arm), width), np.nan)
        for row, own, others in zip(values, arm, baseline, strict=True):
            row[0] = own
            row[1 : 1 + len(others)] = others
        self._values = values
        self._real = ~np.isnan(values)
        self._sizes = self._real.sum(axis=1)
        first, second = np.triu_indices(width, 1)
        self._pairs = (first, second, self._real[:, first] & self._real[:, second])
        self._both = self._real[:, :, None] & self._real[:, None, :]
        self._known: dict[float, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def noise(self, effect: float) -> float:
        """Standard deviation of one start, from the differences within blocks.

        Args:
            effect: of the arm; it is taken off first.
        """
        return self._typical(self._less(effect)) / TYPICAL

    @property
    def least_p(self) -> float:
        """Smallest probability that so many blocks can show."""
        return float(np.prod(1.0 / self._sizes))

    def scores(self, shift: float = 0.0) -> NDArray[np.int64]:
        """`[n, starts]` what each start would count for if it were the arm's.

        Args:
            shift: taken off the arm's values first: the effect that is assumed.
        """
        scores: NDArray[np.int64] = np.rint(self._scores(shift)).astype(np.int64)
        return scores

    def _scores(self, shift: float) -> NDArray[np.float64]:
        values = self._less(shift)
        typical = self._typical(values)
        if not typical:
            return np.zeros(values.shape)
        apart = (values[:, :, None] - values[:, None, :]) * (_STEPS / typical)
        apart = np.where(self._both, np.clip(apart, -CLIP * _STEPS, CLIP * _STEPS), 0.0)
        counted: NDArray[np.float64] = apart.sum(axis=2) / (self._sizes - 1)[:, None]
        return counted

    def probability(self, shift: float = 0.0, *, above: bool = True) -> float:
        """How probable it is that chance makes the arm look as good as it does, or better; exact.

        Args:
            shift: the effect that is assumed, as a logarithm.
            above: whether "better" is above; else below.
        """
        if shift not in self._known:
            self._known[shift] = self._probabilities(shift)
        return self._known[shift][0 if above else 1]

    def _probabilities(self, shift: float) -> tuple[float, float]:
        """Of sums as high as that of the arm's own starts or higher, and as low or lower.

        The chance of every possible sum, block by block: each start of a block is equally often the arm's.
        """
        scores = self.scores(shift)
        offsets = scores - np.where(self._real, scores, scores.max()).min(axis=1, keepdims=True)
        chances = np.ones(1)
        for row, size in zip(offsets.tolist(), self._sizes.tolist(), strict=True):
            own = row[:size]
            longer = np.zeros(len(chances) + max(own))
            chances /= size
            for offset in own:
                longer[offset : offset + len(chances)] += chances
            chances = longer
        seen = int(offsets[:, 0].sum())
        return float(min(1.0, chances[seen:].sum())), float(min(1.0, chances[: seen + 1].sum()))

    def two_sided(self) -> float:
        """Twice the smaller of both probabilities that there is no effect."""
        return min(1.0, 2 * min(self.probability(), self.probability(above=False)))

    def estimate(self) -> float:
        """The effect at which the statistic of the test is zero: a mean that outliers cannot move far."""
        low = self._where(lambda shift: self._scores(shift)[:, 0].sum() > _NONE)
        high = self._where(lambda shift: self._scores(shift)[:, 0].sum() > -_NONE)
        return (low + high) / 2

    def lower(self, level: float) -> float:
        """The smallest effect that the test does not refuse at a one-sided level, at least `least_p`."""
        limit = max(level, self.least_p) * ROUNDING
        return self._where(lambda shift: self.probability(shift) <= limit)

    def upper(self, level: float) -> float:
        """The largest effect that the test does not refuse at a one-sided level, at least `least_p`."""
        limit = max(level, self.least_p) * ROUNDING
        return self._where(lambda shift: self.probability(shift, above=False) > limit)

    def _less(self, shift: float) -> NDArray[np.float64]:
        values = self._values.copy()
        values[:, 0] -= shift
        return values

    def _typical(self, values: NDArray[np.float64]) -> float:
        """Median difference within blocks; their mean where half of them are none."""
        first, second, known = self._pairs
        sizes = np.abs(values[:, first] - values[:, second])[known]
        sizes.sort()
        return float(sizes[(len(sizes) - 1) // 2] + sizes[len(sizes) // 2]) / 2 or float(sizes.mean())

    def _where(self, is_below: Callable[[float], bool]) -> float:
        """Where a condition that holds for small effects stops to hold, by halving."""
        apart = self._values[:, :1] - self._values[:, 1:]
        low, high = float(np.nanmin(apart)), float(np.nanmax(apart))
        margin = max(high - low, 1e-9)
        low, high = low - margin, high + margin
        while high - low > _EXACTNESS:
            middle = (low + high) / 2
            low, high = (middle, high) if is_below(middle) else (low, middle)
        return (low + high) / 2
