"""What moetune has installed where, what was there before, and the backups: the ledger of installs.

All of it lies below `installs/` in the state directory: the manifest, the bytes that were replaced by
their digests, and, while an install or uninstall is under way, its journal. It is read as hostile
input all the same: names outside the servers' grammar are refused, wherever they are to lead.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from moetune.applications.atomic import Attributes, Places, open_places
from moetune.applications.output import check_path
from moetune.applications.provenance import SUFFIX
from moetune.applications.state import private_folder
from moetune.domain.codec import from_json, to_json
from moetune.domain.errors import InputError, OutputError
from moetune.domain.safe_json import JsonLimits, load_json_object
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCHEMA = "moetune.installs/1"
JOURNAL_SCHEMA = "moetune.install-journal/1"
FOLDER = "installs"
MAX_FILE_BYTES = 1 << 20
"""Largest file that is installed, replaced or put back: no config file is larger."""

MARKER_PREFIX, MARKER_SUFFIX = ".moetune-", ".transaction"
_MANIFEST, _JOURNAL, _BLOBS = "manifest.json", "journal.json", "blobs"
_LIMITS = JsonLimits(max_bytes=32 << 20, max_depth=12)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_ID = re.compile(r"i[0-9a-f]{12}", re.ASCII)
_TOKEN = re.compile(r"[0-9a-f]{32}", re.ASCII)
# SGLang reads the rest of the name as numbers, and dies of anything else (0.5.12 and newer).
_DIRECTORY = re.compile(r"configs/triton_[0-9]{1,4}(?:_[0-9]{1,8}){0,4}", re.ASCII)
_MAX_ITEMS = 20_000


@dataclass(frozen=True, slots=True)
class Content:
    """What stands, stood or shall stand at a path.

    Attributes:
        sha256: of its bytes, which the ledger keeps.
        attributes: the rest of it.
    """

    sha256: str
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class Entry:
    """One path of an install.

    Attributes:
        path: below the root.
        written: digest of what moetune wrote there; None: it removed what was there.
        before: what was there before; None: nothing.
    """

    path: str
    written: str | None
    before: Content | None


@dataclass(frozen=True, slots=True)
class Install:
    """Some files that were put below one root together.

    Attributes:
        id: names it for `moetune uninstall`.
        server: whose files they are.
        server_version: the release they were installed for.
        triton_version: its Triton.
        root: the directory below which the paths lie.
        place: why that one: `package`, `variable` or `root` (it was named).
        sources: the files and directories that were named, absolute.
        entries: the paths.
        made: directories below the root that were made for it; empty text: the root itself.
    """

    id: str
    server: str
    server_version: str
    triton_version: str
    root: str
    place: str
    sources: tuple[str, ...]
    entries: tuple[Entry, ...]
    made: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths below the root."""
        return tuple(entry.path for entry in self.entries)


@dataclass(frozen=True, slots=True)
class Manifest:
    """All installs, oldest first."""

    installs: tuple[Install, ...] = ()

    def with_install(self, new: Install) -> Manifest:
        """The same with an install on top; one with its id is replaced."""
        kept = tuple(install for install in self.installs if install.id != new.id)
        made = {folder for one in self.installs if one.id == new.id for folder in one.made}
        new = replace(new, made=tuple(sorted({*new.made, *made})))
        return Manifest((*kept, new) if new.entries else kept)

    def without(self, install_id: str, paths: frozenset[str]) -> Manifest:
        """The same without some paths of an install.

        Where another install later replaced what that one wrote, it inherits what was there before;
        the directories that were made go with the last install in them.
        """
        index = next(number for number, one in enumerate(self.installs) if one.id == install_id)
        old = self.installs[index]
        gone = {entry.path: entry for entry in old.entries if entry.path in paths}
        later: list[Install] = []
        for one in self.installs[index + 1 :]:
            entries = []
            for entry in one.entries:
                under = gone.get(entry.path) if one.root == old.root else None
                if under is not None:
                    # Only the next one stood on it.
                    del gone[entry.path]
                    if _digest_of(entry.before) == under.written:
                        entry = replace(entry, before=under.before)
                entries.append(entry)
            later.append(replace(one, entries=tuple(entries)))
        kept = replace(old, entries=tuple(entry for entry in old.entries if entry.path not in paths))
        middle = (kept,) if kept.entries else ()
        rest = [*self.installs[:index], *middle, *later]
        heir = next((number for number, one in enumerate(rest) if one.root == old.root), None)
        if not middle and heir is not None:
            made = tuple(sorted({*rest[heir].made, *old.made}))
            rest[heir] = replace(rest[heir], made=made)
        return Manifest(tuple(rest))

    def digests(self) -> frozenset[str]:
        """The backups that it needs."""
        entries = [entry for install in self.installs for entry in install.entries]
        return frozenset(entry.before.sha256 for entry in entries if entry.before is not None)


