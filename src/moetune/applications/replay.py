"""Replays a search strategy on a recorded landscape: no GPU, and its regret is exact."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from moetune.domain.errors import InputError
from moetune.domain.landscape import read_landscape
from moetune.domain.predict import PerformanceModel
from moetune.domain.problem import KERNELS
from moetune.domain.search import STRATEGIES, Field
from moetune.domain.space import sglang_grid, worth_trying
from moetune.domain.version import parse_release
from moetune.servers.registry import open_server

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from moetune.domain.config import KernelConfig
    from moetune.domain.launch import Launch
    from moetune.domain.problem import Kernel, Problem

MAX_MEASUREMENTS = 100_000


@dataclass(frozen=True, slots=True)
class Replayed:
    """One (kernel, m) of a replay.

    Attributes:
        best_us: the best time in the landscape.
        chosen_us: the time of what was chosen; None when it cannot run.
        measurements: made, repeats not counted.
    """

    kernel: Kernel
    m: int
    best_us: float
    chosen_us: float | None
    measurements: int

    @property
    def fraction(self) -> float:
        """`best_us` over `chosen_us`; 0 when what was chosen cannot run."""
        return self.best_us / self.chosen_us if self.chosen_us else 0.0


@dataclass(frozen=True, slots=True)
class Replay:
    """A strategy replayed on a landscape.

    Attributes:
        compiled: distinct configs that were asked for, by kernel.
    """

    landscape: str
    strategy: str
    problems: tuple[Replayed, ...]
    compiled: tuple[tuple[Kernel, int], ...]

    @property
    def geomean(self) -> float:
        """Geometric mean of the fractions."""
        if any(problem.fraction <= 0 for problem in self.problems):
            return 0.0
        return math.exp(sum(math.log(problem.fraction) for problem in self.problems) / len(self.problems))

    @property
    def worst(self) -> float:
        """The smallest fraction."""
        return min(problem.fraction for problem in self.problems)

    def to_json(self) -> dict[str, Any]:
        """The document of `moetune replay --json`."""
        return {
            "schema": "moetune.replay/1",
            "landscape": self.landscape,
            "strategy": self.strategy,
            "problems": [
                {
                    "kernel": problem.kernel,
                    "m": problem.m,
                    "best_us": problem.best_us,
                    "chosen_us": problem.chosen_us,
                    "fraction": problem.fraction,
                    "measurements": problem.measurements,
                }
                for problem in self.problems
            ],
            "geomean": self.geomean,
            "worst": self.worst,
            "compiled": dict(self.compiled),
        }


def declared_space(problem: Problem, kernel: Kernel) -> list[Launch]:
    """SGLang's grid less what the constraints rule out, as the server would launch it.

    What a landscape's file holds is not looked at.
    """
    server = open_server(problem.server, problem.server_version, problem.triton_version or None)
    triton = parse_release(server.triton_version)
    launches = (server.launch(problem, kernel, config) for config in sglang_grid())
    return [launch for launch in launches if worth_trying(launch, problem.gpu, triton)]


def field_of(
    problem: Problem, kernel: Kernel, ms: Sequence[int], launches: list[Launch], model: PerformanceModel
) -> Field:
    """What a strategy may know before it measures: the configs and the model's predictions."""
    predictions = [model.predict(problem, kernel, m, launches) for m in ms]
    return Field(
        tuple(launch.config for launch in launches),
        tuple(ms),
        np.stack([prediction.time_us for prediction in predictions]),
        np.stack([prediction.score for prediction in predictions]),
    )


def replay(
    path: Path,
    measurements: int,
    seed: int = 0,
    *,
    strategy: str = "guided",
    model: PerformanceModel | None = None,
    space: Callable[[Problem, Kernel], list[Launch]] = declared_space,
) -> Replay:
    """Replay a strategy, each (kernel, m) chosen on its own.

    Args:
        path: `NAME.csv.gz`, with `NAME.json` beside it.
        measurements: for each (kernel, m); 0 means the model's first pick. A config that the
            landscape lacks costs one and answers that it cannot run; a repeat costs nothing.
        seed: of strategies that draw.
        strategy: a name of `search.STRATEGIES`.
        model: the packaged one by default.
        space: the configs that may be asked for.

    Raises:
        InputError: for a broken landscape, an unknown strategy, or a senseless budget.
    """
    if strategy not in STRATEGIES:
        raise InputError(f"no strategy is called {strategy!r}", f"known are {', '.join(STRATEGIES)}")
    if not 0 <= measurements <= MAX_MEASUREMENTS:
        raise InputError(f"{measurements} measurements are out of range", f"give 0 to {MAX_MEASUREMENTS}")
    landscape = read_landscape(path)
    model = model or PerformanceModel.load()
    replayed: list[Replayed] = []
    compiled: list[tuple[Kernel, int]] = []
    for kernel in KERNELS:
        ms = sorted(m for of_kernel, m in landscape.times_us if of_kernel == kernel)
        if not ms:
            compiled.append((kernel, 0))
            continue
        launches = space(landscape.problem, kernel)
        searched = STRATEGIES[strategy](
            field_of(landscape.problem, kernel, ms, launches, model), measurements, seed
        )
        answered: dict[tuple[int, KernelConfig], float | None] = {}
        while (ask := searched.ask()) is not None:
            answered[ask.m, ask.config] = landscape.times_us[kernel, ask.m].get(ask.config)
            searched.tell(ask.m, ask.config, answered[ask.m, ask.config])
        for m in ms:
            times = landscape.times_us[kernel, m]
            chosen = searched.choose(m)
            best_us = min((time for time in times.values() if time is not None), default=math.inf)
            replayed.append(
                Replayed(
                    kernel,
                    m,
                    best_us,
                    times.get(chosen) if chosen is not None else None,
                    sum(at == m for at, _ in answered),
                )
            )
        compiled.append((kernel, len({config for _, config in answered})))
    return Replay(landscape.name, strategy, tuple(replayed), tuple(compiled))
