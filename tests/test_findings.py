"""docs/findings.md: every table is what the recordings in the repository give, and nothing else stands there.

`python -m benchmarks.findings --write` writes the tables anew.
"""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from benchmarks.findings import PAGE, TABLES, rewritten, tables_in
from benchmarks.findings_choice import Losses
from benchmarks.findings_data import (
    GRID_RECORDINGS,
    LANDSCAPES,
    OWN_RECORDINGS,
    RANGES,
    Cell,
    grid,
    mean_loss,
    own,
    percent,
    quantile,
    range_of,
    table,
    theirs,
    twice,
    whole,
)
from benchmarks.findings_formats import FORMATS, TwoPasses, cells
from benchmarks.findings_grid import default_of, draws_needed, expected_loss, tiles, within
from benchmarks.findings_host import timed_again
from benchmarks.findings_keys import Smaller, shrunk
from benchmarks.findings_published import FAMILIES, stored
from benchmarks.findings_search import ends, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.config import KernelConfig
from moetune.domain.space import sglang_grid

GRID = tuple(sglang_grid())


def a_cell(times_us: dict[KernelConfig, float]) -> Cell:
    return replace(theirs()[0], times_us=times_us)


def some(*times_us: float) -> Cell:
    return a_cell(dict(zip(GRID, times_us, strict=False)))


times = st.lists(st.floats(1, 100), min_size=3, max_size=9)


@pytest.mark.parametrize("name", list(TABLES))
def test_a_table_of_the_page_is_what_the_recordings_give(name: str) -> None:
    assert tables_in(PAGE.read_text("utf-8"))[name] == TABLES[name]()


def test_the_page_holds_every_table_once_in_order() -> None:
    assert list(tables_in(PAGE.read_text("utf-8"))) == list(TABLES)


def test_the_page_says_how_each_table_is_made_and_where_from() -> None:
    page = PAGE.read_text("utf-8")
    assert "python -m benchmarks.findings" in page
    for fact in (
        "NVIDIA H200",
        "torch 2.11.0",
        "Triton 3.6.0",
        "December 2026",
        "SGLang 0.5.23",
        "vLLM 0.33.0",
    ):
        assert fact in page
    for link in re.findall(r"\]\(([^)#]+)", page):
        assert (PAGE.parent / link).exists(), link


def test_writing_mends_a_table_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLES, "noise", lambda: ["| a |", "|---|", "| 1 |"])
    page = "before\n<!-- table: noise -->\n| a |\n|---|\n| 2 |\n| 3 |\n\nafter | 2 |\n"
    assert rewritten(page) == "before\n<!-- table: noise -->\n| a |\n|---|\n| 1 |\n\nafter | 2 |\n"
    assert rewritten("<!-- table: noise -->\n") == "<!-- table: noise -->\n| a |\n|---|\n| 1 |\n"
    with pytest.raises(ValueError, match="twice"):
        tables_in(page + page)


def test_a_cell_of_the_whole_grid_holds_what_runs_of_it() -> None:
    assert {cell.recording for cell in whole()} == {*GRID_RECORDINGS, *OWN_RECORDINGS}
    for cell in whole():
        assert cell.times_us.keys() <= grid()
        assert 950 < len(cell.times_us) < 1280
    assert {pair[0].key == pair[1].key for pair in twice()} == {True}
    assert all("own-kernel" in pair[1].recording and "own" not in pair[0].recording for pair in twice())


def test_the_default_is_recorded_wherever_the_grid_is() -> None:
    """Else the table of what defaults lose would leave out where they are far from the grid."""
    for cell in (*theirs(), *own()):
        for server in ("SGLang", "vLLM"):
            assert cell.loss(default_of(server, cell)) is not None


@given(times, st.integers(1, 9))
def test_expected_loss_is_the_mean_over_all_draws(times_us: list[float], draws: int) -> None:
    draws = min(draws, len(times_us))
    best = [math.log(min(drawn) / min(times_us)) for drawn in combinations(times_us, draws)]
    assert expected_loss(some(*times_us), draws) == pytest.approx(sum(best) / len(best), abs=1e-9)


@given(times)
def test_draws_needed_are_the_fewest_that_find_one_in_95_percent(times_us: list[float]) -> None:
    cell = some(*times_us)
    good = {time_us for time_us in times_us if time_us <= 1.05 * min(times_us)}

    def found(draws: int) -> float:
        tries = [not good.isdisjoint(drawn) for drawn in combinations(times_us, draws)]
        return sum(tries) / len(tries)

    needed = draws_needed(cell, 0.05)
    assert found(needed) > 0.95 - 1e-9
    assert needed == 1 or found(needed - 1) < 0.95 + 1e-9


def test_within_and_loss() -> None:
    cell = some(100.0, 101.0, 105.0, 105.1)
    assert [len(within(cell, share)) for share in (0.0, 0.01, 0.05, 0.1)] == [1, 2, 3, 4]
    assert cell.best == GRID[0]
    assert cell.loss(GRID[2]) == pytest.approx(0.05)
    assert cell.loss(GRID[9]) is None


