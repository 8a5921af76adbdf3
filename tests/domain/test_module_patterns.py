"""Patterns of strangers: the same answers as `re` and `fnmatch`, in bounded time."""

from __future__ import annotations

import fnmatch
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.module_patterns import PatternError, glob_matches, regex_matches

NAMES = [
    "model.layers.3.mlp.experts.0.gate_proj",
    "model.layers.13.mlp.experts.0.gate_proj",
    "model.layers.3.mlp.gate_proj",
    "model.layers.3.mlp.shared_experts.up_proj",
    "model.layers.3.self_attn.q_proj",
    "lm_head",
    "",
]
# From checkpoints of llm-compressor and Moonshot, and the operators beside.
PATTERNS = [
    r".*self_attn.*",
    r".*shared_experts.*",
    r".*mlp\.(gate|up|gate_up|down)_proj.*",
    r"^model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj$",
    r"(?!.*experts).*",
    r"(?=.*mlp)model",
    r"model\.layers\.[0-3]\.",
    r"model\.layers\.[^3]\.",
    r"model\.layers\.\d{2}\.",
    r"model\.layers\.1?3\.mlp",
    r"(?:lm_head|embed)",
    r"[\w.]+proj$",
    r".*\.experts\.\d+?\..*",
    r"$",
    r"",
    r"a{2,}",
    r"x|",
]

REGEXES = st.recursive(
    st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\d", r"\.", "^", "$"]),
    lambda inner: (
        st.builds("({})".format, inner)
        | st.builds("(?:{})*".format, inner)
        | st.builds("(?:{})+".format, inner)
        | st.builds("(?:{})?".format, inner)
        | st.builds("(?:{}){{1,2}}".format, inner)
        | st.builds("{}{}".format, inner, inner)
        | st.builds("(?:{}|{})".format, inner, inner)
        | st.builds("(?={})".format, inner)
        | st.builds("(?!{})".format, inner)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_of_real_checkpoints_match_as_re_does(pattern: str) -> None:
    for name in NAMES:
        assert regex_matches(pattern, name) == bool(re.match(pattern, name)), name


@settings(max_examples=400)
@given(REGEXES, st.text("ab1.", max_size=7))
def test_any_expression_matches_as_re_does(pattern: str, text: str) -> None:
    assert regex_matches(pattern, text) == bool(re.match(pattern, text))


@settings(max_examples=400)
@given(st.text("ab*?.", max_size=8), st.text("ab.", max_size=8))
def test_any_glob_matches_as_fnmatch_does(pattern: str, text: str) -> None:
    assert glob_matches(pattern, text) == fnmatch.fnmatchcase(text, pattern)


@given(st.text(max_size=40), st.text(max_size=20))
def test_any_text_is_a_pattern_or_a_pattern_error(pattern: str, text: str) -> None:
    try:
        answer = regex_matches(pattern, text)
    except PatternError:
        return
    assert answer in (True, False)


@pytest.mark.parametrize(
    "pattern", ["(", ")", "[", "a**", "*", "{2}", r"\1", r"(?<=a)b", "(?i)a", "a{", "a{x}", "\\"]
)
def test_broken_and_unread_patterns_are_errors(pattern: str) -> None:
    with pytest.raises(PatternError):
        regex_matches(pattern, "aaaa")


@pytest.mark.parametrize(
    "pattern", ["(a*)*b", "(a|a)*b", "(a|aa)+$b", "(.*a){20}b", "((((a{9}){9}){9}){9}){9}b"]
)
@pytest.mark.timeout(60)
def test_patterns_that_hang_re_end_here(pattern: str) -> None:
    # Most of these keep `re` busy for longer than the universe is old.
    refused = ""
    try:
        assert not regex_matches(pattern, "a" * 2000)
    except PatternError as error:
        refused = str(error)
    assert refused in ("", "a pattern that takes too many steps")


def test_a_pattern_that_needs_too_many_steps_is_refused() -> None:
    with pytest.raises(PatternError, match="too many steps"):
        regex_matches("(?:(?=.*b)a)*", "a" * 2000 + "b")


def test_long_and_deep_patterns_are_refused() -> None:
    for pattern in ("a" * 5000, "(" * 100 + ")" * 100):
        with pytest.raises(PatternError):
            regex_matches(pattern, "a")
