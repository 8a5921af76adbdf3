"""Searching: the model ranks, few configs are compiled, all m are measured from them, and it learns."""

from __future__ import annotations

import math
import time
from heapq import nsmallest
from typing import TYPE_CHECKING

import numpy as np

from moetune.applications.targets import Target
from moetune.domain.problem import KERNELS
from moetune.domain.search import Field, GuidedSearch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moetune.applications.measuring import Laboratory
    from moetune.applications.tuning_efforts import Effort
    from moetune.domain.config import KernelConfig
    from moetune.domain.launch import Launch
    from moetune.domain.predict import PerformanceModel
    from moetune.domain.problem import Kernel, Problem

_FIRST = 3
"""Configs of each m that an exhaustive run begins with."""
_SETTLING_SHARE = 0.35
"""Of a budget: what is kept for pairs, finalists and checks."""


class Search:
    """Decides what is measured for one problem.

    Args:
        laboratory: where is measured.
        problem: the problem.
        ms: the keys.
        effort: how hard to try.
        launches: the search space of each kernel.
        model: what ranks it.
        one_file: both kernels get one config.
        only: search this kernel alone.
        started: time of the monotonic clock from which the effort's budget counts.
    """

    def __init__(
        self,
        laboratory: Laboratory,
        problem: Problem,
        ms: Sequence[int],
        effort: Effort,
        launches: Mapping[Kernel, Sequence[Launch]],
        model: PerformanceModel,
        *,
        one_file: bool,
        only: Kernel | None,
        started: float,
    ) -> None:
        self._lab, self._problem, self._ms, self._effort = laboratory, problem, tuple(ms), effort
        self._launches, self._model, self._one_file = launches, model, one_file
        self._kernels = KERNELS if only is None or one_file else (only,)
        budget = effort.budget_seconds
        self._search_end = None if budget is None else started + budget * (1 - _SETTLING_SHARE)
        self._end = None if budget is None else started + budget
        self.complete = True
        """The search came to its end; False when the budget ended it."""

    def run(self, start_from: Sequence[KernelConfig] = ()) -> None:
        """Measure what the effort asks for.

        Args:
            start_from: configs to measure at every m, whatever the model says.
        """
        self._lab.want(Target(kernel, m, c) for c in start_from for kernel in self._kernels for m in self._ms)
        if self._effort.exhaustive:
            self._measure_all()
        else:
            self._search()

    def _measure_all(self) -> None:
        lab, ms = self._lab, self._ms
        lab.enter("all")
        for kernel in self._kernels:
            # A good time early tells hopeless ones apart early.
            lab.want(self._ranked_first(kernel, ms), priority=0)
        wanted = [
            Target(kernel, m, launch.config)
            for kernel in self._kernels
            for launch in self._launches[kernel]
            for m in ms
        ]
        lab.want(wanted, priority=1)
        self._lab.run(self._end)
        self.complete = all(target in lab.known.times for target in wanted)

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
            self._lab.run(self._search_end)
            for search, m, config, targets in asked:
                if all(target in lab.known.times for target in targets):
                    times = [lab.known.times[target] for target in targets]
                    known = [time_us for time_us in times if time_us is not None]
                    search.tell(m, config, math.fsum(known) if len(known) == len(times) else None)
            if self._search_end is not None and time.monotonic() >= self._search_end:
                self.complete = False
                break

    def _strategies(self) -> list[tuple[tuple[Kernel, ...], Field, GuidedSearch]]:
        """A search for each kernel; for one file a single one, of both kernels' sum."""
        effort, ms = self._effort, self._ms
        fields = {kernel: self._field(kernel, ms) for kernel in self._kernels}
        if self._one_file:
            joint = _joint(fields["up"], fields["down"])
            return [(KERNELS, joint, GuidedSearch(joint, sum(effort.rounds), limit=effort.limit))]
        return [
            ((kernel,), field, GuidedSearch(field, sum(effort.rounds), limit=effort.limit))
            for kernel, field in fields.items()
        ]

    def _field(self, kernel: Kernel, ms: Sequence[int]) -> Field:
        launches = list(self._launches[kernel])
        predictions = [self._model.predict(self._problem, kernel, m, launches) for m in ms]
        return Field(
            tuple(launch.config for launch in launches),
            tuple(ms),
            np.stack([prediction.time_us for prediction in predictions]),
            np.stack([prediction.score for prediction in predictions]),
        )

    def complete_pairs(self) -> None:
        """Measure what a good config of one kernel needs beside it in the other.

        With two files that is a config of the same BLOCK_SIZE_M, with one file the same config.
        """
        wanted: list[Target] = []
        for m in self._ms:
            by_kernel = {kernel: self._lab.known.times_at(kernel, m) for kernel in KERNELS}
            for kernel, other in (KERNELS, KERNELS[::-1]):
                best = nsmallest(3, by_kernel[kernel].items(), key=lambda item: (item[1], item[0]))
                there = by_kernel[other]
                for config, _ in best:
                    if self._one_file:
                        wanted.append(Target(other, m, config))
                    elif all(has.block_size_m != config.block_size_m for has in there):
                        wanted += self._likely(other, m, config.block_size_m)
        self._lab.want(wanted)
        self._lab.run(self._end)

    def _likely(self, kernel: Kernel, m: int, block_size_m: int) -> list[Target]:
        """The two configs of a BLOCK_SIZE_M that the model ranks first, of those measured elsewhere."""
        launches = [
            launch
            for launch in self._launches[kernel]
            if launch.config.block_size_m == block_size_m
            and (kernel, launch.config) not in self._lab.known.failed
        ]
        known = {target.config for target in self._lab.known.times if target.kernel == kernel}
        launches = [launch for launch in launches if launch.config in known] or launches
        if not launches:
            return []
        score = self._model.predict(self._problem, kernel, m, launches).score
        order = np.argsort(score, kind="stable")[:2]
        return [Target(kernel, m, launches[int(place)].config) for place in order]


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
