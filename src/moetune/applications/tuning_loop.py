"""The tuning loop: search, let finalists meet, cover what lies between the keys, check the numbers."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetune.applications.measuring import Laboratory
from moetune.applications.questions import check_target, measure_peaks
from moetune.applications.targets import Target, targets_of
from moetune.applications.tuning_finals import Finals, LayerResult
from moetune.applications.tuning_search import Search
from moetune.domain.choose import Choices, Pair
from moetune.domain.coverage import Shortfall, check_coverage, probe_ms
from moetune.domain.errors import MoetuneError
from moetune.domain.problem import KERNELS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moetune.applications.tuning_efforts import Effort
    from moetune.domain.config import KernelConfig
    from moetune.domain.coverage import TimesAt
    from moetune.domain.keys import Keys
    from moetune.domain.launch import Launch
    from moetune.domain.predict import PerformanceModel
    from moetune.domain.problem import Kernel, Problem
    from moetune.measure.protocol import Peaks
    from moetune.servers.protocol import Server


@dataclass(frozen=True, slots=True)
class Numerics:
    """A chosen config against the fp32 reference."""

    kernel: Kernel
    m: int
    config: KernelConfig
    relative_error: float
    tolerance: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured tables of one problem.

    Attributes:
        choices: the pair of each key, with measured times of both kernels and of the default.
        keys: the keys asked for, and the traffic.
        added_keys: keys that were added, since between others an entry lost.
        shortfalls: m at which the default was still faster.
        layers: by key, through the whole layer.
        numerics: what was compared with the reference.
        noise: what a gain had to beat.
        spread: median spread of a measurement.
        measured: measurements made in this run.
        known: measurements that the journal had.
        configs: distinct configs that were measured, by kernel.
        failed: culprits with their reasons.
        drifts: changes of the anchor over 2%.
        compilations: kernels that the measuring processes had to compile themselves.
        peaks: what the GPU can do; None where it was not measured.
        complete: the search came to its end; False when the budget ended it.
    """

    choices: Choices
    keys: Keys
    added_keys: tuple[int, ...]
    shortfalls: tuple[int, ...]
    layers: Mapping[int, LayerResult]
    numerics: tuple[Numerics, ...]
    noise: float
    spread: float
    measured: int
    known: int
    configs: Mapping[Kernel, int]
    failed: Mapping[str, str]
    drifts: tuple[float, ...]
    compilations: int
    peaks: Peaks | None
    complete: bool

    @property
    def gain(self) -> float | None:
        """Geometric mean over the traffic of the default's time over the chosen one's, up and down."""
        return self.choices.geomean_speedup(self.keys.traffic)

    @property
    def layer_gain(self) -> float | None:
        """The same through the whole layer."""
        pairs = [
            (weight, layer.uniform_ratio)
            for m, weight in self.keys.traffic
            if (layer := self.layers.get(m)) is not None and layer.uniform_ratio
        ]
        total = math.fsum(weight for weight, _ in pairs)
        return math.exp(-math.fsum(w * math.log(ratio) for w, ratio in pairs) / total) if total else None


