"""doctor: from a log to findings, facts and the command that mends them."""

from __future__ import annotations

import io
import json
import os
import shlex
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from moetune.applications.doctor import Diagnosis, diagnose
from moetune.applications.doctor_solve import Known
from moetune.domain.errors import InputError
from moetune.domain.findings import Severity

if TYPE_CHECKING:
    from collections.abc import Callable

    from moetune.domain.findings import Finding

LOGS = Path(__file__).parents[1] / "logs"
OLD = "/pkg/sglang/srt/layers/moe/fused_moe_triton/configs"
NEW = "/pkg/sglang/srt/layers/moe/moe_runner/triton_utils/configs"
VLLM = "/pkg/vllm/model_executor/layers/fused_moe/configs"
TUNER = "https://github.com/sgl-project/sglang/tree/main/benchmark/kernels/fused_moe_triton"


def read(text: str, known: Known | None = None, config_files: tuple[tuple[str, str], ...] = ()) -> Diagnosis:
    return diagnose(["a.log"], known or Known(), config_files=config_files, stream=io.BytesIO(text.encode()))


def codes(diagnosis: Diagnosis) -> list[str]:
    return [finding.code.code for finding in diagnosis.findings]


def facts(finding: Finding) -> dict[str, str]:
    return dict(finding.facts)


def sglang_default(name: str, triton: str = "3_6_0", root: str = NEW, rank: str = "TP0") -> str:
    return (
        f"[2026-12-01 10:00:00 {rank}] Using default MoE kernel config. Performance might be sub-optimal! "
        f"Config file not found at {root}/triton_{triton}/{name}, you can create them with {TUNER}\n"
    )


def vllm_default(*names: str, rank: str = "TP0") -> str:
    places = ", ".join(f"{VLLM}/{name}" for name in names)
    return (
        f"(Worker_{rank} pid=7) WARNING 12-01 10:00:00 [fused_moe.py:1] Using default MoE config. "
        f"Performance might be sub-optimal! Config file not found at {places}\n"
    )


def server_args(**values: object) -> str:
    said = ", ".join(f"{name}={value!r}" for name, value in values.items())
    return f"[2026-12-01 09:00:00] server_args=ServerArgs({said})\n"


def out_of_resources(required: int) -> str:
    return (
        f"triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: {required}, "
        "Hardware limit: 101376. Reducing block sizes or `num_stages` may help.\n"
    )


CASE_1 = "".join(
    f"[2026-02-21 10:48:1{rank} TP{rank}] Config file not found at {OLD}/triton_3_5_1/E=128,N=192,"
    f"device_name=NVIDIA_H200.json. Fallback to triton version 3.2.0 and use MoE kernel config from "
    f"{OLD}/triton_3_2_0/E=128,N=192,device_name=NVIDIA_H200.json. Performance might be sub-optimal!\n"
    f"[2026-02-21 10:48:1{rank} TP{rank}] Using MoE kernel config with down_moe=False. Performance might be "
    f"sub-optimal! Config file not found at {OLD}/triton_3_5_1/E=128,N=192,"
    f"device_name=NVIDIA_H200_down.json, you can create them with {TUNER}\n"
    for rank in range(4)
)


# --- cases -----------------------------------------------------------------------------------------


def test_case_1_four_ranks_are_two_findings() -> None:
    diagnosis = read(CASE_1)
    assert codes(diagnosis) == ["MOE021", "MOE022"]
    stale, down = diagnosis.findings
    assert "stale" in stale.message
    assert "3.2.0" in stale.message
    assert "3.5.1 runs" in stale.message
    assert facts(stale)["ranks"] == "TP0, TP1, TP2, TP3"
    assert facts(down)["directory"] == "triton_3_5_1"
    assert facts(down)["file"].endswith("_down.json")


