"""How often `moetune experiment` is wrong, how often it finds an effect, and how many starts that takes.

Run: python benchmarks/experiment_simulation.py [--experiments 1000] [--seed 1]

Whole experiments are simulated: the order of starts, every look, arms that drop out, and the last arm of all
that helped. The rules are those of moetune itself (`moetune.domain`), fed with drawn values instead of
measured ones. The goals are issue 6's: of experiments in which nothing has an effect at most 5% claim
one and at most 1% say "helps"; a true 3% at 2% noise is found in at least 80%.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from statistics import median

import numpy as np

from moetune.domain.decision import Claim, arms_of_last, claim_of, proposed_blocks
from moetune.domain.experiment import ScheduledStart, Verdict
from moetune.domain.experiment_plan import BASELINE, COMBINED, DecisionPlan
from moetune.domain.looks import look_at, looks_of
from moetune.domain.permutation import Blocks
from moetune.domain.power import CHANCE
from moetune.domain.schedule import BASELINE_STARTS, block_of

_ORDERS = 200  # different orders of starts: drawing one for each experiment takes longer than judging it


@dataclass(frozen=True, slots=True)
class World:
    """What is true in a simulated experiment.

    Attributes:
        name: for the table.
        noise: standard deviation between starts.
        effects: true effect of each intervention, 0.03 for 3% better.
        together: true effect of all that helped together.
        drift: by how much the machine changes over the experiment, in a straight line.
        within: by how much a start changes from its first pass to its last.
        passes: measured passes of a start.
        slow: by how much one start, drawn at random, is slower than it should be.
        warm_up: by how much the first start of all is slower.
        tail: how starts differ: `normal`, `heavy` (Student's t with 2 degrees of freedom) or `skewed`
            (mostly alike, some much slower).
        growing: the noise doubles half way.
        planned_noise: that the plan expects.
    """

    name: str
    noise: float = 0.02
    effects: tuple[float, ...] = (0.0, 0.0)
    together: float = 0.0
    drift: float = 0.0
    within: float = 0.0
    passes: int = 1
    slow: float = 0.0
    warm_up: float = 0.0
    tail: str = "normal"
    growing: bool = False
    planned_noise: float = 0.02

    def true_effect(self, arm: str) -> float:
        """The true effect of an arm."""
        return self.together if arm == COMBINED else self.effects[int(arm)]


NOTHING = (
    World("noise 1%", noise=0.01),
    World("noise 2%"),
    World("noise 5%", noise=0.05),
    World("machine drifts by 10%", drift=-0.1),
    World("starts drift by 5% in 3 passes", within=-0.05, passes=3),
    World("one start 20% slow", slow=0.2),
    World("all of these", noise=0.05, drift=-0.1, within=-0.05, passes=3, slow=0.2),
)
"""Worlds of issue 6 in which no intervention has an effect."""

MORE_NOTHING = (
    World("1 intervention", effects=(0.0,)),
    World("4 interventions", effects=(0.0,) * 4),
    World("8 interventions", effects=(0.0,) * 8),
    World("noise 1%, and planned so", noise=0.01, planned_noise=0.01),
    World("noise 5%, and planned so", noise=0.05, planned_noise=0.05),
    World("first start of all 20% slow", warm_up=0.2),
    World("heavy tails", tail="heavy"),
    World("skewed", tail="skewed"),
    World("noise doubles half way", growing=True),
    World("2 of 4 help 6%, not together", effects=(0.06, 0.06, 0.0, 0.0)),
)
"""Worlds in which wrong claims could come from elsewhere."""

SOMETHING = (
    World("3%, 1 intervention", effects=(0.03,)),
    World("3% and 0%", effects=(0.03, 0.0)),
    World("3%, 0%, 0%, 0%", effects=(0.03, 0.0, 0.0, 0.0)),
    World("3% at noise 1%, planned so", noise=0.01, effects=(0.03,), planned_noise=0.01),
    World("3% at noise 5%, planned so", noise=0.05, effects=(0.03,), planned_noise=0.05),
    World("3%, machine drifts by 10%", effects=(0.03, 0.0), drift=-0.1),
    World("3%, one start 20% slow", effects=(0.03, 0.0), slow=0.2),
    World("10%, 1 intervention", effects=(0.1,)),
    World("10% and 0%", effects=(0.1, 0.0)),
    World("-3%, 1 intervention", effects=(-0.03,)),
)
"""Worlds in which there is something to find."""

Rule = Callable[[Callable[[], Blocks], int, DecisionPlan, int, int], Claim]
"""A way to judge: blocks so far, their number, what to decide, arms that share alpha, blocks planned."""


def moetunes_rule(
    blocks: Callable[[], Blocks], count: int, decision: DecisionPlan, arms: int, planned: int
) -> Claim:
    """What `judge` says; its intervals and notes are left out."""
    look, due = look_at(count, planned, arms, decision.alpha)
    return claim_of(blocks(), decision, look) if due else Claim(Verdict.INCONCLUSIVE, stops=False)


def peeking_rule(
    blocks: Callable[[], Blocks], count: int, decision: DecisionPlan, arms: int, planned: int
) -> Claim:
    """A mistake for comparison: each arm for itself, after every block from the fourth on, at 5%."""
    del arms
    seen = blocks()
    if count >= 4 and seen.two_sided() <= decision.alpha:
        better = seen.probability() < seen.probability(above=False)
        return Claim(Verdict.HELPS if better else Verdict.HURTS, stops=True)
    return Claim(Verdict.INCONCLUSIVE, stops=count >= planned)


@dataclass(slots=True)
class Machine:
    """Draws the values of starts, one after the other."""

    world: World
    random: np.random.Generator
    starts: int
    slow_start: int
    begun: int = 0

    def start(self, effect: float) -> tuple[float, ...]:
        """Logarithms of the passes of the next start."""
        world, now = self.world, self.begun / self.starts
        value = (
            math.log1p(effect) + world.drift * now + self._noise() * (2 if world.growing and now > 0.5 else 1)
        )
        value += math.log1p(-world.slow) * (self.begun == self.slow_start)
        value += math.log1p(-world.warm_up) * (self.begun == 0)
        self.begun += 1
        if world.passes == 1:
            return (value,)
        along = world.within * np.arange(world.passes) / (world.passes - 1)
        noise = self.random.normal(0, world.noise / 5, world.passes)
        return tuple((value + along + noise).tolist())

    def _noise(self) -> float:
        if self.world.tail == "heavy":
            return self.world.noise / 2 * self.random.standard_t(2)
        if self.world.tail == "skewed":
            return -self.world.noise * self.random.exponential()
        return self.world.noise * self.random.standard_normal()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one experiment.

    Attributes:
        verdicts: by arm, the last arm included where it ran.
        starts: of the server.
    """

    verdicts: Mapping[str, Verdict]
    starts: int


@dataclass(slots=True)
class _Seen:
    """Values of one part of an experiment: by arm and block."""

    as_starts: bool
    values: dict[str, dict[int, list[tuple[float, ...]]]] = field(default_factory=dict)

    def add(self, start: ScheduledStart, passes: tuple[float, ...]) -> None:
        """One start, as one value or, by mistake, as many."""
        units = (median(passes),) if self.as_starts else passes
        self.values.setdefault(start.arm, {}).setdefault(start.block, []).append(units)

    def count(self, arm: str) -> int:
        """Blocks of an arm, or what is taken for them."""
        return sum(len(starts[0]) for starts in self.values[arm].values())

    def blocks(self, arm: str) -> Blocks:
        """As the test takes them."""
        pairs = [(ours[0], self.values[BASELINE][block]) for block, ours in self.values[arm].items()]
        units = [(ours, theirs, index) for ours, theirs in pairs for index in range(len(ours))]
        return Blocks(
            [ours[index] for ours, _, index in units],
            [[one[index] for one in theirs] for _, theirs, index in units],
        )


@cache
def _order(arms: tuple[str, ...], block: int, seed: int) -> tuple[ScheduledStart, ...]:
    return block_of(arms, block, seed)


def simulate(
    world: World, number: int, seed: int, rule: Rule = moetunes_rule, *, as_starts: bool = True
) -> Outcome:
    """One whole experiment.

    Args:
        world: what is true.
        number: of the experiment.
        seed: of all experiments.
        rule: how arms are judged.
        as_starts: the start is the unit; else each pass, as if they were independent.
    """
    decision = DecisionPlan(noise=world.planned_noise)
    names = tuple(str(index) for index in range(len(world.effects)))
    planned = proposed_blocks(decision, len(names))
    random = np.random.default_rng((seed, number))
    most = planned * (len(names) + BASELINE_STARTS)
    machine = Machine(world, random, most, int(random.integers(most)))

    def part(open_arms: tuple[str, ...], first: int, blocks: int, sharing: int) -> dict[str, Verdict]:
        seen = _Seen(as_starts)
        verdicts = dict.fromkeys(open_arms, Verdict.INCONCLUSIVE)
        for block in range(first, first + blocks):
            for start in _order(open_arms, block, number % _ORDERS):
                effect = 0.0 if start.arm == BASELINE else world.true_effect(start.arm)
                seen.add(start, machine.start(effect))
            claims = {
                arm: rule(partial(seen.blocks, arm), seen.count(arm), decision, sharing, blocks)
                for arm in open_arms
            }
            verdicts |= {arm: claim.verdict for arm, claim in claims.items()}
            open_arms = tuple(arm for arm in open_arms if not claims[arm].stops)
            if not open_arms:
                break
        return verdicts

    verdicts = part(names, 0, planned, len(names))
    helped = sum(verdict is Verdict.HELPS for verdict in verdicts.values())
    if helped > 1:
        sharing = arms_of_last(len(names), helped)
        verdicts |= part((COMBINED,), planned, proposed_blocks(decision, sharing), sharing)
    return Outcome(verdicts, machine.begun)


@dataclass(frozen=True, slots=True)
class Summary:
    """Of many experiments in one world.

    Attributes:
        experiments: how many.
        wrong: share with a wrong claim of any kind, about any arm.
        helps: share with a wrong "helps".
        equivalent: share with an arm that was said to be equivalent.
        found: share in which the first intervention got the verdict that its true effect deserves.
        starts: mean of the starts.
        most_starts: of any of them.
    """

    experiments: int
    wrong: float
    helps: float
    equivalent: float
    found: float
    starts: float
    most_starts: int


def summarize(world: World, outcomes: Sequence[Outcome]) -> Summary:
    """Count what was wrong and what was found."""
    margin = DecisionPlan().margin

    def is_wrong(arm: str, verdict: Verdict) -> bool:
        effect = world.true_effect(arm)
        return {
            Verdict.HELPS: effect <= 0,
            Verdict.HURTS: effect >= 0,
            Verdict.EQUIVALENT: abs(effect) > margin,
        }.get(verdict, False)

    count = len(outcomes)
    pairs = [list(one.verdicts.items()) for one in outcomes]
    first = world.effects[0]
    deserved = Verdict.HELPS if first > 0 else Verdict.HURTS if first < 0 else Verdict.EQUIVALENT
    return Summary(
        count,
        sum(any(is_wrong(*pair) for pair in one) for one in pairs) / count,
        sum(any(is_wrong(*pair) and pair[1] is Verdict.HELPS for pair in one) for one in pairs) / count,
        sum(any(verdict is Verdict.EQUIVALENT for _, verdict in one) for one in pairs) / count,
        sum(one.verdicts["0"] is deserved for one in outcomes) / count,
        sum(one.starts for one in outcomes) / count,
        max(one.starts for one in outcomes),
    )


def simulate_all(
    world: World, experiments: int, seed: int, rule: Rule = moetunes_rule, *, as_starts: bool = True
) -> Summary:
    """Many experiments in one world."""
    return summarize(
        world, [simulate(world, number, seed, rule, as_starts=as_starts) for number in range(experiments)]
    )


def _print_table(title: str, worlds: Sequence[World], experiments: int, seed: int) -> None:
    print(f"\n{title}\n")
    print("| world | wrong claim | wrong helps | equivalent | found | starts, mean | most |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for world in worlds:
        _print_row(world.name, simulate_all(world, experiments, seed))


def _print_row(name: str, one: Summary) -> None:
    print(
        f"| {name} | {one.wrong:.1%} | {one.helps:.1%} | {one.equivalent:.1%} | {one.found:.1%} "
        f"| {one.starts:.1f} | {one.most_starts} |",
        flush=True,
    )


def _print_plans() -> None:
    print("\nMost starts of a plan that has to find 3%\n")
    print("| noise | 1 intervention | 2 | 4 | 8 |")
    print("|---|---:|---:|---:|---:|")
    for noise in (0.01, 0.02, 0.05):
        cells = []
        for arms in (1, 2, 4, 8):
            blocks = proposed_blocks(DecisionPlan(noise=noise), arms)
            cells.append(f"{blocks} blocks, {blocks * (arms + BASELINE_STARTS)} starts")
        print(f"| {noise:.0%} | {' | '.join(cells)} |")


def _print_designs(draws: int, seed: int) -> None:
    """How many starts of the baseline a block should have: one look, 3% at 2% noise, found in 80%."""
    print(
        "\nStarts of the baseline in a block: fewest blocks and starts, one look at the level of the last\n"
    )
    print("| interventions | 1 in a block | 2 | 3 |")
    print("|---|---:|---:|---:|")
    decision = DecisionPlan()
    for arms in (1, 2, 4):
        level = looks_of(100, arms, decision.alpha)[-1].helps
        cells = []
        for baselines in (1, 2, 3):
            blocks = _fewest_blocks(baselines, level, draws, seed)
            cells.append(f"{blocks} blocks, {blocks * (arms + baselines)} starts")
        print(f"| {arms} | {' | '.join(cells)} |", flush=True)


def _fewest_blocks(baselines: int, level: float, draws: int, seed: int) -> int:
    decision = DecisionPlan()
    values = np.random.default_rng(seed).normal(0, decision.noise, (draws, 30, 1 + baselines))
    values[:, :, 0] += math.log1p(decision.smallest_effect)
    for count in range(4, 30):
        tables = [Blocks(one[:count, 0].tolist(), one[:count, 1:].tolist()) for one in values]
        if sum(one.probability() <= level for one in tables) >= CHANCE * draws:
            return count
    return 30


def main() -> None:
    """Print the tables of docs/experiment-statistics.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiments", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    count, seed = arguments.experiments, arguments.seed
    began = time.perf_counter()
    print(
        f"{count} experiments of each world, seed {seed}, Python {platform.python_version()}, "
        f"numpy {np.__version__}, {platform.machine()}"
    )
    _print_plans()
    _print_designs(count, seed)
    _print_table("No intervention has an effect (2 interventions)", NOTHING, count, seed)
    _print_table("No effect, otherwise", MORE_NOTHING, count, seed)
    _print_table("Something to find", SOMETHING, count, seed)
    print("\nMistakes, for comparison: no effect, 2 interventions, 2% noise, 3 passes\n")
    print("| rule | wrong claim | wrong helps | equivalent | found | starts, mean | most |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    world = World("", passes=3)
    _print_row("moetune's", simulate_all(world, count, seed))
    _print_row("5% after every block, each arm for itself", simulate_all(world, count, seed, peeking_rule))
    _print_row("moetune's, with passes as units", simulate_all(world, count, seed, as_starts=False))
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
