"""How many samples a decision takes, and what is made of them."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.measure.timing import Gapless, Replayed, interleave, median_spread, sample


class Scripted:
    """A graph whose replays take what a list says."""

    def __init__(self, *samples: float) -> None:
        self.samples = list(samples)
        self.replays = 0

    def sample_us(self, count: int) -> list[float]:
        found = [self.samples[min(self.replays + n, len(self.samples) - 1)] for n in range(count)]
        self.replays += count
        return found


def test_the_first_replay_is_not_counted() -> None:
    assert sample(Scripted(900.0, 100.0), 10).median_us == 10.0


def test_steady_samples_are_few_and_shaky_ones_many() -> None:
    assert sample(Scripted(1.0, 100.0), 1, least=5, most=15).count == 5
    rng = random.Random(0)
    shaky = Scripted(*(100 + 20 * rng.random() for _ in range(30)))
    assert sample(shaky, 1, least=5, most=15).count == 15


def test_one_long_sample_condemns_nobody() -> None:
    # The first replay is not counted; the host was held up during the second.
    assert not sample(Scripted(100.0, 900.0, 100.0), 1, give_up_us=200.0).hopeless


def test_a_hopeless_candidate_costs_three_replays() -> None:
    graph = Scripted(500.0)
    found = sample(graph, 1, give_up_us=200.0)
    assert found.hopeless
    assert found.median_us == 500.0
    assert graph.replays == 3


def test_a_candidate_under_the_bar_is_sampled_to_the_end() -> None:
    assert not sample(Scripted(150.0), 1, give_up_us=200.0).hopeless
    assert not sample(Scripted(150.0), 1, give_up_us=0.0).hopeless


@pytest.mark.parametrize("count", [5, 9, 15])
def test_the_interval_of_the_median_holds_it_as_often_as_it_says(count: int) -> None:
    rng = random.Random(1)
    inside = 0
    for _ in range(400):
        samples = [math.exp(rng.gauss(0.0, 0.05)) for _ in range(count)]
        median = statistics.median(samples)
        inside += abs(1.0 - median) <= 2 * median_spread(samples) * median
    assert inside > 0.93 * 400


@given(st.lists(st.floats(1.0, 1000.0), min_size=2, max_size=30))
def test_the_spread_is_relative(samples: list[float]) -> None:
    spread = median_spread(samples)
    assert spread >= 0
    assert median_spread([2 * value for value in samples]) == pytest.approx(spread)
    assert median_spread([5.0] * len(samples)) == 0


def test_rounds_are_interleaved_and_none_always_follows_the_same_other() -> None:
    order: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self._name = name

        def sample_us(self, count: int) -> list[float]:
            order.extend([self._name] * count)
            return [4.0] * count

    rows = interleave([Named("a"), Named("b"), Named("c")], 2, 30)
    assert rows == ((2.0,) * 30,) * 3
    assert "".join(order[:3]) == "abc"  # not counted
    rounds = ["".join(order[at : at + 3]) for at in range(3, len(order), 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in rounds)
    assert len(set(rounds)) == 6


def test_a_candidate_that_cannot_win_takes_three_samples() -> None:
    graph = Scripted(150.0, 150.0, 153.0, 147.0)
    found = sample(graph, 1, give_up_us=200.0, clear_us=120.0)
    assert (found.count, found.hopeless, found.median_us) == (3, False, 150.0)
    assert found.spread == pytest.approx(0.02)
    # One sample below the bar: it may win yet.
    assert sample(Scripted(150.0, 150.0, 119.0, 150.0), 1, clear_us=120.0).count >= 5


class Host:
    """Replays that take 100 us, or as much longer as the host needs beyond the head start of a cycle a us.

    Args:
        needs: what the host needs for each replay, in us; the last for all further ones.
    """

    def __init__(self, *needs: float) -> None:
        self._needs = list(needs)
        self.starts: list[int] = []

    def __call__(self, count: int, cycles: int) -> list[Replayed]:
        found = []
        for _ in range(count):
            need = self._needs[min(len(self.starts), len(self._needs) - 1)]
            self.starts.append(cycles)
            found.append(Replayed(100.0 + max(need - cycles, 0.0), need <= cycles))
        return found


def test_a_replay_that_waited_for_the_host_does_not_count() -> None:
    host = Host(10.0, 10.0, 5000.0, 5000.0, 10.0)
    graph = Gapless(host, 50)
    assert graph.sample_us(1) + graph.sample_us(3) == [100.0] * 4
    # The two late ones were replayed with twice the head start, and the graph keeps that.
    assert host.starts == [50, 50, 50, 50, 100, 100]
    assert graph.sample_us(1) == [100.0]
    assert host.starts[-1] == 100


def test_the_first_replay_takes_the_graph_to_the_gpu_and_may_be_late() -> None:
    host = Host(5000.0, 10.0)
    assert Gapless(host, 50).sample_us(1) == [5050.0]
    assert len(host.starts) == 1
    host = Host(5000.0, 10.0)
    assert Gapless(host, 50, uploaded=True).sample_us(1) == [100.0]
    # The first alone: the second of the same call has to be in time.
    assert Gapless(Host(5000.0, 5000.0, 10.0), 50).sample_us(2) == [5050.0, 100.0]


def test_a_host_that_is_always_late_is_asked_a_few_times_and_the_least_counts() -> None:
    host = Host(10.0, *(float(need) for need in range(200_000, 100_000, -1000)))
    graph = Gapless(host, 50)
    graph.sample_us(1)
    assert graph.sample_us(1) == [100.0 + 193_000 - 50 * 2**7]
    assert len(host.starts) == 9


@given(st.lists(st.floats(1.0, 10_000.0), min_size=1, max_size=20), st.integers(1, 9))
def test_as_many_samples_come_as_were_asked_for(needs: list[float], count: int) -> None:
    found = Gapless(Host(*needs), 50, uploaded=True).sample_us(count)
    assert len(found) == count
    assert all(value >= 100.0 for value in found)
    if max(needs) <= 50 * 2**7:
        assert found == [100.0] * count