def test_case_2_a_list_and_joined_paths_are_one_finding_with_two_places() -> None:
    name = "E=128,N=384,device_name=NVIDIA_L40S,dtype=fp8_w8a8,block_shape=[128,128].json"
    head = "Using default MoE config. Performance might be sub-optimal! Config file not found at "
    for text in (f"{head}['/etc/a/{name}', '/b/{name}']\n", f"{head}/etc/a/{name}, /b/{name}\n"):
        (finding,) = read(text).findings
        assert finding.code.code == "MOE020"
        assert [value for key, value in finding.facts if key == "looked in"] == ["/etc/a", "/b"]


def test_case_3_the_dense_gemm_is_left_out_and_said_when_nothing_else_is_found() -> None:
    dense = (
        "WARNING 05-03 17:42:23 [fp8_utils.py:1] Using default W8A8 Block FP8 kernel config. "
        "Performance might be sub-optimal! Config file not found at /a/N=576,K=7168,"
        "device_name=NVIDIA_H800,dtype=fp8_w8a8,block_shape=[128,128].json\n"
    )
    assert codes(read(dense)) == ["MOE032"]
    assert "N=576,K=7168" in facts(read(dense).findings[0])["file"]
    assert codes(read(dense + vllm_default("E=8,N=64,device_name=NVIDIA_H800.json"))) == ["MOE020"]


RUNNER_LOGS = {
    "vllm deep_gemm": "Using DEEPGEMM Fp8 MoE backend out of potential backends: [].\n"
    + vllm_default("E=128,N=384,device_name=NVIDIA_B200,dtype=fp8_w8a8,block_shape=[128,128].json"),
    "vllm marlin": "The model is convertible to awq_marlin during runtime. Using awq_marlin kernel.\n"
    + vllm_default("E=128,N=384,device_name=NVIDIA_L40S,dtype=int4_w4a16.json"),
    "vllm flashinfer": "Using FlashInfer CUTLASS Unquantized MoE backend out of potential backends: [].\n"
    + vllm_default("E=128,N=384,device_name=NVIDIA_H200.json"),
    "sglang flashinfer": "Use flashinfer_trtllm as MoE runner backend on sm100 for Qwen3MoeForCausalLM\n"
    + sglang_default("E=128,N=384,device_name=NVIDIA_B200.json"),
    "sglang flag": server_args(moe_runner_backend="cutlass")
    + sglang_default("E=128,N=384,device_name=NVIDIA_B200.json"),
    "sglang deepep": server_args(moe_a2a_backend="deepep", ep_size=8)
    + sglang_default("E=32,N=2048,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json"),
    "sglang awq": server_args(quantization="awq", ep_size=8)
    + sglang_default("E=16,N=768,device_name=NVIDIA_L40S,dtype=int4_w4a16.json"),
}


@pytest.mark.parametrize("text", RUNNER_LOGS.values(), ids=RUNNER_LOGS.keys())
def test_case_4_another_runner_makes_the_warning_moot(text: str) -> None:
    diagnosis = read(text)
    assert codes(diagnosis) == ["MOE030"]
    assert "NOT APPLICABLE" in diagnosis.findings[0].message
    assert not diagnosis.findings[0].mend
    assert "said by" in facts(diagnosis.findings[0])
    assert not diagnosis.worse_or_equal(Severity.COSTS_SPEED)


def test_a_runner_that_falls_back_to_triton_leaves_the_warning_alone() -> None:
    text = (
        server_args(quantization="awq")
        + "The model is convertible to awq_marlin during runtime. Using awq_marlin kernel.\n"
        + "Layer 'model.layers.0.mlp.experts' is not supported by AWQMoeMarlin. "
        + "Falling back to Moe WNA16 kernels.\n"
        + sglang_default("E=128,N=192,device_name=NVIDIA_L40S,dtype=int4_w4a16.json")
    )
    assert codes(read(text)) == ["MOE020"]


