"""The order of starts: random, balanced, the same again, whatever was run before."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.experiment import Arm
from moetune.domain.experiment_plan import BASELINE, Intervention, LoadPlan, Plan, ServerPlan
from moetune.domain.schedule import BASELINE_STARTS, arms_of, block_of

NAMES = st.lists(st.text("abcxyz -é", min_size=1, max_size=8), max_size=6, unique=True)
SEEDS, BLOCKS = st.integers(0, 2**64), st.integers(0, 1000)


def order(arms: list[str], block: int, seed: int) -> list[str]:
    return [one.arm for one in block_of(arms, block, seed)]


@given(NAMES, BLOCKS, SEEDS, st.integers(0, 3))
def test_a_block_holds_every_arm_once_and_the_baseline(
    arms: list[str], block: int, seed: int, baselines: int
) -> None:
    starts = block_of(arms, block, seed, baselines)
    assert Counter(one.arm for one in starts) == Counter(arms) + Counter({BASELINE: baselines})
    assert [one.position for one in starts] == list(range(len(starts)))
    assert {one.block for one in starts} <= {block}


@given(NAMES, st.integers(0, 500), SEEDS)
def test_every_second_block_is_the_reverse_of_the_one_before(arms: list[str], pair: int, seed: int) -> None:
    assert order(arms, 2 * pair + 1, seed) == order(arms, 2 * pair, seed)[::-1]


@given(NAMES, BLOCKS, SEEDS, st.randoms())
def test_the_order_depends_on_which_arms_not_on_how_they_are_listed(
    arms: list[str], block: int, seed: int, random: object
) -> None:
    shuffled = sorted(arms, key=lambda _: random.random())  # type: ignore[attr-defined]
    assert block_of(shuffled, block, seed) == block_of(arms, block, seed)
    assert block_of([BASELINE, *arms], block, seed) == block_of(arms, block, seed)


@given(NAMES.filter(bool), BLOCKS, SEEDS)
def test_an_arm_that_drops_out_leaves_the_order_of_the_others(arms: list[str], block: int, seed: int) -> None:
    rest = [arm for arm in order(arms, block, seed) if arm != arms[0]]
    assert order(arms[1:], block, seed) == rest


def test_the_schedule_of_a_seed_never_changes() -> None:
    # A resumed experiment of an earlier moetune has to find the same order.
    assert order(["b", "a"], 0, 1) == ["a", "b", "baseline", "baseline"]
    assert order(["b", "a"], 2, 1) == ["b", "a", "baseline", "baseline"]


def test_every_place_of_a_block_is_as_likely_for_an_arm() -> None:
    places = Counter(order(["x"], 0, seed).index("x") for seed in range(3000))
    assert all(abs(places[place] - 1000) < 4 * (3000 * 2 / 9) ** 0.5 for place in range(3))


def test_steady_drift_favours_no_arm_over_two_blocks() -> None:
    for seed in range(20):
        starts = [*block_of(["x", "y"], 4, seed), *block_of(["x", "y"], 5, seed)]
        means = {
            arm: sum(place for place, one in enumerate(starts) if one.arm == arm)
            / sum(one.arm == arm for one in starts)
            for arm in ("x", "y", BASELINE)
        }
        assert set(means.values()) == {3.5}


def test_without_arms_the_baseline_is_measured_against_itself() -> None:
    assert order([], 0, 1) == [BASELINE] * BASELINE_STARTS


def test_arms_are_the_baseline_and_each_intervention_alone() -> None:
    plan = Plan(
        "p",
        ServerPlan("sglang", ("serve",)),
        LoadPlan("command"),
        (Intervention("fused sum"), Intervention("tuned")),
    )
    assert arms_of(plan) == (
        Arm(BASELINE),
        Arm("fused sum", ("fused sum",)),
        Arm("tuned", ("tuned",)),
    )


@pytest.mark.parametrize("seeds", [(1, 2), (2, 3)])
def test_another_seed_is_another_order(seeds: tuple[int, int]) -> None:
    orders = [[order(["a", "b", "c"], block, seed) for block in range(0, 20, 2)] for seed in seeds]
    assert orders[0] != orders[1]