def _digest_of(content: Content | None) -> str | None:
    return None if content is None else content.sha256


@dataclass(frozen=True, slots=True)
class Step:
    """What one path changes from and to; None: nothing is there."""

    path: str
    before: Content | None
    after: Content | None


@dataclass(frozen=True, slots=True)
class Journal:
    """An install or uninstall that is under way.

    Attributes:
        token: names the marker that stands in the server's directory as long as it is.
        action: `install` or `uninstall`.
        root: the directory below which the paths lie.
        steps: what changes.
        made: directories that the install makes, or that the uninstall removes when they are empty.
        manifest: what the manifest says when it is done.
    """

    token: str
    action: str
    root: str
    steps: tuple[Step, ...]
    made: tuple[str, ...]
    manifest: Manifest

    @property
    def marker(self) -> str:
        """A name that no server looks for: SGLang lists only what begins with `triton_`."""
        folder, slash, _ = self.steps[0].path.rpartition("/")
        return f"{folder}{slash}{MARKER_PREFIX}{self.token}{MARKER_SUFFIX}"


def digest(content: bytes) -> str:
    """SHA-256 of some bytes."""
    return hashlib.sha256(content).hexdigest()


def install_id(root: str, entries: tuple[Entry, ...]) -> str:
    """A name for an install: the same files over the same files have the same one."""
    said = [[entry.path, entry.written, _digest_of(entry.before)] for entry in entries]
    return "i" + digest(json.dumps([root, said], sort_keys=True).encode())[:12]


def check_target(path: str) -> None:
    """Refuse a path at which no server looks for a config file (or its provenance).

    Raises:
        OutputError: naming it.
    """
    folder, _, name = path.rpartition("/")
    if folder and not _DIRECTORY.fullmatch(folder):
        raise OutputError(
            f"{printable(folder, 120)!r} is no directory of config files: SGLang reads the rest of "
            "triton_ as a version of numbers",
            "give the version without a suffix: --triton-version X.Y.Z",
        )
    check_path(name.removesuffix(SUFFIX))


def _check_root(root: str) -> None:
    if not root.startswith("/") or "\0" in root or ".." in PurePosixPath(root).parts or len(root) > 4096:
        raise InputError(f"{printable(root, 200)!r} is no absolute path")


def _check_content(content: Content | None) -> None:
    if content is None:
        return
    attributes = content.attributes
    if not _SHA256.fullmatch(content.sha256) or not 0 <= attributes.mode <= 0o777:
        raise InputError("a digest or a mode is none")
    if max(abs(attributes.mtime_ns), abs(attributes.atime_ns)) >= 1 << 63:
        raise InputError("a time is out of range")
    if not all(-1 <= number < 1 << 32 for number in (attributes.uid, attributes.gid)):
        raise InputError("an owner is none")


def _check_made(made: tuple[str, ...]) -> None:
    if not all(folder in ("", "configs") or _DIRECTORY.fullmatch(folder) for folder in made):
        raise InputError("a directory is named that no server has")


def check_manifest(manifest: Manifest) -> None:
    """Refuse what no install could have recorded.

    Raises:
        MoetuneError: for a path out of the grammar and whatever else is none.
    """
    if len(manifest.installs) > _MAX_ITEMS or len({one.id for one in manifest.installs}) != len(
        manifest.installs
    ):
        raise InputError("installs have no names of their own")
    for install in manifest.installs:
        _check_root(install.root)
        _check_made(install.made)
        if not _ID.fullmatch(install.id) or len(set(install.paths)) != len(install.entries):
            raise InputError("an install has no proper name, or a path twice")
        for entry in install.entries:
            check_target(entry.path)
            _check_content(entry.before)
            if entry.written is not None and not _SHA256.fullmatch(entry.written):
                raise InputError("a digest is none")


def check_journal(journal: Journal) -> None:
    """Refuse what no install or uninstall could have written.

    Raises:
        MoetuneError: for a path out of the grammar and whatever else is none.
    """
    _check_root(journal.root)
    _check_made(journal.made)
    check_manifest(journal.manifest)
    if not _TOKEN.fullmatch(journal.token) or not 0 < len(journal.steps) <= _MAX_ITEMS:
        raise InputError("the journal has no steps or no proper name")
    for step in journal.steps:
        check_target(step.path)
        _check_content(step.before)
        _check_content(step.after)


