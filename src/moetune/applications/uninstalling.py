"""`moetune uninstall`: back to what was there before, byte for byte."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from moetune import __version__
from moetune.applications.atomic import open_places
from moetune.applications.install_target import find_target
from moetune.applications.installs import Standing, covered, standing_of
from moetune.applications.manifest import (
    MAX_FILE_BYTES,
    Content,
    Entry,
    Install,
    Journal,
    Ledger,
    Step,
    open_ledger,
)
from moetune.applications.provenance import SUFFIX
from moetune.applications.state import state_path
from moetune.applications.transaction import Recovered, commit, recover
from moetune.domain.errors import InputError, MoetuneError, OutputError
from moetune.domain.text import printable

UNINSTALL_SCHEMA = "moetune.uninstall/1"


class Outcome(str, Enum):
    """What an uninstall does about a path."""

    RESTORED = "restored"
    REMOVED = "removed"
    LEFT = "left"
    COVERED = "covered"
    """A later install stands there: what was before this one is now what was before that one."""


@dataclass(frozen=True, slots=True)
class UninstallRequest:
    """What to take back.

    Attributes:
        what: the name of an install, a root, a directory or file in it, or what was installed; None
            takes the only install there is.
        root: names a directory as one that may be written into; see `prepare_uninstall`.
        all: everything.
        forget: drop the record also of what is left because it was changed.
        state: the state directory; None: MOETUNE_STATE, else the XDG state directory.
    """

    what: str | None = None
    _: KW_ONLY
    root: Path | None = None
    all: bool = False
    forget: bool = False
    state: Path | None = None


@dataclass(frozen=True, slots=True)
class Removal:
    """What an uninstall does about one install.

    Attributes:
        install: what was recorded.
        outcomes: path to what becomes of it.
        standings: path to what is there.
    """

    install: Install
    outcomes: Mapping[str, Outcome]
    standings: Mapping[str, Standing]


@dataclass(frozen=True, slots=True)
class Uninstalled:
    """The answer to `moetune uninstall`.

    Attributes:
        removals: newest install first.
        dry_run: nothing was done.
        recovered: what became of an interrupted command before this one.
    """

    removals: tuple[Removal, ...]
    dry_run: bool
    recovered: Recovered | None = None

    @property
    def left(self) -> tuple[str, ...]:
        """Files that were changed since, and that stay as they are."""
        return tuple(
            f"{one.install.root.rstrip('/')}/{path}"
            for one in self.removals
            for path, outcome in one.outcomes.items()
            if outcome is Outcome.LEFT
        )

    @property
    def did_something(self) -> bool:
        """Whether anything was taken back."""
        return any(outcome is not Outcome.LEFT for one in self.removals for outcome in one.outcomes.values())

    def to_json(self) -> dict[str, Any]:
        """The document of `moetune uninstall --json`."""
        return {
            "schema": UNINSTALL_SCHEMA,
            "moetune": __version__,
            "dry_run": self.dry_run,
            "left": list(self.left),
            "installs": [
                {
                    "id": one.install.id,
                    "root": one.install.root,
                    "files": [
                        {
                            "path": path,
                            "outcome": outcome.value,
                            "standing": one.standings[path].value,
                        }
                        for path, outcome in one.outcomes.items()
                    ],
                }
                for one in self.removals
            ],
        }


def uninstall(
    request: UninstallRequest, environ: Mapping[str, str] | None = None, *, dry_run: bool = False
) -> Uninstalled:
    """Bring back what was there before installs, where what is there is what moetune wrote.

    Files are changed only below a directory that a server reads here, or one that the request names:
    a manifest alone leads nowhere.

    Args:
        request: what to take back.
        environ: the variables of the servers; None takes those of this process.
        dry_run: change nothing.

    Raises:
        MoetuneError: when it cannot be done; installs that were taken back before stay so.
    """
    environ = os.environ if environ is None else environ
    with open_ledger(state_path(request.state, environ), writing=not dry_run) as ledger:
        recovered = None if dry_run else recover(ledger)
        chosen = _chosen(request, ledger.manifest.installs)
        for install, _ in chosen:
            _check_allowed(install, request, environ)
        removals = []
        # What was put there last goes first.
        for install, paths in reversed(chosen):
            current = next(one for one in ledger.manifest.installs if one.id == install.id)
            removals.append(_remove(ledger, current, paths, request.forget, dry_run))
    return Uninstalled(tuple(removals), dry_run, recovered)


def _chosen(request: UninstallRequest, installs: tuple[Install, ...]) -> list[tuple[Install, frozenset[str]]]:
    """The installs that are meant, with the paths of each, oldest first."""
    if not installs:
        raise InputError("nothing is installed, as far as is recorded", "moetune status")
    if request.all or (request.what is None and len(installs) == 1 and request.root is None):
        return [(one, frozenset(one.paths)) for one in installs]
    if request.what is None and request.root is None:
        raise InputError(
            f"{len(installs)} installs are recorded: {', '.join(one.id for one in installs[:8])}",
            "name one of them, or a directory: moetune uninstall ID; moetune status lists them",
        )
    what = request.what if request.what is not None else str(request.root)
    chosen = [(one, paths) for one in installs if (paths := _meant(what, one))]
    if not chosen:
        raise InputError(f"nothing is installed as or below {printable(what, 300)}", "moetune status")
    return chosen


def _meant(what: str, install: Install) -> frozenset[str]:
    """The paths of an install that a name or path stands for: of a pair always both."""
    everything = frozenset(install.paths)
    if "\0" in what:
        return frozenset()
    named = Path(what).absolute()
    if what == install.id or str(named) in install.sources or str(named) == install.root:
        return everything
    shapes = {
        _shape(path)
        for path in everything
        if (full := Path(install.root) / path) == named or named in full.parents
    }
    return frozenset(path for path in everything if _shape(path) in shapes)


def _shape(path: str) -> str:
    return path.removesuffix(SUFFIX).removesuffix(".json").removesuffix("_down")


def _check_allowed(install: Install, request: UninstallRequest, environ: Mapping[str, str]) -> None:
    """Refuse a root that nobody but the manifest names."""
    named = [path for path in (request.root, request.what and Path(request.what)) if path]
    root = Path(install.root)
    if any(path.absolute() == root or root in path.absolute().parents for path in named):
        return
    try:
        here = find_target((), environ, server=install.server).root
    except MoetuneError:
        here = None
    if here is None or os.path.realpath(here) != os.path.realpath(root):
        raise InputError(
            f"{install.id} lies in {printable(install.root, 300)}, which no server reads here",
            "name the directory to have it changed: moetune uninstall "
            f"{install.id} --root {shlex.quote(install.root)}",
        )


@contextmanager
def _saying_so(install: Install) -> Iterator[None]:
    """Give what cannot be written a hint that fits."""
    try:
        yield
    except OutputError as error:
        if isinstance(error.__cause__, OSError):
            root = printable(install.root, 300)
            hint = f"nothing was changed; make {root} writable for this user, then run it again"
            raise OutputError(error.message, hint) from error.__cause__
        raise


def _remove(ledger: Ledger, install: Install, paths: frozenset[str], forget: bool, dry_run: bool) -> Removal:
    later = covered(install, ledger.manifest.installs)
    entries = [entry for entry in install.entries if entry.path in paths]
    standings: dict[str, Standing] = {}
    for entry in entries:
        standing = standing_of(Path(install.root), entry)
        standings[entry.path] = Standing.COVERED if entry.path in later else standing
    outcomes = {entry.path: _outcome(entry, standings) for entry in entries}
    mine = [entry for entry in entries if outcomes[entry.path] in (Outcome.RESTORED, Outcome.REMOVED)]
    removal = Removal(install, outcomes, standings)
    if dry_run:
        return removal
    gone = frozenset(path for path, outcome in outcomes.items() if outcome is not Outcome.LEFT or forget)
    manifest = ledger.manifest.without(install.id, gone)
    if not mine:
        ledger.write_manifest(manifest)
        ledger.drop_journal()
        return removal
    with _saying_so(install), open_places(Path(install.root), [entry.path for entry in mine]) as places:
        steps = []
        for entry in mine:
            now, attributes = places.read(entry.path, MAX_FILE_BYTES), places.attributes(entry.path)
            there = None if now is None or attributes is None else Content(ledger.keep(now), attributes)
            if (None if there is None else there.sha256) != entry.written:
                raise OutputError(
                    f"{printable(entry.path, 300)} was changed just now", "look again: run it again"
                )
            if entry.before is not None:
                ledger.content(entry.before.sha256)  # a backup that is lost is seen before anything changes
            steps.append(Step(entry.path, there, entry.before))
        remaining = {path for one in manifest.installs if one.root == install.root for path in one.paths}
        journal = Journal(
            token=secrets.token_hex(16),
            action="uninstall",
            root=install.root,
            steps=tuple(steps),
            made=() if remaining else install.made,
            manifest=manifest,
        )
        commit(ledger, places, journal)
    return removal


def _outcome(entry: Entry, standings: Mapping[str, Standing]) -> Outcome:
    standing = standings[entry.path]
    if standing is Standing.COVERED:
        return Outcome.COVERED
    # Half of an old pair beside half of somebody's new one: a server may assert that they agree.
    if standing is not Standing.INTACT or standings.get(_other(entry.path)) is Standing.CHANGED:
        return Outcome.LEFT
    return Outcome.REMOVED if entry.before is None else Outcome.RESTORED


def _other(path: str) -> str:
    """The other file of a pair; empty for provenance, which no server reads."""
    if path.endswith(SUFFIX):
        return ""
    stem = path.removesuffix(".json")
    return f"{stem.removesuffix('_down')}.json" if stem.endswith("_down") else f"{stem}_down.json"