def test_a_runner_of_one_type_says_nothing_of_another() -> None:
    """fp8 experts on DeepGEMM, the draft's bf16 experts on Triton."""
    text = "Using DEEPGEMM Fp8 MoE backend out of potential backends: [].\n"
    text += "Using TRITON Unquantized MoE backend out of potential backends: [].\n"
    text += vllm_default("E=128,N=384,device_name=NVIDIA_B200,dtype=fp8_w8a8,block_shape=[128,128].json")
    text += vllm_default("E=128,N=384,device_name=NVIDIA_B200.json")
    diagnosis = read(text)
    assert codes(diagnosis) == ["MOE020", "MOE030"]
    assert facts(diagnosis.findings[0])["file"] == "E=128,N=384,device_name=NVIDIA_B200.json"


def test_case_5_deterministic_inference_ignores_every_file() -> None:
    text = "[2026-12-01 10:00:00 TP0] Deterministic inference is enabled, using default MoE kernel config.\n"
    assert codes(read(text)) == ["MOE031"]
    text = server_args(enable_deterministic_inference=True) + sglang_default(
        "E=8,N=64,device_name=NVIDIA_H200.json"
    )
    (finding,) = read(text).findings
    assert finding.code.code == "MOE031"
    assert not finding.mend
    text = "VLLM_BATCH_INVARIANT=1\n" + vllm_default("E=8,N=64,device_name=NVIDIA_H200.json")
    assert codes(read(text)) == ["MOE031"]


def test_case_6_solved_backwards() -> None:
    text = sglang_default("E=60,N=704,device_name=NVIDIA_H200.json")
    (finding,) = read(text, Known(model="Qwen/Qwen1.5-MoE-A2.7B")).findings
    assert "tp 2" in facts(finding)["solved"]
    words = shlex.split(finding.mend)
    assert words[words.index("--tp") + 1] == "2"
    assert "--ep" not in words


def test_several_answers_are_all_told() -> None:
    name = "E=16,N=768,device_name=NVIDIA_H200.json"
    (finding,) = read(vllm_default(name), Known(model="Qwen/Qwen3-30B-A3B")).findings
    solved = facts(finding)["solved"]
    assert "answers fit" in solved
    assert "tp 8, ep 2" in solved
    assert "tp 4, ep 2, dp 2" in solved


def test_what_the_log_says_of_the_split_narrows_it() -> None:
    start = "non-default args: {'model': 'Qwen/Qwen3-30B-A3B', 'tensor_parallel_size': 4, "
    start += "'enable_expert_parallel': True, 'data_parallel_size': 2}\n"
    finding = read(start + vllm_default("E=16,N=768,device_name=NVIDIA_H200.json")).findings[0]
    assert facts(finding)["solved"].startswith("Qwen/Qwen3-30B-A3B with tp 4, ep 2, dp 2 gives")


def test_ep_and_fused_experts_are_solved() -> None:
    ep = read(sglang_default("E=32,N=768,device_name=NVIDIA_H200.json"), Known(model="Qwen/Qwen3-30B-A3B"))
    assert "--ep 4" in ep.findings[0].mend
    assert "--tp 4" in ep.findings[0].mend
    name = "E=257,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json"
    fused = read(sglang_default(name), Known(model="deepseek-ai/DeepSeek-V3"))
    assert "--tp 8" in fused.findings[0].mend
    assert "fusion" not in fused.findings[0].mend
    unfused = read(sglang_default(name.replace("257", "256")), Known(model="deepseek-ai/DeepSeek-V3"))
    assert "--disable-shared-experts-fusion" in unfused.findings[0].mend


def test_dtype_is_solved() -> None:
    text = sglang_default("E=128,N=384,device_name=NVIDIA_H200,dtype=fp8_w8a8,per_channel_quant=True.json")
    (finding,) = read(text, Known(model="Qwen/Qwen3-30B-A3B")).findings
    assert "--quant fp8-channel" in finding.mend
    text = vllm_default("E=128,N=384,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json")
    (finding,) = read(text, Known(model="Qwen/Qwen3-30B-A3B")).findings
    assert "--quant 'fp8-block[128,128]'" in finding.mend


