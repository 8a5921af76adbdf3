"""What a plan says: the layer, the server that is meant, the runner, the files, what is there."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from typing import TYPE_CHECKING, Any

import pytest

from moetune.applications import environment, nvml, planning
from moetune.applications.environment import Installed
from moetune.applications.planning import make_plan
from moetune.applications.request import Request
from moetune.domain.errors import InputError, ServerError, ShardingError, UnknownGpuError
from moetune.domain.predict import PerformanceModel
from moetune.servers.protocol import Applies, Outcome, RunnerVerdict
from moetune.servers.sglang.server import SGLang
from tests.doubles import ModelDouble

if TYPE_CHECKING:
    from pathlib import Path

    from moetune.applications.planning import Plan

MODEL = "Qwen/Qwen3.5-122B-A10B"
RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
RTX_FILE = "E=256,N=256,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition.json"


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> ModelDouble:
    double = ModelDouble()
    monkeypatch.setattr(PerformanceModel, "load", lambda: double)
    return double


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Installed]:
    """What this machine has installed: nothing, until a test says so."""
    packages: dict[str, Installed] = {}
    monkeypatch.setattr(planning, "find_installed", packages.get)
    return packages


def plan(model: str | None = MODEL, environ: dict[str, str] | None = None, **fields: Any) -> Plan:
    fields.setdefault("gpu", RTX)
    return make_plan(Request(model, **fields), environ or {})


def test_the_layer_and_how_it_is_sharded() -> None:
    answer = plan(tp=4)
    assert (answer.layer.num_experts, answer.layer.hidden_size, answer.layer.intermediate_size) == (
        256,
        3072,
        1024,
    )
    problem = answer.gpus[0].problem
    assert problem is not None
    assert (problem.E, problem.N, problem.K, problem.topk) == (256, 256, 3072, 8)
    assert answer.gpus[0].device_name == "NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition"


def test_a_sum_over_topk_in_the_kernel_is_another_problem() -> None:
    flag: dict[str, Any] = {"enable_fused_moe_sum_all_reduce": True}
    summed, plain = (plan(tp=4, **fields).gpus[0] for fields in (flag, dict[str, Any]()))
    assert summed.problem is not None
    assert (summed.problem.flags, plain.problem and plain.problem.flags) == (("fused_sum",), ())
    assert summed.to_json()["fingerprint"] != plain.to_json()["fingerprint"]
    with pytest.raises(ServerError, match="vLLM has no --enable-fused-moe-sum-all-reduce"):
        plan(tp=4, server="vllm", assume_triton=True, **flag)


def test_two_files_with_the_places_in_order_for_sglang_and_one_for_vllm() -> None:
    up, down = plan(tp=4, server="sglang").gpus[0].files
    assert (
        up.path
        == "configs/triton_3_8_0/E=256,N=256,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition.json"
    )
    assert down.path == up.path.replace(".json", "_down.json")
    assert [path.split("/")[-2] for path in up.lookup.candidates][:3] == [
        "triton_3_8_0",
        "triton_3_7_1",
        "triton_3_6_0",
    ]
    (only,) = plan(tp=4, server="vllm", assume_triton=True).gpus[0].files
    assert only.path == RTX_FILE


def test_the_runner_comes_with_its_rule_and_source() -> None:
    runner = plan(tp=4).gpus[0].runner
    assert runner.applies is Applies.YES
    assert runner.reason
    assert "sglang/srt/" in runner.source


def test_another_runner_is_not_applicable_and_says_what_selects_triton() -> None:
    answer = plan("deepseek-ai/DeepSeek-V3", tp=8, gpu="NVIDIA B200")
    part = answer.gpus[0]
    assert not part.applicable
    assert part.predicted is None
    assert "flashinfer_trtllm" in part.reason
    assert part.runner.force_triton == "--moe-runner-backend triton"
    assert not answer.gains
    assert plan("deepseek-ai/DeepSeek-V3", tp=8, gpu="NVIDIA B200", runner_backend="triton").gains


def test_assume_triton_goes_on() -> None:
    part = plan("deepseek-ai/DeepSeek-V3", tp=8, gpu="NVIDIA B200", assume_triton=True).gpus[0]
    assert part.applicable
    assert part.runner.applies is Applies.NO
    assert part.predicted is not None


def test_an_unknown_runner_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = RunnerVerdict("", Applies.UNKNOWN, "no rule covers it")
    monkeypatch.setattr(SGLang, "runner", lambda *_: unknown)
    part = plan(tp=4).gpus[0]
    assert not part.applicable
    assert part.predicted is None
    assert "no rule is known" in part.reason
    assert plan(tp=4, assume_triton=True).gpus[0].predicted is not None


def test_a_dtype_without_a_string_is_an_error_only_where_it_matters() -> None:
    part = plan(tp=4, quant="nvfp4", gpu="NVIDIA B200").gpus[0]
    assert not part.applicable
    with pytest.raises(ServerError):
        plan(tp=4, quant="nvfp4", gpu="NVIDIA B200", assume_triton=True)


def test_case_25_a_tp_that_does_not_divide_lists_those_that_do() -> None:
    with pytest.raises(ShardingError) as caught:
        plan(tp=3)
    assert "8" in f"{caught.value.message} {caught.value.hint}"


def test_fp8_on_a_gpu_without_it_is_not_tuned_and_says_why() -> None:
    part = plan(tp=4, quant="fp8-block", gpu="NVIDIA A100-SXM4-80GB", assume_triton=True).gpus[0]
    assert part.predicted is None
    assert "fp8" in part.reason


def test_gpus_of_other_vendors_have_names_and_lookups_only() -> None:
    part = plan(tp=4, gpu="AMD Instinct MI300X", assume_triton=True).gpus[0]
    assert part.files
    assert part.predicted is None
    assert "AMD" in part.reason


class TestWhichServer:
    def test_none_installed_means_sglang_and_says_so(self) -> None:
        server = plan(tp=4).server
        assert server.name == "sglang"
        assert any("--server sglang" in text for text in server.assumed)

    def test_the_installed_one_is_meant(self, installed: dict[str, Installed]) -> None:
        installed["vllm"] = Installed("vllm", "0.20.0")
        installed["triton"] = Installed("triton", "3.5.1")
        server = plan(tp=4).server
        assert (server.name, server.version, server.triton_version) == ("vllm", "0.20.0", "3.5.1")
        assert server.shipped == "installed"
        assert not any("version" in text for text in server.assumed)

    def test_another_version_than_the_installed_one_takes_what_that_release_ships(
        self, installed: dict[str, Installed]
    ) -> None:
        installed["sglang"] = Installed("sglang", "0.5.12")
        installed["triton"] = Installed("triton", "3.6.0")
        server = plan(tp=4, server="sglang", server_version="0.5.23").server
        assert (server.version, server.triton_version) == ("0.5.23", "3.8.0")
        assert server.shipped == "published wheel"

    def test_what_is_said_is_not_assumed(self) -> None:
        server = plan(tp=4, server="sglang", server_version="0.5.9", triton_version="3.5.0").server
        assert (server.version, server.triton_version) == ("0.5.9", "3.5.0")
        assert server.assumed == ()

    def test_an_unknown_server_is_an_error_that_names_the_known_ones(self) -> None:
        with pytest.raises(ServerError) as caught:
            plan(server="llamacpp")
        assert "sglang" in (caught.value.hint or "")


class TestWhichGpus:
    def test_several_at_once_each_once(self) -> None:
        answer = plan(tp=4, gpu=("NVIDIA H200", "nvidia h200", "NVIDIA L40S"))
        assert [part.gpu.torch_name for part in answer.gpus] == ["NVIDIA H200", "NVIDIA L40S"]

    def test_case_56_two_kinds_in_one_machine_are_two_problems(self, monkeypatch: pytest.MonkeyPatch) -> None:
        devices = tuple(
            nvml.Device(index, name, capability, f"GPU-{index}")
            for index, (name, capability) in enumerate(
                [("NVIDIA H200", "9.0"), ("NVIDIA L40S", "8.9"), ("NVIDIA H200", "9.0")]
            )
        )
        monkeypatch.setattr(nvml, "detect_gpus", lambda: nvml.Detected(devices))
        answer = plan(tp=4, gpu=())
        assert [part.gpu.torch_name for part in answer.gpus] == ["NVIDIA H200", "NVIDIA L40S"]
        assert answer.gpus[0].files[0].path != answer.gpus[1].files[0].path

    def test_no_gpu_here_asks_for_a_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nvml, "detect_gpus", lambda: nvml.Detected(reasons=("no driver",)))
        with pytest.raises(UnknownGpuError) as caught:
            plan(tp=4, gpu=())
        assert "no driver" in caught.value.message
        assert "--gpu" in (caught.value.hint or "")

    def test_an_unknown_gpu_works_with_its_compute_capability(self) -> None:
        with pytest.raises(UnknownGpuError):
            plan(tp=4, gpu="NVIDIA Thing 9")
        part = plan(tp=4, gpu="NVIDIA Thing 9", compute_capability="12.0").gpus[0]
        assert part.files[0].lookup.file_name == "E=256,N=256,device_name=NVIDIA_Thing_9.json"
        assert part.predicted is not None


class TestWhatIsThere:
    def test_a_file_in_the_variables_directory_is_found(self, tmp_path: Path) -> None:
        path = tmp_path / plan(tp=4).gpus[0].files[0].path
        path.parent.mkdir(parents=True)
        path.write_text("{}")
        answer = plan(tp=4, environ={"SGLANG_MOE_CONFIG_DIR": str(tmp_path)})
        up, down = answer.gpus[0].files
        assert up.lookup.outcome is Outcome.EXACT
        assert up.lookup.found == str(path)
        assert down.lookup.outcome is Outcome.REUSED_UP
        assert answer.server.directory == str(tmp_path)

    def test_the_shipped_files_of_a_release_are_known_without_it(self) -> None:
        up = plan("Qwen/Qwen3-30B-A3B", gpu="NVIDIA H200").gpus[0].files[0]
        assert up.lookup.outcome is Outcome.STALE
        assert up.lookup.found is not None
        assert "E=128,N=768,device_name=NVIDIA_H200.json" in up.lookup.found

    def test_case_23_files_of_sibling_gpus_are_shown_nearest_first(self) -> None:
        nearby = [
            near
            for part in plan("Qwen/Qwen3-30B-A3B", gpu="NVIDIA H200 NVL").gpus
            for near in part.files[0].nearby
        ]
        assert nearby
        assert nearby[0].sibling.gpu.torch_name == "NVIDIA H200"

    def test_deterministic_inference_opens_no_file(self) -> None:
        part = plan(tp=4, deterministic=True).gpus[0]
        assert part.files[0].lookup.outcome is Outcome.IGNORED
        assert not part.applicable

    def test_the_fallback_is_the_default_of_each_regime(self) -> None:
        first, second = plan(tp=4).gpus[0].defaults
        assert (first.first_m, first.last_m, second.first_m, second.last_m) == (1, 256, 257, None)
        assert str(first.up) == str(first.down) == "16x32x64 g1 w4 s3"
        assert str(second.up) == "64x64x32 g8 w4 s3"


def test_own_keys_and_the_largest_m_reach_the_table() -> None:
    predicted = plan(tp=4, m="3,77", max_m=500).gpus[0].predicted
    assert predicted is not None
    ms = {choice.m for choice in predicted.choices.entries}
    assert {3, 77, 500} <= ms
    assert max(ms) == 500


def test_a_plan_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan(tp=4)
    assert list(tmp_path.iterdir()) == []


def test_equal_questions_have_equal_answers() -> None:
    first, second = (json.dumps(plan(tp=4, gpu=(RTX, "NVIDIA H200")).to_json()) for _ in range(2))
    assert first == second


def test_answers_are_frozen() -> None:
    answer = plan(tp=4)
    with pytest.raises(FrozenInstanceError):
        answer.gpus = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value"),
    [("tp", 0), ("tp", 10**30), ("tp", True), ("tp", 2.0), ("experts", -1), ("max_m", 0), ("max_m", 1 << 30)],
)
def test_numbers_that_make_no_sense_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InputError, match=field):
        Request(MODEL, **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("m", ["", "0", "1,1", "x", "5:-1", ((0, 1.0),), ((1, 0.0),), ((1, float("nan")),)])
def test_keys_that_make_no_sense_are_refused(m: Any) -> None:
    if m == "":
        assert Request(MODEL, m=()).traffic == ()
        return
    with pytest.raises(InputError):
        Request(MODEL, m=m)


def test_a_variable_of_the_server_has_a_name() -> None:
    with pytest.raises(InputError, match="environment"):
        Request(MODEL, server_environment={"A=B": "1"})


def test_the_trees_are_read_from_the_variables_given_not_from_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(tmp_path))
    assert plan(tp=4).server.directory is None
    assert make_plan(Request(MODEL, tp=4, gpu=RTX)).server.directory == str(tmp_path)
    assert environment.SERVERS == ("sglang", "vllm")
