"""One start of the server, from its config files to their way back: what became of it is a value.

Whatever goes wrong with the server or with the load is that start's ending. What goes wrong with the
machine - a full disk, somebody else on the GPUs, files that cannot be put back - ends the experiment.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from moetune.applications.experiments.arm_errors import (
    ArmError,
    ForeignProcessError,
    StartCancelledError,
)
from moetune.applications.experiments.load_errors import LoadCancelledError
from moetune.applications.experiments.record import Finished
from moetune.domain.errors import MoetuneError, OutputError
from moetune.domain.experiment import Ending, LoadResult, ScheduledStart, ServerFacts, StartResult
from moetune.domain.text import printable

if TYPE_CHECKING:
    from moetune.applications.experiments.known_good import ConfigArms
    from moetune.domain.experiment_plan import Intervention, Plan

_LONGEST_REASON = 600
LEAST_FREE_BYTES = 32 << 20
"""Room for the logs and results of a start: both are limited in size."""


class RunningServer(Protocol):
    """A started server: the shape of `arm_server.ArmServer`."""

    @property
    def url(self) -> str:
        """Where it answers."""

    @property
    def log(self) -> Path:
        """Its log."""

    def wait_ready(self, cancelled: Callable[[], bool]) -> float:
        """Wait until it takes requests, and say how long it took."""

    def alive(self) -> bool:
        """Whether it runs."""

    def ending(self) -> str:
        """How it ended, in words."""

    def mark_prepared(self) -> None:
        """Note that its caches are filled."""

    def stop(self) -> None:
        """End it and all that it started."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What starts, loads and reads a server.

    Attributes:
        start: begins a server: `(plan, interventions, folder, name)`.
        load: one pass: `(plan, url, folder, name, number, cancelled)`; number 0 does not count.
        facts: what it ran: `(plan, log, url, texts)`.
        clock: seconds that never jump.
        wall: seconds since 1970, as far as the machine knows.
    """

    start: Callable[[Plan, Sequence[Intervention], Path, str], RunningServer]
    load: Callable[[Plan, str, Path, str, int, Callable[[], bool]], LoadResult]
    facts: Callable[[Plan, Path, str | None, Sequence[str]], ServerFacts]
    clock: Callable[[], float]
    wall: Callable[[], float]


@dataclass(frozen=True, slots=True)
class StartOrder:
    """What is to be started.

    Attributes:
        start: where in the schedule.
        interventions: of its arm, as they run.
        number: of all that were begun, also of those that were cut short: no two have one.
        attempt: 1, or 2 for a baseline that failed.
        preparing: only fill the caches.
        placed: config files that lie ready for it on another host.
    """

    start: ScheduledStart
    interventions: tuple[Intervention, ...]
    number: int
    attempt: int = 1
    preparing: bool = False
    placed: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of its log and its results."""
        return f"{self.number:03d}-{'prepare-' if self.preparing else ''}{_plain(self.start.arm)}"


