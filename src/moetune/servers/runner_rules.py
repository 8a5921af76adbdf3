"""Rules as data that say which MoE runner a server chooses, and the small engine that applies them.

A book of rules has stages, each an ordered list. In a stage the first rule whose
conditions hold is taken: it either ends with a verdict or sets facts (what `auto` resolves to, say)
and hands over to the next stage. A stage in which no rule holds changes nothing; when the last stage
is left without a verdict, the answer is unknown. Nothing is guessed: a condition on a fact that is
not known leaves both ways open, and where they end differently the answer is unknown too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moetune.domain.version import Release, release_text
from moetune.servers.protocol import Applies, RunnerVerdict

Fact = str | int | bool | None
Facts = Mapping[str, Fact]

# Weakest first: a chain of rules is as certain as its weakest link.
CERTAINTIES = ("none", "inferred", "read", "run")


@dataclass(frozen=True, slots=True)
class Condition:
    """What one fact must be.

    Attributes:
        fact: name of the fact.
        values: values that are allowed; None where a range is given.
        low: smallest number that is allowed, None without.
        high: largest number that is allowed, None without.
        negated: the condition holds for all other values.
    """

    fact: str
    values: frozenset[Fact] | None = None
    low: int | None = None
    high: int | None = None
    negated: bool = False

    def holds(self, facts: Facts) -> bool | None:
        """Whether it holds; None when the fact is not known."""
        value = facts[self.fact]
        if value is None:
            return None
        return self._allows(value) != self.negated

    def _allows(self, value: Fact) -> bool:
        if self.values is not None:
            return value in self.values
        if not isinstance(value, int):
            return False
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Attributes:
        name: unique in its book.
        since: first release that has it.
        until: last release that has it.
        conditions: all of them must hold.
        sets: facts that it changes before the next stage; empty for a verdict.
        runner: the runner that it ends with.
        applies: whether that runner reads the tuned file; None for a rule that only sets facts.
        force: what to give the server for Triton.
        evidence: log lines that prove it.
        because: the rule in a sentence.
        source: where it was read.
        certainty: `run`, `read` or `inferred`.
    """

    name: str
    since: Release
    until: Release
    conditions: tuple[Condition, ...]
    sets: tuple[tuple[str, Fact], ...] = ()
    runner: str = ""
    applies: Applies | None = None
    force: str = ""
    evidence: str = ""
    because: str = ""
    source: str = ""
    certainty: str = "none"

    def holds(self, release: Release, facts: Facts) -> bool | None:
        """Whether it is taken; None when that depends on a fact that is not known."""
        if not self.since <= release <= self.until:
            return False
        answers = [condition.holds(facts) for condition in self.conditions]
        if False in answers:
            return False
        return None if None in answers else True

    def missing(self, facts: Facts) -> frozenset[str]:
        """Facts of its conditions that are not known."""
        return frozenset(item.fact for item in self.conditions if facts[item.fact] is None)


