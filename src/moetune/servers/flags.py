"""Flags that are known: what a server does with them, what they change, and what proves them active.

Everything here takes values and starts nothing. The facts stand as data (`flag_data`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from moetune.domain.errors import ServerError
from moetune.domain.text import printable
from moetune.domain.version import Release, parse_release, release_text
from moetune.servers.command_options import Option, options_of
from moetune.servers.flag_data import SERVERS, Flag, FlagBook, Severity, flag_book, within

if TYPE_CHECKING:
    from moetune.domain.experiment_plan import Intervention
    from moetune.servers.runner_rules import Fact

__all__ = [
    "Flag",
    "FlagProblem",
    "ProofRule",
    "Setting",
    "book_of",
    "consequences_of",
    "flag_problems",
    "known_flag",
    "proofs_of",
    "settings_of",
    "spelling_problems",
]

ABSENT, GIVEN = "absent", "given"
_OFF = "false"
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MAX_JSON = 8192
_LEVELS = ("-O0", "-O1", "-O2", "-O3")
_CONFIG_CHANGES = frozenset({"configs"})


@dataclass(frozen=True, slots=True)
class ProofRule:
    """How a server shows that something is active.

    Attributes:
        active: texts of its log; one of them is enough.
        refused: texts that say that it does not do it; one of them is enough.
        argument: name and value among the resolved arguments, for what no line tells; None otherwise.
        what: it is, in words.
    """

    active: tuple[str, ...]
    refused: tuple[str, ...]
    argument: tuple[str, str] | None
    what: str


@dataclass(frozen=True, slots=True)
class Setting:
    """A flag of a command as the server takes it; a JSON value is taken apart into settings with dots.

    Attributes:
        name: in the table's spelling where the table has it.
        value: what follows it, joined by spaces; `given` after a flag alone, `false` for `--no-...`.
    """

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class FlagProblem:
    """Something to know about a flag before the server is started.

    Attributes:
        severity: `error`: the arm cannot be what it is meant to be.
        flag: as written.
        message: what happens.
        hint: what to do instead.
    """

    severity: Severity
    flag: str
    message: str
    hint: str


def book_of(server: str) -> FlagBook | None:
    """The table of a server; None for one whose flags are not known."""
    return flag_book(server) if server in SERVERS else None


def known_flag(server: str, version: str, name: str) -> Flag | None:
    """What is known of a flag or variable in a release.

    Args:
        server: `sglang`, `vllm` or another.
        version: its release; empty: the newest known.
        name: `--flag`, `--flag=value`, a setting with dots, or a variable.

    Returns:
        None for one that the table lacks or that the release does not have.
    """
    book = book_of(server)
    if book is None:
        return None
    options = options_of((name,))
    spelled = options[0].flag or name if options else name
    flag = book.flags.get(_canonical(book, _release(book, version), spelled)[0])
    return flag if flag is not None and _has(book, flag, _release(book, version)) is not False else None


def proofs_of(server: str, version: str, intervention: Intervention) -> tuple[ProofRule, ...]:
    """How a release shows that an intervention is active; config files are proven by what was read.

    What the table does not know has no rule: then only what changed among the facts can show it.
    """
    book = book_of(server)
    if book is None:
        return ()
    release = book.base(_release(book, version))
    rules = []
    for setting in _own_settings(book, intervention):
        rule = _proof(book, release, setting)
        if rule is not None:
            rules.append(rule)
    given = {setting.name for setting in settings_of(server, intervention.arguments)}
    if server == "sglang":
        # SGLang prints all resolved arguments: a switch that was taken out has to be off.
        for setting in settings_of(server, intervention.remove):
            flag = book.flags.get(setting.name)
            if flag is not None and flag.takes == "nothing" and flag.name not in given:
                rules.append(ProofRule((), (), (flag.field, "False"), f"{flag.name} taken out"))
    return tuple(dict.fromkeys(rules))


def consequences_of(server: str, version: str, intervention: Intervention) -> frozenset[str]:
    """Names of facts (`ServerFacts`) and of resolved arguments that an intervention may change."""
    changed: set[str] = set(intervention.may_change)
    if intervention.configs or intervention.without_configs:
        changed |= _CONFIG_CHANGES
    book = book_of(server)
    if book is None:
        return frozenset(changed)
    release = book.base(_release(book, version))
    taken = settings_of(server, intervention.remove)
    for setting in (*_own_settings(book, intervention), *taken):
        flag = book.flags.get(_canonical(book, release, setting.name)[0])
        if flag is not None:
            changed.update(flag.changes)
            changed.add(flag.field)
    return frozenset(changed)


def settings_of(server: str, arguments: Sequence[str], version: str = "") -> tuple[Setting, ...]:
    """The flags of a command in the table's spelling, the last of two of the same name."""
    book = book_of(server)
    found: dict[str, Setting] = {}
    for option in options_of(arguments):
        if not option.flag:
            continue
        for setting in _settings(book, option, version):
            found.pop(setting.name, None)
            found[setting.name] = setting
    return tuple(found.values())


