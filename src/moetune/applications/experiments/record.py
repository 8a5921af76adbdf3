"""The record of an experiment: what was begun and what is finished, durable before the next step.

A run is a folder below `experiments/` in the state directory, named by the content of its plan and of
the config files that the plan names: the same plan goes on where it stopped, another one begins anew.
Its journal is append-only; what a killed moetune had begun and not finished is begun again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetune.applications.experiments.record_lines import Facts, Finished
from moetune.applications.experiments.redaction import Redactor, redacted_plan
from moetune.applications.journal import Journal
from moetune.applications.state import private_folder
from moetune.domain.codec import from_json, to_json
from moetune.domain.errors import InputError, OutputError
from moetune.domain.experiment_plan import Plan
from moetune.domain.safe_json import JsonLimits, load_json_object
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEMA = "moetune.experiment-journal/1"
FOLDER = "experiments"
JOURNAL = "journal.jsonl"
_ID = re.compile(r"e[0-9a-f]{12}", re.ASCII)
_MAX_BYTES = 64 << 20
_LIMITS = JsonLimits(max_bytes=1 << 20, max_depth=16)


class Record:
    """An open record, locked against other processes. Use it as a context manager.

    Attributes:
        id: of the experiment.
        facts: what it says.
    """

    def __init__(self, journal: Journal, redactor: Redactor) -> None:
        self._journal, self._redactor = journal, redactor
        self.id = journal.folder.name
        self.facts = Facts()
        try:
            for line in journal.lines:
                self.facts.read(line, str(journal.path))
        except InputError:
            journal.close()
            raise

    @classmethod
    def open(cls, state: Path, plan: Plan, environ: Mapping[str, str], digests: Mapping[str, str]) -> Record:
        """Open the record of a plan, or begin one.

        Args:
            state: the state directory.
            plan: the experiment.
            environ: variables, whose secrets are kept out of the record.
            digests: SHA-256 of the config files that the plan names.

        Raises:
            MoetuneError: when it cannot be written, or another process holds it.
        """
        above = private_folder(state, FOLDER, make=True)
        assert above is not None
        header = header_of(plan, digests)
        journal = Journal.open_in(
            above / experiment_id(plan, digests),
            header,
            busy="another moetune runs this experiment",
            other="is the journal of another experiment",
        )
        return cls(journal, Redactor.of(plan, environ))

    @classmethod
    def open_known(cls, state: Path, name: str) -> Record:
        """Open a record that is there, by its id, locked.

        Raises:
            MoetuneError: when there is none, or another process holds it.
        """
        seen = look(state, name)
        journal = Journal.open_in(
            seen.folder,
            seen.header,
            busy="another moetune runs this experiment",
            other="is the journal of another experiment",
        )
        return cls(journal, Redactor())

    @property
    def folder(self) -> Path:
        """Where it lies, with the logs of its servers."""
        return self._journal.folder

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()

    def add(self, kind: str, **values: Any) -> None:  # noqa: ANN401 - JSON values
        """Write a line, and return when it is on the disk.

        Raises:
            OutputError: when it cannot be written.
        """
        line = self._redactor.value(values)
        self._journal.append(kind, **line)
        self.facts.read({"kind": kind, **line}, str(self._journal.path))

    def add_start(self, finished: Finished) -> None:
        """Record a start that is over."""
        self.add("start", **to_json(finished))


@dataclass(frozen=True, slots=True)
class Seen:
    """An experiment as its record says it, without holding it.

    Attributes:
        id: its name.
        folder: where it lies.
        header: first line of its journal.
        plan: without its secrets.
        facts: what its lines say.
        running: a process holds it.
    """

    id: str
    folder: Path
    header: dict[str, Any]
    plan: Plan
    facts: Facts
    running: bool

    @property
    def half_way(self) -> bool:
        """Whether it was begun and is neither over nor taken back nor running."""
        return not (self.facts.done or self.facts.taken_back or self.running)


def experiment_id(plan: Plan, digests: Mapping[str, str]) -> str:
    """A name for an experiment: the same plan with the same config files has the same one."""
    text = json.dumps(header_of(plan, digests), sort_keys=True, separators=(",", ":"))
    return "e" + hashlib.sha256(text.encode()).hexdigest()[:12]


def is_experiment_id(name: str) -> bool:
    """Whether a name has the form of an experiment's."""
    return _ID.fullmatch(name) is not None


def header_of(plan: Plan, digests: Mapping[str, str]) -> dict[str, Any]:
    """First line of a journal: everything that makes it another experiment, and no secret.

    Where a plan's lines stand in its file is not part of it.
    """
    plain = replace(
        redacted_plan(plan),
        interventions=tuple(replace(one, line=0) for one in redacted_plan(plan).interventions),
    )
    return {"schema": SCHEMA, "plan": to_json(plain), "configs": dict(sorted(digests.items()))}


def look(state: Path, name: str) -> Seen:
    """Read a record without locking or changing it.

    Raises:
        InputError: when there is none, or it is broken.
        OutputError: for a state directory that cannot be trusted.
    """
    above = private_folder(state, FOLDER, make=False)
    if not is_experiment_id(name) or above is None or not (above / name / JOURNAL).is_file():
        raise InputError(f"no experiment {printable(name, 60)} is recorded", "moetune status lists them")
    folder = above / name
    lines, running = _lines(folder / JOURNAL)
    source = str(folder / JOURNAL)
    if not lines:
        raise InputError(f"{printable(source, 400)} is empty", f"remove {printable(str(folder), 400)}")
    documents = [
        load_json_object(line, f"{source}, line {number}", _LIMITS) for number, line in enumerate(lines, 1)
    ]
    header = documents[0]
    header.pop("kind", None)
    if header.get("schema") != SCHEMA:
        raise InputError(f"{printable(source, 400)} is no journal of an experiment")
    facts = Facts()
    for document in documents[1:]:
        facts.read(document, source)
    return Seen(name, folder, header, from_json(Plan, header.get("plan"), source), facts, running)


def recorded(state: Path) -> tuple[str, ...]:
    """Names of the experiments of a state directory, sorted."""
    above = private_folder(state, FOLDER, make=False)
    if above is None:
        return ()
    with os.scandir(above) as entries:
        return tuple(sorted(entry.name for entry in entries if is_experiment_id(entry.name)))


def _lines(path: Path) -> tuple[list[bytes], bool]:
    """Whole lines of a journal, and whether a process holds it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise OutputError(f"{printable(str(path), 400)} cannot be read: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        running = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            running = True
        content = file.read(_MAX_BYTES + 1)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    if len(content) > _MAX_BYTES:
        raise InputError(f"{printable(str(path), 400)} is larger than {_MAX_BYTES >> 20} MiB")
    return content.split(b"\n")[:-1], running


def config_digests(paths: Sequence[str]) -> dict[str, str]:
    """SHA-256 of the config files that a plan names, and of those that lie in directories it names.

    Raises:
        InputError: for what cannot be read.
    """
    from moetune.applications.install_target import read_sources

    found: dict[str, str] = {}
    for path in dict.fromkeys(paths):
        for source in read_sources((Path(path),)):
            found[str(source.path)] = hashlib.sha256(source.content).hexdigest()
    return found


__all__ = [
    "FOLDER",
    "Facts",
    "Finished",
    "Record",
    "Seen",
    "config_digests",
    "experiment_id",
    "header_of",
    "is_experiment_id",
    "look",
    "recorded",
]
