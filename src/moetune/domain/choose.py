"""From timed configs to the config of each m: never worse than the default, few different ones.

Pure functions on values: whether times are measured or predicted is the caller's to say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING, Any

from moetune.domain.config import ConfigTable, KernelConfig
from moetune.domain.errors import MoetuneError
from moetune.domain.pairing import Pairings

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FIRST_FEW = 8
_MAX_TIED = 256  # pairs that one run of neighbouring m starts with; the best by score


class NothingRunsError(MoetuneError):
    """Neither a candidate nor the server's default can run."""


class Reason(str, Enum):
    """Why an m has its entry."""

    FASTER = "beats the default by more than the noise"
    AS_NEIGHBOUR = "beats the default, ties with the best, and is the entry of a neighbouring m"
    DEFAULT_KEPT = "the default: nothing beats it by more than the noise"
    DEFAULT_CANNOT_RUN = "the default cannot run"
    DEFAULT_CANNOT_STAND = "the best of its kind: the default is two configs, and the file holds one"


@dataclass(frozen=True, slots=True)
class Pair:
    """The configs of both kernels at one m."""

    up: KernelConfig
    down: KernelConfig


@dataclass(frozen=True, slots=True)
class Candidates:
    """Configs of one kernel at one m that can run, each with its time.

    Attributes:
        configs: `[n]`; the same object at every m makes choosing faster.
        time_us: `[n]` measured or predicted time.
        score: `[n]` what to rank by, lower is better, in the unit of the time; None: the time.
        alternatives_us: `[scenarios, n]` times under other assumptions (another routing, another
            member of an ensemble), for the best worst case.
    """

    configs: Sequence[KernelConfig]
    time_us: Sequence[float]
    score: Sequence[float] | None = None
    alternatives_us: Sequence[Sequence[float]] = ()

    def __post_init__(self) -> None:
        scores = () if self.score is None else (self.score,)
        for values in (self.time_us, *scores, *self.alternatives_us):
            if len(values) != len(self.configs):
                raise ValueError(f"{len(self.configs)} configs with {len(values)} values")
            if len(values) and not (min(values) > 0 and math.isfinite(math.fsum(values))):
                raise ValueError("a time is not a positive number: leave out what cannot run")


