"""The JSON reader keeps what JSON means and refuses what only attacks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moetune.domain.errors import InputError, ModelError
from moetune.domain.safe_json import JsonLimits, load_json_object, read_json_object
from moetune.domain.text import printable

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
)
_KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(_KEYS, _VALUES, max_size=4))
def test_reads_what_json_writes(value: dict[str, Any]) -> None:
    assert load_json_object(json.dumps(value), "here") == value
    assert load_json_object(json.dumps(value, ensure_ascii=False).encode(), "here") == value


@given(st.text(max_size=60) | st.binary(max_size=60))
def test_any_text_is_read_or_refused_with_a_message(text: str | bytes) -> None:
    try:
        assert isinstance(load_json_object(text, "here"), dict)
    except InputError as error:
        assert "here" in error.message  # noqa: PT017
        assert printable(error.message, 1000) == error.message  # noqa: PT017


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ('{"a": 1', "not JSON"),
        ("{'a': 1}", "not JSON"),
        ("[1]", "a list"),
        ("12", "a number"),
        ("null", "null"),
        ('"a"', "a text"),
        ("true", "true or false"),
        ('{"a": NaN}', "NaN"),
        ('{"a": [-Infinity]}', "-Infinity"),
        ('{"a": 1e999}', "too large"),
        ('{"a": ' + "9" * 5000 + "}", "5000 digits"),
        ('{"a": 0.' + "9" * 5000 + "}", "5002 digits"),
        ('\ufeff{"a": 1}', "byte order mark"),
        (b'\xef\xbb\xbf{"a": 1}', "byte order mark"),
        (b'{"a": "\xff"}', "UTF-8"),
        (r'{"a": ["\ud800"]}', "surrogate"),
        (r'{"\udfff": 1}', "surrogate"),
        ('{"a":' * 40 + "1" + "}" * 40, "deeper than 32"),
        ('{"a":' + "[" * 500_000, "deeper than 32"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "twice: 'c'"),
    ],
)
def test_case_38_hostile_json_is_refused_by_name(text: str | bytes, says: str) -> None:
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        load_json_object(text, "config.json", error=ModelError)
    assert says in caught.value.message


def test_size_is_counted_in_bytes_before_anything_is_parsed() -> None:
    limits = JsonLimits(max_bytes=100)
    assert load_json_object('{"a": "' + "x" * 91 + '"}', "here", limits)
    for text in ('{"a": "' + "x" * 92 + '"}', '{"a": "' + "é" * 46 + '"}', b" " * 101):
        with pytest.raises(InputError, match="larger than 100 bytes"):
            load_json_object(text, "here", limits)


def test_depth_limit_is_exact() -> None:
    limits = JsonLimits(max_depth=3)
    assert load_json_object('{"a": [{"b": 1}]}', "here", limits)
    with pytest.raises(InputError, match="deeper than 3"):
        load_json_object('{"a": [{"b": []}]}', "here", limits)


def test_duplicate_keys_are_reported_and_the_last_one_counts() -> None:
    document = read_json_object('{"8": 1, "4": {"x": 0}, "8": 2}', "here")
    assert document.value == {"8": 2, "4": {"x": 0}}
    assert list(document.value) == ["8", "4"]
    assert document.duplicate_keys == ("8",)


def test_many_open_quotes_do_not_take_quadratic_time() -> None:
    # In quadratic time this meets the time limit of the test run.
    with pytest.raises(InputError):
        load_json_object('{"a": ' + '"\\' * 1_000_000, "here")


def test_a_source_cannot_steer_the_terminal() -> None:
    with pytest.raises(InputError) as caught:
        load_json_object("[]", "a\x1b[31mb\x1b]0;title\x07\nc\u202e.json")
    assert caught.value.message.startswith("ab c .json")


@given(st.text(max_size=300), st.integers(1, 50))
@example("a\ufbc3b\ue000c\u202ed", 50)  # without a glyph, of private use, right to left
def test_printable_is_short_printable_and_stable(text: str, limit: int) -> None:
    shown = printable(text, limit)
    assert len(shown) <= limit
    assert shown.isprintable()
    assert printable(shown, limit) == shown


def test_printable_keeps_names_of_models_and_gpus() -> None:
    for text in ("Qwen/Qwen3.5-122B-A10B", "Intel(R) Arc(TM) Pro B60 Graphics", "Größe 大"):
        assert printable(text) == text
