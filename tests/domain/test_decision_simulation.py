"""Issue 6's limits, over 1,000 whole experiments each, with the rules of moetune itself.

The seeds are fixed, so the counts are always the same. docs/experiment-statistics.md has more worlds.
"""

from __future__ import annotations

import pytest
from benchmarks.experiment_simulation import (
    MORE_NOTHING,
    NOTHING,
    SOMETHING,
    Summary,
    World,
    peeking_rule,
    simulate,
    simulate_all,
)

EXPERIMENTS, SEED = 1000, 1
BY_NAME = {world.name: world for world in (*NOTHING, *MORE_NOTHING, *SOMETHING)}
OTHERS = (
    "1 intervention",
    "4 interventions",
    "skewed",
    "2 of 4 help 6%, not together",
)


def summary(world: World) -> Summary:
    return simulate_all(world, EXPERIMENTS, SEED)


@pytest.mark.parametrize("world", NOTHING, ids=lambda world: world.name)
def test_where_nothing_has_an_effect_few_experiments_claim_one(world: World) -> None:
    one = summary(world)
    assert one.wrong <= 0.05
    assert one.helps <= 0.01


@pytest.mark.parametrize("name", OTHERS)
def test_nor_do_they_with_more_arms_other_noise_or_winners_beside(name: str) -> None:
    one = summary(BY_NAME[name])
    assert one.wrong <= 0.05
    assert one.helps <= 0.01


@pytest.mark.parametrize(
    "name", ["3%, 1 intervention", "3% and 0%", "3%, 0%, 0%, 0%", "3% at noise 1%, planned so"]
)
def test_three_percent_are_found_with_the_proposed_starts(name: str) -> None:
    assert summary(BY_NAME[name]).found >= 0.8


def test_a_large_effect_is_found_in_fewer_starts_than_planned() -> None:
    one = summary(BY_NAME["10%, 1 intervention"])
    assert one.found == 1
    assert one.starts < 0.7 * 33


def test_the_last_arm_was_simulated_too() -> None:
    world = BY_NAME["2 of 4 help 6%, not together"]
    assert sum(len(simulate(world, number, SEED).verdicts) == 5 for number in range(20)) >= 15


def test_the_simulation_sees_mistakes() -> None:
    """Peeking without a correction, and passes taken for starts, go far beyond the limits."""
    world = World("", passes=3)
    assert simulate_all(world, 200, SEED, peeking_rule).wrong > 0.12
    assert simulate_all(world, 200, SEED, as_starts=False).wrong > 0.12
