"""How doctor makes a finding: nothing of a log reaches it raw."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetune.domain.finding_codes import find_code
from moetune.domain.findings import Finding
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

Facts = tuple[tuple[str, str], ...]
_MAX_FACT = 1024
_MAX_RANKS = 8


def make_finding(
    code: str, message: str, where: str = "", *, facts: Facts = (), cost: str = "", mend: str = ""
) -> Finding:
    """A finding of a packaged code; a command that could steer a terminal is not offered."""
    safe = all(command.isprintable() for command in mend.split("\n"))
    clean = tuple((name, printable(value, _MAX_FACT)) for name, value in facts)
    return Finding(find_code(code), printable(message, _MAX_FACT), where, clean, cost, mend if safe else "")


def rank_facts(ranks: Iterable[str]) -> Facts:
    """The ranks that said something; nothing where the log names none."""
    named = sorted((printable(rank, 40) for rank in ranks if rank), key=lambda rank: (len(rank), rank))
    if not named:
        return ()
    more = f" and {len(named) - _MAX_RANKS} more" if len(named) > _MAX_RANKS else ""
    return (("ranks", ", ".join(named[:_MAX_RANKS]) + more),)