def test_case_7_a_bf16_draft_is_a_second_job() -> None:
    start = "non-default args: {'model': 'Qwen/Qwen3-30B-A3B-FP8', 'tensor_parallel_size': 2}\n"
    text = start + vllm_default(
        "E=128,N=384,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
    )
    text += vllm_default("E=128,N=384,device_name=NVIDIA_H200.json")
    diagnosis = read(text)
    assert codes(diagnosis) == ["MOE020", "MOE020"]
    commands = {finding.mend for finding in diagnosis.findings}
    assert len(commands) == 2
    assert sum("--quant bf16" in command for command in commands) == 1


PREFIXES: dict[str, Callable[[str], str]] = {
    "docker compose": lambda line: f"\x1b[36msglang-1  |\x1b[0m {line}",
    "kubectl --prefix": lambda line: f"[pod/sglang-0/server] {line}",
    "CRI": lambda line: f"2026-12-01T10:00:00.123456789Z stderr F {line}",
    "docker json-file": lambda line: json.dumps(
        {"log": line + "\n", "stream": "stderr", "time": "2026-12-01T10:00:00Z"}
    ),
    "journald": lambda line: f"Dec 01 10:00:00 node-7 docker[4711]: {line}",
    "journald json": lambda line: json.dumps({"MESSAGE": line, "_PID": "1"}),
    "CRLF": lambda line: line + "\r",
    "ANSI": lambda line: f"\x1b[33m{line}\x1b[0m",
}


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES.keys())
@pytest.mark.parametrize("log", sorted(LOGS.glob("*.log")), ids=lambda path: path.stem)
def test_case_8_and_52_prefixes_change_nothing(log: Path, prefix: Callable[[str], str]) -> None:
    plain = log.read_text("utf-8")
    prefixed = "\n".join(prefix(line) for line in plain.splitlines()) + "\n"
    expected, got = read(plain), read(prefixed)
    assert [(f.code, f.message, f.mend) for f in got.findings] == [
        (f.code, f.message, f.mend) for f in expected.findings
    ]
    assert got.servers == expected.servers


@pytest.mark.parametrize("width", [80, 100, 120, 173])
@pytest.mark.parametrize("hard", [True, False], ids=["cut anywhere", "cut at blanks"])
def test_wrapped_lines_are_joined(width: int, hard: bool) -> None:
    wrapped: list[str] = []
    for line in CASE_1.splitlines():
        if hard:
            wrapped += [line[start : start + width].rstrip() for start in range(0, len(line), width)]
        else:
            wrapped += textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)
    got = read("\n".join(wrapped) + "\n")
    assert codes(got) == ["MOE021", "MOE022"]
    assert [f.message for f in got.findings] == [f.message for f in read(CASE_1).findings]
    assert facts(got.findings[0])["ranks"] == "TP0, TP1, TP2, TP3"


def test_case_51_the_default_does_not_fit() -> None:
    text = sglang_default("E=128,N=768,device_name=NVIDIA_GeForce_RTX_4090,dtype=fp8_w8a8.json")
    text += out_of_resources(147456)
    diagnosis = read(text, Known(model="Qwen/Qwen3-30B-A3B"))
    assert codes(diagnosis) == ["MOE001"]  # and not the missing file once more
    (finding,) = diagnosis.findings
    assert "128x256x128 g32 w8 s4" in finding.message
    assert "does not fit this card" in finding.message
    assert "m from 129 on" in facts(finding)["guilty"]
    assert "--quant fp8" in finding.mend
    # The number proves a release whose default needs that much: 0.5.14 has a smaller one.
    assert diagnosis.servers[0].version == "0.5.13"


