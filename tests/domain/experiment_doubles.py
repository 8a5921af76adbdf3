"""Starts of a server with the values that a test wants."""

from __future__ import annotations

from collections.abc import Sequence

from moetune.domain.experiment import Ending, LoadResult, ScheduledStart, StartResult
from moetune.domain.experiment_plan import BASELINE


def one_pass(tokens_per_s: float, **metrics: float | None) -> LoadResult:
    """A pass of that throughput; other metrics by name."""
    return LoadResult(
        requested=10,
        completed=10,
        duration_s=1.0,
        input_tokens=10,
        output_tokens=10,
        output_tokens_per_s=tokens_per_s,
        requests_per_s=1.0,
        **metrics,
    )


def start(
    arm: str, block: int, *values: float, position: int = 0, ending: Ending = Ending.DONE, **metrics: float
) -> StartResult:
    """A start whose passes have these throughputs."""
    passes = tuple(one_pass(value, **metrics) for value in values)
    return StartResult(ScheduledStart(block, position, arm), ending, passes)


def starts_of(arm: str, values: Sequence[Sequence[float]]) -> list[StartResult]:
    """Starts of an arm: by block, the throughput of each."""
    return [
        start(arm, block, value, position=position)
        for block, inside in enumerate(values)
        for position, value in enumerate(inside)
    ]


def experiment(
    arm: Sequence[float], baseline: Sequence[Sequence[float]]
) -> tuple[list[StartResult], list[StartResult]]:
    """Starts of the baseline and of an arm called `x`."""
    return starts_of(BASELINE, baseline), starts_of("x", [[value] for value in arm])
