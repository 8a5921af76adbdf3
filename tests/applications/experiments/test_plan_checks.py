"""A plan against its server, GPU and model: what is known before the first start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moetune.applications.checkpoints import resolve
from moetune.applications.experiments.plan_checks import (
    PlanProblem,
    check_plan,
    command_facts,
    problems_of_arm,
)
from moetune.domain.experiment_plan import Intervention, LoadPlan, Plan, ServerPlan
from moetune.domain.gpu import find_gpu
from moetune.domain.model import ExpertLayer
from moetune.servers.protocol import Server
from moetune.servers.registry import open_server
from tests.generators import H200

RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
MODEL = "Qwen/Qwen3.5-122B-A10B"
SUM = "--enable-fused-moe-sum-all-reduce"
SGLANG = ("python", "-m", "sglang.launch_server", "--model-path", MODEL, "--port", "{port}", "--tp", "4")
VLLM = ("vllm", "serve", MODEL, "--port", "{port}", "-tp", "4")
CONFIG = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
}


@pytest.fixture(scope="module")
def layer() -> ExpertLayer:
    return resolve(MODEL, offline=True)


def plan_of(*interventions: Intervention, name: str = "sglang", **server: object) -> Plan:
    command = SGLANG if name == "sglang" else VLLM
    given = {
        "name": name,
        "command": command,
        "version": "0.5.23" if name == "sglang" else "0.33.0",
        "gpu": RTX,
    }
    numbered = tuple(replace(one, line=at) for at, one in enumerate(interventions, 10))
    return Plan("evening", ServerPlan(**{**given, **server}), LoadPlan("guidellm"), numbered)  # type: ignore[arg-type]


def errors(found: tuple[PlanProblem, ...], name: str = "") -> list[str]:
    return [str(one) for one in found if one.severity == "error" and name in ("", one.intervention)]


def write(folder: Path, name: str, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(json.dumps({"1": {**CONFIG, **changes}, "8192": {**CONFIG, **changes}}))
    return path


def file_name(server: Server, layer: ExpertLayer, gpu: str) -> str:
    problem = server.problem(
        layer,
        command_facts(plan_of().server).parallelism,
        find_gpu(gpu),
        command_facts(plan_of().server).options,
    )
    return server.file_name(problem, "up")


def test_the_evening_refuses_the_fused_all_reduce_and_nothing_else(layer: ExpertLayer) -> None:
    """On sm_120 it is refused before anything is started, with the reason; the others go on."""
    plan = plan_of(
        Intervention("sum", arguments=(SUM,)),
        Intervention("fused", arguments=("--flashinfer-allreduce-fusion-backend", "auto")),
        Intervention("no files", without_configs=True),
    )
    found = check_plan(plan, layer=layer)
    (refused,) = [one for one in found if one.severity == "error"]
    assert refused.intervention == "fused"
    assert refused.line == 11
    assert "sm_90 and sm_10x only" in refused.message
    assert RTX in refused.message
    assert refused.hint


def test_the_gpu_that_is_given_wins_over_the_plans(layer: ExpertLayer) -> None:
    plan = plan_of(Intervention("fused", arguments=("--flashinfer-allreduce-fusion-backend", "trtllm")))
    assert errors(check_plan(plan, layer=layer))
    assert not errors(check_plan(plan, gpu=H200, layer=layer))


def test_nothing_is_an_error_where_nothing_is_known() -> None:
    plan = plan_of(
        Intervention("sum", arguments=(SUM,)),
        Intervention("fused", arguments=("--flashinfer-allreduce-fusion-backend", "auto")),
        Intervention("no files", without_configs=True),
        gpu="",
    )
    assert check_plan(plan) == ()


def test_without_a_version_flags_are_warnings() -> None:
    plan = plan_of(Intervention("typo", arguments=("--enable-fused-moe-sum-allreduce",)), version="")
    (found,) = check_plan(plan)
    assert found.severity == "warning"
    assert "does not say the version" in found.message
    assert errors(check_plan(plan, version="0.5.23"))


def test_a_flag_that_this_release_does_not_have() -> None:
    (found,) = errors(check_plan(plan_of(Intervention("sum", arguments=(SUM,)), version="0.5.9")))
    assert "0.5.10 is the first" in found
    (found,) = errors(check_plan(plan_of(Intervention("x", arguments=("--enable-fused-moe-sum-al-reduce",)))))
    assert f"did you mean {SUM}?" in found


def test_expert_parallelism_of_the_arm_is_what_counts(layer: ExpertLayer) -> None:
    plan = plan_of(
        Intervention("sum", arguments=(SUM,)),
        Intervention("sum and ep", arguments=(SUM, "--ep-size", "4")),
        version="0.5.20",
    )
    found = check_plan(plan, layer=layer)
    assert not errors(found, "sum")
    assert any("outside its output" in one for one in errors(found, "sum and ep"))


def test_a_conflict_with_the_baseline_is_seen(layer: ExpertLayer) -> None:
    plan = plan_of(
        Intervention("fused", arguments=("--flashinfer-allreduce-fusion-backend", "auto")),
        gpu="NVIDIA H200",
        command=(*SGLANG, "--enable-deterministic-inference"),
    )
    (found,) = errors(check_plan(plan, layer=layer))
    assert "deterministic inference switches it off" in found


def test_on_by_default_needs_the_opposite_flag_in_the_baseline(layer: ExpertLayer) -> None:
    fused = Intervention("fused", arguments=("--flashinfer-allreduce-fusion-backend", "auto"))
    (found,) = errors(check_plan(plan_of(fused, gpu="NVIDIA H200"), layer=layer))
    off = "--enforce-disable-flashinfer-allreduce-fusion"
    assert "on by default" in found
    assert off in found
    # As the hint says: the baseline has it off, and the intervention takes that out.
    honest = plan_of(Intervention("fused", remove=(off,)), gpu="NVIDIA H200", command=(*SGLANG, off))
    assert not errors(check_plan(honest, layer=layer))


def test_together_is_checked_too(layer: ExpertLayer) -> None:
    one = Intervention("sum", arguments=(SUM,))
    two = Intervention("runner", arguments=("--moe-runner-backend", "flashinfer_cutlass"))
    plan = plan_of(one, two)
    assert not errors(check_plan(plan, layer=layer))
    (found,) = errors(problems_of_arm(plan, (one, two), layer=layer))
    assert "flashinfer_cutlass is the MoE runner" in found
    three = Intervention("other", arguments=("--moe-runner-backend", "triton"))
    (found,) = errors(problems_of_arm(plan, (two, three), layer=layer))
    assert "cannot be on together" in found


def test_a_moe_runner_that_does_not_exist_or_is_the_default(layer: ExpertLayer) -> None:
    plan = plan_of(
        Intervention("none", arguments=("--moe-runner-backend", "tritn")),
        Intervention("same", arguments=("--moe-runner-backend", "triton")),
    )
    found = check_plan(plan, layer=layer)
    assert any("no such choice" in one for one in errors(found, "none"))
    (same,) = [one for one in found if one.intervention == "same"]
    assert same.severity == "warning"
    assert "is triton in the baseline too" in same.message


# --- config files ------------------------------------------------------------------------------------


def test_files_of_this_gpu_are_accepted(tmp_path: Path, layer: ExpertLayer) -> None:
    name = file_name(open_server("sglang", "0.5.23"), layer, RTX)
    folder = write(tmp_path / "configs" / "triton_3_8_0", name).parent
    assert not errors(check_plan(plan_of(Intervention("tuned", configs=(str(folder),))), layer=layer))
    assert not errors(check_plan(plan_of(Intervention("tuned", configs=(str(tmp_path),))), layer=layer))


def test_files_of_another_gpu_would_never_be_read(tmp_path: Path, layer: ExpertLayer) -> None:
    name = file_name(open_server("sglang", "0.5.23"), layer, "NVIDIA B200")
    write(tmp_path, name)
    plan = plan_of(Intervention("borrowed as is", configs=(str(tmp_path),)))
    (found,) = errors(check_plan(plan, layer=layer))
    assert "none of the files is the one that sglang looks for" in found
    assert "moetune borrow" in found
    # Without the model the GPU's name in the file is enough.
    (found,) = errors(check_plan(plan))
    assert "the files are for NVIDIA_B200" in found


def test_files_that_cannot_run_here_or_compute_wrong_numbers(tmp_path: Path, layer: ExpertLayer) -> None:
    name = file_name(open_server("sglang", "0.5.23"), layer, RTX)
    big = write(tmp_path / "big", name, BLOCK_SIZE_M=128, BLOCK_SIZE_N=256, BLOCK_SIZE_K=128, num_stages=4)
    broken = tmp_path / "broken" / name
    broken.parent.mkdir()
    broken.write_text('{"default": {}}')
    plan = plan_of(Intervention("big", configs=(str(big),)), Intervention("broken", configs=(str(broken),)))
    found = check_plan(plan, layer=layer)
    assert any("MOE111" in one for one in errors(found, "big"))
    assert any("MOE102" in one for one in errors(found, "broken"))
    on_h200 = check_plan(replace(plan, interventions=plan.interventions[:1]), gpu=H200)
    assert not any("MOE111" in one for one in errors(on_h200))


def test_nothing_to_put_in_place(tmp_path: Path) -> None:
    plan = plan_of(
        Intervention("empty", configs=(str(tmp_path),)), Intervention("gone", configs=(str(tmp_path / "x"),))
    )
    found = check_plan(plan)
    assert "no config file lies in" in errors(found, "empty")[0]
    assert "No such file" in errors(found, "gone")[0]
    far = replace(plan, server=replace(plan.server, host="gpu-7"))
    assert not errors(check_plan(far), "gone")


def test_deterministic_inference_makes_files_void(layer: ExpertLayer) -> None:
    plan = plan_of(
        Intervention("both", arguments=("--enable-deterministic-inference",), without_configs=True),
        Intervention(
            "variable",
            arguments=("--enable-deterministic-inference",),
            environment={"SGLANG_MOE_CONFIG_DIR": "/x"},
        ),
    )
    found = check_plan(plan, layer=layer)
    (void,) = errors(found, "both")
    assert "this arm is void" in void
    assert any("opens no config file" in one for one in errors(found, "variable"))
    invariant = plan_of(
        Intervention("none", without_configs=True), name="vllm", environment={"VLLM_BATCH_INVARIANT": "1"}
    )
    assert any("batch invariance" in one for one in errors(check_plan(invariant, layer=layer)))


def test_files_do_nothing_where_another_runner_does_the_work(layer: ExpertLayer) -> None:
    """On a B200 SGLang gives this model FlashInfer's TRT-LLM kernels, and vLLM on sm_120 CUTLASS."""
    files = Intervention("files", without_configs=True)
    forced = Intervention("forced", without_configs=True, arguments=("--moe-runner-backend", "triton"))
    found = check_plan(plan_of(files, forced, gpu="NVIDIA B200"), layer=layer)
    (one,) = errors(found)
    assert "flashinfer_trtllm, which reads no tuned Triton config" in one
    assert "--moe-runner-backend triton" in one
    (one,) = errors(check_plan(plan_of(files, name="vllm"), layer=layer))
    assert "FLASHINFER_CUTLASS" in one
    assert "--moe-backend triton" in one


