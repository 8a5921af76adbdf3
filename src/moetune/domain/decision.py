"""What is said of an arm: helps, hurts, equivalent, or not known, with what the numbers rest on.

The start of the server is the unit: memory layout, captured graphs and clocks are drawn anew with each,
and all requests of one start share them. A start is one number, the median of its measured passes; the
arm's start of a block is compared with the baseline's of the same block by an exact test.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from moetune.domain.drift import drift_notes, outlier_notes, trend_notes
from moetune.domain.experiment import (
    HIGHER_IS_BETTER,
    Comparison,
    Judgement,
    StartResult,
    Validity,
    Verdict,
)
from moetune.domain.experiment_plan import BASELINE, DecisionPlan
from moetune.domain.looks import STOP_LEVEL, Look, look_at, look_at_end
from moetune.domain.noise import noise_of, start_value
from moetune.domain.permutation import ROUNDING, Blocks
from moetune.domain.power import arms_of_last, proposed_blocks, smallest_effect

VALID = Validity()
"""Nothing speaks against comparing the starts."""

_COMPANIONS: Mapping[str, str] = {
    "ttft_ms": "mean_ttft_ms",
    "itl_ms": "mean_itl_ms",
    "mean_ttft_ms": "ttft_ms",
    "mean_itl_ms": "itl_ms",
}
"""Median and mean of the same times. One of them alone decides nothing: vllm issue 28200 had a better
mean with a worse median."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What one look says.

    Attributes:
        verdict: helps, hurts, equivalent or inconclusive.
        stops: more starts would not change it, or are not worth it.
        disputed: the verdict that did not stand, when there is one.
    """

    verdict: Verdict
    stops: bool
    disputed: Verdict | None = None


_OPEN = Claim(Verdict.INCONCLUSIVE, stops=False)


def judge(
    arm: str,
    baseline: Sequence[StartResult],
    starts: Sequence[StartResult],
    decision: DecisionPlan,
    arms: int,
    planned_blocks: int,
    validity: Validity = VALID,
    *,
    ends: bool = False,
) -> Judgement:
    """What is known of an arm.

    A verdict other than inconclusive is only given after the blocks that `looks_of` names and at the end.
    Between them the numbers are shown, and decide nothing.

    Args:
        arm: its name.
        baseline: starts of the baseline.
        starts: starts of the arm; those that did not end well, and those of blocks without a start of
            the baseline, are not counted.
        decision: what has to be decided.
        arms: how many arms share alpha: interventions that are tried alone, and for the last arm
            `arms_of_last` of them.
        planned_blocks: most blocks, settled before the first start of an arm.
        validity: of its starts; with a problem there are no numbers.
        ends: no start of it comes any more, although fewer than the planned blocks ran: the budget or
            the user ended it.
    """
    if not validity.valid:
        return Judgement(arm, Verdict.INVALID, validity=validity, decided=True)
    metric = decision.metric
    paired = _pair(baseline, starts, metric)
    if paired is None:
        return Judgement(
            arm,
            Verdict.INCONCLUSIVE,
            validity=validity,
            notes=(f"no block has {metric} of both",),
            decided=ends,
        )
    count = len(paired.blocks)
    beside = _estimate(baseline, starts, _COMPANIONS.get(metric))
    look, due = look_at(count, planned_blocks, arms, decision.alpha)
    claim = _undisputed(paired.blocks, beside, decision, look) if due else _OPEN
    if ends and not claim.stops:
        look, due = look_at_end(count, planned_blocks, arms, decision.alpha), True
        claim = _undisputed(paired.blocks, beside, decision, look)
    comparisons = tuple(_comparisons(baseline, starts, metric, look))
    objection = _objection(claim, comparisons)
    effect = math.log(comparisons[0].ratio)
    noise = paired.blocks.noise(effect)
    findable = smallest_effect(noise, count, arms, decision)
    notes = (
        *objection,
        *_reasons(claim, comparisons[0], decision, look, due),
        *_disagreements(comparisons, decision.margin, objection),
        *drift_notes(BASELINE, paired.baseline, metric, decision.margin),
        *drift_notes(arm, paired.starts, metric, decision.margin),
        *trend_notes(baseline, metric, decision.margin),
        *outlier_notes(paired.baseline, paired.starts, metric, effect, noise),
    )
    return Judgement(
        arm,
        claim.verdict,
        comparisons,
        validity,
        findable if math.isfinite(findable) else None,
        notes,
        claim.stops,
    )


def claim_of(blocks: Blocks, decision: DecisionPlan, look: Look) -> Claim:
    """What a look says that is due.

    Equivalence comes first: a change within the margin counts as none, however sure it is.
    """
    higher = HIGHER_IS_BETTER[decision.metric]
    if _lies_within(blocks, decision.margin, look.interval):
        return Claim(Verdict.EQUIVALENT, stops=True)
    if blocks.probability(above=higher) <= look.helps * ROUNDING:
        return Claim(Verdict.HELPS, stops=True)
    if blocks.probability(above=not higher) <= look.hurts * ROUNDING:
        return Claim(Verdict.HURTS, stops=True)
    return Claim(
        Verdict.INCONCLUSIVE, look.last or _lies_within(blocks, decision.smallest_effect, STOP_LEVEL)
    )


def _lies_within(blocks: Blocks, share: float, level: float) -> bool:
    """Whether effects beyond a share are refused on both sides, each at a one-sided level."""
    limit, most = math.log1p(share), level * ROUNDING
    return (
        blocks.least_p <= most
        and blocks.probability(limit, above=False) <= most
        and blocks.probability(-limit) <= most
    )


@dataclass(frozen=True, slots=True)
class _Paired:
    """The starts of blocks that have both."""

    blocks: Blocks
    baseline: tuple[StartResult, ...]
    starts: tuple[StartResult, ...]


def _pair(baseline: Sequence[StartResult], starts: Sequence[StartResult], metric: str) -> _Paired | None:
    """Pairs by block; None without any."""
    theirs: dict[int, list[tuple[float, StartResult]]] = defaultdict(list)
    ours: dict[int, tuple[float, StartResult]] = {}
    for one in baseline:
        if (value := start_value(one, metric)) is not None:
            theirs[one.start.block].append((math.log(value), one))
    for one in starts:
        if (value := start_value(one, metric)) is not None:
            ours.setdefault(one.start.block, (math.log(value), one))
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        return None
    return _Paired(
        Blocks(
            [ours[block][0] for block in shared], [[value for value, _ in theirs[block]] for block in shared]
        ),
        tuple(one for block in shared for _, one in theirs[block]),
        tuple(ours[block][1] for block in shared),
    )


def _comparisons(
    baseline: Sequence[StartResult], starts: Sequence[StartResult], metric: str, look: Look
) -> Iterator[Comparison]:
    """The deciding metric first, then every other that both report."""
    for name in (metric, *(other for other in HIGHER_IS_BETTER if other != metric)):
        paired = _pair(baseline, starts, name)
        if paired is None:
            continue
        blocks = paired.blocks
        level = max(look.interval, blocks.least_p)
        yield Comparison(
            metric=name,
            ratio=math.exp(blocks.estimate()),
            low=math.exp(blocks.lower(level)),
            high=math.exp(blocks.upper(level)),
            level=max(0.0, 1 - 2 * level),
            blocks=len(blocks),
            p_value=blocks.two_sided() if len(blocks) > 1 else None,
            baseline=_median(paired.baseline, name),
            arm=_median(paired.starts, name),
        )


def _median(starts: Sequence[StartResult], metric: str) -> float:
    return median(value for one in starts if (value := start_value(one, metric)) is not None)


def _estimate(
    baseline: Sequence[StartResult], starts: Sequence[StartResult], metric: str | None
) -> float | None:
    paired = _pair(baseline, starts, metric) if metric is not None else None
    return paired.blocks.estimate() if paired is not None else None


def _undisputed(blocks: Blocks, beside: float | None, decision: DecisionPlan, look: Look) -> Claim:
    """What a look says, unless the mean (or median) beside the deciding metric says otherwise."""
    claim = claim_of(blocks, decision, look)
    if beside is None or claim.verdict is Verdict.INCONCLUSIVE:
        return claim
    if claim.verdict is Verdict.EQUIVALENT:
        disputed = abs(beside) > math.log1p(decision.margin)
    else:
        disputed = beside * blocks.estimate() <= 0
    return Claim(Verdict.INCONCLUSIVE, look.last, claim.verdict) if disputed else claim


def _objection(claim: Claim, comparisons: Sequence[Comparison]) -> tuple[str, ...]:
    """Says which verdict did not stand, and why."""
    first = comparisons[0]
    beside = next((one for one in comparisons if one.metric == _COMPANIONS.get(first.metric)), None)
    if claim.disputed is None or beside is None:
        return ()
    return (
        f"{first.metric} alone says {claim.disputed.value} ({_shown(first)}), {beside.metric} does not "
        f"({_shown(beside)}): a median and a mean that disagree decide nothing",
    )


def _disagreements(comparisons: Sequence[Comparison], margin: float, said: Sequence[str]) -> Iterator[str]:
    """Medians and means of the same times that go different ways."""
    by_name = {one.metric: one for one in comparisons}
    for middle, mean in (("ttft_ms", "mean_ttft_ms"), ("itl_ms", "mean_itl_ms")):
        if middle not in by_name or mean not in by_name or (said and comparisons[0].metric in {middle, mean}):
            continue
        both = (by_name[middle], by_name[mean])
        effects = [math.log(one.ratio) for one in both]
        clear = any(not one.low <= 1 <= one.high for one in both) or min(map(abs, effects)) > math.log1p(
            margin
        )
        if effects[0] * effects[1] < 0 and clear:
            yield f"{middle} ({_shown(both[0])}) and {mean} ({_shown(both[1])}) go different ways"


def _reasons(claim: Claim, first: Comparison, decision: DecisionPlan, look: Look, due: bool) -> Iterator[str]:
    """Why there is no verdict, where the numbers alone do not show it."""
    if claim.verdict is not Verdict.INCONCLUSIVE or not due:
        return
    if claim.stops and not look.last:
        yield (
            f"stopped after {first.blocks} of the planned blocks: an effect of "
            f"{decision.smallest_effect:.1%} is excluded both ways, smaller ones are not"
        )
    elif not first.low <= 1 <= first.high and first.p_value is not None:
        yield (
            f"the interval leaves out 1, and a claim needs more: one-sided p at most {look.helps:.2%} "
            f"that it helps, {look.hurts:.2%} that it hurts; it is {first.p_value / 2:.2%}"
        )


def _shown(one: Comparison) -> str:
    return f"{one.ratio:.3f}, {one.low:.3f} to {one.high:.3f}"


__all__ = [
    "Claim",
    "arms_of_last",
    "claim_of",
    "judge",
    "noise_of",
    "proposed_blocks",
    "smallest_effect",
    "start_value",
]
