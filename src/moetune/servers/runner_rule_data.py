"""Reads a book of runner rules from its JSON document, and checks it while reading.

The document: `server`, `inspected` (releases that were read), `facts` (name to what it is), `groups`
(`@name` in a condition stands for these values), `texts` (`@name` for a flag or log lines), `stages`.
A condition is a value, a list of values, `{"min", "max"}`, or `{"not": ...}` of those.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from moetune.domain.version import Release, parse_release
from moetune.servers.protocol import Applies
from moetune.servers.runner_rules import CERTAINTIES, Condition, Fact, Rule, RuleBook

if TYPE_CHECKING:
    from collections.abc import Mapping

_RULE_KEYS = frozenset(
    {"name", "since", "until", "when", "set", "runner", "applies", "force", "evidence"}
    | {"because", "source", "certainty"}
)


class RuleError(ValueError):
    """A book of rules that contradicts itself: a mistake in the packaged data."""


@cache
def packaged_rules(name: str) -> RuleBook:
    """The book of rules that ships as `servers/data/{name}`."""
    text = (resources.files("moetune.servers") / "data" / name).read_text("utf-8")
    return read_rules(text)


def read_rules(text: str) -> RuleBook:
    """Read a book of rules.

    Raises:
        RuleError: when it contradicts itself; names the rule.
    """
    data = json.loads(text)
    facts: dict[str, str] = data["facts"]
    groups: dict[str, list[Fact]] = data["groups"]
    inspected = tuple(parse_release(version) for version in data["inspected"])
    if list(inspected) != sorted(inspected):
        raise RuleError("the inspected releases are not in order")
    stages: list[tuple[Rule, ...]] = []
    names: set[str] = set()
    for stage in data["stages"]:
        rules = tuple(_read_rule(item, data, facts, groups, inspected) for item in stage["rules"])
        stages.append(rules)
        for rule in rules:
            if rule.name in names:
                raise RuleError(f"two rules are named {rule.name}")
            names.add(rule.name)
    if any(rule.applies is None for rule in stages[-1]):
        raise RuleError("a rule of the last stage has no verdict")
    return RuleBook(data["server"], inspected, facts, tuple(stages))


def _read_rule(
    item: Mapping[str, Any],
    data: Mapping[str, Any],
    facts: Mapping[str, str],
    groups: Mapping[str, list[Fact]],
    inspected: tuple[Release, ...],
) -> Rule:
    name = item["name"]
    unknown = set(item) - _RULE_KEYS
    if unknown:
        raise RuleError(f"{name}: unknown keys {sorted(unknown)}")
    sets = tuple((item.get("set") or {}).items())
    if bool(sets) == ("applies" in item):
        raise RuleError(f"{name}: a rule either sets facts or ends with a verdict")
    for fact, _ in sets:
        if fact not in facts:
            raise RuleError(f"{name}: sets the unknown fact {fact}")
    certainty = item.get("certainty", "read")
    if certainty not in CERTAINTIES[1:]:
        raise RuleError(f"{name}: {certainty} is no certainty")
    if not item.get("because") or not item.get("source"):
        raise RuleError(f"{name}: no reason or no source")
    since = parse_release(item["since"]) if "since" in item else inspected[0]
    until = parse_release(item["until"]) if "until" in item else inspected[-1]
    if since not in inspected or until not in inspected or since > until:
        raise RuleError(f"{name}: its releases are not among those that were read")
    evidence = item.get("evidence", "")
    texts: Mapping[str, str] = data["texts"]
    return Rule(
        name=name,
        since=since,
        until=until,
        conditions=tuple(
            read_condition(name, fact, want, facts, groups) for fact, want in item["when"].items()
        ),
        sets=sets,
        runner=item.get("runner", ""),
        applies=Applies(item["applies"]) if "applies" in item else None,
        force=texts[item["force"][1:]] if item.get("force", "").startswith("@") else item.get("force", ""),
        evidence=texts[evidence[1:]] if evidence.startswith("@") else evidence,
        because=item["because"],
        source=item["source"],
        certainty=certainty,
    )


def read_condition(
    rule: str, fact: str, want: object, facts: Mapping[str, str], groups: Mapping[str, list[Fact]]
) -> Condition:
    """Read what one fact must be.

    Args:
        rule: whose condition it is, for messages.
        fact: its name.
        want: a value, a list of values, a range, or `{"not": ...}` of those.
        facts: the names that exist.
        groups: what `@name` stands for.

    Raises:
        RuleError: for a condition that cannot be read.
    """
    if fact not in facts:
        raise RuleError(f"{rule}: unknown fact {fact}")
    negated = isinstance(want, dict) and set(want) == {"not"}
    if isinstance(want, dict) and negated:
        want = want["not"]
    if isinstance(want, dict):
        if not want or set(want) - {"min", "max"}:
            raise RuleError(f"{rule}: a range has min and max")
        return Condition(fact, low=want.get("min"), high=want.get("max"), negated=negated)
    values: list[Fact] = []
    for value in want if isinstance(want, list) else [want]:
        if isinstance(value, str) and value.startswith("@"):
            if value[1:] not in groups:
                raise RuleError(f"{rule}: unknown group {value}")
            values.extend(groups[value[1:]])
        elif isinstance(value, str | int | bool):
            values.append(value)
        else:
            raise RuleError(f"{rule}: {fact} has a condition of an unknown kind")
    return Condition(fact, values=frozenset(values), negated=negated)
