"""`moetune status`: what is installed where, whether it still stands, and whether the server finds it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetune import __version__
from moetune.applications.atomic import open_places
from moetune.applications.environment import SERVERS, find_installed
from moetune.applications.experiments.standing import ExperimentStatus, experiments_there
from moetune.applications.install_checks import lookups_of
from moetune.applications.install_target import Target, find_target
from moetune.applications.manifest import MAX_FILE_BYTES, Entry, Install, digest, open_ledger
from moetune.applications.provenance import SUFFIX
from moetune.applications.state import state_path
from moetune.applications.transaction import Recovered, recover
from moetune.domain.codec import to_json
from moetune.domain.errors import MoetuneError, OutputError
from moetune.servers.registry import open_server

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moetune.servers.protocol import Lookup

STATUS_SCHEMA = "moetune.status/1"


class Standing(str, Enum):
    """What is at a path that moetune wrote."""

    INTACT = "intact"
    CHANGED = "changed since"
    MISSING = "gone"
    COVERED = "replaced by a later install"
    UNREADABLE = "cannot be looked at"


@dataclass(frozen=True, slots=True)
class EntryStatus:
    """A path of an install as it stands.

    Attributes:
        path: below the root.
        standing: what is there.
        lookup: what the server's lookup does with a config file of that name; None for provenance
            and for names that the server does not look for.
    """

    path: str
    standing: Standing
    lookup: Lookup | None = None


@dataclass(frozen=True, slots=True)
class InstallStatus:
    """An install as it stands.

    Attributes:
        install: what was recorded.
        entries: its paths.
        server: the release whose lookup was asked, as `name version (Triton version)`.
        note: why it was not asked; empty as a rule.
    """

    install: Install
    entries: tuple[EntryStatus, ...]
    server: str
    note: str = ""

    @property
    def fine(self) -> bool:
        """Whether all stands as it was written and every config file is found."""
        return all(
            one.standing in (Standing.INTACT, Standing.COVERED)
            and (one.path.endswith(SUFFIX) or one.standing is Standing.COVERED or self.finds(one))
            for one in self.entries
        )

    def finds(self, one: EntryStatus) -> bool:
        """Whether the server reads that very file."""
        return (
            one.lookup is not None
            and one.lookup.found == f"{self.install.root.rstrip('/')}/{one.path}"
            and one.standing is not Standing.MISSING
        )

    def to_json(self) -> dict[str, Any]:
        """As it stands in the document of `moetune status --json`."""
        install = self.install
        return {
            "id": install.id,
            "server": install.server,
            "server_version": install.server_version,
            "triton_version": install.triton_version,
            "root": install.root,
            "place": install.place,
            "sources": list(install.sources),
            "asked": self.server,
            "note": self.note,
            "fine": self.fine,
            "files": [
                {
                    "path": one.path,
                    "standing": one.standing.value,
                    "lookup": None if one.lookup is None else one.lookup.outcome.value,
                    "found": self.finds(one),
                }
                for one in self.entries
            ],
        }


@dataclass(frozen=True, slots=True)
class Status:
    """The answer to `moetune status`.

    Attributes:
        state: the state directory.
        installs: oldest first.
        recovered: what became of an interrupted command.
        pending: why an interrupted command could not be completed; empty as a rule.
        experiments: that are recorded.
    """

    state: Path
    installs: tuple[InstallStatus, ...]
    recovered: Recovered | None = None
    pending: str = ""
    experiments: tuple[ExperimentStatus, ...] = ()

    @property
    def fine(self) -> bool:
        """Whether everything stands as it was written and is found."""
        return not self.pending and all(one.fine for one in self.installs)

    def to_json(self) -> dict[str, Any]:
        """The document of `moetune status --json`."""
        return {
            "schema": STATUS_SCHEMA,
            "moetune": __version__,
            "state": str(self.state),
            "fine": self.fine,
            "pending": self.pending,
            "installs": [one.to_json() for one in self.installs],
            "experiments": [to_json(one) for one in self.experiments],
        }


def status(state: Path | None = None, environ: Mapping[str, str] | None = None) -> Status:
    """What is installed where, whether it still stands, and whether the server still finds it.

    Raises:
        MoetuneError: when the records cannot be read.
    """
    environ = os.environ if environ is None else environ
    where = state_path(state, environ)
    recovered, pending = None, ""
    with open_ledger(where, writing=False) as ledger:
        interrupted = ledger.journal() is not None
        manifest = ledger.manifest
    if interrupted:
        try:
            with open_ledger(where, writing=True) as ledger:
                recovered = recover(ledger)
                manifest = ledger.manifest
        except OutputError as error:
            pending = error.message
    installs = tuple(_install_status(one, manifest.installs, environ) for one in manifest.installs)
    return Status(where, installs, recovered, pending, experiments_there(where))


def _install_status(
    install: Install, installs: tuple[Install, ...], environ: Mapping[str, str]
) -> InstallStatus:
    later = covered(install, installs)
    standings = {
        entry.path: Standing.COVERED if entry.path in later else standing
        for entry, standing in ((one, standing_of(Path(install.root), one)) for one in install.entries)
    }
    names = tuple(dict.fromkeys(Path(path).name for path in standings if not path.endswith(SUFFIX)))
    lookups: dict[str, Lookup | None] = {}
    note = asked = ""
    try:
        target = _target(install, environ)
        server = target.server
        asked = f"{server.name} {server.version} (Triton {server.triton_version})"
        lookups = dict(lookups_of(server, target.trees(environ), names))
    except MoetuneError as error:
        note = error.message
    entries = tuple(
        EntryStatus(path, standing, lookups.get(Path(path).name)) for path, standing in standings.items()
    )
    return InstallStatus(install, entries, asked, note)


def _target(install: Install, environ: Mapping[str, str]) -> Target:
    """The server that would read an install now: the one that is here, where it is its own."""
    if install.place == "root":
        server = open_server(install.server, install.server_version, install.triton_version)
        package = find_installed(install.server) if install.server in SERVERS else None
        same = package if package is not None and package.version == install.server_version else None
        return Target(server, Path(install.root), "root", same)
    return find_target((), environ, server=install.server)


def covered(install: Install, installs: Iterable[Install]) -> frozenset[str]:
    """Paths at which a later install has written."""
    ordered = list(installs)
    later = ordered[[one.id for one in ordered].index(install.id) + 1 :]
    return frozenset(path for one in later if one.root == install.root for path in one.paths)


def standing_of(root: Path, entry: Entry) -> Standing:
    """What is at a path of an install."""
    try:
        with open_places(root, [entry.path], writing=False) as places:
            content = places.read(entry.path, MAX_FILE_BYTES)
    except OutputError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            content = None
        elif isinstance(error.__cause__, PermissionError):
            return Standing.UNREADABLE
        else:
            return Standing.CHANGED  # a link, a directory, something large: not what was written
    now = None if content is None else digest(content)
    if now == entry.written:
        return Standing.INTACT
    return Standing.MISSING if now is None else Standing.CHANGED
