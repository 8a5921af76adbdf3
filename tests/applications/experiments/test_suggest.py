"""The plan that is suggested: arms worth trying, simplest first, none that is known to do nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moetune.applications.checkpoints import resolve
from moetune.applications.experiments.plan_checks import check_plan, command_facts
from moetune.applications.experiments.plan_file import PlanError, parse_plan
from moetune.applications.experiments.suggest import BORROWED, Suggestion, suggest
from moetune.domain.errors import MoetuneError
from moetune.domain.version import release_text
from moetune.servers.flag_data import flag_book

MODEL = "Qwen/Qwen3.5-122B-A10B"
RTX, H200, B200 = "NVIDIA RTX PRO 6000 Blackwell Server Edition", "NVIDIA H200", "NVIDIA B200"
GPUS = (RTX, H200, B200, "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090", "NVIDIA A100-SXM4-80GB")


def asked(
    gpu: str, server: str = "sglang", version: str = "0.5.23", tp: int = 4, **more: object
) -> Suggestion:
    given = {"offline": True, "environ": {}, **more}
    return suggest(str(given.pop("model", MODEL)), gpu=gpu, server=server, version=version, tp=tp, **given)  # type: ignore[arg-type]


def names(suggestion: Suggestion) -> list[str]:
    return [one.name for one in suggestion.plan.interventions]


def with_configs(folder: Path) -> Path:
    for name in ("moetune-configs", BORROWED):
        (folder / name).mkdir(exist_ok=True)
    return folder


def test_the_evening_is_what_is_suggested_for_its_hardware() -> None:
    found = asked(RTX)
    assert names(found) == ["tuned configs", "sum inside the MoE kernel", "prefill steps of 16384 tokens"]
    assert dict(found.left_out).keys() == {"fused all-reduce"}
    assert "sm_90 and sm_10x only" in dict(found.left_out)["fused all-reduce"]
    assert (
        f"# Write them first: moetune tune {MODEL} --server sglang --server-version 0.5.23 --tp 4"
        in found.text
    )


def test_what_is_on_by_default_is_tried_the_other_way_round() -> None:
    assert "no fused all-reduce" in names(asked(H200))
    assert "fused all-reduce" not in names(asked(H200))
    assert "no fused all-reduce" not in names(asked(H200, tp=1))
    assert "fused all-reduce" in names(asked(H200, "vllm", "0.13.0"))
    assert "no fused all-reduce" in names(asked(H200, "vllm", "0.33.0"))


def test_tuned_files_come_with_the_runner_that_reads_them() -> None:
    found = asked(B200)
    (tuned,) = [one for one in found.plan.interventions if one.configs]
    assert tuned.arguments == ("--moe-runner-backend", "triton")
    assert "--runner-backend triton" in found.text
    assert "the Triton MoE runner" in names(found)
    assert "FlashInfer's TRT-LLM MoE runner" not in names(found)  # it is the default there


def test_a_shipped_file_is_asked_what_it_is_worth() -> None:
    found = asked(H200, "vllm", "0.33.0", model="Qwen/Qwen3-30B-A3B", tp=1)
    assert [one.name for one in found.plan.interventions if one.without_configs] == ["no config files"]
    assert "E=128,N=768,device_name=NVIDIA_H200.json" in found.text
    # A sibling's file is offered where the GPU has none of its own.
    near = asked("NVIDIA H200 NVL", model="Qwen/Qwen3-30B-A3B", tp=1)
    assert "borrowed configs" in names(near)
    assert "moetune borrow" in near.text


@pytest.mark.parametrize("server", ["sglang", "vllm"])
@pytest.mark.parametrize("gpu", GPUS)
def test_every_suggestion_is_a_plan_that_its_own_checks_accept(server: str, gpu: str, tmp_path: Path) -> None:
    """For each release that was read: it parses to the very plan, and nothing known speaks against an arm."""
    layer = resolve(MODEL, offline=True)
    folder = with_configs(tmp_path)
    for release in flag_book(server).inspected[2:]:
        found = asked(gpu, server, release_text(release))
        read = parse_plan(found.text.encode(), "x", folder)
        plain = tuple(
            replace(one, line=0, configs=tuple(Path(path).name for path in one.configs))
            for one in read.interventions
        )
        assert replace(read, interventions=plain) == found.plan
        structural = replace(
            found.plan,
            interventions=tuple(
                replace(one, configs=(), without_configs=one.without_configs or bool(one.configs))
                for one in found.plan.interventions
            ),
        )
        problems = [one for one in check_plan(structural, layer=layer) if one.severity == "error"]
        assert problems == [], (release, [str(one) for one in problems])
        assert 1 <= found.plan.load.requests <= 1000
        assert 0 < found.plan.budget.minutes <= 24 * 60


def test_a_plan_whose_files_are_not_there_yet_says_so() -> None:
    found = asked(RTX)
    with pytest.raises(PlanError, match=r"moetune-configs.*does not exist"):
        parse_plan(found.text.encode(), "x", Path("/nowhere"))


def test_files_that_are_there_are_looked_at(tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    folder.mkdir()
    (folder / "E=1,N=1,device_name=NVIDIA_B200.json").write_text(json.dumps({}))
    found = asked(RTX, out=str(folder))
    assert "tuned configs" not in names(found)
    assert "none of the files" in dict(found.left_out)["tuned configs"]


def test_a_command_of_the_users_own_is_the_baseline() -> None:
    command = (
        "docker",
        "run",
        "image",
        "sglang",
        "--chunked-prefill-size",
        "4096",
        "--port",
        "{port}",
        "--tp",
        "8",
    )
    found = asked(RTX, command=command)
    assert found.plan.server.command == command
    assert found.plan.server.model == MODEL
    assert command_facts(found.plan.server).parallelism.tp == 4  # what was said besides the command
    assert "prefill steps of 16384 tokens" not in names(found)
    assert "sum inside the MoE kernel" in names(found)


def test_the_same_question_has_the_same_bytes() -> None:
    assert asked(RTX).text == asked(RTX).text


@pytest.mark.parametrize(
    ("server", "gpu", "model"),
    [("other", RTX, MODEL), ("sglang", "no such GPU", MODEL), ("sglang", RTX, "no/model")],
)
def test_what_is_not_known_is_an_error(server: str, gpu: str, model: str) -> None:
    with pytest.raises(MoetuneError) as error:
        suggest(model, gpu=gpu, server=server, offline=True, environ={})
    assert error.value.hint
