"""Choosing: never worse than the default, pairs that a server accepts, few different configs."""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moetune.domain.choose import (
    Candidates,
    Choices,
    DefaultConfig,
    NothingRunsError,
    Pair,
    Point,
    Reason,
    choose,
)
from moetune.domain.config import KernelConfig, pair_mismatches
from tests.generators import grid, random_configs, times_us

if TYPE_CHECKING:
    import random

DEFAULT = KernelConfig(64, 64, 32, 8)
A, B, C = KernelConfig(64, 128, 64, 1), KernelConfig(64, 64, 128, 16), KernelConfig(128, 128, 64, 1)
SMALL = KernelConfig(16, 64, 64, 1)
NOISES = st.sampled_from([0.0, 0.005, 0.02, 0.1])


def runs(config: KernelConfig, time_us: float | None) -> DefaultConfig:
    return DefaultConfig(config, time_us, time_us)


def point(
    m: int,
    up: dict[KernelConfig, float],
    down: dict[KernelConfig, float],
    default_us: tuple[float | None, float | None] = (100.0, 100.0),
) -> Point:
    return Point(
        m,
        Candidates(tuple(up), tuple(up.values())),
        Candidates(tuple(down), tuple(down.values())),
        runs(DEFAULT, default_us[0]),
        runs(DEFAULT, default_us[1]),
    )


@st.composite
def point_lists(draw: st.DrawFn, *, scored: bool = False, scenarios: int = 0) -> list[Point]:
    """Up to four m with up to six configs a kernel, with many ties and near ties."""
    configs = tuple(draw(st.lists(st.sampled_from(POOL), min_size=1, max_size=6, unique=True)))
    default = draw(st.sampled_from(POOL[:3]))
    values = st.integers(95, 115).map(float)

    def side() -> tuple[Candidates, DefaultConfig]:
        times = [draw(values) for _ in configs]
        scores = [draw(values) for _ in configs] if scored else None
        others = [[draw(values) for _ in configs] for _ in range(scenarios)]
        score = draw(values) if scored else None
        given_default = DefaultConfig(default, draw(values), score, [draw(values) for _ in range(scenarios)])
        return Candidates(configs, times, scores, others), given_default

    points = []
    for m in draw(st.lists(st.integers(1, 100), min_size=1, max_size=4, unique=True)):
        (up, default_up), (down, default_down) = side(), side()
        if default not in configs and draw(st.booleans()):
            default_down = DefaultConfig(default, None)
        points.append(Point(m, up, down, default_up, default_down))
    return points


POOL = random_configs(12, seed=7)


def all_pairs(at: Point, one_file: bool) -> dict[Pair, tuple[float, float]]:
    """Every pair that the server accepts, with its time and its score: brute force."""

    def side(given_candidates: Candidates, default: DefaultConfig) -> dict[KernelConfig, tuple[float, float]]:
        scores = given_candidates.time_us if given_candidates.score is None else given_candidates.score
        found = {
            config: (time, score)
            for config, time, score in zip(
                given_candidates.configs, given_candidates.time_us, scores, strict=True
            )
        }
        if default.time_us is not None and default.config not in found:
            score = default.time_us if default.score is None else default.score
            found[default.config] = (default.time_us, score)
        return found

    ups, downs = side(at.up, at.default_up), side(at.down, at.default_down)
    return {
        Pair(up, down): (ups[up][0] + downs[down][0], ups[up][1] + downs[down][1])
        for up, down in product(ups, downs)
        if (up == down if one_file else up.block_size_m == down.block_size_m)
    }


def default_us(at: Point) -> float | None:
    up, down = at.default_up.time_us, at.default_down.time_us
    return None if up is None or down is None else up + down