def flag_problems(
    server: str, version: str, settings: Iterable[Setting], facts: Mapping[str, Fact]
) -> tuple[FlagProblem, ...]:
    """What is known to go wrong with flags or variables in an arm.

    Args:
        server: `sglang` or `vllm`; nothing is known of others.
        version: its release.
        settings: those that the intervention gives.
        facts: about the arm; `arm_facts` gives those that a command tells.
    """
    book = book_of(server)
    if book is None:
        return ()
    release = _release(book, version)
    found: list[FlagProblem] = []
    for setting in settings:
        flag = book.flags.get(setting.name)
        if flag is None:
            continue
        if _has(book, flag, release) is False:
            found.append(_absent(book, flag, release))
            continue
        own: dict[str, Fact] = dict.fromkeys(book.facts) | dict(facts) | {"value": setting.value}
        shown = {name: printable(str(value), 200) for name, value in own.items() if name.isidentifier()}
        if flag.deprecated_since is not None and release >= flag.deprecated_since:
            message = f"it is deprecated from {release_text(flag.deprecated_since)}"
            found.append(FlagProblem("warning", flag.name, message, f"use {flag.instead}"))
        found.extend(
            FlagProblem(
                rule.severity,
                flag.name,
                rule.message.format_map(shown),
                rule.hint.format_map(shown) or "leave it out",
            )
            for rule in flag.rules
            if rule.holds(book.base(release), own)
        )
    return tuple(dict.fromkeys(found))


def spelling_problems(server: str, version: str, arguments: Sequence[str]) -> tuple[FlagProblem, ...]:
    """Flags that a release does not have, with the nearest that it has.

    A prefix that fits one flag alone is that flag (argparse). What lies between inspected releases that
    disagree is left to the server.
    """
    book = book_of(server)
    if book is None:
        return ()
    release = _release(book, version)
    found = []
    for option in options_of(arguments):
        flag = option.flag.partition(".")[0]
        if not flag.startswith("--") or _canonical(book, release, option.flag)[0] in book.flags:
            continue
        names = [name for name in _spellings(flag) if name in book.options]
        if names and within(book.options[names[0]], release, book.inspected) is not False:
            continue
        here = [
            one for one, rows in book.options.items() if within(rows, release, book.inspected) is not False
        ]
        if not names and any(one.startswith(flag) for one in here):
            continue
        close = get_close_matches(flag, here, 1, 0.7)
        where = f"{server} {release_text(release)}"
        if names:
            spans = book.options[names[0]]
            seen = ", ".join(f"{release_text(first)} to {release_text(last)}" for first, last in spans)
            message = f"{where} does not have it; it was in {seen}"
        else:
            message = f"{where} does not have it, nor any other release that was read"
        # vLLM's front end takes flags from more places than were read.
        severity: Severity = "error" if names or server == "sglang" else "warning"
        hint = f"did you mean {close[0]}?" if close else "look into the server's --help"
        found.append(FlagProblem(severity, flag, message, hint))
    return tuple(found)


# --- spellings and values ---------------------------------------------------------------------------


def _release(book: FlagBook, version: str) -> Release:
    if not version:
        return book.inspected[-1]
    try:
        return (*parse_release(version), 0, 0)[:3]
    except ServerError:
        return book.inspected[-1]


def _has(book: FlagBook, flag: Flag, release: Release) -> bool | None:
    return flag.in_release(release, book.inspected)


def _spellings(flag: str) -> tuple[str, ...]:
    """A flag, and the one that `--no-...` negates."""
    return (flag, "--" + flag.removeprefix("--no-")) if flag.startswith("--no-") else (flag,)