def test_a_crash_with_a_tuned_file_names_the_entry() -> None:
    name = "E=128,N=768,device_name=NVIDIA_GeForce_RTX_4090,dtype=fp8_w8a8.json"
    text = f"[2026-12-01 10:00:00 TP0] Using MoE kernel config from {NEW}/triton_3_6_0/{name}.\n"
    text += f'  File "{NEW.removesuffix("/configs")}/fused_moe.py", line 1, in fused_experts_impl\n'
    text += out_of_resources(147456)
    (finding,) = read(text).findings
    assert finding.code.code == "MOE002"
    assert "128x256x128 and 4 stages" in facts(finding)["guilty"]
    bad = {
        "BLOCK_SIZE_M": 128,
        "BLOCK_SIZE_N": 256,
        "BLOCK_SIZE_K": 128,
        "GROUP_SIZE_M": 1,
        "num_warps": 8,
        "num_stages": 4,
    }
    table = json.dumps({"1": bad | {"num_stages": 3}, "64": bad, "4096": bad | {"BLOCK_SIZE_M": 64}})
    (finding,) = read(text, config_files=((f"/mine/{name}", table),)).findings
    assert "the entry m=64 (128x256x128" in finding.message
    assert "4096" not in finding.message


def test_out_of_resources_of_another_kernel_is_not_blamed_on_the_experts() -> None:
    text = sglang_default("E=128,N=768,device_name=NVIDIA_GeForce_RTX_4090.json")
    text += out_of_resources(131072)
    assert codes(read(text)) == ["MOE003", "MOE020"]


def test_without_a_lookup_the_number_alone_is_only_a_hint() -> None:
    text = "[2026-12-01 10:00:00] Received sigquit from a child process. It usually means the child failed.\n"
    text += out_of_resources(147456)
    (finding,) = read(text).findings
    assert finding.code.code == "MOE003"
    assert "0.5.13 for fp8 experts" in facts(finding)["but"]


def test_case_53_an_upgrade_makes_one_finding() -> None:
    text = server_args(model_path="Qwen/Qwen3-30B-A3B", tp_size=2).replace("ServerArgs(", "ServerArgs(")
    for number in (192, 384, 768):
        for down in ("", "_down"):
            name = f"E=128,N={number},device_name=NVIDIA_H200{down}.json"
            text += (
                f"[2026-12-01 10:00:00 TP0] Config file not found at {NEW}/triton_3_8_0/{name}. "
                f"Fallback to triton version 3.6.0 and use MoE kernel config from {NEW}/triton_3_6_0/{name}. "
                "Performance might be sub-optimal!\n"
            )
    diagnosis = read(text)
    assert codes(diagnosis) == ["MOE021"]
    (finding,) = diagnosis.findings
    assert "3 shapes" in finding.message
    assert len([1 for key, _ in finding.facts if key == "file"]) == 6
    assert facts(finding)["all files"].startswith("moetune borrow --installed --server sglang")
    assert "--tp 2" in finding.mend


def trace(part: str, function: str, last: str, server: str = "sglang") -> str:
    folder = NEW.removesuffix("/configs") if server == "sglang" else VLLM.removesuffix("/configs")
    return (
        "[2026-12-01 10:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        f'  File "{folder}/{part}.py", line 70, in {function}\n    x = y\n{last}\n'
    )


FAULTS = {
    "no configs": (
        "get_moe_configs",
        "FileNotFoundError: [Errno 2] No such file or directory: '/tuned/configs'",
        "MOE004",
    ),
    "backup directory": (
        "get_moe_configs",
        "ValueError: invalid literal for int() with base 10: 'bak'",
        "MOE005",
    ),
    "triton_version key": (
        "get_moe_configs",
        "ValueError: invalid literal for int() with base 10: 'triton_version'",
        "MOE005",
    ),
    "no JSON": (
        "get_moe_configs",
        "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        "MOE006",
    ),
    "a list": ("get_moe_configs", "AttributeError: 'list' object has no attribute 'items'", "MOE006"),
    "unknown key": (
        "invoke_fused_moe_kernel",
        "KeyError: 'Keyword argument waves_per_eu was specified but unrecognised'",
        "MOE007",
    ),
    "missing key": (
        "invoke_fused_moe_kernel",
        "TypeError: dynamic_func() missing 1 required positional argument: 'BLOCK_SIZE_K'",
        "MOE008",
    ),
    "missing M": ("fused_experts_impl", "KeyError: 'BLOCK_SIZE_M'", "MOE008"),
    "pair": ("try_get_optimal_moe_config", "AssertionError", "MOE009"),
    "not a power of two": (
        "invoke_fused_moe_kernel",
        "ValueError: arange's range must be a power of 2",
        "MOE010",
    ),
    "illegal access": (
        "fused_experts_impl",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "MOE011",
    ),
}


