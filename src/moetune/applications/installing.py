"""`moetune install`: puts config files where a server looks, all of them or none."""

from __future__ import annotations

import errno
import os
import secrets
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from moetune import __version__
from moetune.applications.atomic import Attributes, Places, open_places
from moetune.applications.install_checks import lookups_of
from moetune.applications.install_plan import InstallRequest, Prepared, prepare_install
from moetune.applications.manifest import (
    MARKER_PREFIX,
    MARKER_SUFFIX,
    MAX_FILE_BYTES,
    Content,
    Entry,
    Install,
    Journal,
    Ledger,
    Step,
    digest,
    install_id,
    open_ledger,
)
from moetune.applications.state import state_path
from moetune.applications.transaction import Recovered, commit, recover
from moetune.domain.errors import OutputError
from moetune.domain.text import printable
from moetune.servers.protocol import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["InstallRequest", "Installed", "install", "prepare_install"]

SCHEMA = "moetune.install/1"
_FILE_MODE, _FOLDER_MODE = 0o644, 0o755
_NOT_MINE = frozenset({errno.EACCES, errno.EPERM})


@dataclass(frozen=True, slots=True)
class Installed:
    """An install that is done.

    Attributes:
        prepared: what was to be done.
        id: names it for `moetune uninstall`; empty where nothing was left to do or it was a dry run.
        dry_run: nothing was done.
        found: the server's own lookup finds every file in the tree as it now is.
        left: paths that somebody else changed meanwhile.
        recovered: what became of an interrupted command before this one.
        interrupted: markers of commands of other users, or with other records, that were interrupted
            in these directories and that only those can complete.
    """

    prepared: Prepared
    id: str
    dry_run: bool
    found: bool
    left: tuple[str, ...] = ()
    recovered: Recovered | None = None
    interrupted: tuple[str, ...] = ()

    @property
    def use_command(self) -> str:
        """What makes the server read the files; empty where it does so by itself."""
        target = self.prepared.target
        variable = target.server.directory_variable
        if target.place != "root" or variable is None:
            return ""
        return f"export {variable}={shlex.quote(str(target.root))}"

    def to_json(self) -> dict[str, Any]:
        """The document of `moetune install --json`."""
        return {
            "schema": SCHEMA,
            "moetune": __version__,
            **self.prepared.to_json(),
            "id": self.id,
            "dry_run": self.dry_run,
            "found_by_lookup": self.found,
            "left": list(self.left),
            "use_command": self.use_command,
        }


def install(
    prepared: Prepared,
    environ: Mapping[str, str] | None = None,
    *,
    dry_run: bool = False,
    asked: bool = False,
) -> Installed:
    """Do what was prepared, all of it or nothing.

    Args:
        prepared: what was looked at.
        environ: the variables of the server; None takes those of this process.
        dry_run: change nothing.
        asked: a person has agreed to what `prepared` shows, so that nothing else may be done.

    Raises:
        MoetuneError: when it cannot be done; nothing was then changed.
    """
    environ = os.environ if environ is None else environ
    if dry_run:
        return Installed(prepared, "", True, True)
    state = state_path(prepared.request.state, environ)
    target = prepared.target
    with open_ledger(state, writing=True) as ledger:
        recovered = recover(ledger)
        try:
            made = _missing_folders(target.root, prepared.contents)
            with open_places(target.root, prepared.contents, directory_mode=_FOLDER_MODE) as places:
                interrupted = _interrupted(places, prepared)
                new, left = _write(ledger, places, prepared, made, asked)
        except OutputError as error:
            _explain(error, prepared)
    found = _is_found(prepared, environ, left)
    return Installed(prepared, new, False, found, left, recovered, interrupted)


def _interrupted(places: Places, prepared: Prepared) -> tuple[str, ...]:
    """Markers in the directories, which nobody holds a lock on any more: this process has them."""
    folders = dict.fromkeys(path.rpartition("/")[0] for path in prepared.contents)
    return tuple(
        str(prepared.target.root / folder / name)
        for folder in folders
        for name in places.names(folder)
        if name.startswith(MARKER_PREFIX) and name.endswith(MARKER_SUFFIX)
    )


