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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetune.applications.experiments.redaction import Redactor, redacted_plan
from moetune.applications.journal import Journal
from moetune.applications.state import private_folder
from moetune.domain.codec import from_json, to_json
from moetune.domain.errors import InputError, OutputError
from moetune.domain.experiment import ScheduledStart, StartResult
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


@dataclass(frozen=True, slots=True)
class Finished:
    """A start that is over.

    Attributes:
        result: how it went.
        attempt: 1, or 2 where a baseline that failed was started again.
        preparing: it only filled the caches; its numbers count for nothing.
        installed: paths of the config files that were put in place for it.
    """

    result: StartResult
    attempt: int = 1
    preparing: bool = False
    installed: tuple[str, ...] = ()


@dataclass(slots=True)
class Facts:
    """What a journal says, line by line.

    Attributes:
        starts: finished ones, in their order.
        begun: the start that was begun and not finished.
        begun_starts: how many were begun, also those that were cut short.
        refused: interventions that were refused before anything was started, with the reason.
        size: how large the experiment is, None before it is known.
        combined: interventions of the last arm, None before it is known.
        left_out: why interventions that help alone are not in it.
        first_combined: its first block.
        planned_combined: its blocks.
        sharing_combined: by how many arms alpha is divided for it.
        keeping: what is to stay in place, None before that is known.
        kept: ids of its installs.
        done: the experiment is over.
        stopped: why it ended before that; empty as a rule.
        taken_back: `moetune uninstall` has brought back the state before it.
        known_good: that state.
        far: intervention to the folder of its config files on another host.
        plan_path: the plan's file, as it was last named.
    """

    starts: list[Finished] = field(default_factory=list)
    begun: ScheduledStart | None = None
    begun_starts: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    size: dict[str, int] | None = None
    combined: tuple[str, ...] | None = None
    left_out: tuple[str, ...] = ()
    first_combined: int = 0
    planned_combined: int = 0
    sharing_combined: int = 1
    keeping: tuple[str, ...] | None = None
    kept: tuple[str, ...] = ()
    done: bool = False
    stopped: str = ""
    taken_back: bool = False
    known_good: dict[str, Any] | None = None
    far: dict[str, str] = field(default_factory=dict)
    plan_path: str = ""

    def read(self, line: Mapping[str, Any], source: str) -> None:
        """Take in a line; one of a kind that is not known, as of a newer release, is passed over.

        Raises:
            InputError: for one that no experiment writes.
        """
        reader = _READERS.get(str(line.get("kind")))
        if reader is None:
            return
        try:
            reader(self, line)
        except (KeyError, TypeError, ValueError, AttributeError, InputError) as error:
            raise InputError(
                f"{printable(source, 400)} holds a broken line of the kind {line.get('kind')!r}",
                "move it away: the experiment then begins anew",
            ) from error


def _read_start(facts: Facts, line: Mapping[str, Any]) -> None:
    installed = tuple(map(str, line["installed"]))
    result = from_json(StartResult, line["result"], "a start")
    facts.starts.append(Finished(result, int(line["attempt"]), bool(line["preparing"]), installed))
    facts.begun = None


def _read_begun(facts: Facts, line: Mapping[str, Any]) -> None:
    facts.begun = from_json(ScheduledStart, line["start"], "a start")
    facts.begun_starts += 1


def _read_refused(facts: Facts, line: Mapping[str, Any]) -> None:
    facts.refused[str(line["intervention"])] = str(line["reason"])


def _read_size(facts: Facts, line: Mapping[str, Any]) -> None:
    facts.size = {str(name): int(value) for name, value in line["size"].items()}


def _read_combined(facts: Facts, line: Mapping[str, Any]) -> None:
    facts.combined = tuple(map(str, line["interventions"]))
    facts.left_out = tuple(map(str, line["left_out"]))
    facts.first_combined = int(line["first_block"])
    facts.planned_combined = int(line["planned"])
    facts.sharing_combined = int(line["sharing"])


def _read_keeping(facts: Facts, line: Mapping[str, Any]) -> None:
    facts.keeping = tuple(map(str, line["interventions"]))


def _read_kept(facts: Facts, line: Mapping[str, Any]) -> None:
    facts.kept = tuple(map(str, line["installs"]))


def _read_known_good(facts: Facts, line: Mapping[str, Any]) -> None:
    facts.known_good = dict(line["state"])


def _read_far(facts: Facts, line: Mapping[str, Any]) -> None:
    facts.far[str(line["intervention"])] = str(line["folder"])


def _read_far_gone(facts: Facts, line: Mapping[str, Any]) -> None:
    facts.far.pop(str(line["intervention"]), None)


def _read_called(facts: Facts, line: Mapping[str, Any]) -> None:
    facts.plan_path, facts.stopped = str(line["plan"]), ""


def _read_stopped(facts: Facts, line: Mapping[str, Any]) -> None:
    facts.stopped = str(line["reason"])


def _read_done(facts: Facts, _: Mapping[str, Any]) -> None:
    facts.done = True


def _read_taken_back(facts: Facts, _: Mapping[str, Any]) -> None:
    facts.taken_back = True


_READERS: Mapping[str, Callable[[Facts, Mapping[str, Any]], None]] = {
    "start": _read_start,
    "begun": _read_begun,
    "refused": _read_refused,
    "size": _read_size,
    "combined": _read_combined,
    "keeping": _read_keeping,
    "kept": _read_kept,
    "known good": _read_known_good,
    "far": _read_far,
    "far gone": _read_far_gone,
    "called": _read_called,
    "stopped": _read_stopped,
    "done": _read_done,
    "taken back": _read_taken_back,
}


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
