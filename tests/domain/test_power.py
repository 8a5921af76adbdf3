"""How many starts are proposed, and what they can find."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.experiment_plan import DecisionPlan
from moetune.domain.power import arms_of_last, proposed_blocks, smallest_effect

PLAN = DecisionPlan()


@given(st.floats(0.002, 0.1), st.integers(6, 100), st.integers(1, 10))
def test_noise_and_arms_make_it_harder(noise: float, blocks: int, arms: int) -> None:
    here = smallest_effect(noise, blocks, arms, PLAN)
    assert smallest_effect(noise * 1.5, blocks, arms, PLAN) >= here
    assert smallest_effect(noise, blocks, arms + 1, PLAN) >= here * 0.97  # a first look may fall away
    assert smallest_effect(noise, blocks * 2, arms, PLAN) < here or math.isinf(here)


@given(
    st.floats(0.005, 0.06),
    st.integers(1, 8),
    st.sampled_from([0.02, 0.03, 0.05, 0.1]),
)
def test_what_is_proposed_is_the_fewest_that_is_enough(noise: float, arms: int, effect: float) -> None:
    decision = DecisionPlan(noise=noise, smallest_effect=effect)
    blocks = proposed_blocks(decision, arms)
    assert smallest_effect(noise, blocks, arms, decision) <= effect
    assert smallest_effect(noise, blocks - 1, arms, decision) > effect


@pytest.mark.parametrize(("arms", "blocks"), [(1, 11), (2, 12), (4, 14)])
def test_blocks_for_three_percent_at_two_percent_noise(arms: int, blocks: int) -> None:
    # The numbers of docs/experiment-statistics.md; test_decision_simulation.py checks that they are enough.
    assert proposed_blocks(PLAN, arms) == blocks


@pytest.mark.parametrize("blocks", [0, 1, 4])
def test_so_few_blocks_cannot_show_any_effect(blocks: int) -> None:
    # 4 blocks of three starts: 1 in 81 labellings is the real one, and "helps" needs 0.75%
    assert smallest_effect(0.001, blocks, 1, PLAN) == math.inf


def test_five_blocks_can_show_a_large_one() -> None:
    assert smallest_effect(0.02, 5, 1, PLAN) == pytest.approx(0.05, abs=0.01)


@pytest.mark.parametrize(
    ("tried", "helped", "arms"), [(2, 2, 1), (4, 2, 2), (4, 3, 2), (3, 2, 2), (5, 5, 1), (4, 0, 4)]
)
def test_the_last_arm_takes_over_the_parts_of_those_that_helped(tried: int, helped: int, arms: int) -> None:
    assert arms_of_last(tried, helped) == arms
    # Never more of alpha than they had.
    assert not helped or 1 / arms <= helped / tried
