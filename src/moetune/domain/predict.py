"""The performance model: what a config will take, and which are likely to win, without measuring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moetune.domain.launch import Launch
from moetune.domain.problem import Kernel, Problem


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predictions for n configs of one kernel at one m.

    Attributes:
        time_us: `[n]` predicted time with cold weights, in microseconds.
        score: `[n]` what to rank by, lower is better: the time, corrected by the winner head.
        limits: for each config the resource that limits it: `memory`, `tensor cores`, `latency`.
    """

    time_us: NDArray[np.float64]
    score: NDArray[np.float64]
    limits: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Familiarity:
    """How far a problem lies from what the model has seen.

    Attributes:
        distance: 0 on known ground, 1 and more far from it.
        text: the same in words.
    """

    distance: float
    text: str


class PerformanceModel:
    """The packaged performance model."""

    @classmethod
    def load(cls) -> PerformanceModel:
        """Read the packaged artifact."""
        return cls()

    def predict(self, problem: Problem, kernel: Kernel, m: int, launches: Sequence[Launch]) -> Prediction:
        """Predict the time of n launches of one kernel at one m."""
        raise NotImplementedError

    def familiarity(self, problem: Problem) -> Familiarity:
        """Say how far the problem lies from known ground."""
        raise NotImplementedError
