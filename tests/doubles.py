"""Stand-ins for tests: a performance model whose answer can be worked out by hand."""

from __future__ import annotations

from math import log2
from typing import TYPE_CHECKING

import numpy as np

from moetune.domain.familiarity import Familiarity
from moetune.domain.predict import PerformanceModel, Prediction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moetune.domain.launch import Launch
    from moetune.domain.problem import Kernel, Problem

    TimeUs = Callable[[Kernel, int, Launch], float]


def padded_rows_us(kernel: Kernel, m: int, launch: Launch) -> float:
    """Few rows want small tiles, many want large ones; K tiles of 64 and four warps are best."""
    config = launch.config
    wanted = 16 if m <= 64 else 64 if m <= 1024 else 128
    misfit = abs(log2(config.block_size_m / wanted)) + abs(log2(config.block_size_k / 64))
    odd = (config.num_warps != 4) + (config.num_stages != 3) + (config.block_size_n != 64)
    base = 10.0 if kernel == "up" else 6.0
    return (base + m / 100) * (1 + 0.2 * misfit + 0.1 * odd + config.group_size_m / 1000)


class ModelDouble(PerformanceModel):
    """A performance model that calls a function, and counts how often it is asked."""

    def __init__(self, time_us: TimeUs = padded_rows_us, *others_us: TimeUs) -> None:
        self.time_us = time_us
        self.others_us = others_us  # how other members of the ensemble see it
        self.asked: list[tuple[Kernel, int, int]] = []

    def predict(self, problem: Problem, kernel: Kernel, m: int, launches: Sequence[Launch]) -> Prediction:
        """Times from the function."""
        del problem
        self.asked.append((kernel, m, len(launches)))
        times = np.array([self.time_us(kernel, m, launch) for launch in launches])
        others = [[other(kernel, m, launch) for launch in launches] for other in self.others_us]
        return Prediction(
            time_us=times,
            score=times,
            limits=("memory" if kernel == "up" else "latency",) * len(launches),
            scenarios_us=np.array(others).reshape(len(others), len(launches)),
        )

    def familiarity(self, problem: Problem) -> Familiarity:
        """On known ground."""
        del problem
        return Familiarity(0.25, "a stand-in of the tests")