class Tuner:
    """Tunes one problem in a laboratory.

    Args:
        server: the release whose defaults and launches count.
        problem: the problem.
        laboratory: where is measured.
        keys: the keys of the tables.
        effort: how hard to try.
        only: search this kernel alone; the other keeps the default's config where that pairs.
        started: time of the monotonic clock from which the budget counts.
    """

    def __init__(
        self,
        server: Server,
        problem: Problem,
        laboratory: Laboratory,
        keys: Keys,
        effort: Effort,
        only: Kernel | None = None,
        started: float | None = None,
    ) -> None:
        self._server, self._problem, self._lab = server, problem, laboratory
        self._keys, self._effort = keys, effort
        self._only = only
        self._known = len(laboratory.known.times)
        self._finals = Finals(server, problem, laboratory, effort)
        self._started = time.monotonic() if started is None else started
        budget = effort.budget_seconds
        self._end = None if budget is None else self._started + budget
        self.complete = True
        """The search came to its end; False when the budget ended it."""

    def begin(self) -> None:
        """Ask for the defaults, so that compiling and the GPU start before the model has ranked."""
        lab = self._lab
        middle = min(self._keys.ms, key=lambda m: (abs(math.log2(m / 64)), m))
        lab.enter("defaults")
        lab.use_anchor(Target("up", middle, self._server.default_config(self._problem, "up", middle)))
        pairs = [(m, self._finals.default(m)) for m in self._keys.ms]
        lab.want((target for m, pair in pairs for target in targets_of(m, pair)), priority=-1)

    def tune(
        self,
        launches: Mapping[Kernel, Sequence[Launch]],
        model: PerformanceModel,
        start_from: Sequence[KernelConfig] = (),
    ) -> Measured:
        """Search, pair, settle.

        Args:
            launches: the search space of each kernel.
            model: what ranks it.
            start_from: configs to measure at every m, whatever the model says.

        Raises:
            MoetuneError: when nothing can be measured any more; what was measured is in the journal.
        """
        lab = self._lab
        choices, layers = self.search(launches, model, start_from)
        lab.enter("between keys")
        choices, added, shortfalls = self._cover(choices, layers)
        lab.enter("numerics")
        choices, numerics = self._check(choices)
        spreads = sorted(lab.known.spreads.values())
        times = [target for target, time_us in lab.known.times.items() if time_us is not None]
        return Measured(
            choices=choices,
            keys=self._keys,
            added_keys=added,
            shortfalls=shortfalls,
            layers=layers,
            numerics=numerics,
            noise=self._finals.noise,
            spread=statistics.median(spreads) if spreads else 0.0,
            measured=lab.measured,
            known=self._known,
            configs={
                kernel: len({target.config for target in times if target.kernel == kernel})
                for kernel in KERNELS
            },
            failed={f"{kernel} {config}": why for (kernel, config), why in sorted(lab.known.failed.items())},
            drifts=tuple(lab.drifts),
            compilations=lab.compilations,
            peaks=measure_peaks(lab),
            complete=self.complete,
        )

    def search(
        self,
        launches: Mapping[Kernel, Sequence[Launch]],
        model: PerformanceModel,
        start_from: Sequence[KernelConfig] = (),
    ) -> tuple[Choices, dict[int, LayerResult]]:
        """Search, and let finalists meet the default; the arguments are those of `tune`."""
        search = Search(
            self._lab,
            self._problem,
            self._keys.ms,
            self._effort,
            launches,
            model,
            one_file=not self._server.separate_down_file,
            only=self._only,
            started=self._started,
        )
        self.begin()
        search.run(start_from)
        self.complete = search.complete
        self._lab.enter("pairs")
        search.complete_pairs()
        if self._only is None and self._effort.sorted_sizes:
            self._lab.enter("pairs with USE_TMA")
            self._finals.sorted_pairs.measure(self._keys.ms, self._end)
        self._lab.enter("finalists")
        return self._finals.meet_all(self._finals.choose(self._keys.ms))

    # between the keys

    def _cover(
        self, choices: Choices, layers: dict[int, LayerResult]
    ) -> tuple[Choices, tuple[int, ...], tuple[int, ...]]:
        """Measure what the server would pick between the keys; add keys where its default is faster."""
        switches = self._server.default_switches(self._problem)
        smallest, largest = self._keys.ms[0], self._keys.ms[-1]
        added: list[int] = []
        shortfalls: tuple[Shortfall, ...] = ()
        for _ in range(3):
            probes = [
                m
                for m in probe_ms(choices.up, switches, largest, smallest)
                if m not in layers and not self._is_inside(choices, m)
            ]
            times_at = self._times_at(choices, probes)
            measured = [m for m in probes if self._is_known(choices, m)]
            shortfalls = check_coverage(
                choices.up,
                choices.down,
                self._finals.default,
                times_at,
                measured,
                noise=2 * self._finals.noise,
            )
            late = self._end is not None and time.monotonic() > self._end
            if not shortfalls or late or len(added) >= 8:
                break
            worst = sorted(shortfalls, key=lambda s: -(s.time_us or math.inf) / (s.default_us or 1.0))[:4]
            new = [shortfall.m for shortfall in worst]
            self._lab.want(
                target
                for m in new
                for key in sorted(choices.up.keys(), key=lambda key: abs(key - m))[:4]
                for target in targets_of(m, _pair_at(choices, key))
            )
            self._lab.run()
            entries = []
            for choice in self._finals.choose(new).entries:
                entry, layers[choice.m] = self._finals.meet(choice)
                entries.append(entry)
            added += new
            merged = sorted((*choices.entries, *entries), key=lambda entry: entry.m)
            choices = Choices(tuple(merged), choices.one_file)
        return choices, tuple(sorted(added)), tuple(shortfall.m for shortfall in shortfalls)

    def _is_inside(self, choices: Choices, m: int) -> bool:
        """Whether both keys around an m have one pair, which beat one default there: nothing changes."""
        keys = sorted(choices.up.keys())
        below = max((key for key in keys if key <= m), default=None)
        above = min((key for key in keys if key >= m), default=None)
        if below is None or above is None or _pair_at(choices, below) != _pair_at(choices, above):
            return False
        return self._finals.default(below) == self._finals.default(m) == self._finals.default(above)

    def _is_known(self, choices: Choices, m: int) -> bool:
        """Whether both that the server would pick and its default were asked for at that m."""
        pair = Pair(choices.up.nearest(m), (choices.down or choices.up).nearest(m))
        targets = (*targets_of(m, pair), *targets_of(m, self._finals.default(m)))
        return all(target in self._lab.known.times for target in targets)

    def _times_at(self, choices: Choices, probes: Sequence[int]) -> TimesAt:
        """What `check_coverage` asks, measured at once for all probes."""
        wanted = []
        for m in probes:
            pair = Pair(choices.up.nearest(m), (choices.down or choices.up).nearest(m))
            if pair != self._finals.default(m):
                wanted += [*targets_of(m, pair), *targets_of(m, self._finals.default(m))]
        self._lab.want(wanted)
        self._lab.run()

        def times_at(m: int, pairs: Sequence[Pair]) -> list[float | None]:
            found = []
            for pair in pairs:
                up, down = (self._lab.known.times.get(target) for target in targets_of(m, pair))
                found.append(None if up is None or down is None else up + down)
            return found

        return times_at

    # numbers

    def _check(self, choices: Choices) -> tuple[Choices, tuple[Numerics, ...]]:
        """Compare each chosen config with the reference, and put the default where one is wrong."""
        found: dict[tuple[Kernel, KernelConfig, bool], Numerics] = {}
        entries = []
        for choice in choices.entries:
            right = True
            for target in targets_of(choice.m, choice.pair):
                key = (target.kernel, target.config, target.sorted_output)
                if key not in found:
                    checked = check_target(self._lab, target)
                    if checked is None:
                        right = False
                        continue
                    found[key] = Numerics(
                        target.kernel, target.m, target.config, checked.relative_error, checked.tolerance
                    )
                right &= found[key].relative_error <= found[key].tolerance
            is_default = choice.pair == self._finals.default(choice.m)
            if not right and is_default and not self._lab.sealed:
                raise MoetuneError(
                    f"at m={choice.m} even the default computes wrong numbers here: nothing can be trusted",
                    "look at the journal, and report it",
                )
            entries.append(choice if right or is_default else self._finals.kept(choice))
        return Choices(tuple(entries), choices.one_file), tuple(found.values())


def _pair_at(choices: Choices, key: int) -> Pair:
    return next(entry.pair for entry in choices.entries if entry.m == key)
