"""Between the keys too, no m is served worse than by the server's default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.choose import Candidates, DefaultConfig, Pair, Point, Reason
from moetune.domain.config import ConfigTable, KernelConfig
from moetune.domain.coverage import Covered, check_coverage, choose_covering, probe_ms
from moetune.domain.keys import m_keys
from tests.generators import random_configs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

A, B, C, D = (KernelConfig(64, 64, 64, group) for group in (1, 2, 4, 8))
DEFAULTS = (KernelConfig(16, 32, 64, 1), KernelConfig(64, 64, 32, 8))


@dataclass(frozen=True)
class World:
    """Times that are straight lines in m, and a default that changes after m = switch."""

    lines: Mapping[KernelConfig, tuple[float, float]]
    switch: int
    cannot_run: tuple[tuple[KernelConfig, int, int], ...] = ()
    one_file: bool = True

    def time_us(self, config: KernelConfig, m: int) -> float | None:
        if any(config == other and first <= m <= last for other, first, last in self.cannot_run):
            return None
        start, slope = self.lines[config]
        return start + slope * m

    def default_at(self, m: int) -> Pair:
        config = DEFAULTS[m > self.switch]
        return Pair(config, config)

    def times_at(self, m: int, pairs: Sequence[Pair]) -> list[float | None]:
        sums = []
        for pair in pairs:
            up, down = self.time_us(pair.up, m), self.time_us(pair.down, m)
            sums.append(None if up is None or down is None else up + down)
        return sums

    def point_at(self, m: int) -> Point:
        timed = {config: self.time_us(config, m) for config in self.lines if config not in DEFAULTS}
        runs = {config: time for config, time in timed.items() if time is not None}
        side = Candidates(tuple(runs), tuple(runs.values()))
        config = self.default_at(m).up
        default = DefaultConfig(config, self.time_us(config, m))
        return Point(m, side, side, default, default)

    def choose(
        self, ms: Sequence[int], largest_m: int, noise: float = 0.01, max_added: int = 1000
    ) -> Covered:
        return choose_covering(
            ms,
            self.point_at,
            self.default_at,
            self.times_at,
            switches=(self.switch,),
            largest_m=largest_m,
            one_file=self.one_file,
            noise=noise,
            max_added=max_added,
        )


# A is best at m = 1, where it is compared; B at m = 100; in between the default is.
BETWEEN = World(
    {A: (10, 2.0), B: (120, 0.1), DEFAULTS[0]: (60, 0.9), DEFAULTS[1]: (60, 0.9)},
    switch=1000,
)


def test_a_table_that_is_right_at_its_keys_only_is_seen() -> None:
    table = ConfigTable.of({1: A, 100: B})
    found = check_coverage(
        table, None, BETWEEN.default_at, BETWEEN.times_at, probe_ms(table, (), 100), noise=0.01
    )
    assert [(shortfall.m, shortfall.key) for shortfall in found] == [(50, 1), (51, 100)]
    assert found[0].time_us == 2 * (10 + 2.0 * 50)
    assert found[0].default_us == 2 * (60 + 0.9 * 50)


def test_keys_are_added_until_no_m_is_served_worse() -> None:
    covered = BETWEEN.choose((1, 100), 100)
    assert covered.added
    assert covered.shortfalls == ()
    assert {entry.m for entry in covered.choices.entries} == {1, 100, *covered.added}
    assert Reason.DEFAULT_KEPT in {entry.reason for entry in covered.choices.entries}


def test_what_cannot_be_mended_is_said() -> None:
    covered = BETWEEN.choose((1, 100), 100, max_added=0)
    assert covered.added == ()
    assert [shortfall.m for shortfall in covered.shortfalls] == [50, 51]
    assert BETWEEN.choose((1, 100), 100, max_added=1).shortfalls == ()


def test_an_entry_that_cannot_run_in_its_span_falls_short() -> None:
    lines = {A: (10, 0.0), B: (20, 0.0), DEFAULTS[0]: (60, 0.0), DEFAULTS[1]: (60, 0.0)}
    world = World(lines, 1000, ((A, 40, 60), (DEFAULTS[0], 40, 60)))
    covered = world.choose((1, 100), 100)
    assert covered.shortfalls == ()
    for m in range(40, 61):
        assert covered.choices.up.nearest(m) == B
    assert covered.choices.up.nearest(1) == A


def test_probes_stand_at_keys_ends_of_spans_and_switches() -> None:
    table = ConfigTable.of({1: A, 8: A, 64: B})
    assert probe_ms(table, (20, 70), 64) == (1, 4, 5, 8, 20, 21, 36, 37, 64)
    assert probe_ms(table, (20,), 10) == (1, 4, 5, 8, 10)


POOL = random_configs(6, seed=11)
LINES = st.tuples(st.integers(1, 200).map(float), st.floats(0.01, 3))


@given(
    st.lists(LINES, min_size=3, max_size=8),
    st.integers(1, 250),
    st.sampled_from([0.0, 0.01, 0.05]),
    st.booleans(),
)
@settings(max_examples=60)
def test_no_m_at_all_is_served_worse_where_times_are_straight_lines(
    lines: list[tuple[float, float]], switch: int, noise: float, one_file: bool
) -> None:
    """Between two m of one span and one regime straight lines cross at most once: the ends suffice."""
    configs = [*DEFAULTS, *(config for config in POOL if config not in DEFAULTS)]
    world = World(dict(zip(configs, lines, strict=False)), switch, one_file=one_file)
    keys = m_keys((switch,), 200)
    covered = world.choose(keys.ms, 200, noise)
    assert covered.shortfalls == ()
    up = covered.choices.up
    down = covered.choices.down or up
    for m in range(1, 201):
        chosen, default = world.times_at(m, (Pair(up.nearest(m), down.nearest(m)), world.default_at(m)))
        assert chosen is not None
        assert default is not None
        assert chosen <= default * (1 + noise) * (1 + 1e-9)
