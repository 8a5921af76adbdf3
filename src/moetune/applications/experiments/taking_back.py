"""`moetune uninstall RUN`: the state before an experiment; and what `moetune status` says of experiments."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetune import __version__
from moetune.applications.experiments.known_good import KnownGood, take_back
from moetune.applications.experiments.leftovers import leftovers
from moetune.applications.experiments.pasting import with_variables
from moetune.applications.experiments.record import Record, look, recorded
from moetune.applications.manifest import open_ledger
from moetune.applications.uninstalling import UninstallRequest, uninstall
from moetune.domain.codec import from_json
from moetune.domain.errors import MoetuneError
from moetune.domain.text import printable

if TYPE_CHECKING:
    from moetune.applications.experiments.record import Seen
    from moetune.applications.uninstalling import Uninstalled

SCHEMA = "moetune.experiment-taken-back/1"


@dataclass(frozen=True, slots=True)
class TakenBack:
    """The answer to `moetune uninstall RUN`.

    Attributes:
        id: of the experiment.
        ended: servers that an interrupted call had left running, and that were ended.
        arm: files of an arm that was interrupted were taken back.
        uninstalled: what became of the files that had been left in place.
        changed: what is not as it was before the experiment, in words.
        command: that starts the known-good server, without secrets.
        dry_run: nothing was done.
    """

    id: str
    ended: tuple[str, ...]
    arm: bool
    uninstalled: tuple[Uninstalled, ...]
    changed: tuple[str, ...]
    command: str
    dry_run: bool

    @property
    def left(self) -> tuple[str, ...]:
        """Files that were changed since, and that stay as they are."""
        return tuple(path for one in self.uninstalled for path in one.left)

    def to_json(self) -> dict[str, Any]:
        """The document of `moetune uninstall RUN --json`."""
        return {
            "schema": SCHEMA,
            "moetune": __version__,
            "id": self.id,
            "dry_run": self.dry_run,
            "ended": list(self.ended),
            "arm": self.arm,
            "left": list(self.left),
            "changed": list(self.changed),
            "command": self.command,
        }


def take_experiment_back(
    state: Path, name: str, environ: Mapping[str, str], *, dry_run: bool = False
) -> TakenBack:
    """Bring back the state before an experiment: config files by their backups; the command is told.

    Args:
        state: the state directory.
        name: of the experiment.
        environ: variables of this process.
        dry_run: change nothing.

    Raises:
        MoetuneError: when it cannot be done, or the experiment runs.
    """
    if dry_run:
        seen = look(state, name)
        known = _known_good(seen.facts.known_good)
        answers = _uninstall(state, seen.facts.kept, environ, dry_run=True)
        return TakenBack(name, (), False, answers, (), _command(known), True)
    with Record.open_known(state, name) as record:
        ended = end_leftovers(record.folder)
        arm = take_back(record.folder, environ)
        known = _known_good(record.facts.known_good)
        answers = _uninstall(state, record.facts.kept, environ, dry_run=False)
        if not any(one.left for one in answers):
            record.add("taken back")
        changed = () if known is None else known.changed()
    return TakenBack(name, ended, arm, answers, changed, _command(known), False)


def end_leftovers(folder: Path) -> tuple[str, ...]:
    """End what an interrupted call has left running, and say what it was.

    Raises:
        MoetuneError: when something cannot be ended.
    """
    found = leftovers(folder)
    said = tuple(one.describe() for one in found)
    for one in found:
        one.stop()
    return said


def _uninstall(
    state: Path, names: tuple[str, ...], environ: Mapping[str, str], *, dry_run: bool
) -> tuple[Uninstalled, ...]:
    """Take installs back that are still recorded, the last one first."""
    with open_ledger(state, writing=False) as ledger:
        roots = {one.id: one.root for one in ledger.manifest.installs}
    return tuple(
        uninstall(UninstallRequest(what=name, root=Path(roots[name]), state=state), environ, dry_run=dry_run)
        for name in reversed(names)
        if name in roots
    )


def _known_good(document: dict[str, Any] | None) -> KnownGood | None:
    return None if document is None else from_json(KnownGood, document, "the record")


def _command(known: KnownGood | None) -> str:
    if known is None:
        return ""
    return with_variables(known.command, known.environment)


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
    """The experiments of a state directory; what cannot be read is named and passed over."""
    return tuple(_status(state, name) for name in recorded(state))


def _status(state: Path, name: str) -> ExperimentStatus:
    try:
        seen = look(state, name)
    except MoetuneError as error:
        return ExperimentStatus(name, "", "broken", note=error.message)
    facts = seen.facts
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
