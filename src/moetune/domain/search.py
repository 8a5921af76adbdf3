"""Search strategies, ask and tell: which config of one kernel to measure next, at which m.

A strategy is told the configs that may be asked for, what the performance model predicts, and the
measurements as they come. It sees nothing else, so it can be replayed on a recorded landscape.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import field as default
from typing import TYPE_CHECKING, Protocol

import numpy as np

from moetune.domain.residuals import Residuals, Spread

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moetune.domain.config import KernelConfig

    FloatArray = NDArray[np.float64]

CONSIDERED = 256
"""Configs that guided search considers at each m: the best predicted."""


@dataclass(frozen=True, slots=True)
class Field:
    """What is searched: one kernel at some m.

    Attributes:
        configs: n configs.
        ms: k values of m, ascending.
        predicted_us: `[k, n]` predicted times.
        score: `[k, n]` what to rank by without measurements, lower is better.
    """

    configs: tuple[KernelConfig, ...]
    ms: tuple[int, ...]
    predicted_us: FloatArray
    score: FloatArray


@dataclass(frozen=True, slots=True)
class Ask:
    """A measurement that a strategy asks for."""

    m: int
    config: KernelConfig


class Strategy(Protocol):
    """A search strategy for one kernel."""

    def ask(self) -> Ask | None:
        """The next measurement, None when the strategy has spent its budget."""
        ...

    def tell(self, m: int, config: KernelConfig, time_us: float | None) -> None:
        """What was measured; None: it cannot run."""
        ...

    def choose(self, m: int) -> KernelConfig | None:
        """The best measured config for that m, the first by score where none was; None if nothing runs."""
        ...


@dataclass(slots=True)
class Book:
    """Measurements so far, and the choice that follows from them."""

    field: Field
    times_us: dict[tuple[int, int], float] = default(default_factory=dict)
    failed: set[int] = default(default_factory=set)
    asked: set[tuple[int, int]] = default(default_factory=set)
    places: dict[KernelConfig, int] = default(default_factory=dict)

    def __post_init__(self) -> None:
        self.places = {config: place for place, config in enumerate(self.field.configs)}

    def note(self, m: int, config: KernelConfig, time_us: float | None) -> None:
        """Write down an answer. What cannot run at one m cannot run at any: it is the same binary."""
        place, row = self.places[config], self.field.ms.index(m)
        self.asked.add((row, place))
        if time_us is None:
            self.failed.add(place)
        else:
            self.times_us[row, place] = time_us

    @property
    def compiled(self) -> set[int]:
        """Places of the configs that were asked for at any m."""
        return {place for _, place in self.asked}

    def choose(self, m: int) -> KernelConfig | None:
        """The best measured config, or the first by score that is not known to fail."""
        row = self.field.ms.index(m)
        measured = {place: time for (at, place), time in self.times_us.items() if at == row}
        if measured:
            best = min(measured, key=lambda place: (measured[place], place))
            return self.field.configs[best]
        for place in map(int, np.argsort(self.field.score[row], kind="stable")):
            if place not in self.failed and (row, place) not in self.asked:
                return self.field.configs[place]
        return None


class QueuedSearch:
    """Asks for what stands in its queue and keeps the book: the base of all strategies here."""

    def __init__(self, field: Field) -> None:
        self._book = Book(field)
        self._queue: deque[tuple[int, int]] = deque()

    def _plan(self) -> None:
        """Put more into the empty queue; nothing when the budget is spent."""

    def ask(self) -> Ask | None:
        """The next of the queue."""
        if not self._queue:
            self._plan()
        if not self._queue:
            return None
        row, place = self._queue.popleft()
        return Ask(self._book.field.ms[row], self._book.field.configs[place])

    def tell(self, m: int, config: KernelConfig, time_us: float | None) -> None:
        """Write down an answer."""
        self._book.note(m, config, time_us)

    def choose(self, m: int) -> KernelConfig | None:
        """The best measured."""
        return self._book.choose(m)


class ListedSearch(QueuedSearch):
    """Asks for listed configs at each m, round by round: exhaustive and random search."""

    def __init__(self, field: Field, orders: Sequence[Sequence[int]], budget: int) -> None:
        super().__init__(field)
        rounds = min(budget, max((len(order) for order in orders), default=0))
        self._queue = deque(
            (row, order[turn])
            for turn in range(rounds)
            for row, order in enumerate(orders)
            if turn < len(order)
        )


def exhaustive_search(field: Field, budget: int, seed: int) -> ListedSearch:
    """Every config at every m, in random order; `budget` measurements for each m at most."""
    places = list(range(len(field.configs)))
    random.Random(seed).shuffle(places)
    return ListedSearch(field, [places] * len(field.ms), budget if budget else len(places))


def random_search(field: Field, budget: int, seed: int) -> ListedSearch:
    """`budget` random configs for each m, others for each."""
    rng = random.Random(seed)
    count = min(budget, len(field.configs))
    return ListedSearch(field, [rng.sample(range(len(field.configs)), count) for _ in field.ms], budget)


def compile_limit(budget: int) -> int:
    """Distinct configs of a kernel that guided search asks for: compiling is what costs.

    Three to six configs come within 1% at every m (landscapes recorded on an H200, 2026-12-01), so
    configs are shared between the m: 48 for 16 measurements at each m, 128 for 64.
    """
    return 3 * budget if budget <= 16 else 48 + (budget - 16) * 5 // 3


class GuidedSearch(QueuedSearch):
    """Ranks with the performance model, then goes where measurements say that something is to be gained.

    All m take turns. At each turn an m asks for the config with the largest expected improvement
    over its best, where the errors of the prediction are learned from the measurements of all m. New
    configs are rationed over the m (`compile_limit`): beyond its ration an m chooses among those
    that are compiled already.

    Args:
        field: what is searched.
        budget: measurements for each m.
        seed: unused by the ranking; kept so that strategies are made alike.
        limit: distinct configs that may be asked for.
        spread: how the errors of the prediction behave.
    """

    def __init__(
        self,
        field: Field,
        budget: int,
        seed: int = 0,
        *,
        limit: int | None = None,
        spread: Spread | None = None,
    ) -> None:
        del seed
        super().__init__(field)
        self._budget = budget
        self._limit = compile_limit(budget) if limit is None else limit
        order = np.argsort(field.score, axis=1, kind="stable")
        self._candidates = [row[:CONSIDERED] for row in order]
        union = np.unique(np.concatenate(self._candidates)) if len(field.ms) else np.zeros(0, dtype=np.intp)
        self._inner = {int(place): inner for inner, place in enumerate(union)}
        self._residuals = Residuals([field.configs[place] for place in union], field.ms, spread or Spread())
        self._log_predicted = np.log(field.predicted_us)
        self._log_score = np.log(field.score)
        self._spent = [0] * len(field.ms)
        self._introduced = [0] * len(field.ms)

    def _plan(self) -> None:
        rows = [row for row, spent in enumerate(self._spent) if spent < self._budget]
        if not rows:
            return
        self._learn()
        compiled = self._book.compiled
        ration = max(1, self._limit // len(self._spent))
        for row in rows:
            gain = self._expected_gain(row)
            may_add = len(compiled) < self._limit and self._introduced[row] < ration
            best_place, best_gain = None, -math.inf
            for place, value in zip(self._candidates[row].tolist(), gain.tolist(), strict=True):
                usable = place not in self._book.failed and (row, place) not in self._book.asked
                if usable and value > best_gain and (may_add or place in compiled):
                    best_place, best_gain = place, value
            self._spent[row] += 1
            if best_place is None:
                self._spent[row] = self._budget
                continue
            if best_place not in compiled:
                compiled.add(best_place)
                self._introduced[row] += 1
            # Further rounds may be asked for before this one is answered.
            self._book.asked.add((row, best_place))
            self._queue.append((row, best_place))
        if not self._queue:
            self._plan()

    def _learn(self) -> None:
        known = [(row, place) for row, place in self._book.times_us if place in self._inner]
        if known:
            errors = [
                math.log(self._book.times_us[row, place]) - float(self._log_predicted[row, place])
                for row, place in known
            ]
            self._residuals.learn(
                [self._inner[place] for _, place in known], [row for row, _ in known], errors
            )

    def _expected_gain(self, row: int) -> FloatArray:
        """Expected improvement (log time) over the best measured at that m; before any, the score decides."""
        places = self._candidates[row]
        best = min((time for (at, _), time in self._book.times_us.items() if at == row), default=None)
        if best is None:
            first: FloatArray = -self._log_score[row, places]
            return first
        inner = np.asarray([self._inner[int(place)] for place in places], dtype=np.intp)
        error, deviation = self._residuals.expect(inner, row)
        ahead = math.log(best) - (self._log_predicted[row, places] + error)
        ratio = ahead / deviation
        density = np.exp(-0.5 * np.square(ratio)) / math.sqrt(2 * math.pi)
        gain: FloatArray = ahead * _normal_cumulative(ratio) + deviation * density
        return gain


def _normal_cumulative(values: FloatArray) -> FloatArray:
    return 0.5 * (1.0 + np.asarray([math.erf(value / math.sqrt(2)) for value in values.tolist()]))


STRATEGIES: dict[str, Callable[[Field, int, int], Strategy]] = {
    "guided": GuidedSearch,
    "random": random_search,
    "exhaustive": exhaustive_search,
}
"""Name to what makes a strategy from a field, the measurements for each m, and a seed."""