class OneStart:
    """Runs single starts of an experiment.

    Args:
        plan: the experiment.
        folder: of the run.
        configs: puts config files in place.
        tools: what starts, loads and reads a server.
        texts: that would prove an intervention.
        cancelled: whether an end was asked for.
        say: told what happens.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        configs: ConfigArms,
        tools: Tools,
        texts: Sequence[str],
        cancelled: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._folder, self._configs, self._tools = plan, folder, configs, tools
        self._texts, self._cancelled, self._say = texts, cancelled, say

    def run(self, order: StartOrder, looked_for: Sequence[str]) -> Finished:
        """Start, load and stop the server once; the config files are as before when it returns.

        Args:
            order: what to start.
            looked_for: names of the config files that the baseline's lookups asked for.

        Raises:
            KeyboardInterrupt: when an end was asked for; nothing runs then and the files are back.
            MoetuneError: for what no arm is to blame for.
        """
        self._check_room()
        began, wall = self._tools.clock(), self._tools.wall()
        result = StartResult(order.start, Ending.DONE, started_s=wall)
        installed = order.placed
        try:
            try:
                installed += self._configs.put(order.interventions, looked_for)
            except MoetuneError as error:
                result = _ended(result, Ending.CANNOT_INSTALL, error)
            else:
                result = self._serve(order, result)
        finally:
            self._configs.take_back()
        if self._cancelled():
            # What was cut short says nothing about the arm.
            raise KeyboardInterrupt
        if result.ending is not Ending.DONE:
            self._check_room()
        result = replace(result, took_s=round(self._tools.clock() - began, 3))
        return Finished(result, order.attempt, order.preparing, installed)

    def _check_room(self) -> None:
        """A full disk is no arm's fault: logs and results are missing then."""
        try:
            free = shutil.disk_usage(self._folder).free
        except OSError as error:
            raise OutputError(f"{self._folder} cannot be looked at: {error.strerror}") from error
        if free < LEAST_FREE_BYTES:
            raise OutputError(
                f"there are {free >> 20} MiB left for logs below {printable(str(self._folder), 400)}",
                "make room and run the same command again, or give another place with --state DIR",
            )

    def _serve(self, order: StartOrder, result: StartResult) -> StartResult:
        self._say(f"starting {self._plan.server.name}")
        try:
            server = self._tools.start(self._plan, order.interventions, self._folder, order.name)
        except (ForeignProcessError, OutputError):
            raise
        except MoetuneError as error:
            return _ended(result, Ending.CANNOT_START, error)
        try:
            result = replace(result, log=_below(self._folder, server.log))
            result = self._use(order, server, result)
        finally:
            try:
                self._say("stopping it")
            finally:
                stopped = _stop(server)
        if stopped is not None and result.ending is Ending.DONE:
            result = _ended(result, Ending.CANNOT_STOP, stopped)
        return result

    def _use(self, order: StartOrder, server: RunningServer, result: StartResult) -> StartResult:
        """Wait, look, load, look again."""
        try:
            ready_s = server.wait_ready(self._cancelled)
        except StartCancelledError:
            return result
        except ArmError as error:
            facts = self._tools.facts(self._plan, server.log, None, self._texts)
            return replace(_ended(result, Ending.CANNOT_START, error), facts=facts)
        result = replace(result, ready_s=round(ready_s, 3))
        passes: list[LoadResult] = []
        failed: MoetuneError | None = None
        total = 1 if order.preparing else self._plan.load.passes + 1
        for number in range(total):
            what = f"measured pass {number} of {total - 1}" if number else "a whole pass that does not count"
            self._say(what)
            try:
                name = f"{order.name}-pass{number}"
                passed = self._tools.load(self._plan, server.url, self._folder, name, number, self._cancelled)
            except (OutputError, LoadCancelledError):
                if self._cancelled():
                    return result
                raise
            except MoetuneError as error:
                failed = error
                break
            if number:
                passes.append(passed)
            else:
                server.mark_prepared()
        alive = server.alive()
        facts = self._tools.facts(self._plan, server.log, server.url if alive else None, self._texts)
        result = replace(result, facts=facts, passes=tuple(passes))
        if not alive:
            return replace(result, ending=Ending.DIED, reason=_reason(server.ending(), failed))
        return result if failed is None else _ended(result, Ending.LOAD_FAILED, failed)


def _stop(server: RunningServer) -> ArmError | None:
    try:
        server.stop()
    except ArmError as error:
        return error
    return None


def _ended(result: StartResult, ending: Ending, error: MoetuneError) -> StartResult:
    return replace(result, ending=ending, reason=_reason(error.message, None))


def _reason(text: str, failed: MoetuneError | None) -> str:
    return printable(text if failed is None else f"{text}; {failed.message}", _LONGEST_REASON)


def _below(folder: Path, path: Path) -> str:
    """A path below the run's folder, or as it is."""
    try:
        return str(path.relative_to(folder))
    except ValueError:
        return str(path)


def _plain(name: str) -> str:
    """A name of an arm as part of a file's name."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "-.") else "-" for c in name.lower())
    return kept[:48].strip(".-") or "arm"


__all__ = ["OneStart", "RunningServer", "StartOrder", "Tools"]