@pytest.mark.parametrize(("function", "last", "code"), FAULTS.values(), ids=FAULTS.keys())
def test_every_exception_of_loader_and_kernel_is_named(function: str, last: str, code: str) -> None:
    text = sglang_default("E=128,N=384,device_name=NVIDIA_H200.json") if code != "MOE004" else ""
    diagnosis = read(text + trace("fused_moe_triton_config", function, last))
    assert diagnosis.findings[0].code.code == code
    assert diagnosis.findings[0].code.severity is Severity.CRASH
    assert diagnosis.findings[0].mend


@pytest.mark.parametrize(("function", "last", "code"), FAULTS.values(), ids=FAULTS.keys())
def test_the_same_exception_elsewhere_is_not_ours(function: str, last: str, code: str) -> None:
    del function
    elsewhere = f'Traceback (most recent call last):\n  File "/app/other.py", line 7, in main\n{last}\n'
    assert code not in codes(read(sglang_default("E=128,N=384,device_name=NVIDIA_H200.json") + elsewhere))


def test_the_mend_of_a_missing_directory_makes_it() -> None:
    last = "FileNotFoundError: [Errno 2] No such file or directory: '/my tuned/configs'"
    (finding,) = read(trace("fused_moe_triton_config", "get_moe_configs", last)).findings
    assert shlex.split(finding.mend) == ["mkdir", "-p", "/my tuned/configs"]


def test_split_k_of_vllms_grouped_kernel() -> None:
    last = "TypeError: dynamic_func() missing 1 required positional argument: 'SPLIT_K'"
    diagnosis = read(trace("fused_moe", "invoke_fused_moe_wna16_triton_kernel", last, "vllm"))
    assert codes(diagnosis) == ["MOE008"]
    assert "SPLIT_K" in diagnosis.findings[0].message


# --- facts of a start ------------------------------------------------------------------------------


def test_case_47_what_an_experiment_compares() -> None:
    (server,) = read((LOGS / "sglang-0.5.16-h200-no-down.log").read_text()).servers
    assert (server.server, server.version, server.triton_version) == ("sglang", "0.5.16", "3.6.0")
    assert (server.kv_tokens, server.max_running_requests, server.prefill_chunk) == (1502208, 2048, 16384)
    assert server.graphs.decode_tokens == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert dict(server.graphs.off)["prefill"].startswith(
        "Breakable CUDA graph is incompatible with multimodal"
    )
    assert set(dict(server.all_reduce_fusion)) == {"asked", "refused"}
    assert dict(server.arguments)["flashinfer_allreduce_fusion_backend"] == "auto"
    assert dict(server.parallelism) == {"tp": 4, "ep": 1, "dp": 1, "pp": 1}
    assert server.ready


def test_case_48_the_files_that_were_read_are_told() -> None:
    (server,) = read((LOGS / "sglang-0.5.16-h200-no-down.log").read_text()).servers
    up, down = server.lookups
    assert (up.kernel, up.outcome, up.ranks) == ("up", "found", ("TP0", "TP1", "TP2", "TP3"))
    assert up.path.endswith("/configs/triton_3_6_0/" + up.file)
    assert (down.kernel, down.outcome, down.path) == ("down", "reused up", "")
    (server,) = read((LOGS / "sglang-0.5.23-h100-upgraded.log").read_text()).servers
    assert {lookup.outcome for lookup in server.lookups} == {"stale"}
    assert all("/triton_3_6_0/" in lookup.path for lookup in server.lookups)


