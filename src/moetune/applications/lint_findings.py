"""What lint knows of one config file, and how it says what it found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moetune.domain.config import ConfigTable
from moetune.domain.file_names import FileName
from moetune.domain.finding_codes import all_codes
from moetune.domain.findings import Finding
from moetune.domain.problem import Problem
from moetune.domain.rules import Fault
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_SHOWN_KEYS = 24


@dataclass(frozen=True, slots=True)
class Judged:
    """One config file as it was judged.

    Attributes:
        file_name: its bare name.
        name: the same taken apart; None for what is no name.
        problem: what it is for on the GPU it was judged for; None where that is not known.
        table: the entries that the server can read.
        faults: m to what is wrong with the launch of its entry.
        findings: what there is to say.
    """

    file_name: str
    name: FileName | None
    problem: Problem | None = None
    table: ConfigTable = field(default_factory=lambda: ConfigTable(()))
    faults: Mapping[int, tuple[Fault, ...]] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


def finding(
    code: str,
    message: str,
    where: str,
    *,
    keys: Iterable[object] = (),
    facts: Iterable[tuple[str, str]] = (),
    cost: str = "",
    mend: str = "",
) -> Finding:
    """A finding, with the keys of the file that it is about among the facts."""
    listed = list(keys)
    of_keys = [("keys", " ".join(map(str, listed))), ("entries", str(len(listed)))] if listed else []
    return Finding(
        all_codes()[code], printable(message, 600), printable(where, 400), (*of_keys, *facts), cost, mend
    )


def key_list(keys: Sequence[object]) -> str:
    """Keys for a message: `key 8`, `keys 8, 16 and 4 more`."""
    shown = ", ".join(printable(str(key), 24) for key in keys[:_SHOWN_KEYS])
    more = f" and {len(keys) - _SHOWN_KEYS} more" if len(keys) > _SHOWN_KEYS else ""
    return f"{'key' if len(keys) == 1 else 'keys'} {shown}{more}"
