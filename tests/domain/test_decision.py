"""What is said of an arm, and what is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moetune.domain.decision import Claim, claim_of, judge, noise_of, proposed_blocks, smallest_effect
from moetune.domain.experiment import (
    HIGHER_IS_BETTER,
    Ending,
    Judgement,
    ScheduledStart,
    StartResult,
    Validity,
    Verdict,
)
from moetune.domain.experiment_plan import BASELINE, DecisionPlan
from moetune.domain.looks import look_at
from moetune.domain.permutation import Blocks
from tests.domain.experiment_doubles import experiment, one_pass, start

PLAN = DecisionPlan()
BLOCKS = proposed_blocks(PLAN, 1)


def drawn(
    effect: float, noise: float = 0.02, blocks: int = BLOCKS, seed: int = 1, baselines: int = 2
) -> tuple[list[StartResult], list[StartResult]]:
    logs = np.random.default_rng(seed).normal(0, noise, (blocks, 1 + baselines))
    logs[:, 0] += effect
    values = 1000 * np.exp(logs)
    return experiment(values[:, 0].tolist(), values[:, 1:].tolist())


def verdict(effect: float, planned: int = BLOCKS, arms: int = 1, **draw: float) -> Judgement:
    return judge("x", *drawn(effect, **draw), PLAN, arms, planned)  # type: ignore[arg-type]


def with_latency(
    starts: Sequence[StartResult], factor: float = 1.0, mean_factor: float = 1.0
) -> list[StartResult]:
    """TTFT that falls as throughput grows, its median and its mean."""
    return [
        replace(
            one,
            passes=tuple(
                one_pass(
                    each.output_tokens_per_s,
                    ttft_ms=1e5 / each.output_tokens_per_s * factor,
                    mean_ttft_ms=1e5 / each.output_tokens_per_s * mean_factor,
                )
                for each in one.passes
            ),
        )
        for one in starts
    ]


def test_a_clear_gain_helps_and_a_clear_loss_hurts() -> None:
    assert verdict(0.06).verdict is Verdict.HELPS
    assert verdict(-0.06).verdict is Verdict.HURTS


def test_the_ratio_is_arm_to_baseline_inside_its_interval() -> None:
    first = verdict(math.log(1.1)).comparisons[0]
    assert first.metric == "output_tokens_per_s"
    assert first.low < first.ratio < first.high
    assert first.ratio == pytest.approx(1.1, abs=0.02)
    assert first.arm / first.baseline == pytest.approx(1.1, abs=0.03)
    assert first.blocks == BLOCKS
    assert first.level == pytest.approx(1 - 2 * 0.05 * 0.7)


def test_of_a_latency_lower_is_better() -> None:
    plan = DecisionPlan(metric="ttft_ms")
    baseline, starts = map(with_latency, drawn(0.06))
    judged = judge("x", baseline, starts, plan, 1, BLOCKS)
    assert judged.verdict is Verdict.HELPS
    assert judged.comparisons[0].ratio == pytest.approx(math.exp(-0.06), abs=0.02)
    assert judge("x", starts, baseline_of(baseline), plan, 1, BLOCKS).verdict is Verdict.HURTS


def baseline_of(starts: Sequence[StartResult]) -> list[StartResult]:
    """The first start of each block alone."""
    return [one for one in starts if one.start.position == 0]


def test_nothing_is_equivalent_because_nothing_was_found() -> None:
    judged = verdict(0.0, seed=2)
    assert judged.verdict is Verdict.INCONCLUSIVE
    assert judged.decided
    assert judged.smallest_effect is not None
    assert 0.01 < judged.smallest_effect < 0.06


@pytest.mark.parametrize("margin", [0.002, 0.01, 0.03])
def test_equivalent_only_where_the_interval_lies_within_the_margin(margin: float) -> None:
    seen = set()
    for seed in range(12):
        starts = drawn(0.0, noise=0.006, seed=seed)
        judged = judge("x", *starts, DecisionPlan(margin=margin, smallest_effect=0.05), 1, BLOCKS)
        first = judged.comparisons[0]
        inside = 1 / (1 + margin) < first.low and first.high < 1 + margin
        assert (judged.verdict is Verdict.EQUIVALENT) == inside
        seen.add(judged.verdict)
    assert (Verdict.EQUIVALENT in seen) == (margin > 0.002)


def test_a_sure_change_within_the_margin_counts_as_none() -> None:
    judged = verdict(0.004, noise=0.0005)
    assert judged.comparisons[0].low > 1
    assert judged.verdict is Verdict.EQUIVALENT


def test_a_single_run_of_each_proves_nothing() -> None:
    judged = verdict(0.3, blocks=1)
    assert (judged.verdict, judged.decided) == (Verdict.INCONCLUSIVE, False)
    assert judged.comparisons[0].p_value is None
    assert judged.smallest_effect is None
    assert math.isfinite(judged.comparisons[0].high)


def test_between_the_looks_numbers_decide_nothing() -> None:
    # 20% at 2% noise: as clear as can be, and only blocks 7 and 11 may say so
    said = {blocks: verdict(0.2, blocks=blocks).verdict for blocks in range(2, BLOCKS + 1)}
    assert {blocks for blocks, one in said.items() if one is Verdict.HELPS} == {7, BLOCKS}


def test_an_arm_that_nothing_can_be_said_of_stops_early() -> None:
    judged = verdict(0.0, blocks=7, seed=2, noise=0.01)
    assert (judged.verdict, judged.decided) == (Verdict.INCONCLUSIVE, True)
    assert "an effect of 3.0% is excluded both ways" in judged.notes[0]


def test_an_experiment_that_ends_early_is_judged_by_what_it_has() -> None:
    starts = drawn(0.2, blocks=9)
    going_on = judge("x", *starts, PLAN, 1, BLOCKS)
    assert (going_on.verdict, going_on.decided) == (Verdict.INCONCLUSIVE, False)
    ended = judge("x", *starts, PLAN, 1, BLOCKS, ends=True)
    assert (ended.verdict, ended.decided) == (Verdict.HELPS, True)


def test_an_arm_that_its_own_numbers_stopped_gets_no_second_chance() -> None:
    # At block 7 the smallest effect is excluded; with all of alpha the same numbers would be a claim.
    experiments = [drawn(0.012, noise=0.01, blocks=7, seed=seed) for seed in range(40)]
    judged = [(one, judge("x", *one, PLAN, 1, BLOCKS)) for one in experiments]
    stopped = [(one, said) for one, said in judged if said.verdict is Verdict.INCONCLUSIVE and said.decided]
    assert any(judge("x", *one, PLAN, 1, 7).verdict is Verdict.HELPS for one, _ in stopped)
    for one, said in stopped:
        assert judge("x", *one, PLAN, 1, BLOCKS, ends=True) == said


def test_more_arms_need_more_evidence() -> None:
    # One start short of the best possible: enough for one arm, too little for one of eight
    baseline = [[1000.0, 1001.0]] * 6
    starts = experiment([1020.0, 1021.0, 1022.0, 1023.0, 1024.0, 1000.5], baseline)
    assert judge("x", *starts, PLAN, 1, 6).verdict is Verdict.HELPS
    assert judge("x", *starts, PLAN, 8, 6).verdict is Verdict.INCONCLUSIVE


def test_many_passes_of_few_starts_are_not_many_starts() -> None:
    def many(results: list[StartResult]) -> list[StartResult]:
        return [replace(one, passes=one.passes * 50) for one in results]

    baseline, starts = drawn(0.05, blocks=3)
    judged = judge("x", many(baseline), many(starts), PLAN, 1, 3)
    assert judged.verdict is Verdict.INCONCLUSIVE
    assert judged.comparisons[0].blocks == 3


@pytest.mark.parametrize("slow", [0.5, 0.8])
def test_one_slow_start_of_the_baseline_does_not_make_an_arm_help(slow: float) -> None:
    for seed in range(5):
        baseline, starts = drawn(0.0, seed=seed)
        value = baseline[4].passes[0].output_tokens_per_s
        baseline[4] = replace(baseline[4], passes=(one_pass(value * slow),))
        judged = judge("x", baseline, starts, PLAN, 1, BLOCKS)
        assert judged.verdict is Verdict.INCONCLUSIVE
        assert any("block 2 (baseline) is" in note and "below" in note for note in judged.notes)


def test_one_slow_start_does_not_hide_a_large_gain() -> None:
    baseline, starts = drawn(0.08)
    starts[3] = replace(starts[3], passes=(one_pass(500.0),))
    judged = judge("x", baseline, starts, PLAN, 1, BLOCKS)
    assert judged.verdict is Verdict.HELPS
    assert judged.comparisons[0].ratio == pytest.approx(1.08, abs=0.03)


def test_case_48_an_invalid_arm_is_not_judged_whatever_its_numbers_say() -> None:
    validity = Validity(problems=("no line shows the new file",))
    judged = judge("x", *drawn(0.2), PLAN, 1, BLOCKS, validity)
    assert (judged.verdict, judged.comparisons, judged.decided) == (Verdict.INVALID, (), True)
    assert judged.validity == validity


@pytest.mark.parametrize("metric", ["ttft_ms", "mean_ttft_ms"])
def test_case_49_mean_better_and_median_worse_gives_no_verdict(metric: str) -> None:
    baseline, starts = drawn(0.0, noise=0.005)
    both = with_latency(baseline), with_latency(starts, factor=1.06, mean_factor=0.94)
    judged = judge("x", *both, DecisionPlan(metric=metric), 1, BLOCKS)
    assert judged.verdict is Verdict.INCONCLUSIVE
    shown = {one.metric: one for one in judged.comparisons}
    assert shown["ttft_ms"].low > 1
    assert shown["mean_ttft_ms"].high < 1
    assert any("a median and a mean that disagree decide nothing" in note for note in judged.notes)


def test_case_49_it_is_told_where_throughput_decides() -> None:
    baseline, starts = drawn(0.06)
    both = with_latency(baseline), with_latency(starts, factor=1.2, mean_factor=0.9)
    judged = judge("x", *both, PLAN, 1, BLOCKS)
    assert judged.verdict is Verdict.HELPS
    assert any("ttft_ms" in note and "go different ways" in note for note in judged.notes)


def test_mean_and_median_that_agree_are_no_objection() -> None:
    baseline, starts = map(with_latency, drawn(0.06, seed=2))
    judged = judge("x", baseline, starts, DecisionPlan(metric="ttft_ms"), 1, BLOCKS)
    assert (judged.verdict, judged.notes) == (Verdict.HELPS, ())


def test_equivalent_by_the_median_alone_is_not_equivalent() -> None:
    baseline, starts = drawn(0.0, noise=0.002)
    both = with_latency(baseline), with_latency(starts, mean_factor=1.05)
    judged = judge("x", *both, DecisionPlan(metric="ttft_ms"), 1, BLOCKS)
    assert judged.verdict is Verdict.INCONCLUSIVE


def test_starts_that_did_not_end_well_give_no_pair() -> None:
    baseline, starts = drawn(0.06)
    starts[0] = replace(starts[0], ending=Ending.DIED)
    baseline[2:4] = [replace(one, ending=Ending.LOAD_FAILED) for one in baseline[2:4]]
    baseline[4] = replace(baseline[4], ending=Ending.CANNOT_START)  # its twin is left
    judged = judge("x", baseline, starts, PLAN, 1, BLOCKS, ends=True)
    assert judged.comparisons[0].blocks == BLOCKS - 2


@pytest.mark.parametrize("ends", [False, True])
def test_without_a_pair_there_is_nothing_to_say(ends: bool) -> None:
    judged = judge("x", [start(BASELINE, 0, 100)], [start("x", 1, 100)], PLAN, 1, BLOCKS, ends=ends)
    assert (judged.verdict, judged.comparisons, judged.smallest_effect) == (Verdict.INCONCLUSIVE, (), None)
    assert judged.decided == ends
    assert judged.notes


def test_all_metrics_that_both_report_are_shown() -> None:
    baseline, starts = map(with_latency, drawn(0.0))
    metrics = [one.metric for one in judge("x", baseline, starts, PLAN, 1, BLOCKS).comparisons]
    assert metrics == ["output_tokens_per_s", "requests_per_s", "ttft_ms", "mean_ttft_ms"]
    assert set(metrics) <= set(HIGHER_IS_BETTER)


LOGS = st.integers(-80, 80).map(lambda whole: whole / 1000)
TABLES = st.integers(6, 9).flatmap(
    lambda count: st.tuples(
        st.lists(LOGS, min_size=count, max_size=count),
        st.lists(st.lists(LOGS, min_size=1, max_size=2), min_size=count, max_size=count),
    )
)


def judged_logs(
    arm: Sequence[float], baseline: Sequence[Sequence[float]], scale: float = 1000.0
) -> Judgement:
    starts = experiment(
        [scale * math.exp(one) for one in arm],
        [[scale * math.exp(one) for one in inside] for inside in baseline],
    )
    return judge("x", *starts, PLAN, 1, len(arm))


@settings(max_examples=30, deadline=None)
@given(TABLES, st.sampled_from([1e-6, 0.3, 7.0, 1e9]))
def test_the_unit_of_the_metric_does_not_matter(
    table: tuple[list[float], list[list[float]]], scale: float
) -> None:
    here, there = judged_logs(*table), judged_logs(*table, scale)
    assume(
        here.comparisons[0].p_value == pytest.approx(there.comparisons[0].p_value)
    )  # a half rounded otherwise
    assert here.verdict is there.verdict
    assert here.comparisons[0].ratio == pytest.approx(there.comparisons[0].ratio, rel=1e-5)


@settings(max_examples=30, deadline=None)
@given(TABLES, st.floats(-0.1, 0.1))
def test_arm_and_baseline_exchanged_is_the_ratio_turned_and_helps_for_hurts(
    table: tuple[list[float], list[list[float]]], effect: float
) -> None:
    arm = [one + effect for one in table[0]]
    baseline = [inside[0] for inside in table[1]]
    here = judged_logs(arm, [[one] for one in baseline])
    there = judged_logs(baseline, [[one] for one in arm])
    first, second = here.comparisons[0], there.comparisons[0]
    assert first.ratio * second.ratio == pytest.approx(1, abs=1e-4)
    assert first.p_value == pytest.approx(second.p_value, abs=1e-9)
    turned = {Verdict.HELPS: {Verdict.HURTS}, Verdict.HURTS: {Verdict.HELPS, Verdict.INCONCLUSIVE}}
    # "Helps" needs more evidence than "hurts".
    assert there.verdict in turned.get(here.verdict, {here.verdict, Verdict.HURTS})


@settings(max_examples=30, deadline=None)
@given(TABLES, st.randoms(use_true_random=False))
def test_the_order_of_results_changes_nothing(
    table: tuple[list[float], list[list[float]]], random: object
) -> None:
    baseline, starts = experiment(
        [1000 * math.exp(one) for one in table[0]],
        [[1000 * math.exp(one) for one in inside] for inside in table[1]],
    )
    count = len(starts)
    places = sorted(range(count), key=lambda _: random.random())  # type: ignore[attr-defined]

    def moved(results: list[StartResult]) -> list[StartResult]:
        return [
            replace(one, start=ScheduledStart(places[one.start.block], one.start.position, one.start.arm))
            for one in reversed(results)
        ]

    here = judge("x", baseline, starts, PLAN, 1, count)
    there = judge("x", moved(baseline), moved(starts), PLAN, 1, count)
    assert here.verdict is there.verdict
    assert here.comparisons[0].p_value == pytest.approx(there.comparisons[0].p_value, abs=1e-9)
    assert here.comparisons[0].ratio == pytest.approx(there.comparisons[0].ratio, rel=1e-5)


@pytest.mark.parametrize("effect", [0.0, 0.03, -0.05])
@pytest.mark.parametrize("seed", range(6))
def test_the_simulated_rule_is_the_judge(effect: float, seed: int) -> None:
    """`claim_of` on the logarithms of the starts: what benchmarks/experiment_simulation.py counts."""
    baseline, starts = drawn(effect, seed=seed)
    logs = [math.log(one.passes[0].output_tokens_per_s) for one in starts]
    theirs = [math.log(one.passes[0].output_tokens_per_s) for one in baseline]
    blocks = Blocks(logs, list(zip(theirs[::2], theirs[1::2], strict=True)))
    look, _ = look_at(len(blocks), BLOCKS, 2, PLAN.alpha)
    judged = judge("x", baseline, starts, PLAN, 2, BLOCKS)
    assert Claim(judged.verdict, judged.decided) == claim_of(blocks, PLAN, look)


def test_noise_that_was_measured_gives_the_effect_that_could_have_been_found() -> None:
    baseline, starts = drawn(0.0, noise=0.04, blocks=60, seed=2)
    judged = judge("x", baseline, starts, PLAN, 1, 60)
    noise = noise_of(baseline, "output_tokens_per_s")
    assert noise == pytest.approx(0.04, rel=0.2)
    assert judged.smallest_effect == pytest.approx(smallest_effect(0.04, 60, 1, PLAN), rel=0.2)
