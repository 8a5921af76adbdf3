"""The exact test against a count of every labelling, and what must not matter to it."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moetune.domain.permutation import ROUNDING, Blocks

VALUES = st.integers(-300, 300).map(lambda whole: whole / 1000)


@st.composite
def experiments(draw: st.DrawFn, most: int = 5) -> tuple[list[float], list[list[float]]]:
    count = draw(st.integers(1, most))
    arm = draw(st.lists(VALUES, min_size=count, max_size=count))
    baseline = draw(st.lists(st.lists(VALUES, min_size=1, max_size=2), min_size=count, max_size=count))
    return arm, baseline


def counted(blocks: Blocks, sizes: list[int]) -> tuple[float, float]:
    """Both probabilities, by trying every labelling."""
    scores = blocks.scores()
    seen = scores[:, 0].sum()
    sums = [
        sum(int(scores[block, place]) for block, place in enumerate(places))
        for places in product(*map(range, sizes))
    ]
    return np.mean([one >= seen for one in sums]).item(), np.mean([one <= seen for one in sums]).item()


@given(experiments())
def test_probabilities_are_those_of_counting_every_labelling(
    values: tuple[list[float], list[list[float]]],
) -> None:
    blocks = Blocks(*values)
    above, below = counted(blocks, [1 + len(one) for one in values[1]])
    assert blocks.probability() == pytest.approx(above, abs=1e-12)
    assert blocks.probability(above=False) == pytest.approx(below, abs=1e-12)


def test_known_probabilities() -> None:
    ahead = Blocks([0.05, 0.06, 0.07, 0.05], [[0.0], [0.01], [0.02], [0.0]])
    assert ahead.probability() == 1 / 16  # all four signs
    assert ahead.probability(above=False) == 1.0
    assert ahead.two_sided() == 1 / 8
    beside_two = Blocks([0.05, 0.06, 0.07], [[0.0, 0.01], [0.01, 0.0], [0.02, 0.0]])
    assert beside_two.probability() == pytest.approx(1 / 27)
    assert beside_two.least_p == pytest.approx(1 / 27)


def test_one_baseline_a_block_is_the_sign_flip_test_of_paired_differences() -> None:
    differences = [0.022, 0.012, -0.008, 0.024, 0.017, 0.002]  # none is so large that it is clipped
    typical = np.median(np.abs(differences))
    assert max(map(abs, differences)) < 2 * typical
    sums = [
        sum(sign * one for sign, one in zip(signs, differences, strict=True))
        for signs in product((1, -1), repeat=6)
    ]
    expected = np.mean([one >= sum(differences) - 1e-12 for one in sums])
    blocks = Blocks(differences, [[0.0]] * 6)
    assert blocks.probability() == pytest.approx(expected, abs=1e-12)


@given(experiments(), st.randoms(use_true_random=False))
def test_the_order_of_blocks_changes_nothing(
    values: tuple[list[float], list[list[float]]], random: object
) -> None:
    places = sorted(range(len(values[0])), key=lambda _: random.random())  # type: ignore[attr-defined]
    other = Blocks([values[0][place] for place in places], [values[1][place] for place in places])
    assert other.probability() == pytest.approx(Blocks(*values).probability(), abs=1e-12)
    assert other.estimate() == pytest.approx(Blocks(*values).estimate(), abs=3e-6)


@given(experiments(), st.lists(st.integers(-8, 8), min_size=5, max_size=5))
def test_what_a_block_has_in_common_changes_nothing(
    values: tuple[list[float], list[list[float]]], moves: list[int]
) -> None:
    arm, baseline = values
    moved = Blocks(
        [one + move for one, move in zip(arm, moves, strict=False)],
        [[one + move for one in inside] for inside, move in zip(baseline, moves, strict=False)],
    )
    assert np.abs(moved.scores() - Blocks(*values).scores()).max() <= 1  # rounding of halves


@given(experiments())
def test_a_mirrored_experiment_has_mirrored_answers(values: tuple[list[float], list[list[float]]]) -> None:
    blocks = Blocks(*values)
    mirrored = Blocks([-one for one in values[0]], [[-one for one in inside] for inside in values[1]])
    assert mirrored.probability() == pytest.approx(blocks.probability(above=False), abs=1e-12)
    assert mirrored.estimate() == pytest.approx(-blocks.estimate(), abs=3e-6)
    level = max(blocks.least_p, 0.1)
    assert mirrored.lower(level) == pytest.approx(-blocks.upper(level), abs=0.02)


@settings(max_examples=40)
@given(experiments(8), st.sampled_from([0.01, 0.05, 0.1]))
def test_the_interval_is_what_the_test_does_not_refuse(
    values: tuple[list[float], list[list[float]]], level: float
) -> None:
    blocks = Blocks(*values)
    assume(blocks.noise(0.0) > 0)
    level = max(level, blocks.least_p)
    low, high = blocks.lower(level), blocks.upper(level)
    assert low <= high + 3e-6
    assert blocks.probability(low - 1e-4) <= level * ROUNDING or blocks.probability(low + 1e-4) > level
    assert blocks.probability(low - 0.5) <= level * ROUNDING
    assert blocks.probability(high + 0.5, above=False) <= level * ROUNDING


def test_the_interval_holds_the_true_effect_as_often_as_it_says() -> None:
    random = np.random.default_rng(3)
    missed_below = missed_above = 0
    for _ in range(1000):
        values = random.normal(0, 0.02, (5, 3))
        blocks = Blocks((values[:, 0] + 0.04).tolist(), values[:, 1:].tolist())
        missed_below += blocks.probability(0.04) <= 0.1  # then 0.04 is below the lower end
        missed_above += blocks.probability(0.04, above=False) <= 0.1
    assert 70 <= missed_below <= 130
    assert 70 <= missed_above <= 130


def test_one_slow_start_does_not_move_the_estimate_far() -> None:
    baseline = [[0.0, 0.01], [0.01, -0.01], [0.0, 0.0], [-0.01, 0.01], [0.01, 0.0], [0.0, -0.01]]
    arm = [0.05, 0.06, 0.05, 0.04, 0.05, 0.05]
    slow = [-0.5, *arm[1:]]
    assert Blocks(arm, baseline).estimate() == pytest.approx(0.05, abs=0.005)
    assert Blocks(slow, baseline).estimate() == pytest.approx(0.05, abs=0.01)
    assert np.mean(slow) < 0  # as a mean would say


def test_starts_that_are_all_alike_show_nothing() -> None:
    blocks = Blocks([1.0] * 5, [[1.0, 1.0]] * 5)
    assert (blocks.probability(), blocks.probability(above=False)) == (1.0, 1.0)
    assert blocks.estimate() == pytest.approx(0, abs=2e-6)


def test_many_blocks_are_still_counted_exactly() -> None:
    random = np.random.default_rng(5)
    values = random.normal(0, 1, (60, 3))
    probability = Blocks(values[:, 0].tolist(), values[:, 1:].tolist()).probability()
    differences = values[:, 0] - values[:, 1:].mean(axis=1)
    normal = 0.5 * math.erfc(differences.mean() / math.sqrt(1.5 / 60) / math.sqrt(2))
    assert probability == pytest.approx(normal, abs=0.08)


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_noise_is_the_standard_deviation_of_a_start(noise: float) -> None:
    values = np.random.default_rng(1).normal(0, noise, (400, 3))
    blocks = Blocks((values[:, 0] + 0.3).tolist(), values[:, 1:].tolist())
    assert blocks.noise(0.3) == pytest.approx(noise, rel=0.1)
