"""What is written down of a start before it runs, so that whatever happens the next call finds it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.applications.atomic import open_places
from moetune.domain.codec import from_json, to_json
from moetune.domain.errors import InputError
from moetune.domain.safe_json import JsonLimits, load_json_object

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA = "moetune.start/1"
FOLDER = "running"
"""Holds a record for each start that may still run; one that ended well has none."""

_SUFFIX = ".json"
_LIMITS = JsonLimits(max_bytes=1 << 20, max_depth=8)


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process and when it began, in clock ticks since the machine booted."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class StartRecord:
    """A start that may still run; secrets are redacted.

    Attributes:
        name: of the start.
        mark: value of the variable that its processes carry.
        boot: of the machine on which it runs.
        command: arguments.
        host: where it runs through ssh, empty: here.
        port: of its server.
        stop: arguments of the command that stops it.
        stop_redacted: that command holds a secret, which is not written down.
        stop_s: time for an orderly end.
        supervisor: the process that watches it, None before it is there.
        server: its first process, None before it is there.
    """

    name: str
    mark: str
    boot: str
    command: tuple[str, ...]
    host: str = ""
    port: int = 0
    stop: tuple[str, ...] = ()
    stop_redacted: bool = False
    stop_s: float = 60.0
    supervisor: ProcessId | None = None
    server: ProcessId | None = None


def record_place(name: str) -> str:
    """Where the record of a start lies below the folder of its run."""
    return f"{FOLDER}/{name}{_SUFFIX}"


def write_record(folder: Path, record: StartRecord) -> None:
    """Write a record, and return when it is on the disk.

    Raises:
        OutputError: when it cannot be written.
    """
    text = json.dumps({"schema": SCHEMA, **to_json(record)}, indent=1, sort_keys=True) + "\n"
    place = record_place(record.name)
    with open_places(folder, [place], directory_mode=0o700) as places:
        places.put(place, text.encode())


def remove_record(folder: Path, name: str) -> None:
    """Remove the record of a start that is over.

    Raises:
        OutputError: when it cannot be removed.
    """
    place = record_place(name)
    with open_places(folder, [place], directory_mode=0o700) as places:
        places.remove(place)


def read_records(folder: Path) -> Iterator[StartRecord]:
    """The records below the folder of a run, by name; what is no record is passed over."""
    if not (folder / FOLDER).is_dir():
        return
    with open_places(folder, [record_place("x")], writing=False) as places:
        for name in places.names(FOLDER):
            if name.endswith(_SUFFIX) and not name.startswith("."):
                content = places.read(f"{FOLDER}/{name}", _LIMITS.max_bytes) or b""
                try:
                    document = load_json_object(content, name, _LIMITS)
                    record = from_json(StartRecord, document, name)
                except InputError:
                    continue
                # What it is called decides what is removed with it.
                if document.get("schema") == SCHEMA and record_place(record.name) == f"{FOLDER}/{name}":
                    yield record