def _canonical(book: FlagBook, release: Release, name: str) -> tuple[str, bool]:
    """The table's name of a flag, and whether it is negated."""
    root, dot, rest = name.partition(".")
    if book.server == "vllm" and root == "-O" and (dot or release < (0, 12)):
        root = "--compilation-config"  # up to 0.11.1, and with dots ever since
    known = book.flags.get(root)
    if known is not None and dot:
        root = known.name
    full = f"{root}{dot}{rest.replace('_', '-')}"
    if full in book.flags:
        return book.flags[full].name, False
    for spelled in _spellings(full)[1:]:
        if spelled in book.flags:
            return book.flags[spelled].name, True
    return full, False


def _settings(book: FlagBook | None, option: Option, version: str) -> Iterable[Setting]:
    value = " ".join(option.values) if option.values else GIVEN
    if book is None:
        yield Setting(option.flag, value)
        return
    if book.server == "vllm" and option.flag in _LEVELS and not option.values:
        yield Setting("--optimization-level", option.flag[-1])
        return
    name, negated = _canonical(book, _release(book, version), option.flag)
    inner = _json_object(option.values)
    if inner is None:
        yield Setting(name, _OFF if negated else value)
        return
    yield Setting(name, value)
    for path, leaf in _leaves(inner):
        yield Setting(f"{name}.{path}", leaf)


def _json_object(values: tuple[str, ...]) -> Mapping[str, object] | None:
    if len(values) != 1 or not values[0].lstrip().startswith("{") or len(values[0]) > _MAX_JSON:
        return None
    try:
        value = json.loads(values[0])
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _leaves(value: Mapping[str, object], depth: int = 0) -> Iterable[tuple[str, str]]:
    for key, item in value.items():
        name = printable(str(key), 80).replace("_", "-")
        if isinstance(item, dict) and depth < 4:
            for path, leaf in _leaves(item, depth + 1):
                yield f"{name}.{path}", leaf
        else:
            yield name, item if isinstance(item, str) else json.dumps(item)


def _own_settings(book: FlagBook, intervention: Intervention) -> tuple[Setting, ...]:
    """What an intervention gives: flags, then variables that it does not take out."""
    variables = (Setting(name, value) for name, value in intervention.environment.items() if value)
    return (*settings_of(book.server, intervention.arguments), *variables)


def _proof(book: FlagBook, release: Release, setting: Setting) -> ProofRule | None:
    flag = book.flags.get(setting.name)
    if flag is None:
        return None
    facts: dict[str, Fact] = dict.fromkeys(book.facts) | {"value": setting.value}
    for proof in flag.proofs:
        if proof.since <= release <= proof.until and all(one.holds(facts) for one in proof.conditions):
            break
    else:
        return None
    shown = "" if setting.value == GIVEN else setting.value
    argument = None
    if proof.argument:
        resolved = _resolved(flag, setting.value)
        if resolved is None:
            return None
        argument = (flag.field, resolved)
    return ProofRule(
        active=tuple(text.replace("{value}", shown) for text in proof.active),
        refused=proof.refused,
        argument=argument,
        what=" ".join(proof.what.replace("{value}", printable(shown, 80)).split()),
    )


def _resolved(flag: Flag, value: str) -> str | None:
    """A value as the server prints it among the resolved arguments; None for what is no such value."""
    if flag.takes == "nothing":
        return "False" if value.lower() in (_OFF, "0") else "True"
    try:
        if flag.takes == "whole":
            return str(_whole(value))
        if flag.takes == "wholes":
            return "[" + ", ".join(str(_whole(one)) for one in value.split()) + "]"
        if flag.takes == "number":
            return repr(float(value))
    except ValueError:
        return None
    return value


def _whole(text: str) -> int:
    """A whole number; vLLM takes `8k` and `8K` too."""
    factor = _SUFFIXES.get(text[-1:], 1)
    if len(text) > 20:
        raise ValueError(text)
    return int(float(text[:-1]) * factor) if factor > 1 else int(text)


def _absent(book: FlagBook, flag: Flag, release: Release) -> FlagProblem:
    where = f"{book.server} {release_text(release)}"
    if release < flag.since:
        message = f"{where} does not have it: {release_text(flag.since)} is the first that was read with it"
        hint = f"use {book.server} {release_text(flag.since)} or newer, or leave it out"
    else:
        message = f"{where} does not have it any more: {release_text(flag.until)} was the last that was read"
        hint = f"use {flag.instead}" if flag.instead else "leave it out"
    return FlagProblem("error", flag.name, message, hint)
