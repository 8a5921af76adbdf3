"""Training data: recorded landscapes as features and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moetune.domain.config import KernelConfig
from moetune.domain.features import features, launch_arrays
from moetune.domain.gpu import filled
from moetune.domain.landscape import Landscape, read_landscape
from moetune.domain.launch import Launch
from moetune.domain.predict import dtype_tag
from moetune.domain.problem import Kernel, Problem
from moetune.servers.registry import open_server

FloatArray = NDArray[np.float64]
LANDSCAPES = Path(__file__).parent / "landscapes"
GRIDS = Path(__file__).parents[1] / "benchmarks" / "results"
"""Whole grids that were measured to judge the search."""
OWN_KERNEL = "own-kernel"
"""In the names of what was measured with moetune's own kernel, launched with PDL as SGLang 0.5.23 does."""
_PLACES = ((LANDSCAPES, "*.csv.gz"), (GRIDS, f"*{OWN_KERNEL}*.csv.gz"))
_FEWEST = 8


@dataclass(frozen=True, slots=True)
class Group:
    """All measured configs of one kernel at one m of one landscape.

    Attributes:
        landscape: its name.
        shape: `(E, N, K)`, to hold a shape out whole.
        dtype: as `dtype_tag` names it.
        configs: n of them.
        features: `[n, F]`.
        floor_us: the roofline floor.
        time_us: `[n]` of the first pass.
        second_us: `[n]` of the second pass; NaN where there was none.
    """

    landscape: str
    shape: tuple[int, int, int]
    dtype: str
    problem: Problem
    kernel: Kernel
    m: int
    configs: tuple[KernelConfig, ...]
    features: FloatArray
    floor_us: float
    time_us: FloatArray
    second_us: FloatArray

    def shares(self, inside: NDArray[np.bool_], picked: Sequence[int]) -> FloatArray:
        """What share of the best each of some picks reaches, `[picks]`.

        The best is chosen on the first pass and judged on the second, as the picks are, so that no luck of
        the first makes it look better than it is. Where there was one pass, that has to do for both.

        Args:
            inside: `[n]` which configs count at all.
            picked: their places among those.
        """
        first, second = self.time_us[inside], self.second_us[inside]
        best, picks = int(first.argmin()), np.asarray(picked)
        shares: FloatArray = first[best] / first[picks]
        if not np.isnan(second[best]):
            again = second[best] / second[picks]
            shares = np.where(np.isnan(again), shares, again)
        return shares


def load_landscapes() -> list[Landscape]:
    """All landscapes."""
    paths = [path for folder, pattern in _PLACES for path in sorted(folder.glob(pattern))]
    return [read_landscape(path) for path in paths]


def launches_of(landscape: Landscape, kernel: Kernel, configs: Sequence[KernelConfig]) -> list[Launch]:
    """As they were launched: SGLang's own kernel was without PDL, whatever that release does."""
    problem = landscape.problem
    server = open_server("sglang", problem.server_version, problem.triton_version)
    launches = [server.launch(problem, kernel, config) for config in configs]
    if OWN_KERNEL in landscape.name:
        return launches
    return [replace(launch, pdl=False) for launch in launches]


def groups_of(landscape: Landscape) -> list[Group]:
    """Features and times of a landscape, a group a (kernel, m)."""
    problem = landscape.problem
    gpu = filled(problem.gpu)
    assert problem.gpu.compute_capability is not None
    groups = []
    for (kernel, m), times in landscape.times_us.items():
        ran = {config: time for config, time in times.items() if time is not None}
        if len(ran) < _FEWEST:
            continue
        configs = tuple(ran)
        launches = launch_arrays(launches_of(landscape, kernel, configs), problem.gpu.compute_capability)
        matrix, done = features(problem, kernel, m, launches, gpu)
        second = landscape.second_us.get((kernel, m), {})
        groups.append(
            Group(
                landscape.name,
                (problem.E, problem.N, problem.K),
                dtype_tag(problem),
                problem,
                kernel,
                m,
                configs,
                matrix,
                done.floor_us,
                np.array(list(ran.values())),
                np.array([second.get(config, np.nan) for config in configs]),
            )
        )
    return groups