def check(choices: Choices, points: list[Point], one_file: bool, noise: float) -> None:
    """What must hold of every choice, whatever the numbers."""
    by_m = {at.m: at for at in points}
    assert [entry.m for entry in choices.entries] == sorted(by_m)
    for entry in choices.entries:
        at = by_m[entry.m]
        assert entry.pair.up.block_size_m == entry.pair.down.block_size_m
        assert not one_file or entry.pair.up == entry.pair.down
        default = default_us(at)
        assert entry.default_us == default
        if entry.reason is Reason.DEFAULT_KEPT:
            assert entry.pair == Pair(at.default_up.config, at.default_down.config)
            assert entry.time_us == default
        else:
            assert entry.time_us == all_pairs(at, one_file)[entry.pair][0]
            assert (entry.reason is Reason.DEFAULT_CANNOT_RUN) == (default is None)
            assert default is None or entry.time_us < default * (1 - noise)
    last = max(by_m)
    assert choices.down is None or pair_mismatches(choices.up, choices.down, last) == ()
    assert (choices.down is None) == one_file


@given(point_lists(), st.booleans(), NOISES)
@settings(max_examples=300)
def test_measured_choices_are_brute_force_within_the_noise(
    points: list[Point], one_file: bool, noise: float
) -> None:
    choices = choose(points, one_file=one_file, noise=noise)
    check(choices, points, one_file, noise)
    for entry, at in zip(choices.entries, sorted(points, key=lambda at: at.m), strict=True):
        default = default_us(at)
        pairs = all_pairs(at, one_file)
        pairs.pop(Pair(at.default_up.config, at.default_down.config)) if default is not None else None
        best = min((time for time, _ in pairs.values()), default=math.inf)
        gains = default is None or best < default * (1 - noise)
        assert (entry.reason is not Reason.DEFAULT_KEPT) == gains
        if gains:
            assert entry.time_us <= best * (1 + noise) * (1 + 1e-9)
            assert (entry.reason is Reason.AS_NEIGHBOUR) <= (entry.time_us > best)


@given(point_lists(), st.booleans(), NOISES)
@settings(max_examples=200)
def test_neighbours_change_no_more_often_than_they_must(
    points: list[Point], one_file: bool, noise: float
) -> None:
    choices = choose(points, one_file=one_file, noise=noise)
    # Fewest changes by brute force: for each m every acceptable pair and the changes up to there.
    fewest: dict[Pair, int] = {}
    for at in sorted(points, key=lambda at: at.m):
        default = default_us(at)
        default_pair = Pair(at.default_up.config, at.default_down.config)
        pairs = {
            pair: time
            for pair, (time, _) in all_pairs(at, one_file).items()
            if default is None or (time < default * (1 - noise) and pair != default_pair)
        }
        least = min(pairs.values(), default=math.inf)
        allowed = [pair for pair, time in pairs.items() if time / least <= 1 + noise] or [default_pair]
        before = min(fewest.values(), default=-1)
        fewest = {pair: min(fewest.get(pair, math.inf), before + 1) for pair in allowed}  # type: ignore[misc]
    pairs_chosen = [entry.pair for entry in choices.entries]
    changes = sum(a != b for a, b in pairwise(pairs_chosen))
    assert changes == min(fewest.values())


@given(point_lists(scored=True, scenarios=2), st.booleans(), NOISES)
@settings(max_examples=200)
def test_a_predicted_choice_beats_the_default_in_time_and_score_and_loses_in_no_scenario(
    points: list[Point], one_file: bool, noise: float
) -> None:
    assume(all(default_us(at) is not None for at in points))
    choices = choose(points, one_file=one_file, noise=noise)
    check(choices, points, one_file, noise)
    for entry, at in zip(choices.entries, sorted(points, key=lambda at: at.m), strict=True):
        if entry.reason is Reason.DEFAULT_KEPT:
            continue
        score_bar = (at.default_up.score or 0) + (at.default_down.score or 0)
        assert all_pairs(at, one_file)[entry.pair][1] < score_bar * (1 - noise)
        sides = ((at.up, at.default_up, entry.pair.up), (at.down, at.default_down, entry.pair.down))
        for scenario in range(2):
            total = 0.0
            bar = 0.0
            for given_candidates, default, config in sides:
                bar += default.alternatives_us[scenario]
                if config in given_candidates.configs:
                    place = list(given_candidates.configs).index(config)
                    total += given_candidates.alternatives_us[scenario][place]
                else:
                    total += default.alternatives_us[scenario]
            assert total <= bar * (1 + noise)


