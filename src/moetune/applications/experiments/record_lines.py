"""The lines of an experiment's record, and what they say together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moetune.domain.codec import from_json
from moetune.domain.errors import InputError
from moetune.domain.experiment import ScheduledStart, StartResult
from moetune.domain.text import printable


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
