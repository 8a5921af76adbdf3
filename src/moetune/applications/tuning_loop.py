"""The tuning loop: rank, compile few, measure all m from them, learn, choose pairs, let finalists meet.

What was measured teaches the model between two batches. The finalists are timed again, interleaved with
the server's default through the whole layer, and compared with the fp32 reference.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from typing import TYPE_CHECKING

import numpy as np

from moetune.applications.measuring import Laboratory, Target
from moetune.domain.choose import Candidates, Choice, Choices, DefaultConfig, Pair, Point, Reason, choose
from moetune.domain.coverage import Shortfall, check_coverage, probe_ms
from moetune.domain.errors import MoetuneError
from moetune.domain.problem import KERNELS
from moetune.domain.search import Field, GuidedSearch

if TYPE_CHECKING:
    from moetune.domain.config import KernelConfig
    from moetune.domain.coverage import TimesAt
    from moetune.domain.keys import Keys
    from moetune.domain.launch import Launch
    from moetune.domain.predict import PerformanceModel
    from moetune.domain.problem import Kernel, Problem
    from moetune.measure.protocol import LayerTimed, Peaks
    from moetune.servers.protocol import Server

NOISE_FLOOR = 0.005
"""One measurement on an H200 is off by about that (recorded landscapes, 2026-12-01): no claim below."""
SKEWED = "zipf:1.2"
"""The routing under which nothing may lose to the default either, where uniform routing is tuned for."""
_FIRST = 3
"""Configs of each m that an exhaustive run begins with."""
_SETTLING_SHARE = 0.35
"""Of a budget: what is kept for pairs, finalists and checks."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard is tried.

    Attributes:
        name: as on the command line.
        rounds: measurements for each kernel and m, asked for in batches of these sizes; between two
            of them the model learns.
        limit: distinct configs of a kernel to compile.
        budget_seconds: wall clock; None without.
        finalists: pairs that meet the default in the layer.
        layer_rounds: samples of each of them.
        wide: search beyond SGLang's grid.
        exhaustive: measure every config of the grid.
    """

    name: str
    rounds: tuple[int, ...] = ()
    limit: int = 0
    budget_seconds: float | None = None
    finalists: int = 2
    layer_rounds: int = 9
    wide: bool = True
    exhaustive: bool = False


EFFORTS: Mapping[str, Effort] = {
    "quick": Effort("quick", rounds=(4, 4, 4), limit=40, budget_seconds=45.0, wide=False),
    "full": Effort(
        "full",
        rounds=(6, 6, 8, 8, 8, 8, 8, 8, 8, 8),
        limit=240,
        budget_seconds=180.0,
        finalists=6,
        layer_rounds=21,
    ),
    "exhaustive": Effort("exhaustive", finalists=4, layer_rounds=15, wide=False, exhaustive=True),
}


@dataclass(frozen=True, slots=True)
class LayerResult:
    """The chosen pair against the default at one m, through the whole layer.

    Attributes:
        uniform_us: time of the layer with the chosen pair, under the routing that is tuned for; None where
            it was not timed.
        default_us: with the default pair; None: it cannot run.
        uniform_ratio: chosen over default, the median over rounds of both in the same round.
        zipf_ratio: the same under the other routing.
        noise: what two runs of the default differed by.
    """

    m: int
    uniform_us: float | None = None
    default_us: float | None = None
    uniform_ratio: float | None = None
    zipf_ratio: float | None = None
    noise: float = NOISE_FLOOR


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
        self._launches: Mapping[Kernel, Sequence[Launch]] = {}
        self._model: PerformanceModel | None = None
        self._only = only
        self._one_file = not server.separate_down_file
        self._known = len(laboratory.times)
        self._noise = NOISE_FLOOR
        self.complete = True
        """The search came to its end; False when the budget ended it."""
        begun = time.monotonic() if started is None else started
        budget = effort.budget_seconds
        self._search_end = None if budget is None else begun + budget * (1 - _SETTLING_SHARE)
        self._end = None if budget is None else begun + budget

    def begin(self) -> None:
        """Ask for the defaults, so that compiling and the GPU start before the model has ranked."""
        lab = self._lab
        middle = min(self._keys.ms, key=lambda m: (abs(math.log2(m / 64)), m))
        lab.enter("defaults")
        lab.use_anchor(Target("up", middle, self._server.default_config(self._problem, "up", middle)))
        lab.want(self._default_targets(self._keys.ms), priority=-1)

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
        self.search(launches, model, start_from)
        choices, layers = self.settle()
        lab.enter("between keys")
        choices, added, shortfalls = self._cover(choices, layers)
        lab.enter("numerics")
        choices, numerics = self._check(choices)
        spreads = sorted(lab.spreads.values())
        times = [target for target, time_us in lab.times.items() if time_us is not None]
        return Measured(
            choices=choices,
            keys=self._keys,
            added_keys=added,
            shortfalls=shortfalls,
            layers=layers,
            numerics=numerics,
            noise=self._noise,
            spread=statistics.median(spreads) if spreads else 0.0,
            measured=lab.measured,
            known=self._known,
            configs={
                kernel: len({target.config for target in times if target.kernel == kernel})
                for kernel in KERNELS
            },
            failed={f"{kernel} {config}": why for (kernel, config), why in sorted(lab.failed.items())},
            drifts=tuple(lab.drifts),
            compilations=lab.compilations,
            peaks=lab.measured_peaks(),
            complete=self.complete,
        )

    # search

    def search(
        self,
        launches: Mapping[Kernel, Sequence[Launch]],
        model: PerformanceModel,
        start_from: Sequence[KernelConfig] = (),
    ) -> None:
        """Measure what the effort asks for; the arguments are those of `tune`."""
        self._launches, self._model = launches, model
        self.begin()
        self._lab.want(
            Target(kernel, m, c) for c in start_from for kernel in self._kernels() for m in self._keys.ms
        )
        if self._effort.exhaustive:
            self._measure_all()
        else:
            self._search()

    def settle(self) -> tuple[Choices, dict[int, LayerResult]]:
        """Choose among what was measured: pairs, then finalists against the default in the layer."""
        self._lab.enter("pairs")
        self._complete_pairs()
        choices = self._choose(self._keys.ms)
        self._lab.enter("finalists")
        return self._meet_all(choices)

    def _measure_all(self) -> None:
        lab, ms = self._lab, self._keys.ms
        lab.enter("all")
        for kernel in self._kernels():
            # A good time early tells hopeless ones apart early.
            lab.want(self._ranked_first(kernel, ms), priority=0)
        wanted = [
            Target(kernel, m, launch.config)
            for kernel in self._kernels()
            for launch in self._launches[kernel]
            for m in ms
        ]
        lab.want(wanted, priority=1)
        self._run(self._end)
        self.complete = all(target in lab.times for target in wanted)

    def _ranked_first(self, kernel: Kernel, ms: Sequence[int]) -> list[Target]:
        """The configs that the model ranks first at each m."""
        field = self._field(kernel, ms)
        order = np.argsort(field.score, axis=1, kind="stable")[:, :_FIRST]
        return [
            Target(kernel, m, field.configs[place]) for m, row in zip(ms, order, strict=True) for place in row
        ]

    def _search(self) -> None:
        lab = self._lab
        searches = self._strategies()
        for number, rounds in enumerate(self._effort.rounds):
            lab.enter(f"search {number + 1}/{len(self._effort.rounds)}")
            asked: list[tuple[GuidedSearch, int, KernelConfig, tuple[Target, ...]]] = []
            for kernels, field, search in searches:
                for _ in range(rounds * len(field.ms)):
                    ask = search.ask()
                    if ask is None:
                        break
                    targets = tuple(Target(kernel, ask.m, ask.config) for kernel in kernels)
                    asked.append((search, ask.m, ask.config, targets))
            if not asked:
                break
            lab.want((target for *_, targets in asked for target in targets), priority=number)
            self._run(self._search_end)
            for search, m, config, targets in asked:
                if all(target in lab.times for target in targets):
                    times = [lab.times[target] for target in targets]
                    known = [time_us for time_us in times if time_us is not None]
                    search.tell(m, config, math.fsum(known) if len(known) == len(times) else None)
            if self._search_end is not None and time.monotonic() >= self._search_end:
                self.complete = False
                break

    def _run(self, deadline: float | None) -> None:
        lab = self._lab
        lab.run(None if lab.sealed else deadline)

    def _kernels(self) -> tuple[Kernel, ...]:
        return KERNELS if self._only is None or self._one_file else (self._only,)

    def _strategies(self) -> list[tuple[tuple[Kernel, ...], Field, GuidedSearch]]:
        """A search for each kernel; for one file a single one, of both kernels' sum."""
        effort, ms = self._effort, self._keys.ms
        fields = {kernel: self._field(kernel, ms) for kernel in self._kernels()}
        if self._one_file:
            joint = _joint(fields["up"], fields["down"])
            return [(KERNELS, joint, GuidedSearch(joint, sum(effort.rounds), limit=effort.limit))]
        return [
            ((kernel,), field, GuidedSearch(field, sum(effort.rounds), limit=effort.limit))
            for kernel, field in fields.items()
        ]

    def _field(self, kernel: Kernel, ms: Sequence[int]) -> Field:
        assert self._model is not None
        launches = list(self._launches[kernel])
        predictions = [self._model.predict(self._problem, kernel, m, launches) for m in ms]
        return Field(
            tuple(launch.config for launch in launches),
            tuple(ms),
            np.stack([prediction.time_us for prediction in predictions]),
            np.stack([prediction.score for prediction in predictions]),
        )

    def _complete_pairs(self) -> None:
        """Measure what a good config of one kernel needs beside it in the other.

        With two files that is a config of the same BLOCK_SIZE_M, with one file the same config.
        """
        wanted: list[Target] = []
        for m in self._keys.ms:
            by_kernel = {kernel: self._measured(kernel, m) for kernel in KERNELS}
            for kernel, other in (KERNELS, KERNELS[::-1]):
                best = nsmallest(3, by_kernel[kernel].items(), key=lambda item: (item[1], item[0]))
                there = by_kernel[other]
                for config, _ in best:
                    if self._one_file:
                        wanted.append(Target(other, m, config))
                    elif all(has.block_size_m != config.block_size_m for has in there):
                        wanted += self._likely(other, m, config.block_size_m)
        self._lab.want(wanted)
        self._run(self._end)

    def _likely(self, kernel: Kernel, m: int, block_size_m: int) -> list[Target]:
        """The two configs of a BLOCK_SIZE_M that the model ranks first, of those measured elsewhere."""
        launches = [
            launch
            for launch in self._launches[kernel]
            if launch.config.block_size_m == block_size_m and (kernel, launch.config) not in self._lab.failed
        ]
        known = {target.config for target in self._lab.times if target.kernel == kernel}
        launches = [launch for launch in launches if launch.config in known] or launches
        if not launches:
            return []
        assert self._model is not None
        score = self._model.predict(self._problem, kernel, m, launches).score
        order = np.argsort(score, kind="stable")[:2]
        return [Target(kernel, m, launches[int(place)].config) for place in order]

    # choosing

    def _measured(self, kernel: Kernel, m: int) -> dict[KernelConfig, float]:
        return {
            target.config: time_us
            for target, time_us in self._lab.times.items()
            if target.kernel == kernel and target.m == m and time_us is not None
        }

    def _default(self, m: int) -> Pair:
        return Pair(*(self._server.default_config(self._problem, kernel, m) for kernel in KERNELS))

    def _default_targets(self, ms: Sequence[int]) -> list[Target]:
        pairs = [(m, self._default(m)) for m in ms]
        return [target for m, pair in pairs for target in _targets(m, pair)]

    def _point(self, m: int) -> Point:
        sides: dict[Kernel, Candidates] = {}
        for kernel in KERNELS:
            found = self._measured(kernel, m)
            configs = tuple(sorted(found))
            sides[kernel] = Candidates(configs, [found[config] for config in configs])
        pair = self._default(m)
        up, down = (self._lab.times.get(target) for target in _targets(m, pair))
        return Point(
            m, sides["up"], sides["down"], DefaultConfig(pair.up, up), DefaultConfig(pair.down, down)
        )

    def _choose(self, ms: Sequence[int]) -> Choices:
        return choose([self._point(m) for m in ms], one_file=self._one_file, noise=self._noise)

    def _finalists(self, choice: Choice) -> list[Pair]:
        """The chosen pair and the best others by the sum of what was measured, without the default."""
        found: dict[Pair, None] = {choice.pair: None}
        ups, downs = self._measured("up", choice.m), self._measured("down", choice.m)
        sums = [
            (of_up + of_down, Pair(up, down))
            for up, of_up in nsmallest(12, ups.items(), key=lambda item: (item[1], item[0]))
            for down, of_down in nsmallest(24, downs.items(), key=lambda item: (item[1], item[0]))
            if (up == down if self._one_file else up.block_size_m == down.block_size_m)
        ]
        ordered = sorted(sums, key=lambda item: (item[0], item[1].up.sort_key(), item[1].down.sort_key()))
        found.update(dict.fromkeys(pair for _, pair in ordered))
        found.pop(self._default(choice.m), None)
        return list(found)[: self._effort.finalists]

    def _meet_all(self, choices: Choices) -> tuple[Choices, dict[int, LayerResult]]:
        """Let the finalists meet the default, twice there for the noise, in the whole layer."""
        layers: dict[int, LayerResult] = {}
        entries = []
        for choice in choices.entries:
            entry, layers[choice.m] = self._meet(choice)
            entries.append(entry)
        noises = [layer.noise for layer in layers.values()]
        self._noise = max(NOISE_FLOOR, statistics.median(noises)) if noises else NOISE_FLOOR
        return Choices(tuple(entries), choices.one_file), layers

    def _meet(self, choice: Choice) -> tuple[Choice, LayerResult]:
        m = choice.m
        if choice.default_us is None:
            return choice, LayerResult(m)  # there is nothing to lose to
        default, pairs = self._default(m), self._finalists(choice)
        if not pairs or self._cannot_pair(default):
            return choice, LayerResult(m)
        rounds = self._effort.layer_rounds
        contestants = (default, *pairs, default)
        main = self._problem.routing
        uniform = self._lab.layer(m, contestants, main, rounds)
        skewed = self._lab.layer(m, contestants, other_routing(main), max(rounds // 2, 5))
        if uniform is None:
            return self._kept(choice), LayerResult(m)
        noise = max(NOISE_FLOOR, abs(_ratio(uniform, len(pairs) + 1, (0,)) - 1))
        base = (0, len(pairs) + 1)
        ratios = {pair: _ratio(uniform, place, base) for place, pair in enumerate(pairs, 1)}
        skewed_ratios = (
            {}
            if skewed is None
            else {pair: _ratio(skewed, place, base) for place, pair in enumerate(pairs, 1)}
        )
        passed = {
            pair: ratio
            for pair, ratio in ratios.items()
            if ratio < 1 - noise and skewed_ratios.get(pair, 1.0) <= 1 + max(noise, 2 * NOISE_FLOOR)
        }
        times = [statistics.median(row) for row in uniform.samples_us]
        default_us = (times[0] + times[-1]) / 2
        if not passed:
            result = LayerResult(m, default_us, default_us, 1.0, 1.0, noise)
            return self._kept(choice), result
        best = min(passed, key=lambda pair: (passed[pair], pair.up.sort_key(), pair.down.sort_key()))
        # The choice of the neighbouring m stays where nothing is better by more than the noise.
        chosen = choice.pair if passed.get(choice.pair, math.inf) <= passed[best] * (1 + noise) else best
        result = LayerResult(
            m, ratios[chosen] * default_us, default_us, ratios[chosen], skewed_ratios.get(chosen), noise
        )
        return self._entry(choice, chosen), result

    def _cannot_pair(self, pair: Pair) -> bool:
        return not self._one_file and pair.up.block_size_m != pair.down.block_size_m

    def _entry(self, choice: Choice, pair: Pair) -> Choice:
        if pair == choice.pair:
            return choice
        up, down = (self._lab.times[target] for target in _targets(choice.m, pair))
        assert up is not None
        assert down is not None
        return replace(choice, pair=pair, up_us=up, down_us=down, reason=Reason.FASTER)

    def _kept(self, choice: Choice) -> Choice:
        if choice.reason in (Reason.DEFAULT_KEPT, Reason.DEFAULT_CANNOT_STAND):
            return choice
        default = self._default(choice.m)
        if self._one_file and default.up != default.down:
            return choice
        return replace(self._entry(choice, default), reason=Reason.DEFAULT_KEPT)

    # between the keys

    def _cover(
        self, choices: Choices, layers: dict[int, LayerResult]
    ) -> tuple[Choices, tuple[int, ...], tuple[int, ...]]:
        """Measure what the server would pick between the keys; add keys where its default is faster."""
        switches = self._server.default_switches(self._problem)
        largest = self._keys.ms[-1]
        added: list[int] = []
        shortfalls: tuple[Shortfall, ...] = ()
        for _ in range(3):
            probes = [
                m
                for m in probe_ms(choices.up, switches, largest)
                if m not in layers and not self._is_inside(choices, m)
            ]
            times_at = self._times_at(choices, probes)
            measured = [m for m in probes if self._is_known(choices, m)]
            shortfalls = check_coverage(
                choices.up, choices.down, self._default, times_at, measured, noise=2 * self._noise
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
                for target in _targets(m, _pair_at(choices, key))
            )
            self._run(None)
            entries = []
            for choice in self._choose(new).entries:
                entry, layers[choice.m] = self._meet(choice)
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
        return self._default(below) == self._default(m) == self._default(above)

    def _is_known(self, choices: Choices, m: int) -> bool:
        """Whether both that the server would pick and its default were asked for at that m."""
        pair = Pair(choices.up.nearest(m), (choices.down or choices.up).nearest(m))
        targets = (*_targets(m, pair), *_targets(m, self._default(m)))
        return all(target in self._lab.times for target in targets)

    def _times_at(self, choices: Choices, probes: Sequence[int]) -> TimesAt:
        """What `check_coverage` asks, measured at once for all probes."""
        wanted = []
        for m in probes:
            pair = Pair(choices.up.nearest(m), (choices.down or choices.up).nearest(m))
            if pair != self._default(m):
                wanted += [*_targets(m, pair), *_targets(m, self._default(m))]
        self._lab.want(wanted)
        self._run(None)

        def times_at(m: int, pairs: Sequence[Pair]) -> list[float | None]:
            found = []
            for pair in pairs:
                up, down = (self._lab.times.get(target) for target in _targets(m, pair))
                found.append(None if up is None or down is None else up + down)
            return found

        return times_at

    # numbers

    def _check(self, choices: Choices) -> tuple[Choices, tuple[Numerics, ...]]:
        """Compare each chosen config with the reference, and put the default where one is wrong."""
        found: dict[tuple[Kernel, KernelConfig], Numerics] = {}
        entries = []
        for choice in choices.entries:
            right = True
            for target in _targets(choice.m, choice.pair):
                key = (target.kernel, target.config)
                if key not in found:
                    checked = self._lab.check(target.kernel, target.m, target.config)
                    if checked is None:
                        right = False
                        continue
                    found[key] = Numerics(
                        target.kernel, target.m, target.config, checked.relative_error, checked.tolerance
                    )
                right &= found[key].relative_error <= found[key].tolerance
            is_default = choice.pair == self._default(choice.m)
            if not right and is_default and not self._lab.sealed:
                raise MoetuneError(
                    f"at m={choice.m} even the default computes wrong numbers here: nothing can be trusted",
                    "look at the journal, and report it",
                )
            entries.append(choice if right or is_default else self._kept(choice))
        return Choices(tuple(entries), choices.one_file), tuple(found.values())


def other_routing(routing: str) -> str:
    """The routing under which what is tuned for one may not lose to the default either."""
    return SKEWED if routing == "uniform" else "uniform"


def _targets(m: int, pair: Pair) -> tuple[Target, Target]:
    return Target("up", m, pair.up), Target("down", m, pair.down)


def _pair_at(choices: Choices, key: int) -> Pair:
    return next(entry.pair for entry in choices.entries if entry.m == key)


def _joint(up: Field, down: Field) -> Field:
    """One config for both kernels: times and scores add up."""
    places = {config: place for place, config in enumerate(down.configs)}
    shared = [(place, places[config]) for place, config in enumerate(up.configs) if config in places]
    of_up, of_down = (list(side) for side in zip(*shared, strict=True))
    return Field(
        tuple(up.configs[place] for place in of_up),
        up.ms,
        up.predicted_us[:, of_up] + down.predicted_us[:, of_down],
        up.score[:, of_up] + down.score[:, of_down],
    )


def _ratio(timed: LayerTimed, place: int, base: Sequence[int]) -> float:
    """A contestant over the base, the median of the ratios within each round."""
    rows = timed.samples_us
    return statistics.median(
        rows[place][turn] / statistics.fmean(rows[other][turn] for other in base)
        for turn in range(len(rows[place]))
    )
