"""What `moetune status` says of experiments: which run, which are half-way, and what is next."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.applications.experiments.record import look, recorded
from moetune.domain.errors import MoetuneError
from moetune.domain.text import printable

if TYPE_CHECKING:
    from moetune.applications.experiments.record import Seen


@dataclass(frozen=True, slots=True)
class ExperimentStatus:
    """An experiment as `moetune status` shows it.

    Attributes:
        id: its name.
        name: of its plan.
        standing: `running`, `half-way`, `done`, `taken back` or `broken`.
        starts: that are finished.
        note: why it stopped, or cannot be read; empty as a rule.
        next: the command that goes on with it, or takes it back; empty where there is nothing to do.
    """

    id: str
    name: str
    standing: str
    starts: int = 0
    note: str = ""
    next: str = ""


def experiments_there(state: Path) -> tuple[ExperimentStatus, ...]:
    """The experiments of a state directory that were begun; what cannot be read is named."""
    found = (_status(state, name) for name in recorded(state))
    return tuple(one for one in found if one is not None)


def _status(state: Path, name: str) -> ExperimentStatus | None:
    try:
        seen = look(state, name)
    except MoetuneError as error:
        return ExperimentStatus(name, "", "broken", note=error.message)
    facts = seen.facts
    if not (facts.begun_starts or facts.done or seen.running):
        return None  # a plan that could not run: nothing was started
    return ExperimentStatus(
        id=name,
        name=printable(seen.plan.name, 80),
        standing=_standing(seen),
        starts=len(facts.starts),
        note=printable(facts.stopped, 300),
        next=_next(seen),
    )


def _standing(seen: Seen) -> str:
    if seen.running:
        return "running"
    if seen.facts.taken_back:
        return "taken back"
    return "done" if seen.facts.done else "half-way"


def _next(seen: Seen) -> str:
    if seen.half_way and seen.facts.plan_path:
        return shlex.join(["moetune", "experiment", printable(seen.facts.plan_path, 400)])
    if seen.facts.done and seen.facts.kept and not seen.facts.taken_back:
        return shlex.join(["moetune", "uninstall", seen.id])
    return ""