def test_flags_that_crash_are_named() -> None:
    start = server_args(ep_size=8, tp_size=8, enable_fused_moe_sum_all_reduce=True)
    last = "RuntimeError: CUDA error: an illegal memory access was encountered"
    finding = read(start + trace("fused_moe", "fused_experts_impl", last)).findings[0]
    assert "--enable-fused-moe-sum-all-reduce" in facts(finding)["start without"]
    text = (
        server_args(tp_size=2)
        + "ValueError: FlashInfer allreduce fusion requires SM90 or SM10X NVIDIA GPUs.\n"
    )
    finding = read(text).findings[0]
    assert finding.code.code == "MOE012"
    assert "--enforce-disable" in facts(finding)["start with"]


def test_sizes_of_graphs_become_the_keys() -> None:
    (server,) = read((LOGS / "sglang-0.5.23-h100-upgraded.log").read_text()).servers
    captured = {1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192}
    assert set(server.keys) == captured  # 1536 and 3072 are never met: every prefill is padded
    (server,) = read((LOGS / "sglang-0.5.6-rtx-pro-6000.log").read_text()).servers
    assert {12, 40, 160} < set(server.keys)
    assert {256, 512, 1536, 8192} < set(server.keys)
    assert 48 in server.keys
    assert 3 not in server.keys


def test_speculative_decoding_multiplies_the_batch() -> None:
    text = (
        "[2026-12-01 10:00:00 TP0] Capture target verify CUDA graph begin. backend=full, "
        "num_tokens_per_bs=4, bs=[1, 2, 8], avail mem=9 GB\n"
    )
    (server,) = read(text + sglang_default("E=8,N=64,device_name=NVIDIA_H200.json")).servers
    assert server.graphs.decode_tokens == (4, 8, 32)


def test_graphs_that_were_switched_off_give_no_keys() -> None:
    text = server_args(disable_cuda_graph=True, cuda_graph_bs=[1, 2]) + "Capture cuda graph bs [1, 2]\n"
    (server,) = read(text).servers
    assert server.keys == ()
    assert dict(server.graphs.off) == {"decode": "disable_cuda_graph=True"}


def test_no_secret_of_a_log_is_repeated() -> None:
    for log in LOGS.glob("*.log"):
        assert "sk-planted" not in json.dumps(read(log.read_text("utf-8")).to_json())


def test_a_later_start_replaces_the_facts_of_an_earlier_one() -> None:
    first = (
        server_args(model_path="a/b", tp_size=2)
        + "KV Cache is allocated. #tokens: 7, K size: 1 GB, V size: 1 GB\n"
    )
    second = server_args(model_path="c/d", tp_size=4)
    diagnosis = read(first + second)
    assert diagnosis.servers[0].model == "c/d"
    assert diagnosis.servers[0].kv_tokens is None
    assert "MOE041" in codes(diagnosis)


@pytest.mark.parametrize("version", ["0.8.5.post1", "0.1", "99.0.0rc1.dev3+gabc"])
def test_releases_whose_rules_are_not_known_are_read_all_the_same(version: str) -> None:
    text = f"INFO 05-03 10:00:00 [api_server.py:1] vLLM API server version {version}\n"
    diagnosis = read(text + vllm_default("E=128,N=384,device_name=NVIDIA_H200.json"))
    assert codes(diagnosis) == ["MOE020"]
    assert version in diagnosis.servers[0].version_text


def test_a_traceback_ends_with_its_log(tmp_path: Path) -> None:
    first, second = tmp_path / "a.log", tmp_path / "b.log"
    first.write_text(sglang_default("E=8,N=64,device_name=NVIDIA_H200.json") + trace("fused_moe", "run", "x"))
    second.write_text("\n" * 8 + "RuntimeError: CUDA error: an illegal memory access was encountered\n")
    assert codes(diagnose([str(first), str(second)])) == ["MOE020"]


