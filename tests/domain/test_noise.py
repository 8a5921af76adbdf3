"""Noise between starts, and the one number that stands for a start."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moetune.domain.experiment import Ending
from moetune.domain.experiment_plan import BASELINE
from moetune.domain.noise import noise_of, start_value
from tests.domain.experiment_doubles import start, starts_of

METRIC = "output_tokens_per_s"


def test_a_start_is_the_median_of_its_passes() -> None:
    assert start_value(start("x", 0, 100, 40, 102), METRIC) == 100
    assert start_value(start("x", 0, 100, 102), METRIC) == 101


def test_a_start_that_did_not_end_well_has_no_value() -> None:
    for ending in Ending:
        value = start_value(start("x", 0, 100, ending=ending), METRIC)
        assert (value is None) == (ending is not Ending.DONE)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_a_pass_without_a_positive_number_leaves_no_value(bad: float) -> None:
    assert start_value(start("x", 0, 100, bad), METRIC) is None
    assert start_value(start("x", 0), METRIC) is None
    assert start_value(start("x", 0, 100), "ttft_ms") is None


@pytest.mark.parametrize("noise", [0.01, 0.02, 0.05])
@pytest.mark.parametrize("baselines", [1, 2])
def test_noise_is_the_variation_between_starts_not_the_drift_of_the_machine(
    noise: float, baselines: int
) -> None:
    logs = np.random.default_rng(2).normal(0, noise, (300, baselines))
    logs += np.linspace(0, 1, 300)[:, None]  # the machine gets almost three times as fast
    found = noise_of(starts_of(BASELINE, np.exp(logs).tolist()), METRIC)
    assert found == pytest.approx(noise, rel=0.15)


def test_one_slow_start_is_not_noise() -> None:
    alike = [[100.0, 101.0], [100.0, 99.0], [101.0, 100.0], [100.0, 101.0]]
    slow = [*alike[:3], [50.0, 101.0]]
    assert noise_of(starts_of(BASELINE, slow), METRIC) == pytest.approx(
        noise_of(starts_of(BASELINE, alike), METRIC), rel=0.05
    )


def test_one_start_shows_no_noise() -> None:
    assert noise_of(starts_of(BASELINE, [[100.0]]), METRIC) is None
    assert noise_of([], METRIC) is None
