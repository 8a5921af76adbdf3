"""Finds and reads config files below paths that a person names, and believes nothing about them.

Only regular files are opened, never more of one than a config file can have; links are followed as the
servers follow them (files mounted into a container are links), each directory once.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.domain.errors import InputError
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_FILE_BYTES = 1 << 20
_MAX_DEPTH = 12
_MAX_ENTRIES = 100_000
_MAX_FILES = 20_000
_SUFFIX, _PROVENANCE = ".json", ".provenance.json"
_CONFIG = "E="  # what every name of a config file begins with
TRITON = "triton_"
CONFIGS = "configs"


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A file or directory that cannot be looked into.

    Attributes:
        code: of the finding.
        reason: why, in words.
    """

    path: Path
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Discovered:
    """What lies below the paths.

    Attributes:
        files: config files by their names, sorted, each once.
        unreadable: what could not be looked into.
        directories: every directory that was looked into, the named ones included.
    """

    files: tuple[Path, ...]
    unreadable: tuple[Unreadable, ...]
    directories: tuple[Path, ...]


@dataclass
class _Walk:
    files: dict[Path, None] = field(default_factory=dict)
    unreadable: list[Unreadable] = field(default_factory=list)
    directories: list[Path] = field(default_factory=list)
    seen: set[tuple[int, int]] = field(default_factory=set)
    entries: int = 0


def discover(paths: Iterable[Path]) -> Discovered:
    """Find the config files: what is named itself, and all that look like one below directories.

    Raises:
        InputError: for a path that does not exist, and for a place with too many entries.
    """
    walk = _Walk()
    for path in paths:
        try:
            mode = path.stat().st_mode
        except (OSError, ValueError) as error:
            raise InputError(
                f"{_shown(path)} cannot be read: {_reason(error)}",
                "name a config file or a directory of them",
            ) from None
        if stat.S_ISDIR(mode):
            _look_into(walk, path, 0)
        else:
            walk.files[path] = None
    return Discovered(tuple(sorted(walk.files)), tuple(walk.unreadable), tuple(walk.directories))


def _look_into(walk: _Walk, folder: Path, depth: int) -> None:
    try:
        status = folder.stat()
        if (status.st_dev, status.st_ino) in walk.seen:
            return  # a link back up, or the same directory named twice
        walk.seen.add((status.st_dev, status.st_ino))
        with os.scandir(folder) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
    except OSError as error:
        walk.unreadable.append(Unreadable(folder, "MOE136", _reason(error)))
        return
    walk.directories.append(folder)
    walk.entries += len(entries)
    if walk.entries > _MAX_ENTRIES or len(walk.files) > _MAX_FILES:
        raise InputError(
            f"{_shown(folder)} and what was before it hold too many entries for tuned files",
            "name the directory of tuned files itself",
        )
    names = [entry.name for entry in entries]
    is_config_folder = folder.name.startswith(TRITON) or any(name.startswith(_CONFIG) for name in names)
    for entry in entries:
        if entry.name.startswith("."):
            continue  # what a container mount keeps its versions in
        path = folder / entry.name
        try:
            is_folder = entry.is_dir()
        except OSError as error:
            walk.unreadable.append(Unreadable(path, "MOE136", _reason(error)))
            continue
        if is_folder and not entry.name.endswith(_SUFFIX):
            if depth < _MAX_DEPTH:
                _look_into(walk, path, depth + 1)
        elif _may_be_config(entry.name, is_config_folder):
            walk.files[path] = None


def _may_be_config(name: str, is_config_folder: bool) -> bool:
    """Whether a file is worth a look: by its name, or by the company that it keeps."""
    looks_like = name.startswith(_CONFIG) or (is_config_folder and name.endswith(_SUFFIX))
    return looks_like and not name.endswith(_PROVENANCE)


def read_config(path: Path) -> bytes | Unreadable:
    """The bytes of a config file, or why it is not read."""
    try:
        # Opening must not wait for the other end of a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError) as error:
        code = "MOE136" if isinstance(error, FileNotFoundError) else "MOE107"
        return Unreadable(path, code, _reason(error))
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            return Unreadable(path, "MOE107", "it is a directory")
        if not stat.S_ISREG(status.st_mode):
            return Unreadable(path, "MOE108", "it is no regular file")
        if status.st_size > MAX_FILE_BYTES:
            return Unreadable(
                path, "MOE108", f"{status.st_size:,} bytes, no config file has {MAX_FILE_BYTES:,}"
            )
        content = b""
        while len(content) <= MAX_FILE_BYTES and (chunk := os.read(descriptor, 1 << 16)):
            content += chunk
    except OSError as error:
        return Unreadable(path, "MOE107", _reason(error))
    finally:
        os.close(descriptor)
    if len(content) > MAX_FILE_BYTES:
        return Unreadable(path, "MOE108", f"it grows while it is read, over {MAX_FILE_BYTES:,} bytes")
    return content


def _reason(error: Exception) -> str:
    return printable(getattr(error, "strerror", None) or str(error), 200)


def _shown(path: Path) -> str:
    return printable(str(path), 400)
