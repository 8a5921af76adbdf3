"""Changes some config files below a root as one: done, undone, or completed by the next command.

A pair of up and down files cannot be exchanged in one step, and SGLang 0.5.5 to 0.5.12 end with an
assertion where the two disagree on BLOCK_SIZE_M (`try_get_optimal_moe_config` of those wheels). So the
down file is first replaced by an empty table, which every release from 0.5.5 on reads as "no config of
its own: the down kernel takes the up kernel's" - removing it would not do, because the server would
then take one from another Triton's directory. Then the up file is exchanged, then the down file: each
state between is one that the server starts with, whichever process is killed when.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.applications.atomic import Places, open_places
from moetune.applications.manifest import MAX_FILE_BYTES, Journal, Ledger, Step, digest
from moetune.domain.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from moetune.applications.manifest import Content, Manifest

NO_TABLE = b"{}\n"
"""Stands for the down file while its up file is exchanged."""

_DOWN = "_down.json"
_FOREIGN = "?"


@dataclass(frozen=True, slots=True)
class Recovered:
    """What became of what an interrupted command had begun.

    Attributes:
        action: `install` or `uninstall`.
        root: below which it was changing files.
        completed: it is done now; otherwise nothing of it had been done yet.
        left: paths that somebody else has changed since, and that were left as they are.
    """

    action: str
    root: str
    completed: bool
    left: tuple[str, ...] = ()


def commit(ledger: Ledger, places: Places, journal: Journal) -> tuple[str, ...]:
    """Do what a journal says; what it needs is in the ledger already.

    Returns:
        Paths that somebody changed meanwhile, and that were left as they are.

    Raises:
        OutputError: when a file could not be changed; all are then as they were before, or, where
            that failed too, the journal is still there for the next command.
    """
    before = ledger.manifest
    ledger.write_journal(journal)
    try:
        places.mark(journal.marker)
        left = _run(ledger, places, journal.steps)
        ledger.write_manifest(_without(journal, left))
    except BaseException:
        with contextlib.suppress(OutputError):
            _run(ledger, places, tuple(Step(step.path, step.after, step.before) for step in journal.steps))
            ledger.write_manifest(before)
            places.remove(journal.marker)
            ledger.drop_journal()
        raise
    _finish(ledger, places, journal)
    return left


def recover(ledger: Ledger) -> Recovered | None:
    """Complete what an interrupted command had begun; None when there is nothing.

    The marker in the server's directory proves that such a command was at work there: a journal that
    only names a directory makes nothing happen in it.

    Raises:
        OutputError: when it cannot be completed now.
    """
    journal = ledger.journal()
    if journal is None:
        return None
    if not _is_marked(journal):
        # Not begun, or done but for the last few strokes.
        completed = ledger.manifest == journal.manifest
        if completed == (journal.action == "uninstall"):
            _remove_made(journal)
        ledger.drop_journal()
        return Recovered(journal.action, journal.root, completed)
    paths = [journal.marker, *(step.path for step in journal.steps)]
    with open_places(Path(journal.root), paths) as places:
        left = _run(ledger, places, journal.steps)
        ledger.write_manifest(_without(journal, left))
        _finish(ledger, places, journal)
    return Recovered(journal.action, journal.root, True, left)


def _finish(ledger: Ledger, places: Places, journal: Journal) -> None:
    places.remove(journal.marker)
    if journal.action == "uninstall":
        for folder in sorted(journal.made, key=len, reverse=True):
            places.remove_folder(folder)
    ledger.drop_journal()


def _is_marked(journal: Journal) -> bool:
    try:
        with open_places(Path(journal.root), [journal.marker], writing=False) as places:
            return places.attributes(journal.marker) is not None
    except OutputError as error:
        if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
            return False
        raise


def _remove_made(journal: Journal) -> None:
    """Directories that the install made, as far as they are empty."""
    with contextlib.suppress(OutputError), open_places(Path(journal.root), (), writing=False) as places:
        for folder in sorted(journal.made, key=len, reverse=True):
            places.remove_folder(folder)


def _without(journal: Journal, left: tuple[str, ...]) -> Manifest:
    manifest = journal.manifest
    if journal.action == "install" and left:
        return manifest.without(manifest.installs[-1].id, frozenset(left))
    return manifest


def _run(ledger: Ledger, places: Places, steps: Iterable[Step]) -> tuple[str, ...]:
    """Bring each path from before to after; what is neither is somebody else's and stays."""
    left: list[str] = []
    for group in _groups(steps):
        if any(_now(places, step.path) not in _expected(step, len(group)) for step in group):
            left += [step.path for step in group]
            continue
        up, down = group[0], group[1] if len(group) > 1 else None
        if down is not None and not _is_done(places, up):
            places.put(down.path, NO_TABLE)
        for step in group:
            if not _is_done(places, step):
                _put(ledger, places, step)
    return tuple(left)


def _groups(steps: Iterable[Step]) -> Iterator[tuple[Step, ...]]:
    """Pairs of which both files change, up first; everything else on its own."""
    by_path = {step.path: step for step in steps}
    for path, step in by_path.items():
        if path.endswith(_DOWN) and f"{path.removesuffix(_DOWN)}.json" in by_path:
            continue
        down = by_path.get(f"{path.removesuffix('.json')}{_DOWN}")
        yield (step,) if down is None else (step, down)


def _now(places: Places, path: str) -> str | None:
    try:
        content = places.read(path, MAX_FILE_BYTES)
    except OutputError:
        return _FOREIGN  # a link, a directory: nothing that moetune has put there
    return None if content is None else digest(content)


def _expected(step: Step, files: int) -> set[str | None]:
    expected = {_digest(step.before), _digest(step.after)}
    return expected | {digest(NO_TABLE)} if files > 1 and step.path.endswith(_DOWN) else expected


def _digest(content: Content | None) -> str | None:
    return None if content is None else content.sha256


def _is_done(places: Places, step: Step) -> bool:
    return _now(places, step.path) == _digest(step.after)


def _put(ledger: Ledger, places: Places, step: Step) -> None:
    if step.after is None:
        places.remove(step.path)
    else:
        places.put(step.path, ledger.content(step.after.sha256), step.after.attributes)
