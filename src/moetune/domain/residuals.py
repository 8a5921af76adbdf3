"""What measurements teach about a prediction: a Gaussian process over its errors.

The performance model is off by an amount that changes slowly from one config to the next and from
one m to the next, so that a measurement of one config says something about its neighbours, at this
m and at others. The process has that shape: an offset common to all configs of one m, and a part
that decays with the distance of configs (in powers of two) and of m.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moetune.domain.config import KernelConfig

    FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spread:
    """Standard deviations (of log time) and lengths (in powers of two) of the process.

    Fitted to the errors that the model makes on shapes that it has not seen (`training/evaluate.py`).

    Attributes:
        offset: common to all configs of one m.
        config: the part that decays with the distance of configs, common to all m.
        local: the part that decays with the distance of configs and of m.
        noise: of one measurement.
        lengths: for BLOCK_SIZE_M, _N, _K, GROUP_SIZE_M, num_warps, and num_stages in stages.
        m_length: for m.
    """

    offset: float = 0.20
    config: float = 0.05
    local: float = 0.06
    noise: float = 0.006
    lengths: tuple[float, ...] = (0.9, 0.9, 0.9, 3.0, 0.9, 2.0)
    m_length: float = 1.5


def config_points(configs: Sequence[KernelConfig], lengths: Sequence[float]) -> FloatArray:
    """Configs as points whose distance says how alike they are, `[n, 6]`."""
    rows = [
        (
            math.log2(config.block_size_m),
            math.log2(config.block_size_n),
            math.log2(config.block_size_k),
            math.log2(config.group_size_m),
            math.log2(config.num_warps),
            float(config.num_stages),
        )
        for config in configs
    ]
    points: FloatArray = np.asarray(rows, dtype=np.float64).reshape(len(rows), 6) / np.asarray(lengths)
    return points


class Residuals:
    """Errors of a prediction, learned from measurements.

    Args:
        configs: all configs that may be asked about.
        ms: all m that may be asked about.
        spread: shape of the process.
    """

    def __init__(self, configs: Sequence[KernelConfig], ms: Sequence[int], spread: Spread) -> None:
        points = config_points(configs, spread.lengths)
        squared = np.square(points).sum(1)
        distance = np.maximum(squared[:, None] + squared[None, :] - 2 * points @ points.T, 0.0)
        self._alike = np.exp(-0.5 * distance)
        logs = np.log2(np.asarray(ms, dtype=np.float64)) / spread.m_length
        self._near = np.exp(-0.5 * np.square(logs[:, None] - logs[None, :]))
        self._same = np.eye(len(ms))
        self._spread = spread
        self._configs = np.zeros(0, dtype=np.intp)
        self._ms = np.zeros(0, dtype=np.intp)
        self._whiten = np.zeros((0, 0))
        self._weights = np.zeros(0)

    def _covariance(
        self,
        configs: NDArray[np.intp],
        ms: NDArray[np.intp],
        others: NDArray[np.intp],
        other_ms: NDArray[np.intp],
    ) -> FloatArray:
        spread = self._spread
        near = self._near[np.ix_(ms, other_ms)]
        decaying = self._alike[np.ix_(configs, others)]
        offset = spread.offset**2 * (0.7 * near + 0.3 * self._same[np.ix_(ms, other_ms)])
        covariance: FloatArray = decaying * (spread.config**2 + spread.local**2 * near) + offset
        return covariance

    def learn(self, configs: Sequence[int], ms: Sequence[int], errors: Sequence[float]) -> None:
        """Take all measurements so far.

        Args:
            configs: place of the config of each, `[k]`.
            ms: place of the m of each, `[k]`.
            errors: log of measured over predicted time, `[k]`.
        """
        self._configs, self._ms = np.asarray(configs, dtype=np.intp), np.asarray(ms, dtype=np.intp)
        covariance = self._covariance(self._configs, self._ms, self._configs, self._ms)
        covariance[np.diag_indices_from(covariance)] += self._spread.noise**2
        # The factor is inverted once: every m asks for it afterwards.
        self._whiten = np.linalg.inv(np.linalg.cholesky(covariance))
        self._weights = self._whiten.T @ (self._whiten @ np.asarray(errors, dtype=np.float64))

    def expect(self, configs: NDArray[np.intp], m: int) -> tuple[FloatArray, FloatArray]:
        """Mean and standard deviation of the error of some configs at one m, `[n]` each."""
        spread = self._spread
        prior = spread.offset**2 + spread.config**2 + spread.local**2
        if not len(self._configs):
            return np.zeros(len(configs)), np.full(len(configs), math.sqrt(prior))
        across = self._covariance(configs, np.full(len(configs), m), self._configs, self._ms)
        explained = np.square(across @ self._whiten.T).sum(1)
        return across @ self._weights, np.sqrt(np.maximum(prior - explained, 1e-10))
