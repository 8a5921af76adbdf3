"""What an arm's starts say: validity before numbers, faults before both, winners that fit together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moetune.applications.experiments.judging import Judge, compatible, starts_of
from moetune.applications.experiments.record import Facts, Finished
from moetune.domain.experiment import (
    Arm,
    ConfigRead,
    Ending,
    LoadResult,
    Proof,
    ScheduledStart,
    ServerFacts,
    StartResult,
    Verdict,
)
from moetune.domain.experiment_plan import (
    BASELINE,
    COMBINED,
    DecisionPlan,
    Intervention,
    LoadPlan,
    Plan,
    ServerPlan,
)

FAST = Intervention("fast", ("--enable-mixed-chunk",))
TUNED = Intervention("tuned", configs=("/plans/E=64,N=256,device_name=NVIDIA_H200.json",))
UP = "E=64,N=256,device_name=NVIDIA_H200.json"
PLAN = Plan(
    "made up",
    ServerPlan("sglang", ("serve", "--port", "{port}"), version="0.5.23"),
    LoadPlan("guidellm"),
    (FAST, TUNED),
    decision=DecisionPlan(noise=0.002, smallest_effect=0.05, alpha=0.4),
)
SIZE = {"proposed": 4, "planned": 4, "arms": 2}


def facts(**more: Any) -> ServerFacts:
    known = ServerFacts(
        "sglang",
        version="0.5.23",
        arguments={"tp_size": "1", "enable_mixed_chunk": "False"},
        configs=(ConfigRead("up", UP, "default"),),
        kv_tokens=100_000,
        max_running_requests=48,
    )
    return replace(known, **more)


MIXED = facts(arguments={"tp_size": "1", "enable_mixed_chunk": "True"})


def start(
    block: int, position: int, arm: str, rate: float, seen: ServerFacts | None, **more: Any
) -> Finished:
    load = LoadResult(10, 10, 1.0, 10, 10, rate, rate / 10, ttft_ms=1e5 / rate, mean_ttft_ms=1e5 / rate)
    load = replace(load, **more.pop("load", {}))
    finished = {name: more.pop(name) for name in ("attempt", "preparing", "installed") if name in more}
    result = StartResult(ScheduledStart(block, position, arm), Ending.DONE, (load,), seen)
    return Finished(replace(result, **more), **finished)


def blocks(
    arm: str, seen: ServerFacts, ratio: float, count: int = 4, first: int = 0, **more: Any
) -> list[Finished]:
    """Blocks of two starts of the baseline and one of an arm; noise of 0.1%."""
    found = []
    for block in range(first, first + count):
        wobble = 1 + 0.001 * (block % 3 - 1)
        found.append(start(block, 0, BASELINE, 1000 * wobble, facts()))
        found.append(start(block, 1, arm, 1000 * ratio * wobble, seen, **dict(more)))
        found.append(start(block, 2, BASELINE, 1001 * wobble, facts()))
    return found


def judged(starts: list[Finished], name: str = "fast", **more: Any) -> Any:
    record = Facts(starts=starts, size=dict(SIZE), **more)
    return next(one for one in Judge(PLAN, record).all() if one.arm == name)


def test_numbers_count_when_the_arm_is_valid_and_active() -> None:
    one = judged(blocks("fast", MIXED, 1.2))
    assert one.verdict is Verdict.HELPS
    assert one.comparisons[0].ratio == pytest.approx(1.2, rel=0.01)
    assert one.validity.proof is Proof.NO_LINE
    assert judged(blocks("fast", MIXED, 0.8)).verdict is Verdict.HURTS


def test_case_47_more_than_the_intervention_changed() -> None:
    one = judged(blocks("fast", replace(MIXED, max_running_requests=26), 1.2))
    assert one.verdict is Verdict.INVALID
    assert one.comparisons == ()
    assert "max_running_requests is 26" in one.validity.problems[0]
    assert one.decided


def test_case_48_a_new_file_that_no_line_names_is_not_judged() -> None:
    placed = ("/root/configs/triton_3_6_0/" + UP,)
    one = judged(blocks("tuned", facts(), 1.2, installed=placed), "tuned")
    assert one.verdict is Verdict.INVALID
    read = facts(configs=(ConfigRead("up", UP, "exact", placed[0]),))
    assert judged(blocks("tuned", read, 1.2, installed=placed), "tuned").verdict is Verdict.HELPS


def test_case_49_median_better_and_mean_worse_are_both_shown_and_decide_nothing() -> None:
    plan = replace(PLAN, decision=replace(PLAN.decision, metric="ttft_ms"))
    starts = blocks("fast", MIXED, 1.2, load={"mean_ttft_ms": 150.0})
    record = Facts(starts=starts, size=dict(SIZE))
    one = Judge(plan, record).all()[0]
    assert one.verdict is Verdict.INCONCLUSIVE
    assert {"ttft_ms", "mean_ttft_ms"} <= {comparison.metric for comparison in one.comparisons}
    assert any("mean_ttft_ms" in note for note in one.notes)


def test_a_start_that_was_cut_off_from_its_baseline_decides_nothing() -> None:
    assert judged([start(0, 0, "fast", 1200, MIXED)]).verdict is Verdict.INCONCLUSIVE
    assert judged([]).verdict is Verdict.INCONCLUSIVE
    assert not judged([]).decided


@pytest.mark.parametrize(
    ("endings", "verdict", "decided"),
    [
        ([Ending.CANNOT_START], Verdict.INCONCLUSIVE, False),
        ([Ending.CANNOT_START, Ending.LOAD_FAILED], Verdict.FAILED, True),
        ([Ending.DIED], Verdict.FAILED, True),
        ([Ending.CANNOT_INSTALL], Verdict.FAILED, True),
        ([Ending.CANNOT_STOP, Ending.CANNOT_STOP], Verdict.FAILED, True),
    ],
)
def test_failed_starts(endings: list[Ending], verdict: Verdict, decided: bool) -> None:
    starts = [start(0, 9, BASELINE, 1000, facts())]
    starts += [
        start(block, 0, "fast", 1, None, ending=ending, passes=(), reason="because")
        for block, ending in enumerate(endings)
    ]
    one = judged(starts)
    assert (one.verdict, one.decided) == (verdict, decided)
    assert endings[-1].value in one.notes[-1]
    assert "because" in one.notes[-1]


def test_a_death_under_load_is_a_verdict_whatever_the_other_numbers_say() -> None:
    starts = [
        *blocks("fast", MIXED, 1.2),
        start(4, 1, "fast", 1, MIXED, ending=Ending.DIED, reason="SIGSEGV"),
    ]
    one = judged(starts)
    assert one.verdict is Verdict.FAILED
    assert one.comparisons == ()


def test_one_failed_start_among_good_ones_is_told() -> None:
    starts = blocks("fast", MIXED, 1.2)
    starts[1] = start(0, 1, "fast", 1, None, ending=Ending.CANNOT_START, passes=(), reason="a port was taken")
    one = judged([*starts, *blocks("fast", MIXED, 1.2, 1, 4)])
    assert one.verdict is Verdict.HELPS
    assert any("1 of 5 starts failed" in note for note in one.notes)


def test_what_the_server_refuses_cannot_be_activated_even_when_it_dies_of_it() -> None:
    fusion = Intervention("fusion", ("--flashinfer-allreduce-fusion-backend", "auto"))
    plan = replace(PLAN, interventions=(fusion,))
    line = "FlashInfer allreduce fusion requires SM90 or SM10X NVIDIA GPUs."
    seen = facts(all_reduce_fusion=("refused", line), lines=(line,))
    starts = [
        start(0, 0, BASELINE, 1000, facts(), preparing=True),
        start(0, 0, "fusion", 1, seen, ending=Ending.CANNOT_START, passes=(), preparing=True),
    ]
    one = Judge(plan, Facts(starts=starts, size=dict(SIZE))).all()[0]
    assert one.verdict is Verdict.CANNOT_ACTIVATE
    assert one.decided


def test_what_was_refused_before_any_start_says_why() -> None:
    one = judged([], refused={"fast": "not on this GPU"})
    assert one.verdict is Verdict.CANNOT_ACTIVATE
    assert one.validity.problems == ("not on this GPU",)
    assert one.decided


def test_starts_that_fill_caches_count_for_no_number() -> None:
    odd = [
        start(0, 0, "fast", 5000, MIXED, preparing=True),
        start(0, 0, BASELINE, 5000, facts(), preparing=True),
    ]
    with_them = judged([*odd, *blocks("fast", MIXED, 1.2)])
    assert with_them.comparisons == judged(blocks("fast", MIXED, 1.2)).comparisons


def test_the_last_arm_is_judged_by_its_own_blocks_only() -> None:
    starts = [*blocks("fast", MIXED, 1.2), *blocks("tuned", MIXED, 1.2), *blocks(COMBINED, MIXED, 0.9, 4, 4)]
    record = Facts(
        starts=starts, size=dict(SIZE), combined=("fast", "tuned"), first_combined=4, planned_combined=4
    )
    alone, last = starts_of(Arm("fast", ("fast",)), record), starts_of(Arm(COMBINED), record)
    assert {one.result.start.block for one in (*alone.starts, *alone.baseline)} == {0, 1, 2, 3}
    assert {one.result.start.block for one in (*last.starts, *last.baseline)} == {4, 5, 6, 7}


def test_starts_of_earlier_blocks_only() -> None:
    record = Facts(starts=blocks("fast", MIXED, 1.2), size=dict(SIZE))
    judge = Judge(PLAN, record)
    assert judge.all(before=1)[0].verdict is Verdict.INCONCLUSIVE
    assert judge.all()[0].verdict is Verdict.HELPS
    assert judge.all(before=1)[0].comparisons[0].blocks == 1


def test_what_is_known_grows_with_the_record() -> None:
    starts = blocks("fast", MIXED, 1.2)
    record = Facts(starts=starts[:3], size=dict(SIZE))
    judge = Judge(PLAN, record)
    first = judge.all()[0]
    record.starts += starts[3:]
    assert first.comparisons[0].blocks == 1
    assert judge.all()[0] == Judge(PLAN, record).all()[0]
    assert judge.all()[0].comparisons[0].blocks == 4


def test_winners_that_fit_together_stay_in_the_order_of_the_plan() -> None:
    names, left = compatible(PLAN.server, [(FAST, 1.05), (TUNED, 1.2)])
    assert names == ("fast", "tuned")
    assert left == ()


@pytest.mark.parametrize(
    ("rival", "said"),
    [
        (Intervention("other", configs=("/x.json",)), "both about the config files"),
        (Intervention("other", without_configs=True), "both about the config files"),
    ],
)
def test_of_two_that_are_about_the_config_files_the_better_stays(rival: Intervention, said: str) -> None:
    names, left = compatible(PLAN.server, [(rival, 1.1), (TUNED, 1.2), (FAST, 1.01)])
    assert names == ("tuned", "fast")
    assert len(left) == 1
    assert said in left[0]


def test_of_two_values_of_a_flag_the_better_stays() -> None:
    small = Intervention("small", ("--chunked-prefill-size", "2048"))
    large = Intervention("large", ("--chunked-prefill-size", "16384"))
    names, left = compatible(PLAN.server, [(small, 1.1), (large, 1.3)])
    assert names == ("large",)
    assert left[0].startswith("small is not in the last arm")
