"""Choosing: finalists meet the server's default, interleaved, through the whole layer."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from heapq import nsmallest
from typing import TYPE_CHECKING

from moetune.applications.questions import time_layer
from moetune.applications.targets import targets_of
from moetune.applications.tuning_sorted import SortedPairs
from moetune.domain.choose import Candidates, Choice, Choices, DefaultConfig, Pair, Point, Reason, choose
from moetune.domain.problem import KERNELS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moetune.applications.measuring import Laboratory
    from moetune.applications.tuning_efforts import Effort
    from moetune.domain.problem import Kernel, Problem
    from moetune.measure.protocol import LayerTimed
    from moetune.servers.protocol import Server

NOISE_FLOOR = 0.005
"""One measurement on an H200 is off by about that (recorded landscapes, 2026-12-01): no claim below."""
SKEWED = "zipf:1.2"
"""The routing under which nothing may lose to the default either, where uniform routing is tuned for."""


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


class Finals:
    """Chooses among what a laboratory has measured.

    Args:
        server: the release whose defaults count.
        problem: the problem.
        laboratory: what was measured, and where finalists meet.
        effort: how many finalists, and how often each is timed.
    """

    def __init__(self, server: Server, problem: Problem, laboratory: Laboratory, effort: Effort) -> None:
        self._server, self._problem, self._lab, self._effort = server, problem, laboratory, effort
        self._one_file = not server.separate_down_file
        self.sorted_pairs = SortedPairs(server, problem, laboratory, effort)
        self.noise = NOISE_FLOOR
        """What a gain has to beat."""

    def default(self, m: int) -> Pair:
        """What the server takes without a file."""
        return Pair(*(self._server.default_config(self._problem, kernel, m) for kernel in KERNELS))

    def _point(self, m: int) -> Point:
        sides: dict[Kernel, Candidates] = {}
        for kernel in KERNELS:
            found = self._lab.known.times_at(kernel, m)
            configs = tuple(sorted(found))
            sides[kernel] = Candidates(configs, [found[config] for config in configs])
        pair = self.default(m)
        up, down = (self._lab.known.times.get(target) for target in targets_of(m, pair))
        return Point(
            m, sides["up"], sides["down"], DefaultConfig(pair.up, up), DefaultConfig(pair.down, down)
        )

    def choose(self, ms: Sequence[int]) -> Choices:
        """The pair of each key, by what was measured."""
        return choose([self._point(m) for m in ms], one_file=self._one_file, noise=self.noise)

    def _finalists(self, choice: Choice) -> list[Pair]:
        """The chosen pair and the best others by the sum of what was measured, without the default."""
        found: dict[Pair, None] = {choice.pair: None}
        ups, downs = self._lab.known.times_at("up", choice.m), self._lab.known.times_at("down", choice.m)
        sums = [
            (of_up + of_down, Pair(up, down))
            for up, of_up in nsmallest(12, ups.items(), key=lambda item: (item[1], item[0]))
            for down, of_down in nsmallest(24, downs.items(), key=lambda item: (item[1], item[0]))
            if (up == down if self._one_file else up.block_size_m == down.block_size_m)
        ]
        ordered = sorted(sums, key=lambda item: (item[0], item[1].up.sort_key(), item[1].down.sort_key()))
        found.update(dict.fromkeys(pair for _, pair in ordered))
        found.pop(self.default(choice.m), None)
        by_tma = self.sorted_pairs.best(choice.m, self._effort.finalists // 2)
        return [*list(found)[: self._effort.finalists], *by_tma]

    def meet_all(self, choices: Choices) -> tuple[Choices, dict[int, LayerResult]]:
        """Let the finalists meet the default, twice there for the noise, in the whole layer."""
        layers: dict[int, LayerResult] = {}
        entries = []
        for choice in choices.entries:
            entry, layers[choice.m] = self.meet(choice)
            entries.append(entry)
        noises = [layer.noise for layer in layers.values()]
        self.noise = max(NOISE_FLOOR, statistics.median(noises)) if noises else NOISE_FLOOR
        return Choices(tuple(entries), choices.one_file), layers

    def meet(self, choice: Choice) -> tuple[Choice, LayerResult]:
        """Let the finalists of one key meet the default."""
        m = choice.m
        if choice.default_us is None:
            return choice, LayerResult(m)  # there is nothing to lose to
        default, pairs = self.default(m), self._finalists(choice)
        if not pairs or self._cannot_pair(default):
            return choice, LayerResult(m)
        rounds = self._effort.layer_rounds
        contestants = (default, *pairs, default)
        main = self._problem.routing
        uniform = time_layer(self._lab, m, contestants, main, rounds)
        skewed = time_layer(self._lab, m, contestants, other_routing(main), max(rounds // 2, 5))
        if uniform is None:
            return self.kept(choice), LayerResult(m)
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
            return self.kept(choice), result
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
        up, down = (self._lab.known.times[target] for target in targets_of(choice.m, pair))
        assert up is not None
        assert down is not None
        return replace(choice, pair=pair, up_us=up, down_us=down, reason=Reason.FASTER)

    def kept(self, choice: Choice) -> Choice:
        """The choice with the default's pair, where that can stand in a file."""
        if choice.reason in (Reason.DEFAULT_KEPT, Reason.DEFAULT_CANNOT_STAND):
            return choice
        default = self.default(choice.m)
        if self._one_file and default.up != default.down:
            return choice
        return replace(self._entry(choice, default), reason=Reason.DEFAULT_KEPT)


def other_routing(routing: str) -> str:
    """The routing under which what is tuned for one may not lose to the default either."""
    return SKEWED if routing == "uniform" else "uniform"


def _ratio(timed: LayerTimed, place: int, base: Sequence[int]) -> float:
    """A contestant over the base, the median of the ratios within each round."""
    rows = timed.samples_us
    return statistics.median(
        rows[place][turn] / statistics.fmean(rows[other][turn] for other in base)
        for turn in range(len(rows[place]))
    )
