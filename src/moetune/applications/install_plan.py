"""What an install would do: which file goes where, what is there now, what speaks against it."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetune.applications.atomic import open_places
from moetune.applications.config_files import Unreadable, read_config
from moetune.applications.install_checks import check
from moetune.applications.install_target import Source, Target, find_target, is_nested, read_sources
from moetune.applications.lint_report import finding_to_json
from moetune.applications.manifest import MAX_FILE_BYTES, check_target, digest
from moetune.applications.path_arguments import AnyPaths, as_paths
from moetune.applications.provenance import Kind, provenance_name, read_provenance
from moetune.domain.config import KernelConfig
from moetune.domain.errors import ConfigFileError, InputError, MoetuneError, OutputError
from moetune.domain.identity import differences
from moetune.domain.safe_json import read_json_object
from moetune.domain.text import printable

if TYPE_CHECKING:
    from moetune.applications.install_checks import Checked
    from moetune.domain.findings import Finding


class Change(str, Enum):
    """What an install does to one path."""

    NEW = "new"
    REPLACE = "replace"
    REMOVE = "remove"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True)
class InstallRequest:
    """What to install, and where.

    Attributes:
        paths: config files, or directories of them such as `tune --out` writes.
        server: the server that will read them; None: the one that the files or this machine say.
        server_version: its release; likewise.
        triton_version: its Triton; likewise.
        root: the directory to install below; None: the one that the server here reads.
        copy_shipped: also copy in the shipped files that a directory of one's own would hide.
        state: the state directory; None: MOETUNE_STATE, else the XDG state directory.
    """

    paths: AnyPaths
    _: KW_ONLY
    server: str | None = None
    server_version: str | None = None
    triton_version: str | None = None
    root: Path | None = None
    copy_shipped: bool = False
    state: Path | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """The paths that are named."""
        return as_paths(self.paths)


@dataclass(frozen=True, slots=True)
class FileChange:
    """What becomes of one path.

    Attributes:
        path: below the root.
        source: where its new bytes come from; empty: nowhere, it is removed.
        change: what becomes of it.
        diff: of a config file that is replaced: `(m, before, after)` for each entry that changes, a
            side empty where there is no such entry.
    """

    path: str
    source: str
    change: Change
    diff: tuple[tuple[int, str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Prepared:
    """An install that was looked at from all sides and not yet done.

    Attributes:
        request: what was asked.
        target: the directory and its server.
        changes: what becomes of each path, config files and provenance.
        contents: new bytes of each path; None: it is removed.
        before: digests of what is there now.
        checked: what lint's rules and the lookup say.
        notes: what a person should know.
        copied: shipped files that are copied in.
    """

    request: InstallRequest
    target: Target
    changes: tuple[FileChange, ...]
    contents: Mapping[str, bytes | None]
    before: Mapping[str, str | None]
    checked: Checked
    notes: tuple[str, ...]
    copied: tuple[str, ...]

    @property
    def changes_something(self) -> bool:
        """Whether there is anything to do."""
        return any(one.change is not Change.UNCHANGED for one in self.changes)

    def to_json(self) -> dict[str, Any]:
        """What the document of `moetune install --json` says before anything is done."""
        server = self.target.server
        return {
            "server": server.name,
            "server_version": server.version,
            "triton_version": server.triton_version,
            "root": str(self.target.root),
            "place": self.target.place,
            "assumed": list(self.target.assumed),
            "notes": list(self.notes),
            "files": [
                {
                    "path": one.path,
                    "source": one.source,
                    "change": one.change.value,
                    "diff": [{"m": m, "before": before, "after": after} for m, before, after in one.diff],
                }
                for one in self.changes
            ],
            "hidden": list(self.checked.hidden),
            "copied": list(self.copied),
            "findings": [finding_to_json(found) for found in self.checked.remarks],
        }


class RefusedError(MoetuneError):
    """Files that lint calls fatal.

    Args:
        target: where they were to go.
        findings: why not.
        origins: path below the root to where the file lies now.
    """

    def __init__(self, target: Target, findings: tuple[Finding, ...], origins: Mapping[str, str]) -> None:
        self.findings = findings
        server, origin = target.server, origins.get(findings[0].where, findings[0].where)
        shown = "; ".join(f"{one.code.code} {one.code.severity.value}: {one.message}" for one in findings[:3])
        more = f"; and {len(findings) - 3} more findings" if len(findings) > 3 else ""
        borrow = ["moetune", "borrow", origin, "--server", server.name, "--server-version", server.version]
        super().__init__(
            f"{printable(origin, 400)} must not be installed: {shown}{more}",
            f"make it safe first: {shlex.join([*borrow, '--triton-version', server.triton_version])}",
        )


def prepare_install(request: InstallRequest, environ: Mapping[str, str] | None = None) -> Prepared:
    """Look at what an install would do; nothing is changed.

    Args:
        request: what is asked.
        environ: the variables of the server; None takes those of this process.

    Raises:
        MoetuneError: for what cannot be installed, with the reason.
    """
    environ = os.environ if environ is None else environ
    sources = read_sources(request.files)
    target = find_target(
        sources,
        environ,
        server=request.server,
        server_version=request.server_version,
        triton_version=request.triton_version,
        root=request.root,
    )
    chosen, notes = _place(sources, target)
    wanted = {path: source.content for path, source in chosen.items()}
    checked = check(target, environ, wanted)
    origins = {path: str(source.path) for path, source in chosen.items()}
    if checked.fatal:
        raise RefusedError(target, checked.fatal, origins)
    contents: dict[str, bytes | None] = {}
    for path, source in chosen.items():
        contents[path] = source.content
        contents[provenance_name(path)] = source.provenance
        origins[provenance_name(path)] = provenance_name(str(source.path)) if source.provenance else ""
    copied: tuple[str, ...] = ()
    if request.copy_shipped:
        shipped = _shipped(target, checked.hidden)
        copied = tuple(shipped)
        for path, (origin, content) in shipped.items():
            contents[path], origins[path] = content, origin
    for path in contents:
        check_target(path)
    existing = _existing(target.root, contents)
    changes = tuple(
        _change(path, content, existing.get(path), origins[path], path in chosen)
        for path, content in contents.items()
        if content is not None or existing.get(path) is not None
    )
    said = [
        f"{printable(path, 300)}: {note}"
        for path in chosen
        if existing.get(path) not in (None, contents[path])
        and (beside := existing.get(provenance_name(path))) is not None
        and (note := _knows_less(contents[provenance_name(path)], beside))
    ]
    return Prepared(
        request=request,
        target=target,
        changes=changes,
        contents=contents,
        before={path: None if (there := existing.get(path)) is None else digest(there) for path in contents},
        checked=replace(checked, hidden=() if copied else checked.hidden),
        notes=(*notes, *said),
        copied=copied,
    )


def _place(sources: tuple[Source, ...], target: Target) -> tuple[dict[str, Source], tuple[str, ...]]:
    """The path below the root of each file that is for the target's Triton."""
    server = target.server
    directory = ""
    if is_nested(server):
        directory = f"triton_{server.triton_version.replace('.', '_')}"
        # Asked here, so that the message speaks of the version and not of a path.
        check_target(f"configs/{directory}/E=1,N=1,device_name=any.json")
    others = [one for one in sources if one.directory and directory and one.directory != directory]
    mine = [one for one in sources if one not in others]
    if not mine:
        raise InputError(
            f"the files are for {', '.join(sorted({one.directory for one in others}))}, and {server.name} "
            f"runs Triton {server.triton_version} there: from that directory they would pass for tuned ones",
            f"make them for it: moetune borrow {shlex.quote(str(others[0].path.parent))} "
            f"--server {server.name} --server-version {server.version} "
            f"--triton-version {server.triton_version}",
        )
    notes = [f"{len(others)} files of another Triton version are left out"] if others else []
    prefix = f"configs/{directory}/" if directory else ""
    chosen: dict[str, Source] = {}
    for source in mine:
        path = prefix + source.path.name
        other = chosen.setdefault(path, source)
        if other.content != source.content:
            raise InputError(
                f"{printable(str(other.path), 300)} and {printable(str(source.path), 300)} are two files for "
                "one place",
                "name one of them",
            )
        if source.note:
            notes.append(source.note)
    return chosen, tuple(notes)


