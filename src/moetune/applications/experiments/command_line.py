"""The command of an arm: that of the baseline, with what the interventions add, replace and take out.

A flag is what begins with a dash and a letter; its values are what follows up to the next flag, or
what stands behind its `=`. `--a_b` and `--a-b` are one flag, as vLLM reads them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from moetune.applications.experiments.redaction import redacted_arguments
from moetune.domain.errors import InputError
from moetune.domain.text import printable

if TYPE_CHECKING:
    from moetune.domain.experiment_plan import Intervention, ServerPlan

_FLAG = re.compile(r"--?[A-Za-z]")
_END_OF_FLAGS = "--"
_MOST_FILES, _LARGEST_BYTES = 2000, 8 << 20
_SHELLS = frozenset({"ash", "bash", "dash", "fish", "ksh", "sh", "zsh"})


@dataclass(frozen=True, slots=True)
class ArmCommand:
    """How the server of an arm is started.

    Attributes:
        arguments: of its process. `{port}`, `{log}` and `{cache}` may still stand in them:
            `ArmServer.start` puts in what it chooses.
        environment: variables that differ from moetune's own; an empty value takes one out.
        port: that was put in, 0: `ArmServer.start` chooses it.
        kernels: names the compiled kernels that this command may use: those of the same command.
        arm: names all that decides which kernels run, config files included.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    kernels: str = ""
    arm: str = ""

    def filled(self, values: Mapping[str, str]) -> ArmCommand:
        """The command with values in the place of some placeholders."""
        environment = {name: _fill(value, values) for name, value in self.environment.items()}
        return replace(self, arguments=fill(self.arguments, values), environment=environment)

    def mentions(self, placeholder: str) -> bool:
        """Whether a placeholder stands somewhere in it."""
        return any("{" + placeholder + "}" in text for text in (*self.arguments, *self.environment.values()))


def arm_command(
    plan: ServerPlan, interventions: Sequence[Intervention], port: int = 0, log: str = ""
) -> ArmCommand:
    """The command of an arm.

    Args:
        plan: the known-good server.
        interventions: those that are on in this arm; none: the baseline.
        port: of the start; 0 leaves `{port}` to `ArmServer.start`.
        log: file of the start; empty leaves `{log}` to `ArmServer.start`.

    Raises:
        InputError: for interventions that contradict each other or do not fit the command.
    """
    for first, second in combinations(interventions, 2):
        _check_conflicts(first, second)
    groups = _split(plan.command)
    for one in interventions:
        if (one.arguments or one.remove) and _is_shell_text(plan.command):
            raise _error(
                one,
                f"the server's command is a text for {printable(plan.command[0], 40)}, which takes no"
                " further arguments",
                "give the server's own argument list as the command",
            )
    done: set[_Group] = set()
    for one in interventions:
        for group in _split(one.remove):
            groups = groups if group in done else _without(groups, group, one)
            done.add(group)
    done = set()
    for one in interventions:
        new = _split(one.arguments)
        for group in new:
            groups = groups if group in done else _with(groups, group, one)
        done.update(new)
    environment = dict(plan.environment)
    for one in interventions:
        environment |= one.environment
    values = ({"port": str(port)} if port else {}) | ({"log": log} if log else {})
    arguments = tuple(token for group in groups for token in group.tokens)
    kernels = _digest(plan.host, plan.folder, arguments, sorted(environment.items()))
    arm = _digest(kernels, [[one.without_configs, *map(_content, one.configs)] for one in interventions])
    return ArmCommand(arguments, environment, port, kernels, arm).filled(values)


