"""Weights stay cold: between two uses of the same weights three times the L2 is touched."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.quantization import Dtype, Quantization
from moetune.measure.workload import (
    COLD_FACTOR,
    Circle,
    NotColdError,
    expert_bytes,
    least_launches,
    needed_bytes,
    plan_circle,
    relabelled,
    reuse_touches,
    spread_experts,
)
from tests.applications.fake_machine import PROBLEM


def played(circle: Circle, turns: int = 3) -> int:
    """Least experts between two uses of the same weights, by playing the circle."""
    last: dict[tuple[int, int], int] = {}
    place, least = 0, 1 << 60
    for _ in range(turns):
        for number, experts in enumerate(circle.experts):
            for expert in experts:
                key = (number % circle.copies, expert)
                if key in last:
                    least = min(least, place - last[key] - 1)
                last[key] = place
                place += 1
    return least


@given(
    experts=st.integers(1, 300),
    touched=st.lists(st.integers(1, 300), min_size=1, max_size=16),
    size=st.integers(1 << 18, 1 << 27),
    l2=st.sampled_from([6 << 20, 40 << 20, 60 << 20, 128 << 20]),
    m=st.sampled_from([1, 64, 512, 8192]),
)
def test_a_planned_circle_is_cold_when_it_is_played(
    experts: int, touched: list[int], size: int, l2: int, m: int
) -> None:
    counts = [min(count, experts) for count in touched]
    try:
        circle = plan_circle(counts, experts, size, l2, least_launches(m, size))
    except NotColdError:
        assert min(counts) * size * 2000 < COLD_FACTOR * l2 or experts * size * 60 < COLD_FACTOR * l2
        return
    assert len(circle.experts) >= least_launches(m, size)
    assert len(circle.experts) % circle.copies == 0
    assert played(circle) * size == circle.reuse_bytes >= COLD_FACTOR * l2
    for number, taken in enumerate(circle.experts):
        assert list(taken) == sorted(set(taken))
        assert len(taken) == counts[number % len(counts)]
        assert set(taken) <= set(range(experts))


def test_a_large_problem_needs_one_copy_and_a_small_one_many() -> None:
    h200 = 60 << 20
    seed = plan_circle([256], 256, expert_bytes(PROBLEM, "up"), h200, 4)
    assert (seed.copies, len(seed.experts)) == (1, 4)
    small = plan_circle([8], 8, 1 << 20, h200, 4)
    assert small.copies > 1
    assert small.reuse_bytes >= 3 * h200


def test_few_tokens_take_turns_among_the_experts() -> None:
    circle = plan_circle([16], 256, expert_bytes(PROBLEM, "up"), 60 << 20, 16)
    assert circle.copies == 1
    first, second = circle.experts[:2]
    assert not set(first) & set(second)


def test_too_few_copies_are_an_error_and_no_warm_number() -> None:
    with pytest.raises(NotColdError, match="cannot be kept out"):
        plan_circle([8], 8, 1 << 20, 60 << 20, 4, most_copies=1)


def test_a_rank_without_work_has_a_circle() -> None:
    circle = plan_circle([0, 0], 8, 1 << 20, 60 << 20, 4)
    assert circle.experts == ((),) * 4


def test_the_wrap_around_counts() -> None:
    # Without the end the least would be 2.
    assert reuse_touches([(0, 1), (2, 3), (0, 1)], 1) == 1
    assert reuse_touches([(0, 1), (0, 1)], 1) == 1
    assert reuse_touches([(0, 1), (0, 1)], 2) == 3


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(1, 3))
def test_the_longest_unused_experts_are_taken(counts: list[int], copies: int) -> None:
    circle = spread_experts(counts, 12, copies)
    used: dict[tuple[int, int], int] = {}
    for number, taken in enumerate(circle):
        copy = number % copies
        ages = {expert: used.get((copy, expert), -1) for expert in range(12)}
        left = [ages[expert] for expert in range(12) if expert not in taken]
        assert max(ages[expert] for expert in taken) <= min(left, default=1 << 30)
        used.update({(copy, expert): number for expert in taken})


@given(st.sets(st.integers(0, 50), min_size=1), st.integers(0, 10))
def test_experts_are_matched_one_to_one(distinct: set[int], seed: int) -> None:
    targets = range(100, 100 + len(distinct))
    found = relabelled(sorted(distinct), targets, random.Random(seed))
    assert set(found) == distinct
    assert sorted(found.values()) == list(targets)


def test_the_memory_that_is_needed_grows_with_copies_tokens_and_bits() -> None:
    one = needed_bytes(PROBLEM, 4096, 1, 1)
    up, down = (PROBLEM.E * expert_bytes(PROBLEM, kernel) for kernel in ("up", "down"))
    assert needed_bytes(PROBLEM, 4096, 2, 1) - one == up
    assert needed_bytes(PROBLEM, 4096, 1, 3) - one == 2 * down
    assert needed_bytes(PROBLEM, 8192, 1, 1) > one
    quantization = Quantization(Dtype.FP8_W8A8, "fp8", (128, 128), dynamic_activation=True)
    assert expert_bytes(replace(PROBLEM, quantization=quantization), "up") * 2 == expert_bytes(PROBLEM, "up")