@dataclass(frozen=True, slots=True)
class RuleBook:
    """The rules of one server.

    Attributes:
        server: `sglang` or `vllm`.
        inspected: releases whose wheels were read, oldest first.
        facts: name of each fact to what it is, for messages.
        stages: ordered lists of rules.
    """

    server: str
    inspected: tuple[Release, ...]
    facts: Mapping[str, str]
    stages: tuple[tuple[Rule, ...], ...]

    @property
    def rules(self) -> tuple[Rule, ...]:
        """All rules, in order."""
        return tuple(rule for stage in self.stages for rule in stage)


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict, and how it came about.

    Attributes:
        verdict: the verdict.
        rules: names of the rules that were taken, in order; of the first branch where several are open.
    """

    verdict: RunnerVerdict
    rules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Branch:
    """One way through the stages; `missing` are the facts that it was assumed along."""

    trail: tuple[Rule, ...]
    missing: frozenset[str]

    @property
    def last(self) -> Rule | None:
        return self.trail[-1] if self.trail and self.trail[-1].applies is not None else None

    @property
    def answer(self) -> tuple[str, Applies]:
        last = self.last
        return (last.runner, last.applies) if last and last.applies else ("", Applies.UNKNOWN)


def decide(book: RuleBook, release: Release, facts: Facts) -> Decision:
    """Apply a book of rules.

    A release between two inspected ones is treated as the older of them; where the newer one differs,
    the verdict says that it is inferred.

    Args:
        book: the rules.
        release: the server's release.
        facts: one value for every fact of the book; None where it is not known.
    """
    release = (*release, 0, 0)[:3]
    older = [known for known in book.inspected if known <= release]
    if not older:
        oldest = release_text(book.inspected[0])
        name = f"{book.server} {release_text(release)}"
        return _unknown(f"no rule is known for {name}: the oldest that was read is {oldest}")
    decision = _decide_inspected(book, older[-1], facts)
    if older[-1] == release or decision.verdict.applies is Applies.UNKNOWN:
        return decision
    newer = [known for known in book.inspected if known > release]
    if newer and _same(decision, _decide_inspected(book, newer[0], facts)):
        return decision
    return _inferred(book, decision, release, older[-1], newer[0] if newer else None)


def _same(one: Decision, other: Decision) -> bool:
    return (one.verdict.runner, one.verdict.applies) == (other.verdict.runner, other.verdict.applies)


def _inferred(
    book: RuleBook, decision: Decision, release: Release, base: Release, newer: Release | None
) -> Decision:
    verdict = decision.verdict
    after = f", and {release_text(newer)} differs" if newer else ", the newest one that was read"
    note = (
        f"Inferred: {book.server} {release_text(release)} was not read; these are the rules of "
        f"{release_text(base)}{after}."
    )
    return Decision(
        RunnerVerdict(
            runner=verdict.runner,
            applies=verdict.applies,
            reason=f"{verdict.reason} {note}",
            source=verdict.source,
            certainty="inferred",
            force_triton=verdict.force_triton,
            evidence=verdict.evidence,
        ),
        decision.rules,
    )


def _decide_inspected(book: RuleBook, release: Release, facts: Facts) -> Decision:
    branches = _branches(book.stages, release, dict(facts))
    first = branches[0]
    answers = {branch.answer for branch in branches}
    if len(answers) == 1:
        return _conclude(book, first)
    if len({applies for _, applies in answers}) == 1 and first.last is not None:
        runners = " or ".join(dict.fromkeys(branch.answer[0] for branch in branches))
        concluded = _conclude(book, first).verdict
        return Decision(
            RunnerVerdict(
                runner=runners,
                applies=concluded.applies,
                reason=f"{_missing_text(book, branches)} decides between {runners}; the answer is the same.",
                source=concluded.source,
                certainty="inferred",
                force_triton=concluded.force_triton,
                evidence=concluded.evidence,
            ),
            tuple(rule.name for rule in first.trail),
        )
    open_way = _unknown(f"It depends on {_missing_text(book, branches)}, which is not known.")
    return Decision(open_way.verdict, tuple(rule.name for rule in first.trail))


def _missing_text(book: RuleBook, branches: Iterable[_Branch]) -> str:
    missing = sorted({name for branch in branches for name in branch.missing})
    return " and ".join(book.facts[name] for name in missing)


def _branches(
    stages: tuple[tuple[Rule, ...], ...], release: Release, facts: dict[str, Fact]
) -> list[_Branch]:
    """All ways through the stages that the known facts leave open."""
    if not stages:
        return [_Branch((), frozenset())]
    found: list[_Branch] = []
    for rule in stages[0]:
        holds = rule.holds(release, facts)
        if holds is False:
            continue
        missing = rule.missing(facts)
        found.extend(
            _Branch((rule, *branch.trail), branch.missing | missing)
            for branch in _taken(rule, stages[1:], release, facts)
        )
        if holds:
            return found
    return [*found, *_branches(stages[1:], release, facts)]


def _taken(
    rule: Rule, rest: tuple[tuple[Rule, ...], ...], release: Release, facts: dict[str, Fact]
) -> list[_Branch]:
    if rule.applies is not None:
        return [_Branch((), frozenset())]
    return _branches(rest, release, facts | dict(rule.sets))


def _conclude(book: RuleBook, branch: _Branch) -> Decision:
    last = branch.last
    if last is None or last.applies is None:
        return _unknown(f"no rule is known for this combination in {book.server}")
    trail = branch.trail
    certainty = min((rule.certainty for rule in trail), key=CERTAINTIES.index)
    verdict = RunnerVerdict(
        runner=last.runner,
        applies=last.applies,
        reason=" ".join(rule.because for rule in trail),
        source="; ".join(dict.fromkeys(rule.source for rule in trail)),
        certainty=certainty,
        force_triton=last.force,
        evidence=" | ".join(dict.fromkeys(rule.evidence for rule in trail if rule.evidence)),
    )
    return Decision(verdict, tuple(rule.name for rule in trail))


def _unknown(reason: str) -> Decision:
    return Decision(RunnerVerdict(runner="", applies=Applies.UNKNOWN, reason=reason))
