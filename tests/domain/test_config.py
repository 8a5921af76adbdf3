"""Configs and tables say what the servers' files say, and pick what the servers pick."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.config import ConfigTable, KernelConfig, Span, pair_mismatches
from moetune.domain.errors import ConfigFileError
from tests import wheels
from tests.generators import configs, ms, tables

ENTRY = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8}
BIG = KernelConfig(128, 128, 64, 8, 8, 4)
SMALL = KernelConfig(16, 64, 128, 1)


@given(configs())
def test_an_entry_round_trips(config: KernelConfig) -> None:
    assert KernelConfig.from_json(json.loads(json.dumps(config.to_json())), "here") == config


@given(tables())
def test_a_table_round_trips_in_its_own_order(table: ConfigTable) -> None:
    assert ConfigTable.from_json(json.loads(json.dumps(table.to_json())), "here") == table


@given(tables())
def test_the_rendered_text_is_canonical(table: ConfigTable) -> None:
    text = table.render()
    read = ConfigTable.parse(text, "here")
    assert read == table.sorted()
    assert read.render() == text
    assert ConfigTable(tuple(reversed(table.entries))).render() == text


def test_missing_warps_and_stages_are_tritons_own() -> None:
    config = KernelConfig.from_json(ENTRY, "here")
    assert (config.num_warps, config.num_stages, config.use_tma, config.extra) == (4, 3, False, ())


def test_unknown_keys_are_kept_sorted() -> None:
    config = KernelConfig.from_json({**ENTRY, "kpack": 2, "SPLIT_K": 1, "grf_mode": "256"}, "here")
    assert config.extra == (("SPLIT_K", 1), ("grf_mode", "256"), ("kpack", 2))
    assert config.to_json()["grf_mode"] == "256"


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (None, "no object"),
        ([64], "no object"),
        ({}, "lacks BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, GROUP_SIZE_M"),
        ({key: 1 for key in ENTRY if key != "GROUP_SIZE_M"}, "lacks GROUP_SIZE_M"),
        ({**ENTRY, "BLOCK_SIZE_M": True}, "BLOCK_SIZE_M is true"),
        ({**ENTRY, "BLOCK_SIZE_M": 64.0}, "BLOCK_SIZE_M is 64.0"),
        ({**ENTRY, "BLOCK_SIZE_M": "64"}, 'BLOCK_SIZE_M is "64"'),
        ({**ENTRY, "num_warps": None}, "num_warps is null"),
        ({**ENTRY, "num_stages": 0}, "num_stages is 0"),
        ({**ENTRY, "GROUP_SIZE_M": -8}, "GROUP_SIZE_M is -8"),
        ({**ENTRY, "GROUP_SIZE_M": 2**31}, "out of range"),
        ({**ENTRY, "USE_TMA": 1}, "USE_TMA is 1"),
        ({**ENTRY, "SPLIT_K": [1]}, "SPLIT_K is [1]"),
        ({**ENTRY, "SPLIT_K": 1.5}, "SPLIT_K is 1.5"),
        ({**ENTRY, "grf_mode": "x" * 65}, "grf_mode"),
        ({**ENTRY, "a b\x1b[31m": 1}, "no name of a kernel argument"),
    ],
)
def test_what_is_no_entry_is_refused_by_name(entry: Any, says: str) -> None:
    with pytest.raises(ConfigFileError) as caught:
        KernelConfig.from_json(entry, "here.json: entry '8'")
    assert caught.value.message.startswith("here.json: entry '8'")
    assert says in caught.value.message
    assert "\x1b" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "a list"),
        ('{"8.0": {}}', "'8.0' is no number of tokens"),
        ('{"default": {}}', "'default' is no number"),
        ('{"": {}}', "'' is no number"),
        ('{"' + "9" * 30 + '": {}}', "is no number"),
        ('{"8": {"BLOCK_SIZE_M": NaN}}', "NaN"),
        ('{"8": 8}', "no object"),
        ("{" + ",".join(f'"{m}": 0' for m in range(5000)) + "}", "5000 entries"),
        (" " * (9 << 20), "larger than"),
    ],
)
def test_case_38_hand_written_files_are_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(ConfigFileError, match="mine") as caught:
        ConfigTable.parse(text, "mine")
    assert says in caught.value.message


def test_keys_are_read_as_the_servers_int_reads_them() -> None:
    small, big = json.dumps(SMALL.to_json()), json.dumps(BIG.to_json())
    table = ConfigTable.parse(f'{{" 8 ": {small}, "1_0": {small}, "64": {small}, "8": {big}}}', "here")
    assert table.entries == ((8, BIG), (10, SMALL), (64, SMALL))


def test_only_the_keys_that_a_loader_drops_are_dropped() -> None:
    text = json.dumps({"triton_version": "3.6.0", "8": ENTRY})
    assert ConfigTable.parse(text, "here", frozenset({"triton_version"})).keys() == (8,)
    with pytest.raises(ConfigFileError, match="'triton_version' is no number"):
        ConfigTable.parse(text, "here")


def test_an_empty_table_is_read_and_picks_nothing() -> None:
    table = ConfigTable.parse("{}", "here")
    assert len(table) == 0
    assert table.spans(8192) == ()
    assert not table.covers(1, 1)
    with pytest.raises(ConfigFileError, match="empty"):
        table.nearest(8)


def test_a_table_holds_each_m_once() -> None:
    with pytest.raises(ValueError, match="once"):
        ConfigTable(((8, BIG), (8, SMALL)))


@given(tables(min_size=1), ms())
def test_nearest_is_the_nearest_and_the_first_of_two(table: ConfigTable, m: int) -> None:
    key = table.nearest_key(m)
    distances = [abs(other - m) for other, _ in table.entries]
    assert abs(key - m) == min(distances)
    assert table.keys().index(key) == distances.index(min(distances))
    assert table.nearest(m) == dict(table.entries)[key]


def test_ties_go_to_the_first_in_file_order() -> None:
    assert ConfigTable(((8, SMALL), (16, BIG))).nearest(12) == SMALL
    assert ConfigTable(((16, BIG), (8, SMALL))).nearest(12) == BIG


@given(tables(min_size=1, max_size=6), st.integers(1, 400))
def test_spans_are_what_nearest_picks(table: ConfigTable, last: int) -> None:
    picked = [span.key for span in table.spans(last) for _ in range(span.first, span.last + 1)]
    assert picked == [table.nearest_key(m) for m in range(1, last + 1)]


def test_case_30_keys_that_start_at_96_do_not_cover_decode() -> None:
    table = ConfigTable.of(dict.fromkeys((96, 128, 256, 512, 1024), BIG))
    assert table.nearest_key(1) == 96
    assert table.spans(1024)[0] == Span(key=96, first=1, last=112)
    assert not table.covers(1, 1024)
    assert table.merge(ConfigTable.of({1: SMALL})).covers(1, 1024)


def test_case_31_keys_up_to_64_do_not_cover_prefill() -> None:
    table = ConfigTable.of(dict.fromkeys((1, 2, 4, 8, 16, 32, 64), SMALL))
    assert table.spans(8192)[-1] == Span(key=64, first=49, last=8192)
    assert not table.covers(1, 8192)
    assert table.covers(1, 64)


@given(tables(), tables(), tables())
def test_merge_goes_by_key_and_the_other_wins(a: ConfigTable, b: ConfigTable, c: ConfigTable) -> None:
    merged = a.merge(b)
    for m in {*a.keys(), *b.keys()}:
        assert merged.get(m) == (b.get(m) or a.get(m))
    assert set(merged.keys()) == {*a.keys(), *b.keys()}
    assert merged.keys() == tuple(sorted(merged.keys()))
    assert merged.merge(c) == a.merge(b.merge(c))
    assert a.merge(a) == a.merge(ConfigTable(())) == ConfigTable(()).merge(a) == a.sorted()


@given(tables(), tables())
def test_diff_is_what_turns_one_table_into_the_other(a: ConfigTable, b: ConfigTable) -> None:
    diff = a.diff(b)
    kept = {m: config for m, config in a.entries if m not in dict(diff.removed)}
    patched = kept | dict(diff.added) | {m: after for m, _, after in diff.changed}
    assert patched == dict(b.entries)
    assert all(before == a.get(m) and before != after for m, before, after in diff.changed)
    assert bool(diff) == (dict(a.entries) != dict(b.entries))
    places = [m for m, *_ in (*diff.added, *diff.removed, *diff.changed)] + list(diff.unchanged)
    assert sorted(places) == sorted({*a.keys(), *b.keys()})


def test_a_diff_of_nothing_is_false() -> None:
    table = ConfigTable(((16, BIG), (8, SMALL)))
    assert not table.diff(table.sorted())


def test_case_32_a_pair_that_disagrees_on_block_size_m_is_seen() -> None:
    up = ConfigTable.of({1: SMALL, 64: KernelConfig(64, 64, 64, 1)})
    down = ConfigTable.of({1: SMALL, 64: SMALL})
    assert pair_mismatches(up, down, 8192) == ((33, 64, 16),)
    assert pair_mismatches(up, up, 8192) == ()


def test_a_pair_with_other_keys_is_compared_as_each_side_picks() -> None:
    up = ConfigTable.of({1: SMALL, 64: BIG})
    down = ConfigTable.of({1: SMALL, 32: BIG, 64: BIG})
    assert pair_mismatches(up, down, 64) == ((17, 16, 128),)
    assert pair_mismatches(up, down, 16) == ()


@given(tables(max_size=5), tables(max_size=5), st.integers(1, 200))
def test_pair_mismatches_miss_no_m(up: ConfigTable, down: ConfigTable, last: int) -> None:
    found = pair_mismatches(up, down, last)
    ok = not up.entries or not down.entries
    wrong = [
        m for m in range(1, last + 1) if not ok and up.nearest(m).block_size_m != down.nearest(m).block_size_m
    ]
    assert bool(found) == bool(wrong)
    assert {m for m, _, _ in found} <= set(wrong)
    if found:
        assert found[0][0] == wrong[0]


@given(st.lists(configs(), min_size=2, max_size=5))
def test_any_configs_can_be_put_in_order(some: list[KernelConfig]) -> None:
    ordered = sorted(some, key=KernelConfig.sort_key)
    some.reverse()
    assert sorted(some, key=KernelConfig.sort_key) == ordered


@pytest.mark.parametrize(("package", "version"), [("sglang", "0.5.23"), ("vllm", "0.33.0")])
def test_every_file_that_a_server_ships_is_read_and_keeps_its_meaning(package: str, version: str) -> None:
    names = [
        name
        for name in wheels.members(package, version)
        # FlyDSL is another kernel with keys of its own.
        if "moe" in name and "/E=" in name and name.endswith(".json") and "flydsl" not in name
    ]
    assert len(names) > 200
    for name in names:
        document = json.loads(wheels.read_member(package, version, name))
        dropped = frozenset({"triton_version"})
        table = ConfigTable.parse(json.dumps(document), name, dropped)
        wanted = {int(key): value for key, value in document.items() if key not in dropped}
        assert list(table.keys()) == list(wanted)
        for m, entry in wanted.items():
            written = table.to_json()[str(m)]
            assert {key: written.get(key, False) for key in entry} == entry
            assert set(written) - set(entry) <= {"num_warps", "num_stages"}


def test_the_pairs_that_sglang_ships_agree_at_every_m() -> None:
    names = wheels.members("sglang", "0.5.23")
    pairs = [(name.replace("_down.json", ".json"), name) for name in names if name.endswith("_down.json")]
    # Where only the down file is shipped in a directory, the up file comes from another one.
    pairs = [(up, down) for up, down in pairs if up in names]
    assert len(pairs) > 30
    for names_of_pair in pairs:
        up, down = (
            ConfigTable.parse(wheels.read_member("sglang", "0.5.23", name), name) for name in names_of_pair
        )
        assert pair_mismatches(up, down, 16_384) == (), names_of_pair
