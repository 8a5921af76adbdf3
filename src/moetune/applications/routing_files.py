"""Which files a user means by the recording of a server, opened so that they stay what they are."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from moetune.applications.routing_process import OpenFile
from moetune.domain.errors import InputError
from moetune.domain.recording import MAX_LAYERS
from moetune.domain.text import printable
from moetune.measure.routing_frames import MAX_FILE_BYTES

MAX_FILES = 4096
_IDS = re.compile(r"topk_ids_layer([0-9]{1,4})_idx([0-9]{1,6})\.pt")
_DUMP = re.compile(r"expert_distribution_recorder_[0-9.]{1,40}(?:_[0-9]{1,6})?\.pt")
_HINT = "moetune routing DIR, with DIR/topk_ids_layer3_idx0.pt or DIR/expert_distribution_recorder_*.pt in it"


@dataclass(frozen=True, slots=True)
class RecordedFile:
    """A file by its name.

    Attributes:
        path: of it.
        layer: number of the layer where it is a file of SGLang's tuner, else None.
        index: of the call.
        named: the user named it, rather than its directory.
    """

    path: Path
    layer: int | None = None
    index: int = 0
    named: bool = False


def find_files(paths: Sequence[str | Path]) -> tuple[RecordedFile, ...]:
    """The files that are meant, in the order of their layers and calls, or of their names.

    A directory gives those of its files that have the names of a recording; what else lies there is passed
    over.

    Raises:
        InputError: for what is not there, is no recording, or two kinds of it.
    """
    found: list[RecordedFile] = []
    for path in map(Path, paths):
        found += _of_directory(path) if path.is_dir() else [_of_name(path, named=True)]
    if not found:
        raise InputError("no recording is named", _HINT)
    if len(found) > MAX_FILES:
        raise InputError(f"{len(found):,} files are more than the {MAX_FILES:,} that are read", "name fewer")
    kinds = {file.layer is None for file in found}
    if len(kinds) > 1:
        raise InputError("files of SGLang's tuner and dumps of its recorder are two recordings", "name one")
    ordered = sorted(found, key=lambda file: (file.layer or 0, file.index, str(file.path)))
    for one, other in pairwise(ordered):
        if one.layer is not None and (one.layer, one.index) == (other.layer, other.index):
            raise InputError(f"layer {one.layer} has two files of call {one.index}", "name one directory")
    return tuple(ordered)


def _of_directory(path: Path) -> list[RecordedFile]:
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise InputError(f"{printable(str(path), 400)} cannot be read: {error.strerror}") from error
    found = [_of_name(path / name) for name in names if _IDS.fullmatch(name) or _DUMP.fullmatch(name)]
    if not found:
        raise InputError(f"{printable(str(path), 400)} holds no recording", _HINT)
    return found


def _of_name(path: Path, *, named: bool = False) -> RecordedFile:
    of_layer = _IDS.fullmatch(path.name)
    if of_layer is None:
        return RecordedFile(path, named=named)
    layer = int(of_layer[1])
    if layer >= MAX_LAYERS:
        raise InputError(f"{printable(path.name, 200)} is of layer {layer}, no model has so many")
    return RecordedFile(path, layer, int(of_layer[2]), named)


@contextmanager
def opened(files: Sequence[RecordedFile]) -> Iterator[tuple[OpenFile, ...]]:
    """The files, open; links that lie in a directory are not followed.

    Raises:
        InputError: for what is no plain file, or too large.
    """
    open_files: list[OpenFile] = []
    try:
        for file in files:
            open_files.append(_open(file))  # noqa: PERF401 - what is open by then is closed below
        yield tuple(open_files)
    finally:
        for open_file in open_files:
            os.close(open_file.descriptor)


def _open(file: RecordedFile) -> OpenFile:
    shown = printable(str(file.path), 400)
    # O_NONBLOCK: opening a named pipe must not wait for its other end.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if file.named else os.O_NOFOLLOW)
    try:
        descriptor = os.open(file.path, flags)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no path"
        raise InputError(f"{shown} cannot be read: {reason}", _HINT) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
        os.close(descriptor)
        regular = stat.S_ISREG(status.st_mode)
        reason = f"is larger than {MAX_FILE_BYTES >> 30} GiB" if regular else "is no plain file"
        raise InputError(f"{shown} {reason}", _HINT)
    return OpenFile(str(file.path), descriptor, status.st_size)
