"""An experiment without processes: servers, loads and a clock that are made up, for the loop itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from moetune.applications.experiments.arm_errors import CannotStartError, CannotStopError
from moetune.applications.experiments.far_configs import FarConfigs
from moetune.applications.experiments.interrupts import Interrupts
from moetune.applications.experiments.known_good import ConfigArms
from moetune.applications.experiments.load_errors import LoadError
from moetune.applications.experiments.one_start import RunningServer, Tools
from moetune.applications.experiments.progress import Progress
from moetune.applications.experiments.record import Record, config_digests
from moetune.applications.experiments.report import Report, report_of
from moetune.applications.experiments.running import Experiment
from moetune.domain.experiment import ConfigRead, LoadResult, ServerFacts
from moetune.domain.experiment_plan import Budget, DecisionPlan, Intervention, LoadPlan, Plan, ServerPlan

FACTORS = ("--times", "--again")
NO_LIMIT = Budget()
QUICK = DecisionPlan(noise=0.002, smallest_effect=0.05, alpha=0.4)
"""A decision that four blocks can make."""


def made_plan(*interventions: Intervention, budget: Budget = NO_LIMIT, **server: Any) -> Plan:
    """A plan whose interventions are effects of the made-up server: `--times 1.1`."""
    known = ServerPlan(**{"name": "other", "command": ("serve", "--port", "{port}"), **server})
    load = LoadPlan("guidellm", passes=1)
    return Plan("made up", known, load, interventions, budget, QUICK)


def effect(name: str, *arguments: str) -> Intervention:
    """An intervention that the log of the made-up server proves."""
    return Intervention(name, arguments, proof="runs")


@dataclass
class MadeUp:
    """A machine on which nothing is real but the record.

    Attributes:
        faults: text that an arm's arguments hold to what happens then.
        noise: between starts.
        seconds: of a start.
        begun: arms in the order of their starts.
        running: servers that were not stopped.
        now: its clock.
    """

    faults: Mapping[str, str] = field(default_factory=dict)
    noise: float = 0.002
    seconds: float = 60.0
    begun: list[str] = field(default_factory=list)
    running: int = 0
    now: float = 0.0
    wall: float = 1.7e9
    said: list[Progress] = field(default_factory=list)
    prepared: set[tuple[str, ...]] = field(default_factory=set)
    refused: tuple[tuple[str, str], ...] = ()
    fill_caches: bool = False
    count: int = 0
    far: dict[str, tuple[str, ...]] = field(default_factory=dict)
    variables: list[Mapping[str, str]] = field(default_factory=list)
    on_load: Callable[[], None] = lambda: None

    def tools(self) -> Tools:
        return Tools(self._start, self._load, self._facts, lambda: self.now, lambda: self.wall)

    def _start(
        self, plan: Plan, interventions: Sequence[Intervention], folder: Path, name: str
    ) -> RunningServer:
        del plan
        words = tuple(word for one in interventions for word in (*one.arguments, *one.configs))
        self.begun.append(" ".join(words) or "baseline")
        self.variables.append(
            {name: value for one in interventions for name, value in one.environment.items()}
        )
        if "no start" in self._fault(words):
            raise CannotStartError("it ends at once")
        self.running += 1
        self._now = words
        (folder / f"{name}.log").write_text(" ".join(words))
        return _Server(self, words, folder / f"{name}.log", tuple(one.name for one in interventions))

    def _fault(self, words: Sequence[str]) -> str:
        return next((fault for text, fault in self.faults.items() if text in " ".join(words)), "")

    def _load(
        self, plan: Plan, url: str, folder: Path, name: str, number: int, cancelled: Callable[[], bool]
    ) -> LoadResult:
        del plan, url, folder, name, cancelled
        self.on_load()
        self.now += self.seconds / 2
        words = self._now
        fault = self._fault(words)
        if "no load" in fault or ("dies" in fault and number):
            raise LoadError("3 of 10 requests were answered")
        times = 1.0
        for flag, value in pairwise(words):
            times *= float(value) if flag in FACTORS else 1.0
        # The same start has the same noise, whether it is the first try or one after a crash.
        drawn = random.Random(f"{self.count} {words}").gauss(1.0, self.noise)
        rate = 1000 * times * drawn
        return LoadResult(10, 10, 1e4 / rate, 100, 160, rate, rate / 16)

    def _facts(self, plan: Plan, log: Path, url: str | None, texts: Sequence[str]) -> ServerFacts:
        del plan, url
        words = log.read_text().split()
        configs = (ConfigRead("up", "E=64,N=256,device_name=NVIDIA_H200.json", "default"),)
        fault = self._fault(words)
        return ServerFacts(
            "other",
            version="1.2.3",
            configs=configs,
            max_running_requests=26 if "fewer requests" in fault else 48,
            lines=() if "silent" in fault or not words else tuple(text for text in texts if text),
        )

    def run(self, plan: Plan, state: Path, interrupts: Interrupts | None = None) -> Report:
        """Run a plan, or go on with it."""
        digests = config_digests([path for one in plan.interventions for path in one.configs])
        with Record.open(state, plan, {}, digests) as record:
            experiment = Experiment(
                plan,
                record,
                state,
                ConfigArms(plan, record.folder, {}),
                FarConfigs(plan.server, record, self._put_far, self._remove_far),
                self.tools(),
                interrupts or Interrupts(),
                self._show(record),
                lambda _: self.refused,
                self._needs_preparing,
            )
            experiment.run()
            return report_of(plan, record.id, record.folder, record.facts)

    def _put_far(self, host: str, files: Mapping[str, bytes]) -> str:
        folder = f"/far/{len(self.far)}"
        self.far[folder] = (host, *files)
        return folder

    def _remove_far(self, host: str, folder: str) -> None:
        assert self.far.pop(folder)[0] == host

    def _show(self, record: Record) -> Callable[[Progress], None]:
        def show(progress: Progress) -> None:
            self.count = len(record.facts.starts)
            self.said.append(progress)

        return show

    def _needs_preparing(self, interventions: Sequence[Intervention]) -> bool:
        return self.fill_caches and tuple(one.name for one in interventions) not in self.prepared


@dataclass
class _Server:
    machine: MadeUp
    words: tuple[str, ...]
    log: Path
    names: tuple[str, ...]
    url: str = "http://127.0.0.1:1"
    up: bool = True

    def wait_ready(self, cancelled: Callable[[], bool]) -> float:
        del cancelled
        if "never" in self.machine._fault(self.words):
            raise CannotStartError("it was not ready in time")
        self.machine.now += self.machine.seconds / 4
        return self.machine.seconds / 4

    def alive(self) -> bool:
        return "dies" not in self.machine._fault(self.words)

    def ending(self) -> str:
        return "it was ended by SIGSEGV"

    def mark_prepared(self) -> None:
        self.machine.prepared.add(self.names)

    def stop(self) -> None:
        if self.up:
            self.up = False
            self.machine.running -= 1
        if "stays" in self.machine._fault(self.words):
            raise CannotStopError("process 7 is left")
