"""The keys of a table cover every m, and no m is served across a switch of the default."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.config import ConfigTable, KernelConfig
from moetune.domain.errors import InputError
from moetune.domain.keys import LARGEST_M, STANDARD_KEYS, m_keys, parse_traffic

ANY = KernelConfig(64, 64, 64, 1)
SWITCHES = st.lists(st.integers(1, 9000), max_size=8)
OWN = st.dictionaries(st.integers(1, 20_000), st.floats(0.01, 100), max_size=6).map(
    lambda found: tuple(found.items())
)


def test_the_default_keys_reach_the_largest_prefill_chunk() -> None:
    keys = m_keys(switches=(256,))
    assert keys.ms == tuple(sorted({*STANDARD_KEYS, 257, 8192}))


def test_case_31_keys_reach_whatever_chunk_the_server_has() -> None:
    assert m_keys((), 32_768).ms[-4:] == (4096, 8192, 16_384, 32_768)
    assert m_keys((), 10_000).ms[-3:] == (4096, 8192, 10_000)
    assert m_keys((), 2048).ms[-2:] == (1536, 2048)
    assert m_keys((), 1).ms == (1,)


def test_the_users_own_keys_stand_in_place_of_the_standard_ones() -> None:
    keys = m_keys((256,), own=((64, 1), (300, 3)))
    assert keys.ms == (1, 64, 256, 257, 300, 8192)
    assert keys.traffic == ((64, 0.25), (300, 0.75))


def test_case_30_own_keys_alone_never_leave_small_or_large_m_uncovered() -> None:
    keys = m_keys((), own=tuple((m, 1.0) for m in (96, 128, 1024)))
    assert keys.ms == (1, 96, 128, 1024, 8192)
    assert m_keys((), own=((50_000, 1.0),)).ms == (1, 50_000)


@given(SWITCHES, st.integers(1, 20_000), OWN)
def test_keys_cover_every_m_and_split_at_every_switch(
    switches: list[int], largest: int, own: tuple[tuple[int, float], ...]
) -> None:
    keys = m_keys(switches, largest, own)
    last = max([largest, *(m for m, _ in own)])
    assert list(keys.ms) == sorted(set(keys.ms))
    assert ConfigTable.of(dict.fromkeys(keys.ms, ANY)).covers(1, last)
    assert {m for m, _ in own} <= set(keys.ms)
    for switch in switches:
        for span in ConfigTable.of(dict.fromkeys(keys.ms, ANY)).spans(last):
            # The entry and the m that it serves lie on the same side.
            assert (span.key <= switch) == (span.last <= switch)
            assert (span.key <= switch) == (span.first <= switch)


@given(SWITCHES, OWN)
def test_weights_add_up_to_one_and_keep_their_ratios(
    switches: list[int], own: tuple[tuple[int, float], ...]
) -> None:
    keys = m_keys(switches, own=own)
    assert math.isclose(math.fsum(weight for _, weight in keys.traffic), 1)
    assert {m for m, _ in keys.traffic} == ({m for m, _ in own} or set(keys.ms))
    given_weights = dict(own)
    first, first_weight = keys.traffic[0]
    for m, weight in keys.traffic:
        wanted = given_weights.get(m, 1.0) / given_weights.get(first, 1.0)
        assert math.isclose(weight / first_weight, wanted)


def test_traffic_is_read_with_and_without_weights() -> None:
    assert parse_traffic("64, 1,8192") == ((1, 1.0), (64, 1.0), (8192, 1.0))
    assert parse_traffic("1,64:3") == ((1, 1.0), (64, 3.0))
    assert parse_traffic("1:0.7,64:.2,8192:1.") == ((1, 0.7), (64, 0.2), (8192, 1.0))


@given(st.dictionaries(st.integers(1, LARGEST_M), st.integers(1, 10**6), min_size=1, max_size=20))
def test_traffic_round_trips(found: dict[int, int]) -> None:
    text = ",".join(f"{m}:{weight / 1000}" for m, weight in found.items())
    assert dict(parse_traffic(text)) == {m: weight / 1000 for m, weight in found.items()}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "''"),
        ("0", "'0'"),
        ("-1", "'-1'"),
        ("1,,2", "''"),
        ("1;2", "'1;2'"),
        ("1.5", "'1.5'"),
        ("1e3", "'1e3'"),
        ("٣", "'٣'"),
        ("1:nan", "'1:nan'"),
        ("1:inf", "'1:inf'"),
        ("1:-1", "'1:-1'"),
        ("1:", "'1:'"),
        ("1:0", "m=1 has the weight 0"),
        ("8,8", "m=8 stands twice"),
        ("1048577", "larger than 1048576"),
        (",".join(map(str, range(1, 300))), "299 keys"),
        ("1," * 10_000 + "1", "longer than"),
        ("1\x1b[31m", "no number of tokens"),
    ],
)
def test_a_wrong_traffic_is_named(text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_traffic(text)
    assert says in caught.value.message
    assert "\x1b" not in caught.value.message
    assert caught.value.hint is not None
    assert "--m 1:0.7" in caught.value.hint


@given(st.text(max_size=40))
def test_any_text_is_traffic_or_a_clear_error(text: str) -> None:
    with contextlib.suppress(InputError):
        assert all(1 <= m <= LARGEST_M and weight > 0 for m, weight in parse_traffic(text))
