"""Reads an experiment's plan from TOML: all its faults at once, each with line, key and what was meant."""

from __future__ import annotations

import math
import os
import shlex
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from moetune.applications.experiments.plan_fields import (
    MAX_INTERVENTIONS,
    MAX_ITEMS,
    MAX_TEXT,
    MAX_WHOLE,
    PLACEHOLDER,
    TABLES,
    VARIABLE,
    Field,
    fields_of,
)
from moetune.applications.experiments.plan_lines import MAX_BYTES, Place, TomlDocument, TomlFault, read_toml
from moetune.applications.experiments.plan_meaning import Read, check_meaning
from moetune.domain.errors import InputError
from moetune.domain.experiment_plan import Budget, DecisionPlan, Intervention, LoadPlan, Plan, ServerPlan
from moetune.domain.text import printable

_SHOWN = 20  # faults that a message spells out
_KINDS: Mapping[str, str] = {
    "str": "a text in quotes",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list of str": "a list of texts",
    "list of int": "a list of whole numbers",
    "table of str": "a table of texts",
}
_Table = TypeVar("_Table")
_RELATIVE = ("folder", "config_root")


@dataclass(frozen=True, slots=True)
class PlanFault:
    """One thing that is wrong with a plan.

    Attributes:
        line: of the file; 0 when it is about the whole file.
        key: as in `server.command`, empty when it is about the whole file.
        message: what is wrong, and what is meant.
    """

    line: int
    key: str
    message: str

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        return f"{where}{self.key + ': ' if self.key else ''}{self.message}"


class PlanError(InputError):
    """A plan that cannot be read or that contradicts itself.

    Args:
        source: the file.
        faults: all that is wrong with it, in the order of its lines.
    """

    def __init__(self, source: str, faults: tuple[PlanFault, ...]) -> None:
        where = printable(source, 400)
        lines = [f"{where}: {fault}" for fault in faults[:_SHOWN]]
        if len(faults) > _SHOWN:
            lines.append(f"{where}: and {len(faults) - _SHOWN} more faults")
        super().__init__(
            "\n".join(lines), "the keys of a plan: docs/experiment-plan.md; a new plan: --suggest"
        )
        self.lines = tuple(lines)
        self.source = source
        self.faults = faults


def read_plan(path: Path) -> Plan:
    """Read a plan; paths in it are relative to its own directory and come back absolute.

    Raises:
        PlanError: with all faults of the file.
    """
    try:
        data = _bytes_of(path)
    except OSError as broken:
        reason = broken.strerror or type(broken).__name__
        raise PlanError(str(path), (PlanFault(0, "", f"cannot be read: {reason}"),)) from None
    except ValueError:
        raise PlanError(str(path), (PlanFault(0, "", "is no path"),)) from None
    return parse_plan(data, str(path), path.absolute().parent, default_name=printable(path.stem, 80))


def parse_plan(data: bytes, source: str, folder: Path, default_name: str = "") -> Plan:
    """Read the content of a plan.

    Args:
        data: the file.
        source: its name, for messages.
        folder: what its relative paths start from.
        default_name: of a plan that says none.

    Raises:
        PlanError: with all faults.
    """
    try:
        document = read_toml(data)
    except TomlFault as broken:
        raise PlanError(source, (PlanFault(broken.line, "", broken.reason),)) from None
    reader = _Reader(document, folder)
    plan = reader.plan(default_name)
    if plan is None or reader.faults:
        raise PlanError(source, tuple(sorted(reader.faults, key=lambda fault: fault.line)))
    return plan


