"""Training data: recorded landscapes as features and times."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moetune.domain.config import KernelConfig
from moetune.domain.features import features, launch_arrays
from moetune.domain.gpu import filled
from moetune.domain.landscape import Landscape, read_landscape
from moetune.domain.problem import Kernel, Problem
from moetune.servers.registry import open_server

FloatArray = NDArray[np.float64]
LANDSCAPES = Path(__file__).parent / "landscapes"


@dataclass(frozen=True, slots=True)
class Group:
    """All measured configs of one kernel at one m of one landscape.

    Attributes:
        landscape: its name.
        shape: `(E, N, K)`, to hold a shape out whole.
        configs: n of them.
        features: `[n, F]`.
        floor_us: the roofline floor.
        time_us: `[n]`.
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


def load_landscapes(folder: Path = LANDSCAPES) -> list[Landscape]:
    """All landscapes of a folder."""
    return [read_landscape(path) for path in sorted(folder.glob("*.csv.gz"))]


def groups_of(landscape: Landscape) -> list[Group]:
    """Features and times of a landscape, a group a (kernel, m)."""
    problem = landscape.problem
    server = open_server("sglang", problem.server_version, problem.triton_version)
    gpu = filled(problem.gpu)
    assert problem.gpu.compute_capability is not None
    groups = []
    for (kernel, m), times in landscape.times_us.items():
        ran = {config: time for config, time in times.items() if time is not None}
        if len(ran) < 8:
            continue
        launches = launch_arrays(
            [server.launch(problem, kernel, config) for config in ran], problem.gpu.compute_capability
        )
        matrix, done = features(problem, kernel, m, launches, gpu)
        shape = (problem.E, problem.N, problem.K)
        dtype = problem.quantization.dtype.value
        groups.append(
            Group(
                landscape.name,
                shape,
                dtype,
                problem,
                kernel,
                m,
                tuple(ran),
                matrix,
                done.floor_us,
                np.array(list(ran.values())),
            )
        )
    return groups