@dataclass(frozen=True, slots=True)
class DefaultConfig:
    """What the server uses for one kernel when it finds no file.

    Attributes:
        config: the server's own default at that m.
        time_us: its time; None: it cannot run.
        score: as in `Candidates`, needed where they have scores.
        alternatives_us: `[scenarios]` as in `Candidates`, needed where they have them.
    """

    config: KernelConfig
    time_us: float | None
    score: float | None = None
    alternatives_us: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Point:
    """All that is known about one m."""

    m: int
    up: Candidates
    down: Candidates
    default_up: DefaultConfig
    default_down: DefaultConfig


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen for one m.

    Attributes:
        default_us: time of the default pair; None: it cannot run.
    """

    m: int
    pair: Pair
    up_us: float
    down_us: float
    default_us: float | None
    reason: Reason

    @property
    def time_us(self) -> float:
        """Up and down together."""
        return self.up_us + self.down_us

    @property
    def speedup(self) -> float | None:
        """Time of the default over the time of the choice; None when the default cannot run."""
        return None if self.default_us is None else self.default_us / self.time_us

    def to_json(self) -> dict[str, Any]:
        """What every document says of it; the configs stand beside it."""
        return {
            "m": self.m,
            "up_us": self.up_us,
            "down_us": self.down_us,
            "default_us": self.default_us,
            "speedup": self.speedup,
            "reason": self.reason.value,
        }


@dataclass(frozen=True, slots=True)
class Choices:
    """What was chosen, by ascending m.

    Attributes:
        one_file: the server reads one file, so that up and down are the same config.
    """

    entries: tuple[Choice, ...]
    one_file: bool

    @property
    def improves(self) -> bool:
        """Whether any m gains; if not, there is nothing to write."""
        kept = (Reason.DEFAULT_KEPT, Reason.DEFAULT_CANNOT_STAND)
        return any(entry.reason not in kept for entry in self.entries)

    @property
    def up(self) -> ConfigTable:
        """The table of the up kernel, of both kernels where the server reads one file."""
        return ConfigTable(tuple((entry.m, entry.pair.up) for entry in self.entries))

    @property
    def down(self) -> ConfigTable | None:
        """The table of the down kernel; None where the server reads one file."""
        if self.one_file:
            return None
        return ConfigTable(tuple((entry.m, entry.pair.down) for entry in self.entries))

    def geomean_speedup(self, traffic: Iterable[tuple[int, float]]) -> float | None:
        """Geometric mean of the speedups over `(m, weight)`; None where no default can run."""
        logs = [(weight, math.log(speedup)) for weight, speedup in self._weighted(traffic)]
        total = math.fsum(weight for weight, _ in logs)
        return math.exp(math.fsum(weight * log for weight, log in logs) / total) if total else None

    def total_speedup(self, traffic: Iterable[tuple[int, float]]) -> float | None:
        """Time of the defaults over that of the choices, with weight calls of each `(m, weight)`."""
        by_m = {entry.m: entry for entry in self.entries}
        pairs = [(w, by_m[m]) for m, w in traffic if by_m[m].default_us is not None]
        default = math.fsum(weight * (entry.default_us or 0.0) for weight, entry in pairs)
        chosen = math.fsum(weight * entry.time_us for weight, entry in pairs)
        return default / chosen if chosen else None

    def _weighted(self, traffic: Iterable[tuple[int, float]]) -> list[tuple[float, float]]:
        by_m = {entry.m: entry.speedup for entry in self.entries}
        return [(weight, speedup) for m, weight in traffic if (speedup := by_m[m]) is not None]


def choose(
    points: Sequence[Point],
    *,
    one_file: bool,
    noise: float,
    tie: float | None = None,
    first_few: int = FIRST_FEW,
    veto: bool = True,
) -> Choices:
    """Choose up and down together for each m.

    With one file both kernels get the same config and their sum is least; with two they agree on
    BLOCK_SIZE_M. The default keeps an m unless something beats it by more than the noise, in time
    and in score. Of what ties with the best, neighbouring m get the same configs, in the fewest
    possible runs. Configs with USE_TMA are left out: they change the other kernel's layout, so that
    the sum of two times says nothing.

    Args:
        points: one for each m.
        one_file: the server reads one file for both kernels.
        noise: relative difference of two times that means nothing.
        tie: relative difference of score that counts as a tie; None: the noise.
        first_few: with alternatives, how many pairs by score the best worst case is sought among.
        veto: refuse a pair that loses to the default under any one alternative; False: alternatives
            only rank the first few.

    Raises:
        NothingRunsError: when an m has neither a candidate nor a default that can run.
    """
    if not 0 <= noise < 1:
        raise ValueError(f"noise is {noise}")
    pairings = Pairings()
    ordered = [
        _Field(point, pairings, one_file, noise, noise if tie is None else tie, first_few, veto)
        for point in sorted(points, key=lambda point: point.m)
    ]
    entries: list[Choice] = []
    while len(entries) < len(ordered):
        rest = islice(ordered, len(entries), None)
        entries += _run(next(rest), rest)
    return Choices(tuple(entries), one_file)


def _run(first: _Field, rest: Iterable[_Field]) -> list[Choice]:
    """The choices from one m on, as far as one pair ties with the best at every m."""
    if first.best is None:
        return [first.keep_default()]
    run = [first]
    values = first.tied()
    for field in rest:
        shared = {}
        for pair, value in values.items():
            here = field.value(pair)
            if here is not None:
                shared[pair] = value + here
        if not shared:
            break
        run.append(field)
        values = shared
    pair = min(values, key=lambda pair: (values[pair], pair.up.sort_key(), pair.down.sort_key()))
    return [field.choice(pair) for field in run]


class _Side:
    """One kernel at one m: its candidates, and its default as one more."""

    def __init__(self, given: Candidates, default: DefaultConfig, pairings: Pairings) -> None:
        self.default = default
        self.default_score = default.time_us if given.score is None else default.score
        self.layout = pairings.layout(given.configs, None if default.time_us is None else default.config)
        self.place = self.layout.place
        self.time = given.time_us
        self.score = given.time_us if given.score is None else given.score
        self.scenarios = list(given.alternatives_us)
        if default.time_us is None:
            return
        if self.default_score is None or len(default.alternatives_us) != len(self.scenarios):
            raise ValueError("the default lacks the score or the alternatives that the candidates have")
        if len(self.layout.configs) > len(given.configs):
            self.time = (*self.time, default.time_us)
            self.score = (*self.score, self.default_score)
            alternatives = zip(self.scenarios, default.alternatives_us, strict=True)
            self.scenarios = [(*values, value) for values, value in alternatives]


class _Field:
    """One m, prepared: which pairs may take the default's place, and how good each is."""

    def __init__(
        self,
        point: Point,
        pairings: Pairings,
        one_file: bool,
        noise: float,
        tie: float,
        first_few: int,
        veto: bool,
    ) -> None:
        self.m = point.m
        self.up = _Side(point.up, point.default_up, pairings)
        self.down = _Side(point.down, point.default_down, pairings)
        self.pairing = pairings.pairing(self.up.layout, self.down.layout, one_file)
        self.tie = tie
        self.noise = noise
        self.default = Pair(point.default_up.config, point.default_down.config)
        # vLLM's defaults of the grouped int4 kernel: no entry of the one file can say both.
        self.is_split = one_file and self.default.up != self.default.down
        self._check()
        self._set_bars(noise, veto)
        front = self._front(self.up.score, self.down.score, first_few)
        # Where the score and the time disagree about what beats the default, the fastest still may.
        self.front = front or self._front(self.up.time, self.down.time, first_few)
        self.best = min(self.front.values(), default=None)
        self.regret = self._regret() if self.up.scenarios else None
        if self.best is None and (self.default_us is None or self.is_split):
            raise NothingRunsError(
                f"no config and not even the server's default can run at m={point.m}",
                "widen the search space, or ask for another GPU",
            )

    def _check(self) -> None:
        if len(self.up.scenarios) != len(self.down.scenarios):
            raise ValueError("up and down have different numbers of alternatives")
        if not self.is_split and self.default.up.block_size_m != self.default.down.block_size_m:
            raise ValueError("the default pair disagrees on BLOCK_SIZE_M")

    def _set_bars(self, noise: float, veto: bool) -> None:
        """What a pair must stay under to take the default's place."""
        up, down = self.up.default, self.down.default
        self.default_us: float | None = None
        self.time_bar = self.score_bar = math.inf
        self.scenario_bars = [math.inf] * len(self.up.scenarios)
        if up.time_us is None or down.time_us is None:
            return
        self.default_us = up.time_us + down.time_us
        if self.is_split:
            return  # it cannot be kept, so that nothing has to beat it
        self.time_bar = self.default_us * (1 - noise)
        self.score_bar = ((self.up.default_score or 0.0) + (self.down.default_score or 0.0)) * (1 - noise)
        if not veto:
            return
        alternatives = zip(up.alternatives_us, down.alternatives_us, strict=True)
        self.scenario_bars = [(of_up + of_down) * (1 + noise) for of_up, of_down in alternatives]

    def _accepts(self, up: int, down: int) -> bool:
        """Whether a pair beats the default by more than the noise, and loses under no assumption."""
        if self.default_us is None:
            return True
        scenarios = zip(self.up.scenarios, self.down.scenarios, self.scenario_bars, strict=True)
        return (
            self.up.time[up] + self.down.time[down] < self.time_bar
            and self.up.score[up] + self.down.score[down] < self.score_bar
            and all(of_up[up] + of_down[down] <= bar for of_up, of_down, bar in scenarios)
            # Timed a second time among the candidates, the default must not beat itself.
            and self._pair(up, down) != self.default
        )

    def _pair(self, up: int, down: int) -> Pair:
        return Pair(self.up.layout.configs[up], self.down.layout.configs[down])

    def _front(self, of_up: Sequence[float], of_down: Sequence[float], count: int) -> dict[Pair, float]:
        """Of the first few pairs by these values those that may replace the default, with their score."""
        return {
            self._pair(i, j): self.up.score[i] + self.down.score[j]
            for _, i, j in self.pairing.least(of_up, of_down, count)
            if self._accepts(i, j)
        }

    def _regret(self) -> dict[Pair, float]:
        """For the first few pairs the largest loss under any assumption; 1 is none."""
        scenarios = [
            (self.up.time, self.down.time),
            *zip(self.up.scenarios, self.down.scenarios, strict=True),
        ]
        worst = dict.fromkeys(self.front, 1.0)
        for of_up, of_down in scenarios:
            sums = {
                pair: of_up[self.up.place[pair.up]] + of_down[self.down.place[pair.down]] for pair in worst
            }
            least = min(sums.values(), default=1.0)
            worst = {pair: max(worst[pair], total / least) for pair, total in sums.items()}
        return worst

    def value(self, pair: Pair) -> float | None:
        """How far a pair is from the best, 1 being the best; None where it does not tie with it."""
        if self.best is None:
            return None
        if self.regret is not None:
            regret = self.regret.get(pair, math.inf)
            return regret if regret <= min(self.regret.values()) * (1 + self.tie) else None
        up, down = self.up.place.get(pair.up), self.down.place.get(pair.down)
        if up is None or down is None:
            return None
        relative = (self.up.score[up] + self.down.score[down]) / self.best
        return relative if relative <= 1 + self.tie and self._accepts(up, down) else None

    def tied(self) -> dict[Pair, float]:
        """Pairs that tie with the best: all of them up to `_MAX_TIED`, the best among them always."""
        pairs = list(self.front)
        if self.regret is None and self.best is not None:
            limit = self.best * (1 + self.tie)
            near = self.pairing.within(self.up.score, self.down.score, limit, _MAX_TIED)
            pairs += [self._pair(i, j) for _, i, j in near]
        return {pair: value for pair in pairs if (value := self.value(pair)) is not None}

    def choice(self, pair: Pair) -> Choice:
        """The choice of one pair that `value` accepts."""
        up, down = self.up.place[pair.up], self.down.place[pair.down]
        time_us = self.up.time[up] + self.down.time[down]
        if self.default_us is None:
            reason = Reason.DEFAULT_CANNOT_RUN
        elif self.is_split and time_us >= self.default_us * (1 - self.noise):
            reason = Reason.DEFAULT_CANNOT_STAND
        elif self._is_behind(pair):
            reason = Reason.AS_NEIGHBOUR
        else:
            reason = Reason.FASTER
        return Choice(self.m, pair, self.up.time[up], self.down.time[down], self.default_us, reason)

    def _is_behind(self, pair: Pair) -> bool:
        """Whether another pair is ahead of this one, within the tie."""
        least = 1.0 if self.regret is None else min(self.regret.values())
        return (self.value(pair) or least) > least

    def keep_default(self) -> Choice:
        """The default's own entry."""
        up, down = self.up.default.time_us, self.down.default.time_us
        if up is None or down is None:
            raise ValueError("a default that cannot run cannot be kept")
        return Choice(self.m, self.default, up, down, self.default_us, Reason.DEFAULT_KEPT)
