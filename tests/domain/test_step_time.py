from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.step_time import step_times, throughput_gain, time_saved, union_us

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moetune.domain.step_time import Floats


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 50)), max_size=40))
def test_a_union_counts_every_covered_microsecond_once(intervals: list[tuple[int, int]]) -> None:
    covered = {moment for begin, length in intervals for moment in range(begin, begin + length)}
    begin = np.array([float(begin) for begin, _ in intervals])
    end = np.array([float(begin + length) for begin, length in intervals])
    assert union_us(begin, end) == len(covered)


def _step(first: float, *kernels: tuple[float, bool]) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    begins, ends, clock = [], [], first
    for duration, _ in kernels:
        begins.append(clock)
        clock += duration
        ends.append(clock)
    return np.array(begins), np.array(ends), np.array([moe for _, moe in kernels])


def test_wall_time_has_the_short_wait_for_the_next_step() -> None:
    first, second = _step(0.0, (60.0, False), (40.0, True)), _step(150.0, (60.0, False), (40.0, True))
    times = step_times([second, first])
    assert [time.begin_us for time in times] == [0.0, 150.0]
    assert [time.wall_us for time in times] == [150.0, 100.0]
    assert times[0].share == pytest.approx(40 / 150)


def test_a_server_without_requests_is_no_step() -> None:
    # The wait of a second would make the share of any kernel vanish, and the bound with it.
    times = step_times([_step(0.0, (60.0, False), (40.0, True)), _step(1e6, (100.0, True))])
    assert times[0].wall_us == 100.0


def test_up_and_down_alternate() -> None:
    (time,) = step_times([_step(0.0, (12.0, True), (3.0, False), (8.0, True), (12.0, True), (8.0, True))])
    assert (time.up_us, time.down_us, time.moe_us, time.moe_kernels) == (24.0, 16.0, 40.0, 4)


def test_an_odd_number_of_kernels_cannot_be_told_apart() -> None:
    (time,) = step_times([_step(0.0, (12.0, True), (8.0, True), (12.0, True))])
    assert (time.up_us, time.down_us, time.moe_us) == (None, None, 32.0)


def test_overlapping_streams_are_not_counted_twice() -> None:
    begin, end = np.array([0.0, 0.0, 10.0]), np.array([20.0, 20.0, 30.0])
    (time,) = step_times([(begin, end, np.array([True, True, False]))])
    assert (time.moe_us, time.busy_us) == (20.0, 30.0)


def test_case_50_ten_of_77_milliseconds() -> None:
    assert time_saved(10 / 77, math.inf) == pytest.approx(0.13, abs=0.001)
    assert throughput_gain(time_saved(10 / 77, math.inf)) == pytest.approx(1.149, abs=0.001)


@given(st.floats(0.0, 1.0), st.floats(1.0, 100.0))
def test_no_speedup_saves_more_than_the_share(share: float, speedup: float) -> None:
    assert 0.0 <= time_saved(share, speedup) <= share
    assert throughput_gain(time_saved(share, speedup)) >= 1.0
