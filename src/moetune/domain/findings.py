"""Findings: what doctor and lint say, each with a stable code, the facts and the command that mends it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(str, Enum):
    """How bad a finding is, worst first."""

    CRASH = "crashes the server"
    CANNOT_RUN = "cannot run"
    WRONG_NUMBERS = "wrong numbers"
    NEVER_READ = "never read"
    COSTS_SPEED = "costs speed"
    INFO = "info"

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True)
class Code:
    """A kind of finding.

    Attributes:
        code: `MOE001`; stable: never given to anything else. 001 to 099 come from server logs,
            101 to 199 from config files and trees.
        title: a few words.
        severity: of findings of this kind.
        story: what `moetune explain` tells: what happens, why, what it costs, how it is mended.
    """

    code: str
    title: str
    severity: Severity
    story: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    Attributes:
        code: its kind.
        message: what is wrong, with what, in a sentence.
        where: a file, a file and key, or a line of a log; empty when it is about the whole.
        facts: names and values that it rests on.
        cost: what it costs, empty when unknown.
        mend: the command that mends it, ready to paste; empty when there is nothing to mend.
    """

    code: Code
    message: str
    where: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    cost: str = ""
    mend: str = ""