@pytest.mark.parametrize(
    ("best_us", "reason", "improves"),
    [(5.0, Reason.FASTER, True), (10.0, Reason.DEFAULT_CANNOT_STAND, False)],
)
def test_a_default_of_two_configs_cannot_stand_in_one_file(
    best_us: float, reason: Reason, improves: bool
) -> None:
    # vLLM's grouped int4 kernel: its default differs between up and down.
    candidates = Candidates((A, B), (best_us, 20.0))
    point = Point(8, candidates, candidates, DefaultConfig(SMALL, 8.0), DefaultConfig(DEFAULT, 8.0))
    chosen = choose([point], one_file=True, noise=0.01)
    (entry,) = chosen.entries
    assert entry.pair == Pair(A, A)
    assert entry.default_us == 16.0
    assert entry.reason is reason
    assert chosen.improves is improves


def test_nothing_but_a_default_of_two_configs_is_an_error() -> None:
    none = Candidates((), ())
    point = Point(8, none, none, DefaultConfig(SMALL, 8.0), DefaultConfig(DEFAULT, 8.0))
    with pytest.raises(NothingRunsError, match="m=8"):
        choose([point], one_file=True, noise=0.01)


@given(point_lists(scored=True), st.booleans(), NOISES, st.randoms(use_true_random=False))
def test_the_order_of_the_points_does_not_matter(
    points: list[Point], one_file: bool, noise: float, rng: random.Random
) -> None:
    shuffled = list(points)
    rng.shuffle(shuffled)
    assert choose(points, one_file=one_file, noise=noise) == choose(shuffled, one_file=one_file, noise=noise)


def test_case_45_a_default_that_is_best_is_kept_and_said_so() -> None:
    points = [point(m, {A: 99.5, B: 104.0}, {A: 100.0, B: 99.9}) for m in (1, 64)]
    choices = choose(points, one_file=False, noise=0.01)
    assert not choices.improves
    assert {entry.reason for entry in choices.entries} == {Reason.DEFAULT_KEPT}
    assert choices.up.get(1) == DEFAULT
    assert choices.geomean_speedup(((1, 0.5), (64, 0.5))) == 1.0


def test_case_30_an_m_where_the_default_is_best_keeps_the_defaults_entry() -> None:
    points = [point(1, {A: 100.0}, {A: 100.0}), point(4096, {A: 60.0}, {A: 60.0})]
    choices = choose(points, one_file=True, noise=0.01)
    assert choices.improves
    assert choices.up.entries == ((1, DEFAULT), (4096, A))
    assert choices.down is None


def test_case_43_a_gain_within_the_noise_is_no_gain() -> None:
    gains = [
        choose([point(8, {A: time}, {A: 100.0})], one_file=False, noise=0.01).improves
        for time in (98.1, 97.9)
    ]
    assert gains == [False, True]


def test_case_26_a_default_that_cannot_run_is_no_candidate() -> None:
    points = [point(8, {A: 300.0}, {A: 300.0}, default_us=(None, 299.0))]
    assert choose(points, one_file=True, noise=0.01).up.get(8) == A
    choices = choose(points, one_file=False, noise=0.01)
    assert choices.entries[0].reason is Reason.DEFAULT_CANNOT_RUN
    assert choices.entries[0].pair == Pair(A, DEFAULT)  # of the down kernel it can
    assert choices.improves
    assert choices.entries[0].speedup is None
    assert choices.geomean_speedup(((8, 1.0),)) is None
    assert choices.total_speedup(((8, 1.0),)) is None


def test_nothing_that_runs_is_an_error_with_the_m() -> None:
    with pytest.raises(NothingRunsError, match="m=8"):
        choose([point(8, {}, {}, default_us=(None, None))], one_file=False, noise=0.01)
    with pytest.raises(NothingRunsError, match="m=8"):  # no shared BLOCK_SIZE_M
        choose([point(8, {SMALL: 1.0}, {A: 1.0}, default_us=(None, None))], one_file=False, noise=0.01)


