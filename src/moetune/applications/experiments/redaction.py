"""Secrets of a plan and of this process, kept out of journals, reports and dry runs.

A secret is a variable or an argument whose name says so, or a value that looks like a token. Its value
is then replaced wherever it stands, also inside a sentence or a line of a log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moetune.applications.environment import REDACTED, SECRET_VALUE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from moetune.domain.experiment_plan import Plan

_WORDS = frozenset(
    [
        "token",
        "key",
        "apikey",
        "secret",
        "password",
        "passwd",
        "passphrase",
        "credential",
        "credentials",
        "auth",
        "authorization",
    ]
)
_NUMBERS = re.compile(r"-?[0-9.]+|true|false|none|auto", re.I)
_SPLIT = re.compile(r"[^A-Za-z0-9]+")
_SHORTEST = 6
"""A shorter value is replaced where its name stands beside it only: it may be part of any word."""


def is_secret_name(name: str) -> bool:
    """Whether a variable or an argument is named like a secret: `HF_TOKEN`, not `--max-total-tokens`."""
    return not _WORDS.isdisjoint(_SPLIT.split(name.lower()))


def redacted_arguments(arguments: Sequence[str]) -> tuple[str, ...]:
    """Arguments of a command, the values of those that are secrets replaced."""
    shown: list[str] = []
    named = False
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if named and not argument.startswith("-"):
            shown.append(REDACTED)
        elif equals and value and is_secret_name(flag):
            shown.append(f"{flag}={REDACTED}")
        else:
            shown.append(REDACTED if SECRET_VALUE.search(argument) else argument)
        named = argument.startswith("-") and not equals and is_secret_name(argument)
    return tuple(shown)


def redacted_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables, the values of those that are secrets replaced."""
    return {
        name: REDACTED if value and (is_secret_name(name) or SECRET_VALUE.search(value)) else value
        for name, value in variables.items()
    }


def redacted_plan(plan: Plan) -> Plan:
    """A plan without its secrets."""
    return replace(
        plan,
        server=replace(
            plan.server,
            command=redacted_arguments(plan.server.command),
            environment=redacted_variables(plan.server.environment),
            stop=redacted_arguments(plan.server.stop),
            logs=redacted_arguments(plan.server.logs),
        ),
        load=replace(
            plan.load,
            command=redacted_arguments(plan.load.command),
            arguments=redacted_arguments(plan.load.arguments),
            environment=redacted_variables(plan.load.environment),
        ),
        interventions=tuple(
            replace(
                one,
                arguments=redacted_arguments(one.arguments),
                remove=redacted_arguments(one.remove),
                environment=redacted_variables(one.environment),
            )
            for one in plan.interventions
        ),
    )


@dataclass(frozen=True, slots=True)
class Redactor:
    """Replaces the secrets that are known wherever they stand.

    Attributes:
        secrets: values, longest first.
    """

    secrets: tuple[str, ...] = ()

    @classmethod
    def of(cls, plan: Plan, environ: Mapping[str, str]) -> Redactor:
        """What a plan and the variables of this process hold of secrets."""
        return cls._of_values((*_of_plan(plan), *_of_variables(environ)))

    @classmethod
    def of_command(cls, command: Sequence[str], variables: Mapping[str, str]) -> Redactor:
        """What one command and the variables that it runs with hold of secrets."""
        return cls._of_values((*_of_command(command), *_of_variables(variables)))

    @classmethod
    def _of_values(cls, values: Iterable[str]) -> Redactor:
        found = {value for value in values if len(value) >= _SHORTEST}
        plain = {value for value in found if not _NUMBERS.fullmatch(value)}
        return cls(tuple(sorted(plain, key=lambda value: (-len(value), value))))

    def text(self, text: str) -> str:
        """A text without secrets."""
        for secret in self.secrets:
            text = text.replace(secret, REDACTED)
        return SECRET_VALUE.sub(REDACTED, text)

    def value(self, value: Any) -> Any:  # noqa: ANN401 - any JSON value
        """A JSON value without secrets: its texts, and what a secret's name stands before."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                name: REDACTED
                if isinstance(item, str) and item and is_secret_name(name)
                else self.value(item)
                for name, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        return value


def _of_plan(plan: Plan) -> Iterator[str]:
    variables = [plan.server.environment, plan.load.environment]
    commands = [plan.server.command, plan.server.stop, plan.server.logs, plan.load.command]
    commands.append(plan.load.arguments)
    for one in plan.interventions:
        variables.append(one.environment)
        commands += [one.arguments, one.remove]
    for environment in variables:
        yield from _of_variables(environment)
    for command in commands:
        yield from _of_command(command)


def _of_command(command: Sequence[str]) -> Iterator[str]:
    for given, shown in zip(command, redacted_arguments(command), strict=True):
        if given != shown:
            flag, equals, value = given.partition("=")
            yield value if equals and shown.startswith(flag) else given


def _of_variables(variables: Mapping[str, str]) -> Iterator[str]:
    for name, value in variables.items():
        if is_secret_name(name) or SECRET_VALUE.search(value):
            yield value
