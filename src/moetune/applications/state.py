"""The state directory: where runs, backups and manifests live, and why it can be trusted."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.domain.errors import InputError, OutputError
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE = "MOETUNE_STATE"
_PRIVATE = 0o700
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ANOTHER = "name another with --state DIR"


def state_path(option: str | Path | None, environ: Mapping[str, str]) -> Path:
    """The state directory: `--state`, else MOETUNE_STATE, else the XDG state directory.

    Raises:
        InputError: when there is no place for one.
    """
    named = os.fspath(option) if option is not None else environ.get(VARIABLE, "")
    if "\0" in named:
        raise InputError(f"{printable(named, 200)} is no path", _ANOTHER)
    if named:
        try:
            return Path(named).expanduser().absolute()
        except RuntimeError:
            who = printable(named.partition("/")[0], 60)
            raise InputError(f"{printable(named, 200)}: the home of {who} is unknown", _ANOTHER) from None
    # The XDG specification has relative paths ignored.
    base = environ.get("XDG_STATE_HOME", "")
    if base and Path(base).is_absolute():
        return Path(base) / "moetune"
    home = environ.get("HOME", "")
    if not Path(home).is_absolute():
        raise InputError("there is no home directory for moetune's state", _ANOTHER)
    return Path(home) / ".local" / "state" / "moetune"


def private_folder(state: Path, name: str, *, make: bool) -> Path | None:
    """A folder of the state directory that nobody else can write into.

    What lies in it decides which files are put back where, so it must be this user's own; for root
    the way to it must be root's too.

    Args:
        state: the state directory.
        name: of the folder in it.
        make: make what is missing.

    Returns:
        None where it is missing and not to be made.

    Raises:
        OutputError: when it cannot be made, or others could write into it.
    """
    folder = state / name
    try:
        if make:
            # One by one: what mkdir makes on the way gets the umask's mode, not this one.
            missing = [above for above in (folder, *folder.parents) if not os.path.lexists(above)]
            for above in reversed(missing):
                above.mkdir(mode=_PRIVATE, exist_ok=True)
        status = folder.lstat()
        shared = _shared_with(folder, status) or (_shared_way(state) if os.geteuid() == 0 else "")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OutputError(
            f"the state directory {_shown(state)} cannot be used: {error.strerror or error}", _ANOTHER
        ) from error
    if shared:
        raise OutputError(
            f"{shared}: what is recorded there could be somebody else's",
            f"mend its owner and mode (chmod go-w), or {_ANOTHER}",
        )
    return folder


def _shared_with(path: Path, status: os.stat_result) -> str:
    """Why others could change what lies in a directory of this user; empty when they cannot."""
    if not stat.S_ISDIR(status.st_mode):
        return f"{_shown(path)} is a link or a file where a directory of this user is expected"
    if status.st_uid != os.geteuid():
        return f"{_shown(path)} belongs to the user {status.st_uid}, not to {os.geteuid()}"
    if status.st_mode & _OTHERS_WRITE:
        return f"{_shown(path)} can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def _shared_way(state: Path) -> str:
    """For root: why others could exchange the state directory, or a directory above it."""
    real = Path(os.path.realpath(state))
    shared = _shared_with(real, real.lstat())
    for above in real.parents:
        status = above.lstat()
        # In a sticky directory (/tmp) only the owner of an entry can rename it.
        open_to_others = status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX
        if not shared and (status.st_uid != 0 or open_to_others):
            shared = f"{_shown(above)}, above the state directory, can be changed by others than root"
    return shared


def _shown(path: Path) -> str:
    return printable(str(path), 400)