def test_row_tiles_are_those_of_the_launch_grid() -> None:
    """Few slots: one tile each. Many: each expert and those elsewhere waste all but one row of a tile."""
    cell = theirs()[0]
    assert (cell.problem.E, cell.problem.topk) == (256, 8)
    assert tiles(replace(cell, m=2), 16) == tiles(replace(cell, m=2), 256) == 16
    assert tiles(replace(cell, m=64), 16) == -(-(64 * 8 + 257 * 15) // 16)


@given(st.lists(times.map(lambda found: (found * 3)[:5]), min_size=2, max_size=5))
def test_greedy_choice_never_gets_worse_and_ends_with_nothing_lost(rows: list[list[float]]) -> None:
    cells = [some(*times_us) for times_us in rows]
    losses = Losses.of(cells, GRID[:5])
    order = losses.greedy(5)
    assert sorted(order) == list(range(5))
    sums = [float(np.minimum(losses.left(order[:count]), math.log(2)).sum()) for count in range(1, 6)]
    assert all(after <= before + 1e-12 for before, after in pairwise(sums))
    assert sums[-1] == pytest.approx(0)
    singles = [float(np.minimum(losses.lost[:, column], math.log(2)).sum()) for column in range(5)]
    assert sums[0] == pytest.approx(min(singles))


def test_a_smaller_grid_is_the_larger_one_without_a_value() -> None:
    losses = Losses.of([cell for cell in theirs() if cell.m == 64])
    grids = shrunk(losses)
    assert grids[0].size == len(losses.configs) == 1920
    assert grids[-1].size == 1
    for before, after in pairwise(grids):
        dropped = [key for key in before.axes if before.axes[key] != after.axes[key]]
        assert len(dropped) == 1
        assert {*after.axes[dropped[0]]} < {*before.axes[dropped[0]]}
    one = Smaller({**grids[0].axes, "block_size_m": (16,), "num_warps": (8,)})
    assert one.size == 1920 // 10 == len(one.columns(losses))
    assert {losses.configs[column].block_size_m for column in one.columns(losses)} == {16}


@settings(max_examples=20)
@given(st.integers(0, 1 << 32))
def test_walking_downhill_ends_where_no_step_is_faster(seed: int) -> None:
    draw = random.Random(seed).random
    cell = a_cell({config: 1 + draw() for config in GRID if draw() < 0.7})
    for start, (end, measured) in list(ends(cell).items())[::50]:
        around = [cell.times_us[one] for _, one in steps(end) if one in cell.times_us]
        assert cell.times_us[end] <= min([cell.times_us[start], *around])
        assert measured >= 1 + sum(one in cell.times_us for _, one in steps(start))


def test_a_step_changes_one_key_to_the_next_value_of_the_grid() -> None:
    config = KernelConfig(16, 64, 128, 16, 4, 5)
    assert {(key, str(other)) for key, other in steps(config)} == {
        ("block_size_m", "32x64x128 g16 w4 s5"),
        ("block_size_n", "16x32x128 g16 w4 s5"),
        ("block_size_n", "16x128x128 g16 w4 s5"),
        ("block_size_k", "16x64x64 g16 w4 s5"),
        ("block_size_k", "16x64x256 g16 w4 s5"),
        ("group_size_m", "16x64x128 g1 w4 s5"),
        ("group_size_m", "16x64x128 g32 w4 s5"),
        ("num_warps", "16x64x128 g16 w8 s5"),
        ("num_stages", "16x64x128 g16 w4 s4"),
    }


def test_every_gpu_of_a_published_file_has_its_place() -> None:
    placed = [gpu for _, gpus in FAMILIES for gpu in gpus]
    assert len(placed) == len(set(placed))
    assert {one.gpu for one in stored()} == set(placed)


def test_means_quantiles_and_ranges() -> None:
    assert mean_loss([0.0, 0.21]) == pytest.approx(0.1)
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0, 2.0], 1.0) == 2.0
    assert [percent(0.1234), percent(0.1234, 0), percent(-0.0001), percent(-0.01)] == [
        "12.3%",
        "12%",
        "0.0%",
        "-1.0%",
    ]
    assert [range_of(m) for m in (1, 4, 5, 257, 8192)] == [
        "1 to 4",
        "1 to 4",
        "8 to 32",
        "256 to 512",
        "1024 to 8192",
    ]
    assert all(range_of(first) == range_of(last) == f"{first} to {last}" for first, last in RANGES)
    assert table(["a", "b"], [["1", "2"]]) == ["| a | b |", "|---|---|", "| 1 | 2 |"]


def test_a_best_of_two_passes_is_chosen_on_the_first_and_judged_on_the_second() -> None:
    first = some(10.0, 11.0, 30.0)
    a, b, c = first.times_us
    cell = TwoPasses("bf16", first, {a: 12.0, b: 9.0})
    assert cell.loss(a) == 0
    assert cell.loss(b) == -0.25
    assert cell.loss(c) == 2.0  # not in the second pass: it had lost already
    assert cell.loss(GRID[-1]) is None


def test_every_landscape_of_two_passes_is_of_a_format_that_tables_name() -> None:
    assert {cell.format for cell in cells()} == set(FORMATS)
    assert all(cell.second_us for cell in cells())


def test_what_was_timed_again_is_what_the_landscapes_count() -> None:
    counted = sum(
        json.loads(path.read_text("utf-8"))["timed_again"]
        for path in LANDSCAPES.glob("*_h200_own-kernel.json")
    )
    again = timed_again()
    assert sum(len(times) - 1 for passes in again.values() for times in passes.values()) == counted > 4000
    assert {len(times) for passes in again.values() for times in passes.values()} == {1, 2}
