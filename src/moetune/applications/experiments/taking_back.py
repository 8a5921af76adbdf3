"""`moetune uninstall RUN`: brings back the state before an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetune import __version__
from moetune.applications.experiments.far_configs import FarConfigs
from moetune.applications.experiments.known_good import KnownGood, take_back
from moetune.applications.experiments.leftovers import leftovers
from moetune.applications.experiments.pasting import pasteable
from moetune.applications.experiments.record import Record, look
from moetune.applications.manifest import open_ledger
from moetune.applications.uninstalling import UninstallRequest, uninstall
from moetune.domain.codec import from_json

if TYPE_CHECKING:
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
    state: Path, name: str, environ: Mapping[str, str], *, dry_run: bool = False, forget: bool = False
) -> TakenBack:
    """Bring back the state before an experiment: config files by their backups; the command is told.

    Args:
        state: the state directory.
        name: of the experiment.
        environ: variables of this process.
        dry_run: change nothing.
        forget: leave what somebody else has changed as it is, for good.

    Raises:
        MoetuneError: when it cannot be done, or the experiment runs.
    """
    seen = look(state, name)
    command = pasteable(seen.plan.server, ())
    if dry_run:
        answers = _uninstall(state, seen.facts.kept, environ, dry_run=True, forget=forget)
        return TakenBack(name, (), False, answers, (), command, True)
    with Record.open_known(state, name) as record:
        ended = end_leftovers(record.folder)
        arm = take_back(record.folder, environ, forget=forget)
        FarConfigs(seen.plan.server, record).remove()
        known = _known_good(record.facts.known_good)
        answers = _uninstall(state, record.facts.kept, environ, dry_run=False, forget=forget)
        if not any(one.left for one in answers):
            record.add("taken back")
        changed = () if known is None else known.changed()
    return TakenBack(name, ended, arm, answers, changed, command, False)


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
    state: Path, names: tuple[str, ...], environ: Mapping[str, str], *, dry_run: bool, forget: bool
) -> tuple[Uninstalled, ...]:
    """Take installs back that are still recorded, the last one first."""
    with open_ledger(state, writing=False) as ledger:
        roots = {one.id: one.root for one in ledger.manifest.installs}
    return tuple(
        uninstall(
            UninstallRequest(what=name, root=Path(roots[name]), state=state, forget=forget),
            environ,
            dry_run=dry_run,
        )
        for name in reversed(names)
        if name in roots
    )


def _known_good(document: dict[str, Any] | None) -> KnownGood | None:
    return None if document is None else from_json(KnownGood, document, "the record")
