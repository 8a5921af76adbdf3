"""Drift and slow starts are told."""

from __future__ import annotations

import numpy as np
import pytest

from moetune.domain.drift import drift_notes, outlier_notes, trend_notes
from moetune.domain.experiment_plan import BASELINE
from tests.domain.experiment_doubles import start, starts_of

METRIC, MARGIN = "output_tokens_per_s", 0.01


def test_a_start_that_slows_down_from_pass_to_pass_is_told() -> None:
    slowing = [start("x", block, 100, 97, 95) for block in range(4)]
    (note,) = drift_notes("x", slowing, METRIC, MARGIN)
    assert "goes down by 5.0%" in note
    assert "4 of 4 starts" in note


@pytest.mark.parametrize(
    "passes",
    [
        [(100.0, 99.8)] * 5,  # within the margin
        [(100.0, 95.0)] * 2,  # too few starts
        [(100.0, 95.0), (95.0, 100.0)] * 3,  # now one way, now the other
        [(100.0,)] * 5,  # one pass
    ],
)
def test_passes_that_settle_are_not(passes: list[tuple[float, ...]]) -> None:
    starts = [start("x", block, *values) for block, values in enumerate(passes)]
    assert not list(drift_notes("x", starts, METRIC, MARGIN))


def test_a_machine_that_steadily_slows_down_is_told() -> None:
    logs = np.random.default_rng(1).normal(0, 0.01, (10, 2)) + np.linspace(0, -0.1, 20).reshape(10, 2)
    (note,) = trend_notes(starts_of(BASELINE, (100 * np.exp(logs)).tolist()), METRIC, MARGIN)
    assert "of the baseline goes down by" in note


def test_a_steady_machine_is_hardly_ever_said_to_drift() -> None:
    random = np.random.default_rng(4)
    told = sum(
        bool(
            list(
                trend_notes(
                    starts_of(BASELINE, np.exp(random.normal(0, 0.02, (10, 2))).tolist()), METRIC, MARGIN
                )
            )
        )
        for _ in range(300)
    )
    assert told <= 9


@pytest.mark.parametrize(("value", "said"), [(80.0, "20.4% below"), (120.0, "19.4% above")])
def test_a_start_far_from_its_block_is_named(value: float, said: str) -> None:
    baseline = starts_of(BASELINE, [[100.0, 101.0], [100.0, 99.0], [value, 100.0]])
    arm = starts_of("x", [[110.0], [111.0], [111.1]])
    (note,) = outlier_notes(baseline, arm, METRIC, np.log(1.1), 0.01)
    assert f"start 1 of block 2 (baseline) is {said} the others of its block" in note


def test_of_two_starts_none_is_blamed() -> None:
    baseline, arm = starts_of(BASELINE, [[100.0], [100.0]]), starts_of("x", [[100.0], [70.0]])
    (note,) = outlier_notes(baseline, arm, METRIC, 0.0, 0.01)
    assert "the two starts of block 1 are 30.0% apart" in note


def test_starts_as_far_as_noise_puts_them_are_not_named() -> None:
    baseline, arm = starts_of(BASELINE, [[100.0, 103.0]] * 4), starts_of("x", [[98.0]] * 4)
    assert not list(outlier_notes(baseline, arm, METRIC, 0.0, 0.02))