def _bytes_of(path: Path) -> bytes:
    """The content of a regular file, never more than one byte over what a plan can have."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "it is no regular file")
        return file.read(MAX_BYTES + 1)


class _Reader:
    """Turns a document into a plan and gathers faults."""

    def __init__(self, document: TomlDocument, folder: Path) -> None:
        self._document = document
        self._folder = folder
        self.faults: list[PlanFault] = []

    def plan(self, default_name: str) -> Plan | None:
        """The plan; None where there are faults."""
        top = self._document.value
        self._unknown(top, (), [*fields_of(""), *TABLES], "")
        given = {key: value for key, value in top.items() if key not in TABLES}
        own = self._values("", {"name": default_name, **given}, ())
        server = self._table("server", ServerPlan)
        load = self._table("load", LoadPlan)
        budget = self._table("budget", Budget, Budget())
        decision = self._table("decision", DecisionPlan, DecisionPlan())
        interventions = self._interventions()
        for place, message in check_meaning(Read(server, load, budget, decision, interventions)):
            self._fault(place, message)
        if self.faults or server is None or load is None or budget is None or decision is None:
            return None
        return Plan(
            server=server,
            load=load,
            interventions=tuple(one for one, _ in interventions),
            budget=budget,
            decision=decision,
            **own,
        )

    # tables

    def _table(self, name: str, kind: Callable[..., _Table], default: _Table | None = None) -> _Table | None:
        """A table; None where it has faults."""
        given = self._document.value.get(name)
        before = len(self.faults)
        if given is None:
            if default is None:
                self._fault((), f"there is no table [{name}]{_BECAUSE.get(name, '')}", name)
            return default
        if not isinstance(given, dict):
            self._fault((name,), f"is {_shown(given)}, and has to be a table [{name}]")
            return None
        self._unknown(given, (name,), list(fields_of(name)), name)
        values = self._values(name, given, (name,))
        for key in _RELATIVE:
            if values.get(key) and not values.get("host"):
                values[key] = self._absolute(values[key])
        return kind(**values) if len(self.faults) == before else None

    def _interventions(self) -> tuple[tuple[Intervention, bool], ...]:
        """What could be read of each, and whether that is all of it."""
        given = self._document.value.get("intervention", [])
        if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
            self._fault(("intervention",), "interventions are tables [[intervention]], in two brackets each")
            return ()
        if not given:
            self._fault((), "there is none: nothing to try on the server", "[[intervention]]")
        if len(given) > MAX_INTERVENTIONS:
            self._fault(("intervention",), f"there are {len(given)}, and {MAX_INTERVENTIONS} are the most")
            return ()
        read = []
        for position, one in enumerate(given):
            place: Place = ("intervention", position)
            before = len(self.faults)
            self._unknown(one, place, list(fields_of("intervention")), "intervention")
            values = {"name": "", **self._values("intervention", one, place)}
            values["configs"] = self._configs(place, values.get("configs", ()))
            intervention = Intervention(**values, line=self._document.line(place))
            read.append((intervention, len(self.faults) == before))
        return tuple(read)

    def _configs(self, place: Place, given: tuple[str, ...]) -> tuple[str, ...]:
        paths = []
        for position, item in enumerate(given):
            path = self._absolute(item)
            if not Path(path).exists():
                self._fault(
                    (*place, "configs", position), f"{_quoted(item)} does not exist ({_quoted(path)})"
                )
            paths.append(path)
        return tuple(paths)

    def _absolute(self, item: str) -> str:
        return os.path.normpath(self._folder / item)

    def _unknown(self, given: Mapping[str, Any], place: Place, known: list[str], table: str) -> None:
        for key in given:
            if key not in known:
                self._fault(
                    (*place, key),
                    f"is no key of {f'[{table}]' if table else 'a plan'}{_nearest(key, known, table)}",
                )

    # values

    def _values(self, table: str, given: Mapping[str, Any], place: Place) -> dict[str, Any]:
        """The values of a table that are right; the others leave a fault."""
        read = {}
        for name, field in fields_of(table).items():
            if name not in given:
                if field.required:
                    self._fault(place, f"is missing{_BECAUSE.get(field.key, '')}", field.key)
                continue
            value = self._value(field, given[name], (*place, name))
            if value is not None:
                read[name] = value
        return read

    def _value(self, field: Field, value: Any, place: Place) -> Any:  # noqa: ANN401 - any TOML value
        before = len(self.faults)
        if field.kind.startswith("list of ") and isinstance(value, str) and field.kind == "list of str":
            self._fault(place, _split_advice(field.name, value))
        elif field.kind.startswith("list of ") and isinstance(value, list):
            if len(value) > MAX_ITEMS:
                self._fault(place, f"holds {len(value)} items, and {MAX_ITEMS} are the most")
            elif not value and not field.bounds.empty:
                self._fault(place, "is empty")
            else:
                kind = field.kind.removeprefix("list of ")
                for position, item in enumerate(value):
                    self._scalar(field, kind, item, (*place, position))
                value = tuple(value)
        elif field.kind == "table of str" and isinstance(value, dict):
            self._mapping(field, value, place)
        else:
            value = self._scalar(field, field.kind, value, place)
        return value if len(self.faults) == before else None

    def _mapping(self, field: Field, value: Mapping[str, Any], place: Place) -> None:
        if len(value) > MAX_ITEMS:
            self._fault(place, f"holds {len(value)} entries, and {MAX_ITEMS} are the most")
        for key, item in value.items():
            here = (*place, key)
            if field.name == "environment" and not VARIABLE.fullmatch(key):
                self._fault(here, "is not the name of an environment variable")
            elif isinstance(item, bool | int | float):
                text = str(item).lower() if isinstance(item, bool) else str(item)
                self._fault(here, f'is {_shown(item)}, and has to be a text: write "{printable(text, 40)}"')
            else:
                self._scalar(field, "str", item, here)

    def _scalar(self, field: Field, kind: str, value: Any, place: Place) -> Any:  # noqa: ANN401
        if kind == "float" and type(value) is int and abs(value) <= MAX_WHOLE:
            value = float(value)
        if type(value) is int and abs(value) > MAX_WHOLE:
            self._fault(place, "is a number of too many digits")
        elif type(value) is not _TYPES.get(kind):
            self._fault(place, f"is {_shown(value)}, and has to be {_KINDS[kind]}")
        elif isinstance(value, str):
            self._text(field, value, place)
        elif isinstance(value, int | float) and kind != "bool":
            self._number(field, value, place)
        return value

    def _number(self, field: Field, value: float, place: Place) -> None:
        bounds = field.bounds
        if not math.isfinite(value):
            self._fault(place, f"is {value}, which is no finite number")
        elif not bounds.least <= value <= bounds.greatest or (
            bounds.least_excluded and value == bounds.least
        ):
            least = (
                f"over {bounds.least:g} and at most" if bounds.least_excluded else f"from {bounds.least:g} to"
            )
            self._fault(place, f"is {value:.12g}, and has to be {least} {bounds.greatest:.12g}")

    def _text(self, field: Field, value: str, place: Place) -> None:
        bounds = field.bounds
        if len(value) > MAX_TEXT:
            self._fault(place, f"is longer than {MAX_TEXT} characters")
        elif printable(value, MAX_TEXT) != value:
            self._fault(place, "holds a control character or one that cannot be seen")
        elif not value and not bounds.empty and field.kind == "str":
            self._fault(place, "is empty")
        elif value and bounds.choices and value not in bounds.choices:
            close = get_close_matches(value, bounds.choices, 1, 0.5)
            meant = f"did you mean {_quoted(close[0])}? " if close else ""
            self._fault(
                place, f"is {_quoted(value)}; {meant}It is one of {', '.join(map(_quoted, bounds.choices))}"
            )
        elif value and bounds.pattern is not None and not bounds.pattern.fullmatch(value):
            self._fault(place, f"is {_quoted(value)}, and has to be {bounds.shape}")
        elif field.placeholders is not None:
            self._placeholders(field.placeholders, value, place)

    def _placeholders(self, known: tuple[str, ...], value: str, place: Place) -> None:
        for name in PLACEHOLDER.findall(value):
            if name not in known:
                close = get_close_matches(name, known, 1, 0.5)
                meant = f"did you mean {{{close[0]}}}? " if close else ""
                choice = ", ".join(f"{{{one}}}" for one in known)
                self._fault(place, f"{{{name}}} stands for nothing; {meant}Here stand {choice}")

    def _fault(self, place: Place, message: str, key: str | None = None) -> None:
        self.faults.append(
            PlanFault(self._document.line(place), _key(place) if key is None else key, message)
        )


_TYPES: Mapping[str, type] = {"str": str, "int": int, "float": float, "bool": bool}
_BECAUSE: Mapping[str, str] = {
    "server": ": the command that starts the known-good server is the baseline",
    "server.command": ": the command that starts the known-good server is the baseline",
    "load": ": without a load nothing can be compared",
}


def _key(place: Place) -> str:
    """`intervention[1].arguments[0]` for a person, who counts from one."""
    text = ""
    for part in place:
        text += f"[{part + 1}]" if isinstance(part, int) else f"{'.' if text else ''}{printable(part, 80)}"
    return text


def _nearest(key: str, known: list[str], table: str) -> str:
    close = get_close_matches(key.lower().replace("-", "_"), known, 1, 0.6)
    if close:
        return f"; did you mean {close[0]}?"
    owners = [name for name in ("", *TABLES) if name != table and key in fields_of(name)]
    if owners:
        places = " or ".join(f"[{owner}]" if owner else "the top" for owner in owners)
        return f"; it belongs to {places}"
    return f"; its keys are {', '.join(known)}"


def _split_advice(name: str, value: str) -> str:
    try:
        words = shlex.split(value)
    except ValueError:
        words = [value]
    if printable(value, MAX_TEXT) != value or len(words) > 256:
        return "is one text, and has to be a list of texts: no shell reads it"
    items = ", ".join(_quoted(word, 400) for word in words)
    return f"is one text, and has to be a list, since no shell reads it: write {name} = [{items}]"


def _quoted(text: str, limit: int = 120) -> str:
    """A text as TOML writes it."""
    return '"' + printable(text, limit).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _shown(value: object) -> str:
    words = {dict: "a table", list: "a list", bool: str(value).lower()}
    return words.get(type(value)) or (
        _quoted(value, 40) if isinstance(value, str) else printable(str(value), 40)
    )


__all__ = ["PlanError", "PlanFault", "parse_plan", "read_plan"]