def test_case_32_the_best_of_each_kernel_is_not_taken_across_block_size_m() -> None:
    choices = choose([point(8, {SMALL: 10.0, A: 30.0}, {SMALL: 90.0, A: 20.0})], one_file=False, noise=0.01)
    assert choices.entries[0].pair == Pair(A, A)


def test_one_file_takes_the_best_compromise_not_the_up_winner() -> None:
    at = point(64, {A: 50.0, B: 55.0, C: 90.0}, {A: 90.0, B: 50.0, C: 40.0})
    assert choose([at], one_file=True, noise=0.01).entries[0].pair == Pair(B, B)
    assert choose([at], one_file=False, noise=0.01).entries[0].pair == Pair(A, B)


def test_the_default_of_one_kernel_may_stay_while_the_other_gains() -> None:
    choices = choose([point(8, {A: 120.0}, {A: 50.0})], one_file=False, noise=0.01)
    assert choices.entries[0].pair == Pair(DEFAULT, A)
    assert choices.entries[0].time_us == 150.0


def test_a_tie_goes_to_the_config_of_the_neighbouring_m() -> None:
    points = [
        point(1, {A: 50.0, B: 50.4}, {A: 50.0, B: 60.0}),
        point(2, {A: 50.2, B: 50.0}, {A: 50.0, B: 60.0}),
        point(4, {A: 80.0, B: 50.0}, {A: 80.0, B: 50.0}),
    ]
    choices = choose(points, one_file=False, noise=0.01)
    assert [entry.pair.up for entry in choices.entries] == [A, A, B]
    assert [entry.reason for entry in choices.entries] == [
        Reason.FASTER,
        Reason.AS_NEIGHBOUR,
        Reason.FASTER,
    ]
    apart = choose(points, one_file=False, noise=0.01, tie=0.0)
    assert [entry.pair.up for entry in apart.entries] == [A, B, B]


def test_the_score_ranks_and_the_time_is_what_is_reported() -> None:
    at = Point(
        8,
        Candidates((A, B), (50.0, 55.0), (70.0, 60.0)),
        Candidates((A, B), (50.0, 50.0), (50.0, 50.0)),
        runs(DEFAULT, 100.0),
        runs(DEFAULT, 100.0),
    )
    entry = choose([at], one_file=True, noise=0.01).entries[0]
    assert entry.pair.up == B
    assert (entry.up_us, entry.down_us) == (55.0, 50.0)


def test_a_score_alone_does_not_replace_the_default() -> None:
    """The winner head prefers B although B is slower than the default: the fastest is taken."""
    at = Point(
        8,
        Candidates((A, B), (90.0, 150.0), (80.0, 10.0)),
        Candidates((A, B), (90.0, 150.0), (80.0, 10.0)),
        runs(DEFAULT, 100.0),
        runs(DEFAULT, 100.0),
    )
    assert choose([at], one_file=True, noise=0.01).entries[0].pair.up == A
    assert choose([at], one_file=True, noise=0.01, first_few=1).entries[0].pair.up == A


def test_the_best_worst_case_among_the_first_few_is_taken() -> None:
    def side(of_b: float) -> Candidates:
        return Candidates((A, B, C), (50.0, 51.0, 52.0), None, [(70.0, of_b, 50.0)])

    def at(of_b: float) -> Point:
        default = DefaultConfig(DEFAULT, 100.0, 100.0, (100.0,))
        return Point(8, side(of_b), side(of_b), default, default)

    def first(of_b: float, first_few: int) -> KernelConfig:
        return choose([at(of_b)], one_file=True, noise=0.0, first_few=first_few).entries[0].pair.up

    assert first(50.5, 3) == B  # worst case 1.02, against 1.40 of A and 1.04 of C
    assert first(60.0, 3) == C
    assert first(60.0, 1) == A  # C is not among the first few