def _shipped(target: Target, hidden: tuple[str, ...]) -> dict[str, tuple[str, bytes]]:
    """The shipped files that would be hidden: path to where it lies and its bytes."""
    if not hidden:
        return {}
    installed, home = target.installed, getattr(target.server, "home", None)
    if installed is None or installed.folder is None or not isinstance(home, str):
        raise InputError(
            f"the shipped files are only where {target.server.name} {target.server.version} is installed",
            "run moetune in the server's environment for --copy-shipped",
        )
    found = {}
    for relative in hidden:
        origin = installed.folder.parent / home / "configs" / relative
        content = read_config(origin)
        if not isinstance(content, Unreadable):
            found[f"configs/{relative}"] = (str(origin), content)
    return found


def _existing(root: Path, paths: Mapping[str, object]) -> dict[str, bytes]:
    """What stands at some paths now."""
    found: dict[str, bytes] = {}
    for folder in dict.fromkeys(path.rpartition("/")[0] for path in paths):
        inside = [path for path in paths if path.rpartition("/")[0] == folder]
        try:
            with open_places(root, inside, writing=False) as places:
                contents = {path: places.read(path, MAX_FILE_BYTES) for path in inside}
        except OutputError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                continue
            raise OutputError(error.message, "name another directory with --root DIR") from None
        found.update({path: content for path, content in contents.items() if content is not None})
    return found


