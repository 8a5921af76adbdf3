"""Compiled kernels of an arm, so that no measured start pays for compiling them.

Triton names what it compiles by source, options and version, so that arms of one command share what is
the same in them. Each distinct command has a folder of its own: what its flags or variables change is
never served from the kernels of another. Besides Triton's there are other caches in the user's home
(inductor's, FlashInfer's, the driver's): the start that is discarded fills them as well.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.domain.errors import OutputError
from moetune.domain.text import printable

if TYPE_CHECKING:
    from moetune.applications.experiments.command_line import ArmCommand

VARIABLE = "TRITON_CACHE_DIR"
_PREPARED = "prepared-"


def cache_folder(caches: Path, command: ArmCommand) -> Path:
    """Where the compiled kernels of a command lie."""
    return caches / kernels_name(command) / "triton"


def needs_preparing(command: ArmCommand, caches: Path) -> bool:
    """Whether an arm has to be started once, loaded and discarded before it is measured."""
    return not _mark(command, caches).is_file()


def mark_prepared(command: ArmCommand, caches: Path) -> None:
    """Note that an arm has run under load: what it compiles is there.

    Raises:
        OutputError: when it cannot be noted.
    """
    make_private(_mark(command, caches).parent)
    try:
        _mark(command, caches).touch()
    except OSError as error:
        raise _cannot(caches, error.strerror or str(error)) from error


def make_private(folder: Path) -> Path:
    """Make a folder that only this user can read or write, as code is loaded from it.

    Raises:
        OutputError: when it cannot be made, or what is there is somebody else's.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise _cannot(folder, error.strerror or str(error)) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise _cannot(folder, "it is a link, or somebody else's")
    if status.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def _mark(command: ArmCommand, caches: Path) -> Path:
    return caches / kernels_name(command) / (_PREPARED + (command.arm or kernels_name(command)))


def kernels_name(command: ArmCommand) -> str:
    """Its folder's name; of a command that no plan made, from what it is."""
    if command.kernels:
        return command.kernels
    words = [
        *command.arguments,
        "",
        *(f"{name}={value}" for name, value in sorted(command.environment.items())),
    ]
    return hashlib.sha256("\0".join(words).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _cannot(folder: Path, reason: str) -> OutputError:
    return OutputError(
        f"{printable(str(folder), 400)} cannot hold compiled kernels: {printable(reason, 200)}",
        "give another place with --state DIR",
    )