def test_a_pair_that_loses_to_the_default_under_one_assumption_is_refused() -> None:
    given_candidates = Candidates((A,), (50.0,), None, [(110.0,)])
    default = DefaultConfig(DEFAULT, 100.0, 100.0, (100.0,))
    choices = choose(
        [Point(8, given_candidates, given_candidates, default, default)], one_file=True, noise=0.01
    )
    assert not choices.improves


def test_without_a_veto_the_assumptions_only_rank() -> None:
    up = Candidates((A, B), (5.0, 5.1), None, [(9.0, 6.0)])
    down = Candidates((A, B), (5.0, 5.1), None, [(9.0, 6.0)])
    default = DefaultConfig(DEFAULT, 8.0, alternatives_us=(5.0,))
    point = Point(8, up, down, default, default)
    (vetoed,) = choose([point], one_file=True, noise=0.01).entries
    assert vetoed.reason is Reason.DEFAULT_KEPT
    (ranked,) = choose([point], one_file=True, noise=0.01, veto=False).entries
    assert ranked.pair == Pair(B, B)


def test_configs_with_tma_are_not_added_up() -> None:
    tma = KernelConfig(64, 128, 64, 1, use_tma=True)
    choices = choose([point(8, {tma: 1.0, A: 50.0}, {tma: 1.0, A: 50.0})], one_file=False, noise=0.01)
    assert choices.entries[0].pair == Pair(A, A)


def test_a_default_measured_again_does_not_beat_itself() -> None:
    choices = choose([point(8, {DEFAULT: 80.0}, {DEFAULT: 80.0})], one_file=True, noise=0.01)
    assert not choices.improves


def test_weights_only_change_the_mean() -> None:
    points = [point(1, {A: 50.0}, {A: 50.0}), point(2, {A: 100.0}, {A: 100.0}, default_us=(400.0, 400.0))]
    choices = choose(points, one_file=True, noise=0.01)
    assert choices.geomean_speedup(((1, 1.0), (2, 1.0))) == pytest.approx(math.sqrt(8))
    assert choices.geomean_speedup(((1, 3.0),)) == pytest.approx(2)
    assert choices.total_speedup(((1, 1.0), (2, 1.0))) == pytest.approx(1000 / 300)
    assert choices.total_speedup(((1, 2.0), (2, 1.0))) == pytest.approx(1200 / 400)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_times_that_are_no_times_are_a_fault_of_the_caller(bad: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        Candidates((A, B), (1.0, bad))
    with pytest.raises(ValueError, match="positive"):
        Candidates((A, B), (1.0, 1.0), None, [(1.0, bad)])
    with pytest.raises(ValueError, match="2 configs with 1"):
        Candidates((A, B), (1.0,))


def test_a_missing_score_of_the_default_is_a_fault_of_the_caller() -> None:
    scored = Candidates((A,), (1.0,), (1.0,))
    default = DefaultConfig(DEFAULT, 100.0)
    with pytest.raises(ValueError, match="lacks the score"):
        choose([Point(8, scored, scored, default, default)], one_file=True, noise=0.01)
    other = DefaultConfig(SMALL, 100.0, 100.0)
    with pytest.raises(ValueError, match="BLOCK_SIZE_M"):
        choose([Point(8, scored, scored, runs(DEFAULT, 1), other)], one_file=False, noise=0.01)


def test_the_whole_grid_at_many_m_is_chosen_as_by_brute_force() -> None:
    configs = grid()
    points = [
        Point(
            m,
            Candidates(configs, times_us(len(configs), seed=m)),
            Candidates(configs, times_us(len(configs), seed=1000 + m)),
            runs(DEFAULT, 1e6),
            runs(DEFAULT, 1e6),
        )
        for m in range(1, 6)
    ]
    for entry, at in zip(choose(points, one_file=False, noise=0.0).entries, points, strict=True):
        least: dict[int, list[float]] = {}
        for side, candidates in enumerate((at.up, at.down)):
            for config, time in zip(candidates.configs, candidates.time_us, strict=True):
                slot = least.setdefault(config.block_size_m, [math.inf, math.inf])
                slot[side] = min(slot[side], time)
        assert entry.time_us == min(sum(slot) for slot in least.values())
