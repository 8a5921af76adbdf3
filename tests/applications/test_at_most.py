from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from moetune.applications.at_most import MODEL_ERROR, NoStepsError, bounds
from moetune.applications.planning import make_plan
from moetune.applications.request import Request
from moetune.domain.errors import InputError
from moetune.domain.predict import PerformanceModel
from tests.applications.made_traces import LAYER, MadeStep, events, write_trace
from tests.doubles import ModelDouble

if TYPE_CHECKING:
    from moetune.applications.at_most import AtMost
    from moetune.applications.planning import Plan

MODEL = "Qwen/Qwen3.5-122B-A10B"


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan with the times of the double."""
    with pytest.MonkeyPatch.context() as patch:
        double = ModelDouble()
        patch.setattr(PerformanceModel, "load", lambda: double)
        return make_plan(Request(MODEL, tp=4, server="sglang", gpu=("NVIDIA H200",), offline=True), {})


def speedup(plan: Plan, m: int) -> float:
    predicted = plan.gpus[0].predicted
    assert predicted is not None
    found = {entry.m: entry.speedup for entry in predicted.choices.entries}[m]
    assert found is not None
    return found


def traced(plan: Plan, tmp_path: Path, *steps: MadeStep) -> AtMost:
    (bound,) = bounds(plan, [str(write_trace(tmp_path / "t.json", events(steps)))], [])
    return bound


def test_the_share_of_a_trace_and_the_predicted_distance_give_the_bound(plan: Plan, tmp_path: Path) -> None:
    bound = traced(plan, tmp_path, MadeStep(), MadeStep())
    (phase,) = bound.phases
    assert (phase.phase, phase.steps, phase.m, phase.wall_us) == ("decode", 2, 64, 320.0)
    assert (phase.up_us, phase.down_us) == (48.0, 32.0)
    assert phase.share == bound.saved_if_free == 0.25
    distance = speedup(plan, 64)
    assert distance > 1.05
    assert bound.saved == pytest.approx(0.25 * (1 - 1 / distance))
    at_most = 0.25 * (1 - 1 / (distance * (1 + MODEL_ERROR)))
    assert bound.saved_at_most == pytest.approx(at_most)
    assert bound.gain_at_most == pytest.approx(1 / (1 - at_most))
    assert bound.worth
    assert "at most" in bound.reason


def test_prefill_and_decode_are_weighted_by_their_time(plan: Plan, tmp_path: Path) -> None:
    prefill = MadeStep("step[EXTEND bs=1 toks=4096]", layers=12, kernels=(("attention_kernel", 80.0), *LAYER))
    bound = traced(plan, tmp_path, MadeStep(), prefill)
    decode, context = bound.phases
    assert decode.weight == pytest.approx(320 / (320 + 1920))
    assert context.m == 4096
    assert context.share == pytest.approx(1 / 8)
    assert bound.saved_if_free == pytest.approx((80 + 240) / (320 + 1920))
    assert bound.saved == pytest.approx(
        sum(p.weight * p.share * (1 - 1 / speedup(plan, p.m or 0)) for p in bound.phases)
    )


def test_case_50_ten_of_77_milliseconds_is_said_before_anything_is_tuned(plan: Plan, tmp_path: Path) -> None:
    layer = (("attention_kernel", 67.0), ("fused_moe_kernel", 6.0), ("fused_moe_kernel", 4.0))
    bound = traced(plan, tmp_path, MadeStep(layers=1000, kernels=layer))
    assert bound.phases[0].wall_us == 77_000.0
    assert bound.saved_if_free == pytest.approx(0.13, abs=0.001)
    assert bound.saved_at_most is not None
    assert bound.saved_at_most < bound.saved_if_free


def test_a_bound_within_the_noise_is_not_worth_it(plan: Plan, tmp_path: Path) -> None:
    layer = (("attention_kernel", 990.0), ("fused_moe_kernel", 6.0), ("fused_moe_kernel", 4.0))
    bound = traced(plan, tmp_path, MadeStep(layers=4, kernels=layer))
    assert not bound.worth
    assert bound.reason.startswith("not worth tuning: at most ")


def test_another_runner_gains_nothing(plan: Plan, tmp_path: Path) -> None:
    layer = (("attention_kernel", 60.0), ("void marlin_moe_wna16::Marlin<int>()", 20.0))
    bound = traced(plan, tmp_path, MadeStep(kernels=layer))
    assert (bound.worth, bound.saved_at_most, bound.runners) == (False, 0.0, (("Marlin", 1.0),))
    assert "Marlin" in bound.reason


def test_of_two_runners_only_the_triton_kernel_can_gain(plan: Plan, tmp_path: Path) -> None:
    layer = (*LAYER, ("void marlin_moe_wna16::Marlin<int>()", 20.0), ("attention_kernel", 100.0))
    bound = traced(plan, tmp_path, MadeStep(kernels=layer))
    assert bound.saved_if_free == pytest.approx(20 / 200)


def test_a_trace_without_experts_names_what_it_saw(plan: Plan, tmp_path: Path) -> None:
    bound = traced(plan, tmp_path, MadeStep(kernels=(("attention_kernel", 60.0),)))
    assert not bound.worth
    assert "attention_kernel" in bound.reason


def test_steps_of_unknown_m_count_with_the_largest_distance(plan: Plan, tmp_path: Path) -> None:
    bound = traced(plan, tmp_path, MadeStep("", graph=False))
    predicted = plan.gpus[0].predicted
    assert predicted is not None
    assert bound.phases[0].m is None
    assert bound.phases[0].speedup == max(entry.speedup or 0 for entry in predicted.choices.entries)
    assert any("names no steps" in problem for problem in bound.problems)


# --- logs -------------------------------------------------------------------------------------------


def decode_line(running: int, rate: float, extra: str = "") -> str:
    return (
        f"[2026-12-01 10:00:00 TP0] Decode batch, #running-req: {running}, #token: 9, token usage: 0.10, "
        f"{extra}cuda graph: True, gen throughput (token/s): {rate:.2f}, #queue-req: 0\n"
    )


def logged(plan: Plan, tmp_path: Path, *lines: str) -> AtMost:
    path = tmp_path / "server.log"
    path.write_text("".join(lines))
    (bound,) = bounds(plan, [], [str(path)])
    return bound


def test_a_log_gives_an_estimate_from_its_steps_without_prefill(plan: Plan, tmp_path: Path) -> None:
    predicted = plan.gpus[0].predicted
    assert predicted is not None
    default_us = {entry.m: entry.default_us for entry in predicted.choices.entries}[64]
    assert default_us is not None
    layers = plan.layer.num_moe_layers
    assert layers
    step_us = 4 * layers * default_us
    pure, with_prefill = 64e6 / step_us, 64e6 / (3 * step_us)
    bound = logged(plan, tmp_path, *[decode_line(64, with_prefill)] * 12, *[decode_line(64, pure)] * 4)
    assert bound.kind == "estimated"
    assert bound.phases[0].m == 64
    assert bound.saved_if_free == pytest.approx(0.25, rel=1e-3)
    assert bound.saved == pytest.approx(0.25 * (1 - 1 / speedup(plan, 64)), rel=1e-3)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([decode_line(64, 1000.0)] * 4, "holds 4 lines"),
        ([decode_line(0, 0.0)] * 9, "holds 0 lines"),
        ([decode_line(64, 1000.0, "accept len: 2.10, ")] * 9, "speculatively"),
        (
            ["SpecDecoding metrics: Mean acceptance length: 2\n", *[decode_line(64, 1000.0)] * 9],
            "speculatively",
        ),
    ],
)
def test_a_log_that_says_no_step_time_is_refused(
    lines: list[str], message: str, plan: Plan, tmp_path: Path
) -> None:
    with pytest.raises(NoStepsError, match=message):
        logged(plan, tmp_path, *lines)


def test_a_bound_is_for_one_kind_of_gpu(tmp_path: Path) -> None:
    both = make_plan(Request(MODEL, tp=4, gpu=("NVIDIA H200", "NVIDIA L40S"), offline=True), {})
    with pytest.raises(InputError, match="this plan has 2"):
        bounds(both, [str(tmp_path / "t.json")], [])
