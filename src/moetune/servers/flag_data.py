"""What is known of a server's flags and variables, as data: `servers/data/{server}_flags.json`.

The document: `server`, `inspected` (releases whose wheels were read), `facts` (what conditions ask about,
besides `--flags` and variables), `groups` (`@name` stands for these values), `roles` (what a flag says about
the model or its split), `kinds` (words of log lines), `flags`, `variables`. A flag has

- `since`, `until`: its first and last inspected release;
- `takes`: `nothing`, `text`, `whole`, `wholes`, `number` or `json`;
- `changes`: facts of `ServerFacts` and resolved arguments that it may change besides itself;
- `rules`: when it cannot work or means something else than one thinks; conditions as in the runner rules;
- `proofs`: texts of the log that show it, or refuse it; `argument`: no line, the resolved argument stands
  for it. The first proof that holds for a release and a value counts.

Beside it lies `{server}_options.json`, every flag of each inspected release, to find misspelled ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from moetune.domain.version import Release, parse_release, release_text
from moetune.servers.runner_rule_data import read_condition
from moetune.servers.runner_rules import Condition, Fact

Severity = Literal["error", "warning"]
SERVERS = ("sglang", "vllm")
TAKES = ("nothing", "text", "whole", "wholes", "number", "json")
_SEVERITIES = ("error", "warning")
_FLAG_KEYS = frozenset(
    {"name", "aliases", "takes", "since", "until", "what", "changes", "deprecated", "note", "source"}
    | {"rules", "proofs"}
)
_RULE_KEYS = frozenset({"since", "until", "severity", "when", "message", "hint", "source"})
_PROOF_KEYS = frozenset({"since", "until", "when", "active", "refused", "words", "argument", "what"})


class FlagDataError(ValueError):
    """Packaged data that contradict themselves."""


@dataclass(frozen=True, slots=True)
class FlagRule:
    """When a flag cannot work, or means something else than one thinks.

    Attributes:
        since: first release with the rule.
        until: last release with it.
        severity: `error`: the server need not be started to know; `warning`: worth knowing.
        conditions: all of them must hold.
        message: what happens, with facts in braces.
        hint: what to do instead.
        source: where it was read.
    """

    since: Release
    until: Release
    severity: Severity
    conditions: tuple[Condition, ...]
    message: str
    hint: str
    source: str

    def holds(self, release: Release, facts: Mapping[str, Fact]) -> bool:
        """Whether it does; a fact that is not known leaves it open, and then nothing is said."""
        return self.since <= release <= self.until and all(one.holds(facts) for one in self.conditions)


@dataclass(frozen=True, slots=True)
class FlagProof:
    """How a release shows that a flag is active; the attributes are those of `ProofRule` with braces.

    Attributes:
        since: first release that shows it so.
        until: last release that does.
        conditions: on the flag's value.
        active: texts, one of which stands in the log.
        refused: texts of which none may stand there.
        argument: its resolved argument stands for it.
        what: in words.
    """

    since: Release
    until: Release
    conditions: tuple[Condition, ...]
    active: tuple[str, ...]
    refused: tuple[str, ...]
    argument: bool
    what: str


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag, a variable, or a setting inside a flag's JSON value (dots in its name).

    Attributes:
        name: with dashes, in the spelling of the command line; a variable's own name.
        aliases: other spellings.
        takes: what follows it.
        since: first inspected release that has it.
        until: last inspected release that has it.
        what: it does.
        changes: facts and resolved arguments that it may change besides itself.
        rules: when it cannot work.
        proofs: how it is shown to be active.
        deprecated_since: release from which another flag stands for it, None without.
        instead: that flag.
        source: where it was read.
    """

    name: str
    aliases: tuple[str, ...]
    takes: str
    since: Release
    until: Release
    what: str
    changes: tuple[str, ...]
    rules: tuple[FlagRule, ...]
    proofs: tuple[FlagProof, ...]
    deprecated_since: Release | None
    instead: str
    source: str

    @property
    def field(self) -> str:
        """Its name among the resolved arguments."""
        return self.name.lstrip("-").replace("-", "_")

    def in_release(self, release: Release, inspected: tuple[Release, ...]) -> bool | None:
        """Whether a release has it; None between an inspected one that has it and one that has not."""
        return within(((self.since, self.until),), release, inspected)


@dataclass(frozen=True, slots=True)
class FlagBook:
    """All that is known of a server's flags.

    Attributes:
        server: `sglang` or `vllm`.
        inspected: releases whose wheels were read, oldest first.
        facts: names that conditions may ask about.
        roles: what a flag says (`tp`, `model`, ...) to its spellings.
        flags: flags and variables by name and alias.
        options: every flag to the stretches of inspected releases that have it.
    """

    server: str
    inspected: tuple[Release, ...]
    facts: frozenset[str]
    roles: Mapping[str, tuple[str, ...]]
    flags: Mapping[str, Flag]
    options: Mapping[str, tuple[tuple[Release, Release], ...]]

    def base(self, release: Release) -> Release:
        """The inspected release whose rules are used: the newest that is not newer, else the oldest."""
        return max((one for one in self.inspected if one <= release), default=self.inspected[0])