class Ledger:
    """The records of installs, held open; where they are written, locked against other processes."""

    def __init__(self, folder: Path | None, places: Places | None) -> None:
        self.folder, self._places = folder, places
        self.manifest = self._read_manifest()

    def journal(self) -> Journal | None:
        """What an interrupted command left; None as a rule.

        Raises:
            OutputError: for a journal that cannot be one.
        """
        content = self._read(_JOURNAL)
        if content is None:
            return None
        try:
            document = _document(content, JOURNAL_SCHEMA)
            journal = from_json(Journal, document.get("journal"), "the journal")
            check_journal(journal)
        except (InputError, OutputError) as error:
            raise self._broken(_JOURNAL, error) from None
        return journal

    def write_journal(self, journal: Journal) -> None:
        """Record what is about to be done, for good."""
        self._write(_JOURNAL, {"schema": JOURNAL_SCHEMA, "journal": to_json(journal)})

    def write_manifest(self, manifest: Manifest) -> None:
        """Record what is installed, for good."""
        self._write(_MANIFEST, {"schema": SCHEMA, **to_json(manifest)})
        self.manifest = manifest

    def drop_journal(self) -> None:
        """What was under way is done or undone; bytes that nobody needs any more go too."""
        places = self._opened()
        places.remove(_JOURNAL)
        kept = self.manifest.digests()
        for name in places.names(_BLOBS):
            if _SHA256.fullmatch(name) and name not in kept:
                places.remove(f"{_BLOBS}/{name}")

    def keep(self, content: bytes) -> str:
        """Keep some bytes, and return their digest."""
        name = digest(content)
        if self._opened().read(f"{_BLOBS}/{name}", MAX_FILE_BYTES) != content:
            self._opened().put(f"{_BLOBS}/{name}", content)
        return name

    def content(self, sha256: str) -> bytes:
        """The bytes of a digest.

        Raises:
            OutputError: when they are not there, or are other ones.
        """
        if not _SHA256.fullmatch(sha256):
            raise OutputError("a backup has no proper name")
        content = self._read(f"{_BLOBS}/{sha256}")
        if content is None or digest(content) != sha256:
            raise OutputError(
                f"the backup {sha256[:12]}... in {printable(str(self.folder), 400)} is missing or damaged",
                "moetune uninstall --forget drops the record and leaves the file as it is",
            )
        return content

    def _read_manifest(self) -> Manifest:
        content = self._read(_MANIFEST)
        if content is None:
            return Manifest()
        try:
            manifest = from_json(Manifest, _document(content, SCHEMA), "the manifest")
            check_manifest(manifest)
        except (InputError, OutputError) as error:
            raise self._broken(_MANIFEST, error) from None
        return manifest

    def _broken(self, name: str, error: InputError | OutputError) -> OutputError:
        return OutputError(
            f"{printable(str(self.folder), 400)}/{name} is not what moetune writes: {error.message}",
            "nothing was changed; name another state directory with --state DIR",
        )

    def _opened(self) -> Places:
        assert self._places is not None
        return self._places

    def _read(self, relative: str) -> bytes | None:
        if self._places is None or not self._places.has(relative):
            return None
        return self._places.read(relative, _LIMITS.max_bytes)

    def _write(self, name: str, document: dict[str, object]) -> None:
        text = json.dumps(document, indent=1, sort_keys=True) + "\n"
        self._opened().put(name, text.encode())


def _document(content: bytes, schema: str) -> dict[str, object]:
    document = load_json_object(content, "the file", _LIMITS)
    if document.get("schema") != schema:
        raise InputError("it has another schema")
    return document


@contextmanager
def open_ledger(state: Path, *, writing: bool) -> Iterator[Ledger]:
    """Open the records of installs.

    Args:
        state: the state directory.
        writing: make what is missing and lock out other processes; else only look.

    Raises:
        OutputError: for a state directory that cannot be used or trusted, and for broken records.
    """
    folder = private_folder(state, FOLDER, make=writing)
    if folder is None:
        yield Ledger(None, None)
        return
    relatives = [_MANIFEST]
    if writing or (folder / _BLOBS).is_dir():
        relatives.append(f"{_BLOBS}/x")
    with open_places(folder, relatives, writing=writing, directory_mode=0o700) as places:
        yield Ledger(folder, places)