def test_a_model_in_a_path_is_taken_for_the_packaged_one_and_said() -> None:
    text = server_args(model_path="/data/models/Qwen3-30B-A3B", tp_size=2)
    (finding,) = read(text + sglang_default("E=128,N=384,device_name=NVIDIA_H200.json")).findings
    assert "by the last part of its path" in facts(finding)["model"]
    assert "/data/models/Qwen3-30B-A3B" in shlex.split(finding.mend)


def test_no_path_of_a_log_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that the log names as its model, and the config files that it names."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["X"], "num_experts": 4}')
    opened: list[str] = []
    real = Path.open

    def watched(self: Path, *arguments: object, **options: object) -> object:
        opened.append(str(self))
        return real(self, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", watched)
    real_open = os.open

    def watched_os(path: str, flags: int, mode: int = 0o777) -> int:
        opened.append(str(path))
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", watched_os)
    text = server_args(model_path=str(model), tp_size=2)
    text += f"[2026-12-01 10:00:00 TP0] Using MoE kernel config from {tmp_path}/configs/triton_3_6_0/"
    text += "E=8,N=64,device_name=X.json.\n"
    text += sglang_default("E=128,N=384,device_name=NVIDIA_H200.json", root=f"{tmp_path}/configs")
    read(text)
    assert not [path for path in opened if str(tmp_path) in path]


def test_unknown_gpus_and_models_say_what_to_add() -> None:
    (finding,) = read(sglang_default("E=7,N=96,device_name=NVIDIA_Imaginary_9000.json")).findings
    assert "--compute-capability" in facts(finding)["GPU"]
    assert finding.mend == "moetune doctor a.log --model MODEL"


def test_an_amd_gpu_gets_a_plan_and_no_tuning() -> None:
    text = vllm_default("E=128,N=384,device_name=AMD_Instinct_MI325X.json")
    (finding,) = read(text, Known(model="Qwen/Qwen3-30B-A3B")).findings
    assert shlex.split(finding.mend)[:2] == ["moetune", "plan"]
    assert "--effort" not in finding.mend


@pytest.mark.parametrize("evil", ["$(touch pwned)", "`id`", "a; rm -rf /", "x' 'y", "-rf", "a\x1b[2Kb"])
def test_commands_are_quoted(evil: str) -> None:
    start = f"non-default args: {{'model': {evil!r}, 'tensor_parallel_size': 2}}\n"
    diagnosis = read(start + vllm_default("E=128,N=384,device_name=NVIDIA_H200.json"))
    words = shlex.split(diagnosis.findings[0].mend)
    assert words[0] == "moetune"
    assert words[1] in ("tune", "doctor")
    # What a shell would act on stands inside one word.
    assert ";" not in words
    assert not any(word.startswith("$(") and word.endswith(")") is False for word in words)


def test_what_is_no_server_log_is_an_error() -> None:
    with pytest.raises(InputError, match=r"no line of a\.log"):
        read("hello\nworld\nINFO:     Application startup complete.\n" * 100)


def test_a_dense_model_has_nothing_to_find() -> None:
    text = server_args(model_path="meta-llama/Llama-3.1-8B-Instruct", tp_size=1)
    assert codes(read(text)) == ["MOE033"]
    assert not read(text).worse_or_equal(Severity.COSTS_SPEED)


def test_the_same_log_gives_the_same_bytes() -> None:
    for log in sorted(LOGS.glob("*.log")):
        text = log.read_text("utf-8")
        assert json.dumps(read(text).to_json(), sort_keys=True) == json.dumps(
            read(text).to_json(), sort_keys=True
        )


def test_rotated_logs_are_one_server(tmp_path: Path) -> None:
    lines = (LOGS / "sglang-0.5.6-rtx-pro-6000.log").read_text().splitlines(keepends=True)
    paths = [tmp_path / "a.log", tmp_path / "b.log"]
    paths[0].write_text("".join(lines[:5]))
    paths[1].write_text("".join(lines[5:]))
    diagnosis = diagnose([str(path) for path in paths])
    assert codes(diagnosis) == ["MOE020"]
    assert "--tp 2" in diagnosis.findings[0].mend
