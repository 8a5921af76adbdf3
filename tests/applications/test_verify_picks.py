"""Which entries a server picks for each m, and which of them are measured."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from moetune.applications.verify_answer import VerifyRequest
from moetune.applications.verify_picks import picks_of
from moetune.domain.config import ConfigTable, KernelConfig
from tests.applications.fake_machine import PROBLEM, SERVER, FakeMachine
from tests.applications.verify_world import (
    DOWN,
    GOOD_DOWN,
    GOOD_UP,
    MS,
    SLOW,
    UP,
    lay,
    look,
    measured,
)

if TYPE_CHECKING:
    from moetune.domain.problem import Kernel


def test_between_the_keys_what_the_server_would_pick_is_measured_too(tmp_path: Path) -> None:
    paths = lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN})
    picks = {pick.m: pick for pick in look(*paths, between=True).looked.picks}
    switches = [m for m in SERVER.default_switches(PROBLEM) if m < 2048]
    assert {*MS, 32, 33, *switches, *(m + 1 for m in switches)} <= set(picks)
    assert picks[33].up_key == picks[33].down_key == 64
    entries = measured(FakeMachine(tmp_path), *paths, between=True)
    assert set(entries) == set(picks)


def test_tables_with_different_keys_meet_as_the_server_lets_them_meet(tmp_path: Path) -> None:
    down = {1: GOOD_DOWN[1], 32: GOOD_DOWN[64], 64: GOOD_DOWN[64], 2048: GOOD_DOWN[2048]}
    picks = look(*lay(tmp_path, {UP: GOOD_UP, DOWN: down})).looked.picks
    spans = [(pick.first, pick.last) for pick in picks]
    assert spans[0][0] == 1
    assert spans[-1][1] == 2048
    assert all(later[0] == earlier[1] + 1 for earlier, later in pairwise(spans))
    keys = {(pick.m, pick.up_key, pick.down_key) for pick in picks}
    assert (32, 1, 32) in keys
    assert (33, 64, 32) in keys  # no key of either lies there
    for pick in picks:
        for m in (pick.first, pick.m, pick.last):
            assert SERVER.config_for(ConfigTable.of(GOOD_UP), m) == pick.up
            assert SERVER.config_for(ConfigTable.of(down), m) == pick.down


PICKED = [*GOOD_UP.values(), SLOW]
TABLES = st.none() | st.dictionaries(st.integers(0, 3000), st.sampled_from(PICKED), min_size=1, max_size=6)


@given(up=TABLES, down=TABLES, max_m=st.integers(1, 3000), between=st.booleans())
def test_every_m_is_in_one_stretch_and_there_the_server_picks_what_it_says(
    up: dict[int, KernelConfig] | None, down: dict[int, KernelConfig] | None, max_m: int, between: bool
) -> None:
    if up is None and down is None:
        return
    asked = VerifyRequest(paths=(Path("x"),), max_m=max_m, between=between)
    tables = [None if table is None else ConfigTable(tuple(table.items())) for table in (up, down)]
    picks = picks_of(SERVER, PROBLEM, tables[0], tables[1], asked)
    stretches = list(dict.fromkeys((pick.first, pick.last) for pick in picks))
    assert [first for first, _ in stretches] == [1, *(last + 1 for _, last in stretches[:-1])]
    keys = {key for table in (up, down) if table for key in table}
    assert stretches[-1][1] == max(max_m, *keys)
    assert {key for key in keys if key} <= {pick.m for pick in picks}
    for pick in picks:
        for m in {pick.first, pick.m, pick.last, (pick.first + pick.last) // 2}:
            for kernel, table, config in (("up", tables[0], pick.up), ("down", tables[1], pick.down)):
                kernels: dict[str, Kernel] = {"up": "up", "down": "down"}
                default = SERVER.default_config(PROBLEM, kernels[kernel], m)
                assert config == (default if table is None else SERVER.config_for(table, m))