def fill(arguments: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """Arguments with values in the place of placeholders; other braces stay as they are."""
    return tuple(_fill(argument, values) for argument in arguments)


def _fill(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text


def _digest(*values: object) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def _content(path: str) -> list[str]:
    """What lies at the path of config files: names and digests."""
    place = Path(path)
    files = sorted(place.rglob("*"))[:_MOST_FILES] if place.is_dir() else [place]
    found = []
    for file in files:
        with contextlib.suppress(OSError):
            if file.is_file() and file.stat().st_size <= _LARGEST_BYTES:
                found.append(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}")
    return found


@dataclass(frozen=True, slots=True)
class _Group:
    """A flag and what belongs to it; with no flag, what stands before the first.

    Attributes:
        flag: as written, without an `=` and what is behind it.
        values: what belongs to it.
        joined: flag and first value are one token.
    """

    flag: str
    values: tuple[str, ...] = ()
    joined: bool = False

    @property
    def name(self) -> str:
        """The flag as it is compared."""
        return self.flag.replace("_", "-")

    @property
    def tokens(self) -> tuple[str, ...]:
        """As in the command."""
        if self.joined:
            return (f"{self.flag}={self.values[0]}", *self.values[1:])
        return (self.flag, *self.values) if self.flag else self.values


def _split(tokens: Sequence[str]) -> list[_Group]:
    """A command as groups; what follows a lone `--` belongs to it."""
    groups = [_Group("")]
    for token in tokens:
        if groups[-1].flag != _END_OF_FLAGS and (token == _END_OF_FLAGS or _FLAG.match(token)):
            flag, equals, value = token.partition("=")
            groups.append(_Group(flag, (value,) if equals else (), bool(equals)))
        else:
            last = groups[-1]
            groups[-1] = _Group(last.flag, (*last.values, token), last.joined)
    return groups if groups[0].values else groups[1:]


def _without(groups: list[_Group], gone: _Group, one: Intervention) -> list[_Group]:
    """The groups without a flag and its values, or without those of its values that are named."""
    if not gone.flag:
        for value in gone.values:
            groups = _without_word(groups, value, one)
        return groups
    count = len(gone.values)
    places = [
        place
        for place, group in enumerate(groups)
        if group.name == gone.name and group.values[:count] == gone.values
    ]
    if len(places) != 1:
        said = f"stands in it {len(places)} times" if places else "does not stand in it"
        hint = "name it with its value in `remove`" if places else "take it out of `remove`"
        raise _error(one, f"`{_shown(gone)}` is to be taken out of the server's command and {said}", hint)
    place = places[0]
    # Values that are named leave what stands behind them: a model, the next command.
    rest = groups[place].values[count:] if count else ()
    return _joined([*groups[:place], *([_Group("", rest)] if rest else []), *groups[place + 1 :]])


def _without_word(groups: list[_Group], word: str, one: Intervention) -> list[_Group]:
    tokens = [token for group in groups for token in group.tokens]
    if tokens.count(word) != 1:
        raise _error(
            one,
            f"{_quoted(word)} is to be taken out of the server's command and stands in it"
            f" {tokens.count(word)} times",
            "name the flag that it belongs to in `remove`",
        )
    tokens.remove(word)
    return _split(tokens)


def _with(groups: list[_Group], new: _Group, one: Intervention) -> list[_Group]:
    """The groups with a flag's new values in the place of its old ones, or at the end."""
    places = [place for place, group in enumerate(groups) if new.flag and group.name == new.name]
    if not places:
        return [*groups, new]
    if len(places) > 1:
        raise _error(
            one,
            f"`{_quoted(new.flag)}` stands in the server's command {len(places)} times",
            "name the one that is meant, with its value, in `remove`",
        )
    old = groups[places[0]]
    if len(new.values) < len(old.values):
        raise _error(
            one,
            f"`{_shown(old)}` of the server's command has {len(old.values)} values and"
            f" `{_shown(new)}` has {len(new.values)}: what of it is to go is not clear",
            f"name what goes in `remove`: a flag alone, or with the values that are its own"
            f" (remove = {_toml(old.flag, *old.values[:1])})",
        )
    return [*groups[: places[0]], new, *groups[places[0] + 1 :]]


def _joined(groups: list[_Group]) -> list[_Group]:
    """Words without a flag belong to the flag before them."""
    return _split([token for group in groups for token in group.tokens])


def _check_conflicts(first: Intervention, second: Intervention) -> None:
    """Refuse two interventions that cannot both be on."""
    sets, other_sets = _flags(first.arguments), _flags(second.arguments)
    takes, other_takes = _flags(first.remove), _flags(second.remove)
    for name in sets:
        if name in other_sets and sets[name] != other_sets[name]:
            raise _conflict(first, second, f"both set `{_quoted(name)}`, to different values")
    for name in [
        *(name for name in sets if name in other_takes),
        *(name for name in takes if name in other_sets),
    ]:
        # One that replaces a flag by taking it out and giving it again is no conflict with itself.
        raise _conflict(first, second, f"one sets `{_quoted(name)}` and the other takes it out")
    for name, value in first.environment.items():
        if second.environment.get(name, value) != value:
            raise _conflict(
                first, second, f"both set the variable {printable(name, 80)}, to different values"
            )


def _flags(arguments: Sequence[str]) -> dict[str, list[tuple[str, ...]]]:
    found: dict[str, list[tuple[str, ...]]] = {}
    for group in _split(arguments):
        if group.flag:
            found.setdefault(group.name, []).append(group.values)
    return found


def _is_shell_text(command: Sequence[str]) -> bool:
    """Whether a command is `sh -c TEXT`, to which further arguments are no arguments of the server."""
    name = PurePosixPath(command[0]).name
    return name in _SHELLS and any(re.fullmatch(r"-[a-z]*c", word) for word in command[1:3])


def _shown(group: _Group) -> str:
    return printable(shlex.join(redacted_arguments(group.tokens)), 160)


def _quoted(word: str) -> str:
    return printable(shlex.quote(word), 80)


def _toml(*words: str) -> str:
    return "[" + ", ".join(f'"{printable(word, 60)}"' for word in words) + "]"


def _named(one: Intervention) -> str:
    where = f" (line {one.line})" if one.line else ""
    return f'the intervention "{printable(one.name, 80)}"{where}'


def _error(one: Intervention, message: str, hint: str) -> InputError:
    return InputError(f"{_named(one)}: {message}", hint)


def _conflict(first: Intervention, second: Intervention, message: str) -> InputError:
    return InputError(
        f"{_named(first)} and {_named(second)} cannot be on together: {message}",
        "make them one intervention, or leave one out",
    )
