"""Looks: fixed before the first start, and together no more wrong than alpha."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.looks import HELPS_PART, HURTS_PART, least_p, look_at, look_at_end, looks_of

PLANNED, ARMS = st.integers(1, 200), st.integers(1, 12)
ALPHAS = st.sampled_from([0.01, 0.05, 0.2])


@given(PLANNED, ARMS, ALPHAS)
def test_the_parts_of_all_looks_at_all_arms_add_up_to_alpha(planned: int, arms: int, alpha: float) -> None:
    looks = looks_of(planned, arms, alpha)
    assert arms * sum(one.helps for one in looks) == pytest.approx(alpha * HELPS_PART)
    assert arms * sum(one.hurts for one in looks) == pytest.approx(alpha * HURTS_PART)
    assert arms * sum(one.interval for one in looks) == pytest.approx(alpha)


def test_claims_use_no_more_than_alpha_and_helps_no_more_than_a_fifth_of_it() -> None:
    assert HELPS_PART <= 0.2
    assert HELPS_PART + HURTS_PART <= 1


@given(PLANNED, ARMS, ALPHAS)
def test_looks_come_one_after_the_other_and_the_last_at_the_end(
    planned: int, arms: int, alpha: float
) -> None:
    looks = looks_of(planned, arms, alpha)
    assert [one.blocks for one in looks] == sorted({one.blocks for one in looks})
    assert looks[-1].blocks == planned
    assert [one.last for one in looks] == [False] * (len(looks) - 1) + [True]


@given(PLANNED, ARMS, ALPHAS)
def test_no_look_is_too_early_to_find_anything(planned: int, arms: int, alpha: float) -> None:
    assert all(least_p(one.blocks) <= one.helps for one in looks_of(planned, arms, alpha)[:-1])


def test_the_looks_of_a_usual_plan() -> None:
    assert [one.blocks for one in looks_of(11, 1, 0.05)] == [7, 11]
    assert [one.blocks for one in looks_of(55, 1, 0.05)] == [14, 33, 55]
    assert [one.blocks for one in looks_of(3, 1, 0.05)] == [3]


@given(PLANNED, ARMS, ALPHAS, st.data())
def test_an_experiment_that_ends_early_uses_what_is_left_and_no_more(
    planned: int, arms: int, alpha: float, data: st.DataObject
) -> None:
    ended = data.draw(st.integers(1, planned))
    looks = looks_of(planned, arms, alpha)
    used = math.fsum(one.helps for one in looks if one.blocks < ended)
    last = look_at_end(ended, planned, arms, alpha)
    assert (last.blocks, last.last) == (ended, True)
    assert used + last.helps == pytest.approx(alpha * HELPS_PART / arms)


def test_between_two_looks_nothing_is_due() -> None:
    assert [look_at(blocks, 11, 1, 0.05)[1] for blocks in range(1, 13)] == [
        blocks in {7, 11, 12} for blocks in range(1, 13)
    ]