def _change(
    path: str, content: bytes | None, there: bytes | None, origin: str, is_config: bool
) -> FileChange:
    if content is None:
        return FileChange(path, "", Change.REMOVE)
    if there is None:
        return FileChange(path, origin, Change.NEW)
    if there == content:
        return FileChange(path, origin, Change.UNCHANGED)
    if not is_config:
        return FileChange(path, origin, Change.REPLACE)
    return FileChange(path, origin, Change.REPLACE, _diff(there, content, path))


def _diff(before: bytes, after: bytes, path: str) -> tuple[tuple[int, str, str], ...]:
    old, new = _entries(before, path), _entries(after, path)
    ms = sorted(m for m in {*old, *new} if old.get(m) != new.get(m))
    return tuple((m, str(old.get(m, "")), str(new.get(m, ""))) for m in ms)


def _entries(content: bytes, path: str) -> dict[int, KernelConfig | str]:
    """The entries of a file; what cannot be read is no entry to compare."""
    try:
        document = read_json_object(content, path, error=ConfigFileError).value
    except ConfigFileError:
        return {}
    found: dict[int, KernelConfig | str] = {}
    for key, entry in document.items():
        with contextlib.suppress(ConfigFileError, ValueError):
            found[int(key)] = _without_tile(entry) or KernelConfig.from_json(entry, path)
    return found


def _without_tile(entry: object) -> str:
    """An entry that leaves its tile to the server, in words; empty for any other."""
    if not isinstance(entry, dict) or "BLOCK_SIZE_M" not in entry or "BLOCK_SIZE_N" in entry:
        return ""
    return f"BLOCK_SIZE_M {printable(str(entry['BLOCK_SIZE_M']), 20)}, the tile is the server's"


def _knows_less(new: bytes | None, old: bytes) -> str:
    """Why provenance that is there says more than what replaces it; empty when it does not."""
    kinds = list(Kind)  # in ascending order of what they know
    try:
        there = read_provenance(old, "the file there")
        here = None if new is None else read_provenance(new, "the new file")
    except InputError:
        return ""
    if here is None:
        return f"the configs there are {there.kind.value}, of these nothing is known"
    if kinds.index(here.kind) < kinds.index(there.kind):
        return f"the configs there are {there.kind.value}, and these are {here.kind.value}"
    if here.fingerprint != there.fingerprint and (said := differences(here.identity, there.identity)):
        return f"the file there is for another problem that shares its name: {said}"
    return ""
