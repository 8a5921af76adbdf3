"""int4 on vLLM before 0.27: at few tokens a CUDA kernel runs, and every verb says and does the same there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetune.applications import borrow_sources, lint, planning
from moetune.applications.borrow import borrow
from moetune.applications.borrow_answer import BorrowRequest
from moetune.applications.lint_report import Linted, LintRequest
from moetune.applications.measure_request import MeasureRequest
from moetune.applications.planning import Plan, make_plan
from moetune.applications.request import Request, TuneRequest
from moetune.applications.tuning import tune_request
from moetune.applications.tuning_efforts import EFFORTS
from moetune.applications.tuning_measured import tune_measured
from moetune.applications.verify_answer import VerifyRequest
from moetune.applications.verifying import verify
from moetune.domain.predict import PerformanceModel
from moetune.domain.problem import Problem
from moetune.servers.registry import open_server
from tests.applications.fake_machine import FakeMachine
from tests.doubles import ModelDouble

MODEL = "Qwen/Qwen3.5-122B-A10B"  # 256 experts, topk 8: the CUDA kernel runs up to m = 192
ASKED: dict[str, Any] = {"tp": 4, "server": "vllm", "server_version": "0.12.0", "quant": "int4"}
NAME = "E=256,N=256,device_name=NVIDIA_H200,dtype=int4_w4a16.json"
SIZES: dict[str, Any] = {"hidden": 3072, "topk": 8}
TRITON = {
    "BLOCK_SIZE_M": 64,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 1,
    "SPLIT_K": 1,
    "num_warps": 4,
    "num_stages": 3,
}
OWN_KEYS = [1, 2, 3, 4, 5, 8, 9, 16, 32, 64, 128, 192]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (lint, planning, borrow_sources):
        monkeypatch.setattr(module, "find_installed", lambda _: None)
    monkeypatch.setattr(PerformanceModel, "load", ModelDouble)
    quick = replace(EFFORTS["quick"], rounds=(2, 2), limit=8, layer_rounds=5, budget_seconds=None)
    monkeypatch.setattr("moetune.applications.tuning_measured.EFFORTS", {**EFFORTS, "quick": quick})
    return iter(())


def plan(**fields: Any) -> Plan:
    return make_plan(Request(MODEL, gpu=("NVIDIA H200",), offline=True, **{**ASKED, **fields}), {})


def problem_of(answer: Plan) -> Problem:
    problem = answer.gpus[0].problem
    assert problem is not None
    return problem


def written(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / NAME).read_text())
    document.pop("triton_version", None)
    return document


def assert_own_entries(document: dict[str, Any]) -> None:
    """Up to m = 192 the server does what it does without a file, and from 193 on what was chosen."""
    assert [int(key) for key in document if int(key) <= 192] == OWN_KEYS
    assert min(int(key) for key in document if int(key) > 192) == 193
    for key, entry in document.items():
        if int(key) <= 192:
            rows = min(16, 1 << (int(key) - 1).bit_length())
            assert entry == {"BLOCK_SIZE_M": rows, "GROUP_SIZE_M": 1, "SPLIT_K": 1}
        else:
            assert entry["BLOCK_SIZE_N"] >= 16


def lint_file(path: Path, **asked: Any) -> Linted:
    request = LintRequest(paths=(path,), server="vllm", server_version="0.12.0", **asked)
    return lint.lint(request, {})


def codes(linted: Linted) -> list[str]:
    return [found.code.code for found in linted.findings]


def tune(out: Path) -> Path:
    request = TuneRequest(MODEL, gpu=("NVIDIA H200",), offline=True, out=out, compile_configs=False, **ASKED)
    (file,) = tune_request(request, {}).files
    return file.path


def test_a_plan_says_which_m_and_chooses_for_the_others() -> None:
    (part,) = plan().gpus
    assert part.cuda_kernel_until == part.to_json()["cuda_kernel_until"] == 192
    assert part.defaults[0].first_m == 193
    assert part.predicted is not None
    assert part.predicted.choices.entries[0].m == 193
    assert min(m for m, _ in part.predicted.keys.traffic) == 193


def test_who_runs_triton_everywhere_has_none() -> None:
    for fields in (
        {"server_version": "0.33.0"},
        {"quant": "fp8"},
        {"server": "sglang", "server_version": "0.5.23"},
    ):
        (part,) = plan(**fields).gpus
        assert part.cuda_kernel_until == 0
        assert part.defaults[0].first_m == 1


def test_traffic_below_counts_for_nothing_and_alone_leaves_nothing_to_tune() -> None:
    (part,) = plan(m="8:3,256:1,1024:1").gpus
    assert part.predicted is not None
    assert part.predicted.keys.traffic == ((256, 0.5), (1024, 0.5))
    for fields in ({"m": "1,64"}, {"max_m": 192}):
        (part,) = plan(**fields).gpus
        assert part.predicted is None
        assert "nothing to tune" in part.reason
        assert "m = 1 to 192: vllm 0.12.0 runs a CUDA kernel of its own" in part.reason


def test_a_predicted_file_holds_the_servers_own_entries_and_passes_lint(tmp_path: Path) -> None:
    path = tune(tmp_path)
    assert_own_entries(written(tmp_path))
    for asked in ({}, SIZES, {"model": MODEL}):
        assert codes(lint_file(path, **asked)) == [], asked


def test_a_measured_file_too_and_the_gpu_is_asked_for_no_such_m(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    request = MeasureRequest(
        MODEL, m="1,256,512", max_m=512, offline=True, out=tmp_path / "out", state=tmp_path / "state", **ASKED
    )
    tuned = tune_measured(request, {}, gpus=machine.devices(), command=machine.command, pool=machine.pool)
    assert tuned.gains
    assert_own_entries(written(tmp_path / "out"))
    asked = {int(line["m"]) for what in ("time", "layer", "check") for line in machine.log(what)}
    assert min(asked) == 193


def test_lint_names_what_ends_the_cuda_kernel(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_text(json.dumps({"1": TRITON, "64": TRITON, "1024": TRITON, "8192": TRITON}))
    (found,) = [found for found in lint_file(path, **SIZES).findings if found.code.code == "MOE103"]
    assert dict(found.facts)["keys"].split() == ["1", "64"]
    assert "BLOCK_SIZE_K 64 is no multiple of the group of 128" in found.message
    # Without topk nobody knows which m those are.
    assert "MOE103" not in codes(lint_file(path))
    fits = TRITON | {"BLOCK_SIZE_K": 128}
    path.write_text(json.dumps({"1": fits, "64": fits, "1024": TRITON, "8192": TRITON}))
    assert "MOE103" not in codes(lint_file(path, **SIZES))
    newer = LintRequest(paths=(path,), server="vllm", server_version="0.27.1", **SIZES)
    assert "MOE103" not in codes(lint.lint(newer, {}))


def test_lint_looks_at_all_m_that_pick_an_entry(tmp_path: Path) -> None:
    path = tmp_path / NAME
    own = {"BLOCK_SIZE_M": 16, "GROUP_SIZE_M": 1, "SPLIT_K": 1}
    # 256 serves m from 129 on, where the CUDA kernel still runs; and 1 those up to 128.
    path.write_text(json.dumps({"1": own, "256": TRITON, "8192": TRITON}))
    (found,) = [found for found in lint_file(path, **SIZES).findings if found.code.code == "MOE103"]
    assert dict(found.facts)["keys"].split() == ["256"]
    assert "at m = 129" in found.message
    # An entry of that kernel that Triton meets too must do for both.
    huge = TRITON | {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 1024, "BLOCK_SIZE_K": 256}
    path.write_text(json.dumps({"1": own, "192": huge, "4096": TRITON, "8192": TRITON}))
    assert "MOE111" in codes(lint_file(path, **SIZES))


def test_verify_measures_where_the_triton_kernel_runs(tmp_path: Path) -> None:
    path = tune(tmp_path)
    request = VerifyRequest(paths=(path,), server="vllm", server_version="0.12.0", lookup_only=True)
    (one,) = verify(request, environ={}).problems
    assert one.looked.picks[0].first == 193
    assert min(pick.m for pick in one.looked.picks) == 193
    assert one.looked.other_kernel.startswith("m = 1 to 192: vllm 0.12.0 runs a CUDA kernel")
    assert one.to_json()["other_kernel"] == one.looked.other_kernel


def test_borrowed_entries_give_way_there(tmp_path: Path) -> None:
    source = tmp_path / "configs" / NAME
    source.parent.mkdir()
    ms = (1, 8, 64, 100, 256, 1024, 4096, 8192)
    source.write_text(json.dumps({str(m): TRITON for m in ms}))
    request = BorrowRequest(
        paths=(source,), server="vllm", server_version="0.12.0", out=tmp_path / "out", **SIZES
    )
    (lent,) = borrow(request, {}, ModelDouble()).lent
    assert_own_entries(written(tmp_path / "out"))
    actions = {change.m: change.action.value for change in lent.changes}
    assert (actions[1], actions[64], actions[1024]) == (
        "the server's default",
        "the server's default",
        "kept",
    )
    assert actions[100] == "dropped"
    assert codes(lint_file(tmp_path / "out", **SIZES)) == []
    # Without topk it is not known where they have to.
    blind = BorrowRequest(paths=(source,), server="vllm", server_version="0.12.0", out=tmp_path / "blind")
    answer = borrow(blind, {}, ModelDouble())
    assert not answer.lent
    assert any("--topk" in str(passed) for passed in answer.passed_over)


def test_the_problem_of_the_plan_is_that_of_the_server() -> None:
    problem = problem_of(plan())
    server = open_server("vllm", "0.12.0")
    assert server.launch_classes(problem, "up", [192], 16) == ()
    assert len(server.launch_classes(problem, "up", [193], 16)) == 1