# --- the baseline ------------------------------------------------------------------------------------


def test_the_port_has_to_be_one_for_each_start() -> None:
    command = tuple(word if word != "{port}" else "8000" for word in SGLANG)
    (wrong,) = check_plan(plan_of(command=command))
    assert wrong.severity == "error"
    assert wrong.intervention == ""
    assert "says port 8000, and the plan 30000" in wrong.message
    (fixed,) = check_plan(plan_of(command=command, port=8000))
    assert fixed.severity == "warning"
    assert check_plan(plan_of(environment={"PORT": "{port}"}, command=command[:5])) == ()


def test_a_variable_that_nothing_shows_needs_a_proof() -> None:
    bare = Intervention("bare", environment={"NCCL_ALGO": "Tree"})
    proven = replace(bare, name="proven", proof="NCCL_ALGO set")
    found = check_plan(
        plan_of(bare, proven, Intervention("known", environment={"SGLANG_MOE_CONFIG_DIR": "/x"}))
    )
    assert [one.intervention for one in found if "without a proof" in one.message] == ["bare"]


def test_of_a_server_that_is_not_known_only_the_command_is_checked() -> None:
    plan = plan_of(
        Intervention("x", arguments=("--anything",)),
        Intervention("y", remove=("--gone",)),
        name="other",
        command=("transformers", "serve", "--port", "{port}"),
    )
    (found,) = check_plan(plan)
    assert found.intervention == "y"
    assert "does not stand in it" in found.message


def test_what_the_plan_says_wins_over_the_command() -> None:
    facts = command_facts(plan_of(model="org/other", tp=8).server)
    assert (facts.model, facts.parallelism.tp) == ("org/other", 8)
    arm = command_facts(plan_of().server, (Intervention("x", arguments=("--tp", "2"), configs=("/",)),))
    assert arm.parallelism.tp == 2


def test_a_problem_is_one_line() -> None:
    problem = PlanProblem("error", "sum", 12, "it is refused", "leave it out")
    assert str(problem) == "line 12: sum: it is refused; leave it out"
    assert str(PlanProblem("warning", "", 0, "hm", "")) == "hm"