def _missing_folders(root: Path, paths: Mapping[str, object]) -> tuple[str, ...]:
    folders = {""}
    for path in paths:
        parts = path.split("/")[:-1]
        folders |= {"/".join(parts[: depth + 1]) for depth in range(len(parts))}
    return tuple(sorted(folder for folder in folders if not (root / folder).exists()))


def _write(
    ledger: Ledger, places: Places, prepared: Prepared, made: tuple[str, ...], asked: bool
) -> tuple[str, tuple[str, ...]]:
    """Change the files, and return the install's name and the paths that were left."""
    now = time.time_ns()
    steps: list[Step] = []
    for path, content in prepared.contents.items():
        there = places.read(path, MAX_FILE_BYTES)
        if asked and (None if there is None else digest(there)) != prepared.before[path]:
            raise OutputError(
                f"{printable(path, 300)} was changed while you were asked", "look again: run it again"
            )
        if there == content:
            continue
        attributes = places.attributes(path)
        before = after = None
        if there is not None and attributes is not None:
            before = Content(ledger.keep(there), attributes)
        if content is not None:
            kept = attributes or Attributes(_FILE_MODE, -1, -1, now, now)
            # Whoever could read the old file reads the new one, and the server must.
            mode = kept.mode | (_FILE_MODE & 0o444)
            after = Content(ledger.keep(content), Attributes(mode, kept.uid, kept.gid, now, now))
        steps.append(Step(path, before, after))
    if not steps:
        return "", ()
    entries = tuple(
        Entry(step.path, None if step.after is None else step.after.sha256, step.before) for step in steps
    )
    server, target = prepared.target.server, prepared.target
    new = Install(
        id=install_id(str(target.root), entries),
        server=server.name,
        server_version=server.version,
        triton_version=server.triton_version,
        root=str(target.root),
        place=target.place,
        sources=tuple(str(path.absolute()) for path in prepared.request.files),
        entries=entries,
        made=made,
    )
    journal = Journal(
        token=secrets.token_hex(16),
        action="install",
        root=str(target.root),
        steps=tuple(steps),
        made=made,
        manifest=ledger.manifest.with_install(new),
    )
    left = commit(ledger, places, journal)
    return new.id, left


def _is_found(prepared: Prepared, environ: Mapping[str, str], left: tuple[str, ...]) -> bool:
    """Ask the server's lookup again, in the tree as it now is."""
    target = prepared.target
    trees = target.trees(environ)
    wanted = {Path(path).name: path for path in prepared.checked.lookups if path not in left}
    return all(
        lookup is not None
        and lookup.outcome is Outcome.EXACT
        and lookup.found == f"{trees[0].root}/{wanted[name]}"
        for name, lookup in lookups_of(target.server, trees, tuple(wanted))
    )


def _explain(error: OutputError, prepared: Prepared) -> NoReturn:
    """Say whose directory it is, and the command that would do it."""
    cause, root = error.__cause__, prepared.target.root
    if not isinstance(cause, OSError):
        raise error
    if cause.errno == errno.EROFS:
        raise OutputError(
            error.message,
            "install into a directory of your own with --root DIR, and name that to the server: "
            f"{prepared.target.server.directory_variable or 'mount it over the folder'}",
        ) from cause
    if cause.errno not in _NOT_MINE:
        raise OutputError(
            error.message.replace("--out", "--root"), (error.hint or "").replace("--out", "--root") or None
        ) from cause
    raise OutputError(f"{error.message}{_owner(root)}", f"as its owner: {_as_root(prepared)}") from cause


def _owner(root: Path) -> str:
    for folder in (root, *root.parents):
        try:
            uid = folder.stat().st_uid
        except OSError:
            continue
        if uid != os.geteuid():
            return f" ({printable(str(folder), 300)} belongs to the user {_user(uid)})"
        break
    return ""


def _user(uid: int) -> str:
    import pwd

    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return str(uid)


def _as_root(prepared: Prepared) -> str:
    """The same command for another user, with nothing left to the environment."""
    server, request = prepared.target.server, prepared.request
    words = ["sudo", "-H", sys.executable, "-m", "moetune", "install"]
    words += [str(path.absolute()) for path in request.files]
    words += ["--root", str(prepared.target.root), "--server", server.name]
    words += ["--server-version", server.version, "--triton-version", server.triton_version, "--yes"]
    return shlex.join([*words, *(["--copy-shipped"] if request.copy_shipped else [])])
