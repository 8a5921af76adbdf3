"""What is to be installed, for which release of which server, and below which directory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.applications.config_files import TRITON, Unreadable, discover, read_config
from moetune.applications.environment import SERVERS, config_trees, find_installed, read_tree, shipped_tree
from moetune.applications.file_meaning import guess_server
from moetune.applications.provenance import (
    SUFFIX,
    Recorded,
    provenance_name,
    read_provenance,
    text_sha256,
)
from moetune.domain.catalogue import published
from moetune.domain.errors import InputError, ServerError
from moetune.domain.text import printable
from moetune.domain.version import parse_release
from moetune.servers.registry import open_server

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moetune.applications.environment import Installed
    from moetune.servers.protocol import ConfigTree, Server


@dataclass(frozen=True, slots=True)
class Source:
    """A config file that is to be installed.

    Attributes:
        path: where it lies now.
        content: its bytes.
        provenance: those of the file beside it, where that speaks of these bytes.
        recorded: what that file says, also where it speaks of other bytes: the server is still the same.
        note: why the file beside it is left out; empty as a rule.
    """

    path: Path
    content: bytes
    provenance: bytes | None = None
    recorded: Recorded | None = None
    note: str = ""

    @property
    def directory(self) -> str:
        """The directory of a Triton version that it lies in; empty in any other."""
        return self.path.parent.name if self.path.parent.name.startswith(TRITON) else ""


def read_sources(paths: Sequence[Path]) -> tuple[Source, ...]:
    """The config files that are named or lie below what is named.

    Raises:
        InputError: for what cannot be read, and where there are none.
    """
    # `install DIR/*` names the provenance beside each file too.
    found = discover([path for path in paths if not path.name.endswith(SUFFIX)])
    for unreadable in found.unreadable:
        raise InputError(f"{_shown(unreadable.path)} cannot be read: {unreadable.reason}")
    if not found.files:
        shown = ", ".join(_shown(path) for path in paths[:3])
        raise InputError(
            f"no config file lies below {shown}", "moetune tune MODEL --out DIR writes some: install that DIR"
        )
    return tuple(_read_source(path) for path in found.files)


def _read_source(path: Path) -> Source:
    content = read_config(path)
    if isinstance(content, Unreadable):
        raise InputError(f"{_shown(path)} cannot be read: {content.reason}")
    beside = path.with_name(provenance_name(path.name))
    provenance = read_config(beside)
    if isinstance(provenance, Unreadable):
        return Source(path, content)
    try:
        recorded = read_provenance(provenance, str(beside))
    except InputError as error:
        return Source(path, content, note=f"left out: {error.message}")
    if recorded.config_sha256 != text_sha256(content.decode("utf-8", "replace")):
        note = f"left out: {_shown(beside)} speaks of other configs: the file was changed since"
        return Source(path, content, recorded=recorded, note=note)
    return Source(path, content, provenance, recorded)


@dataclass(frozen=True, slots=True)
class Target:
    """A directory that a server reads, and that server.

    Attributes:
        server: the release.
        root: the directory below which its `file_path` leads.
        place: `package`, `variable` or `root`: the server's own, the one that its variable names
            here, or the one that was named.
        installed: the server's package, when it is that release.
        assumed: what nobody said and moetune took, in words.
    """

    server: Server
    root: Path
    place: str
    installed: Installed | None
    assumed: tuple[str, ...] = ()

    def trees(self, environ: Mapping[str, str]) -> tuple[ConfigTree, ...]:
        """The trees that the server reads, the one of this root first."""
        server = self.server
        if self.place == "package":
            return config_trees(server, environ, self.installed)
        mine = read_tree(self.root, nested=is_nested(server))
        shipped = shipped_tree(server, self.installed)
        return (mine,) if shipped is None or server.directory_variable is None else (mine, shipped)


def is_nested(server: Server) -> bool:
    """Whether the server keeps its files in directories of `configs/`."""
    known = published(server.name)
    return known is not None and "" not in known.directories


def find_target(
    sources: Sequence[Source],
    environ: Mapping[str, str],
    *,
    server: str | None = None,
    server_version: str | None = None,
    triton_version: str | None = None,
    root: Path | None = None,
) -> Target:
    """Where files go: what was said, else what is installed here, else what the files' provenance says.

    Args:
        sources: the files.
        environ: the variables of the server.
        server: its name.
        server_version: its release.
        triton_version: its Triton.
        root: the directory that the server's variable will name, or its package's own.

    Raises:
        MoetuneError: where that is not known.
    """
    assumed: list[str] = []
    name = (server or _name(sources, root, assumed)).strip().lower()
    package = find_installed(name) if name in SERVERS else None
    recorded = _recorded_versions(sources, name)
    here = package.version if package is not None and root is None else None
    version = server_version or here or recorded[0]
    if version is None:
        reader = f"read {_shown(root)}" if root is not None else "read the files: it is not installed here"
        raise InputError(
            f"nothing says which release of {printable(name, 40)} will {reader}",
            "add --server-version X.Y.Z"
            if root is not None
            else "run moetune in the server's environment, or add --root DIR --server-version X.Y.Z",
        )
    installed = package if package is not None and package.version == version else None
    triton = triton_version
    if triton is None and installed is not None and root is None:
        of_package = find_installed("triton")
        triton = None if of_package is None else of_package.version
    if triton is None and recorded[0] == version:
        triton = recorded[1]
    opened = open_server(name, version, triton)
    if server_version is None and here is None:
        assumed.append(f"--server-version {version}: from the files' provenance")
    if triton is None:
        assumed.append(f"--triton-version {opened.triton_version}: what {name} {version} pins")
    if recorded[0] is not None and recorded[0] != version:
        assumed.append(f"the files were made for {name} {printable(recorded[0], 40)}, and go to {version}")
    where, place = _root(opened, installed, package, environ, root)
    return Target(opened, where, place, installed, tuple(assumed))


def _name(sources: Sequence[Source], root: Path | None, assumed: list[str]) -> str:
    names = {name for source in sources if (name := _said(source, "server")) is not None}
    if len(names) == 1:
        return names.pop()
    if len(names) > 1:
        raise InputError(
            f"the files are for several servers: {printable(', '.join(sorted(names)), 80)}",
            "install those of one server at a time",
        )
    here = [name for name in SERVERS if find_installed(name) is not None]
    if root is None and len(here) == 1:
        return here[0]
    guess = guess_server([source.path for source in sources], {one.path: one.content for one in sources})
    if guess is None:
        raise InputError(
            "nothing says which server will read the files", "add --server sglang or --server vllm"
        )
    assumed.append(f"--server {guess[0]}: {guess[1]}")
    return guess[0]


def _said(source: Source, field: str) -> str | None:
    value = source.recorded.identity.get(field) if source.recorded is not None else None
    return value if isinstance(value, str) else None


def _recorded_versions(sources: Sequence[Source], name: str) -> tuple[str | None, str | None]:
    """The release and its Triton that the provenance of all files agrees on."""
    said = {
        (_said(source, "server_version"), _said(source, "triton_version"))
        for source in sources
        if source.recorded is not None and _said(source, "server") == name
    }
    return said.pop() if len(said) == 1 else (None, None)


def _root(
    server: Server,
    installed: Installed | None,
    package: Installed | None,
    environ: Mapping[str, str],
    root: Path | None,
) -> tuple[Path, str]:
    home = home_of(server)
    folder = None if installed is None else installed.folder
    own = None if home is None or folder is None else folder.parent / home
    variable = server.directory_variable
    if root is not None:
        # Named by hand (or by sudo) it is still the folder that the server reads by itself.
        if own is not None and variable not in environ and os.path.realpath(own) == os.path.realpath(root):
            return own, "package"
        return Path(root).absolute(), "root"
    if variable is not None and variable in environ:
        if not environ[variable]:
            raise InputError(
                f"{variable} is set to an empty text, which names no directory", f"unset {variable}"
            )
        return Path(environ[variable]).absolute(), "variable"
    named = "name the directory with --root DIR"
    if package is None:
        raise InputError(f"{server.name} is not installed for this interpreter", named)
    if installed is None:
        raise InputError(
            f"{server.name} {package.version} is installed here, not {server.version}",
            f"leave --server-version out, or {named}",
        )
    if own is None:
        raise InputError(f"where {server.name} {server.version} keeps its files is not known", named)
    return own, "package"


def home_of(server: Server) -> str | None:
    """Folder of a release inside site-packages from which its lookup starts."""
    own = getattr(server, "home", None)
    if isinstance(own, str):
        return own
    try:
        known = published(server.name, parse_release(server.version))
    except ServerError:
        return None
    return None if known is None else known.home


def _shown(path: Path) -> str:
    return printable(str(path), 400)