def within(
    stretches: tuple[tuple[Release, Release], ...], release: Release, inspected: tuple[Release, ...]
) -> bool | None:
    """Whether a release lies in stretches of inspected ones; None where the next ones disagree.

    A release newer than all is taken for the newest, an older one for the oldest.
    """
    older = [one for one in inspected if one <= release][-1:]
    newer = [one for one in inspected if one >= release][:1]
    answers = {any(first <= one <= last for first, last in stretches) for one in (*older, *newer)}
    return answers.pop() if len(answers) == 1 else None


@cache
def flag_book(server: str) -> FlagBook:
    """The packaged data of a server.

    Raises:
        FlagDataError: when they contradict themselves.
    """
    folder = resources.files("moetune.servers") / "data"
    texts = [(folder / f"{server}_{part}.json").read_text("utf-8") for part in ("flags", "options")]
    return read_flag_book(json.loads(texts[0]), json.loads(texts[1]))


def read_flag_book(data: Mapping[str, Any], options: Mapping[str, Any]) -> FlagBook:
    """Read the two documents.

    Raises:
        FlagDataError: when they contradict themselves.
    """
    inspected = tuple(parse_release(version) for version in data["inspected"])
    if list(inspected) != sorted(inspected) or options["inspected"] != data["inspected"]:
        raise FlagDataError("the inspected releases are not in order, or not those of the options")
    stretches = {
        name: tuple((parse_release(first), parse_release(last)) for first, last in rows)
        for name, rows in options["options"].items()
    }
    variables = [item["name"] for item in data["variables"]]
    known = {**data["facts"], **{name: name for name in (*stretches, *variables)}}
    reader = _Reader(inspected, known, data["groups"], tuple(data["kinds"]))
    flags: dict[str, Flag] = {}
    for item in (*data["flags"], *data["variables"]):
        flag = reader.flag(item)
        for name in (flag.name, *flag.aliases):
            if name in flags:
                raise FlagDataError(f"{name} is there twice")
            flags[name] = flag
    roles = {role: tuple(names) for role, names in data["roles"].items()}
    return FlagBook(data["server"], inspected, frozenset(known), roles, flags, stretches)


@dataclass(frozen=True, slots=True)
class _Reader:
    inspected: tuple[Release, ...]
    facts: Mapping[str, str]
    groups: Mapping[str, list[Fact]]
    kinds: tuple[str, ...]

    def flag(self, item: Mapping[str, Any]) -> Flag:
        name = item["name"]
        self._check_keys(name, item, _FLAG_KEYS)
        if item["takes"] not in TAKES or not item["what"] or not item["source"]:
            raise FlagDataError(f"{name}: no source, no text, or it takes nothing that is known")
        since, until = self._span(name, item, (self.inspected[0], self.inspected[-1]))
        deprecated = item.get("deprecated")
        return Flag(
            name=name,
            aliases=tuple(item.get("aliases", ())),
            takes=item["takes"],
            since=since,
            until=until,
            what=item["what"],
            changes=tuple(item["changes"]),
            rules=tuple(self._rule(name, one, (since, until)) for one in item.get("rules", ())),
            proofs=tuple(self._proof(name, one, (since, until)) for one in item.get("proofs", ())),
            deprecated_since=parse_release(deprecated["since"]) if deprecated else None,
            instead=deprecated["instead"] if deprecated else "",
            source=item["source"],
        )

    def _rule(self, name: str, item: Mapping[str, Any], whole: tuple[Release, Release]) -> FlagRule:
        self._check_keys(name, item, _RULE_KEYS)
        if item["severity"] not in _SEVERITIES or not item["hint"] or not item["source"]:
            raise FlagDataError(f"{name}: a rule without severity, hint or source")
        since, until = self._span(name, item, whole)
        conditions = self._conditions(name, item)
        return FlagRule(
            since, until, item["severity"], conditions, item["message"], item["hint"], item["source"]
        )

    def _proof(self, name: str, item: Mapping[str, Any], whole: tuple[Release, Release]) -> FlagProof:
        self._check_keys(name, item, _PROOF_KEYS)
        since, until = self._span(name, item, whole)
        active = tuple(item.get("active", ()))
        if "words" in item:
            active = tuple(
                text.replace("{word}", word).replace("{kind}", kind)
                for word in item["words"]
                for kind in self.kinds
                for text in active
            )
        argument = bool(item.get("argument"))
        if bool(active) == argument:
            raise FlagDataError(f"{name}: a proof is a text or an argument")
        conditions = self._conditions(name, item)
        return FlagProof(
            since, until, conditions, active, tuple(item.get("refused", ())), argument, item["what"]
        )

    def _conditions(self, name: str, item: Mapping[str, Any]) -> tuple[Condition, ...]:
        return tuple(
            read_condition(name, fact, want, self.facts, self.groups)
            for fact, want in item.get("when", {}).items()
        )

    def _span(
        self, name: str, item: Mapping[str, Any], whole: tuple[Release, Release]
    ) -> tuple[Release, Release]:
        since = parse_release(item["since"]) if "since" in item else whole[0]
        until = parse_release(item["until"]) if "until" in item else whole[1]
        if since not in self.inspected or until not in self.inspected or not whole[0] <= since <= until:
            raise FlagDataError(f"{name}: {release_text(since)} to {release_text(until)} was not read")
        if until > whole[1]:
            raise FlagDataError(f"{name}: a rule outlives its flag")
        return since, until

    @staticmethod
    def _check_keys(name: str, item: Mapping[str, Any], known: frozenset[str]) -> None:
        if set(item) - known:
            raise FlagDataError(f"{name}: unknown keys {sorted(set(item) - known)}")
