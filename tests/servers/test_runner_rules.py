"""The engine of the runner rules: first match, facts that are not known, releases in between."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.servers.protocol import Applies
from moetune.servers.runner_rule_data import RuleError, read_rules
from moetune.servers.runner_rules import Fact, RuleBook, decide
from moetune.servers.sglang.runner import runner_rules as sglang_rules
from moetune.servers.vllm.runner import runner_rules as vllm_rules

BOOKS = {"sglang": sglang_rules, "vllm": vllm_rules}


def book(*stages: list[dict[str, Any]], **extra: Any) -> RuleBook:
    document = {
        "server": "serve",
        "inspected": ["1.0.0", "1.2.0", "1.4.0"],
        "facts": {"cc": "the compute capability", "scheme": "the quantization", "runner": "the runner"},
        "groups": {"eight_bits": ["fp8", "int8"]},
        "texts": {"lookup": "Using config"},
        "stages": [{"name": "a stage", "rules": rules} for rules in stages],
        **extra,
    }
    return read_rules(json.dumps(document))


def rule(name: str, when: dict[str, Any], runner: str = "triton", applies: str = "yes", **k: Any) -> Any:
    return {
        "name": name,
        "when": when,
        "runner": runner,
        "applies": applies,
        "because": f"{name}.",
        "source": "file.py:function",
        **k,
    }


def setter(name: str, when: dict[str, Any], **values: Fact) -> Any:
    return {"name": name, "when": when, "set": values, "because": f"{name}.", "source": "other.py"}


def facts(**known: Fact) -> dict[str, Fact]:
    return {"cc": 90, "scheme": "bf16", "runner": "auto", **known}


def test_the_first_rule_that_holds_is_taken() -> None:
    rules = book([rule("hopper", {"cc": 90}, "cutlass", "no"), rule("any", {})])
    assert decide(rules, (1, 0, 0), facts()).verdict.runner == "cutlass"
    assert decide(rules, (1, 0, 0), facts(cc=89)).verdict.runner == "triton"
    assert decide(rules, (1, 0, 0), facts(cc=89)).rules == ("any",)


@pytest.mark.parametrize(
    ("condition", "value", "holds"),
    [
        ({"cc": {"min": 100, "max": 109}}, 100, True),
        ({"cc": {"min": 100, "max": 109}}, 109, True),
        ({"cc": {"min": 100, "max": 109}}, 110, False),
        ({"cc": {"min": 100, "max": 109}}, 99, False),
        ({"cc": {"not": [90, 100]}}, 89, True),
        ({"cc": {"not": [90, 100]}}, 100, False),
        ({"scheme": ["@eight_bits", "bf16"]}, "int8", True),
        ({"scheme": ["@eight_bits", "bf16"]}, "int4", False),
    ],
)
def test_conditions(condition: dict[str, Any], value: Fact, holds: bool) -> None:
    verdict = decide(book([rule("r", condition)]), (1, 0), facts(**dict.fromkeys(condition, value))).verdict
    assert verdict.applies is (Applies.YES if holds else Applies.UNKNOWN)


def test_without_a_rule_the_answer_is_unknown() -> None:
    verdict = decide(book([rule("r", {"cc": 90})]), (1, 0, 0), facts(cc=80)).verdict
    assert (verdict.applies, verdict.runner, verdict.certainty) == (Applies.UNKNOWN, "", "none")


def test_a_fact_that_is_not_known_leaves_the_answer_open() -> None:
    rules = book([rule("hopper", {"cc": 90}, "cutlass", "no"), rule("any", {})])
    verdict = decide(rules, (1, 0, 0), facts(cc=None)).verdict
    assert verdict.applies is Applies.UNKNOWN
    assert "the compute capability" in verdict.reason


def test_a_fact_that_is_not_known_does_not_matter_where_every_way_ends_alike() -> None:
    rules = book([rule("hopper", {"cc": 90}, "triton"), rule("any", {}, "triton")])
    assert decide(rules, (1, 0, 0), facts(cc=None)).verdict.applies is Applies.YES


def test_two_runners_that_both_ignore_the_file_are_both_named() -> None:
    rules = book([rule("hopper", {"cc": 90}, "cutlass", "no"), rule("any", {}, "marlin", "no")])
    verdict = decide(rules, (1, 0, 0), facts(cc=None)).verdict
    assert (verdict.applies, verdict.runner, verdict.certainty) == (
        Applies.NO,
        "cutlass or marlin",
        "inferred",
    )


def test_an_unknown_fact_is_not_asked_when_another_condition_fails() -> None:
    rules = book([rule("fp8", {"cc": 90, "scheme": "fp8"}, "cutlass", "no"), rule("any", {})])
    assert decide(rules, (1, 0, 0), facts(cc=None)).verdict.applies is Applies.YES


def test_a_stage_hands_on_what_it_set_and_its_reason() -> None:
    rules = book(
        [setter("override", {"cc": 100}, runner="trtllm")],
        [rule("trtllm", {"runner": "trtllm"}, "trtllm", "no", certainty="run"), rule("auto", {})],
    )
    decision = decide(rules, (1, 0, 0), facts(cc=100))
    assert decision.rules == ("override", "trtllm")
    assert decision.verdict.reason == "override. trtllm."
    assert decision.verdict.source == "other.py; file.py:function"
    assert decision.verdict.certainty == "read", "a chain is as certain as its weakest link"
    assert decide(rules, (1, 0, 0), facts()).rules == ("auto",)


def test_a_release_that_was_not_read_takes_the_older_rules_and_says_so() -> None:
    rules = book([rule("new", {}, "cutlass", "no", since="1.2.0"), rule("old", {}, until="1.0.0")])
    assert decide(rules, (1, 0, 0), facts()).verdict.certainty == "read"
    between = decide(rules, (1, 1, 0), facts()).verdict
    assert (between.runner, between.certainty) == ("triton", "inferred")
    assert "serve 1.1.0 was not read" in between.reason
    assert "1.2.0 differs" in between.reason
    assert decide(rules, (1, 3, 7), facts()).verdict.certainty == "read", "1.2 and 1.4 agree"
    newer = decide(rules, (2, 0), facts()).verdict
    assert (newer.runner, newer.certainty) == ("cutlass", "inferred")


def test_a_release_older_than_all_that_were_read_is_unknown() -> None:
    verdict = decide(book([rule("any", {})]), (0, 9, 9), facts()).verdict
    assert verdict.applies is Applies.UNKNOWN
    assert "0.9.9" in verdict.reason


def test_short_and_long_releases_are_compared_by_three_parts() -> None:
    rules = book([rule("any", {})])
    assert decide(rules, (1, 0), facts()).verdict.certainty == "read"
    assert decide(rules, (1, 4, 0, 1), facts()).verdict.certainty == "read"


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (rule("r", {"colour": "red"}), "unknown fact"),
        (rule("r", {"scheme": "@ghosts"}), "unknown group"),
        (rule("r", {"cc": {"at_least": 3}}), "range"),
        (rule("r", {"cc": 9.0}), "unknown kind"),
        (rule("r", {}, because=""), "no reason"),
        (rule("r", {}, source=""), "no source"),
        (rule("r", {}, certainty="sure"), "certainty"),
        (rule("r", {}, since="1.3.0"), "releases"),
        (rule("r", {}, since="1.4.0", until="1.0.0"), "releases"),
        (rule("r", {}, colour="red"), "unknown keys"),
        (rule("r", {}) | {"set": {"cc": 1}}, "either"),
        (setter("s", {}, runner="x"), "last stage"),
        (setter("s", {}, colour="x"), "unknown fact"),
    ],
)
def test_a_book_that_contradicts_itself_is_refused(broken: dict[str, Any], says: str) -> None:
    with pytest.raises(RuleError, match=says):
        book([broken])


def test_two_rules_of_one_name_are_refused() -> None:
    with pytest.raises(RuleError, match="named same"):
        book([rule("same", {"cc": 1}), rule("same", {})])


def _values(rules: RuleBook) -> dict[str, list[Fact]]:
    """Values of each fact that some rule tells apart, and one that none does."""
    found: dict[str, set[Fact]] = {name: set() for name in rules.facts}
    for item in rules.rules:
        for condition in item.conditions:
            known = found[condition.fact]
            known.update(condition.values or ())
            known.update(edge for edge in (condition.low, condition.high) if edge is not None)
        for fact, value in item.sets:
            found[fact].add(value)
    return {name: [*sorted(values, key=repr), "something else"] for name, values in found.items()}


@pytest.mark.parametrize("server", BOOKS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_not_knowing_a_fact_never_contradicts_knowing_it(server: str, data: st.DataObject) -> None:
    rules = BOOKS[server]()
    values = _values(rules)
    known: dict[str, Fact] = {name: data.draw(st.sampled_from(values[name]), name) for name in sorted(values)}
    hidden = data.draw(st.sampled_from(sorted(values)), "hidden")
    release = data.draw(st.sampled_from(rules.inspected), "release")
    open_answer = decide(rules, release, known | {hidden: None}).verdict.applies
    if open_answer is not Applies.UNKNOWN:
        assert decide(rules, release, known).verdict.applies is open_answer


@pytest.mark.parametrize("server", BOOKS)
def test_every_verdict_says_why_and_from_where(server: str) -> None:
    for item in BOOKS[server]().rules:
        assert item.because.endswith("."), item.name
        assert item.source.startswith(("sglang/srt/", "vllm/")), item.name
        assert item.certainty in ("run", "read", "inferred"), item.name
        if item.applies is Applies.YES:
            assert item.evidence, f"{item.name}: what in the log proves it"
