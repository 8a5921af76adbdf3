"""A plan as TOML, with comments that say why: what `read_plan` reads back to the same plan."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moetune.applications.experiments.plan_fields import fields_of
from moetune.domain.experiment_plan import Plan
from moetune.servers.command_options import flag_of

Notes = Mapping[str, Sequence[str]]
"""Comments by what they stand before: empty for the file, `server`, `server.command`, an intervention's name
behind `intervention:`."""

_BARE = re.compile(r"[A-Za-z0-9_-]+", re.A)
_WIDE = 100
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}
_TABLES = ("server", "load", "budget", "decision")


def render_plan(plan: Plan, notes: Notes | None = None, shown: Collection[str] = ()) -> str:
    """Write a plan; what has its default is left out.

    Args:
        plan: the plan.
        notes: comments.
        shown: keys (`load.requests`) that are written also where they have their default.
    """
    writer = _Writer(notes or {}, shown)
    lines = [*writer.comment("", blank=True), *writer.keys("", plan)]
    for name in _TABLES:
        body = list(writer.keys(name, getattr(plan, name)))
        if body:
            lines += ["", *writer.comment(name), f"[{name}]", *body]
    for one in plan.interventions:
        head = writer.comment(f"intervention:{one.name}")
        lines += ["", *head, "[[intervention]]", *writer.keys("intervention", one)]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class _Writer:
    notes: Notes
    shown: Collection[str]

    def comment(self, key: str, *, blank: bool = False) -> Iterator[str]:
        lines = self.notes.get(key, ())
        for line in lines:
            yield f"# {line}".rstrip()
        if lines and blank:
            yield ""

    def keys(self, table: str, values: object) -> Iterator[str]:
        for name, field in fields_of(table).items():
            value = getattr(values, name)
            if field.required or value != field.default or field.key in self.shown:
                yield from self.comment(field.key)
                yield from _assignment(name, value)


def _assignment(name: str, value: Any) -> Iterator[str]:  # noqa: ANN401 - any value of a plan
    line = f"{name} = {_value(value)}"
    if not isinstance(value, tuple) or len(line) <= _WIDE:
        yield line
        return
    yield f"{name} = ["
    for row in _rows(value):
        yield "    " + " ".join(f"{_value(item)}," for item in row)
    yield "]"


def _rows(items: Sequence[Any]) -> Iterator[list[Any]]:
    """A long command: each flag in a line with its values."""
    row: list[Any] = []
    for item in items:
        if row and isinstance(item, str) and flag_of(item):
            yield row
            row = []
        row.append(item)
    yield row


def _value(value: Any) -> str:  # noqa: ANN401
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        pairs = (
            f"{key if _BARE.fullmatch(key) else _text(key)} = {_value(item)}" for key, item in value.items()
        )
        return "{ " + ", ".join(pairs) + " }"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return (
        str(int(value)) if isinstance(value, float) and value.is_integer() and value < 1e15 else repr(value)
    )


def _text(text: str) -> str:
    """A string of TOML: a literal one where that needs no escapes, as for JSON in an argument."""
    if '"' in text and "'" not in text and text.isprintable():
        return f"'{text}'"
    return (
        '"'
        + "".join(_ESCAPES.get(c) or (c if c >= " " and c != "\x7f" else f"\\u{ord(c):04X}") for c in text)
        + '"'
    )
