"""What an experiment has to leave as it was: the known-good server, and its config files byte for byte."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moetune.applications.atomic import open_places
from moetune.applications.config_files import TRITON
from moetune.applications.environment import read_tree
from moetune.applications.manifest import MAX_FILE_BYTES, digest
from moetune.domain.text import printable


@dataclass(frozen=True, slots=True)
class FileThere:
    """A file of a server's config directory.

    Attributes:
        path: below the directory.
        sha256: of its bytes.
        mode: permission bits.
        mtime_ns: when it was last written.
    """

    path: str
    sha256: str
    mode: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class KnownGood:
    """What an experiment has to leave as it was.

    Attributes:
        server: `sglang`, `vllm` or `other`.
        version: of the server, as far as it is known before it is started.
        triton_version: likewise.
        command: that starts it, without secrets.
        environment: variables that the plan adds, without secrets.
        host: where it runs; empty: here.
        root: directory of the config files that it reads; empty: no arm changes files here.
        files: what lies in it.
        installs: names of what `moetune install` had put there.
    """

    server: str
    version: str
    triton_version: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    root: str = ""
    files: tuple[FileThere, ...] = ()
    installs: tuple[str, ...] = ()

    def changed(self) -> tuple[str, ...]:
        """What is not as it was, in words; empty when every byte, mode and time is."""
        if not self.root:
            return ()
        before = {one.path: one for one in self.files}
        now = {one.path: one for one in files_there(Path(self.root))}
        said = []
        for path in sorted({*before, *now}):
            old, new = before.get(path), now.get(path)
            if old == new:
                continue
            shown = printable(f"{self.root}/{path}", 300)
            if old is None:
                said.append(f"{shown} is new")
            elif new is None:
                said.append(f"{shown} is gone")
            elif old.sha256 != new.sha256:
                said.append(f"{shown} has other bytes")
            else:
                said.append(f"{shown} has another mode or time")
        return tuple(said)


def files_there(root: Path) -> tuple[FileThere, ...]:
    """The config files below a directory, in the layout of either server, with what lies beside them.

    Raises:
        MoetuneError: for what cannot be read.
    """
    paths = sorted(config_paths(root))
    if not paths:
        return ()
    found = []
    with open_places(root, paths, writing=False) as places:
        for path in paths:
            attributes, content = places.attributes(path), places.read(path, MAX_FILE_BYTES)
            if attributes is not None and content is not None:
                found.append(FileThere(path, digest(content), attributes.mode, attributes.mtime_ns))
    return tuple(found)


def config_paths(root: Path) -> list[str]:
    """Names of the config files: `NAME.json` (vLLM) and `configs/triton_*/NAME.json` (SGLang)."""
    found = [name for names in _names(root, nested=False).values() for name in names]
    for folder, names in _names(root, nested=True).items():
        if folder.startswith(TRITON):
            found += [f"configs/{folder}/{name}" for name in names]
    return [path for path in found if path.endswith(".json") and _is_config(root / path)]


def _is_config(path: Path) -> bool:
    """Whether it is a plain file of a size that arms could touch."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size <= MAX_FILE_BYTES


def _names(root: Path, *, nested: bool) -> Mapping[str, frozenset[str]]:
    return read_tree(root, nested=nested).directories or {}
