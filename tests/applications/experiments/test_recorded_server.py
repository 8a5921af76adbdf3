"""The recorded server does what the real ones do around their work: start, refuse, read files, end."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from moetune.applications.doctor_facts import GRAMMARS
from moetune.domain.log_lines import body
from tests.applications.experiments.recorded import (
    COMMANDS,
    EVENING,
    LIMIT_S,
    RELEASES,
    SGLANG,
    config_folder,
    start,
    write_configs,
)
from tests.wheels import members, read_member

# Words of each release's own source, as literal as they stand there: a recording prints these.
WORDS: dict[str, dict[str, tuple[str, ...]]] = {
    "sglang-0.5.9": {
        "fused_moe_triton_config.py": (
            "Using MoE kernel config from ",
            "Using default MoE kernel config. Performance might be sub-optimal! ",
            "Using MoE kernel config with down_moe=False. Performance might be sub-optimal! ",
            "Deterministic inference is enabled, using default MoE kernel config.",
            "Fallback to triton version ",
        ),
        "memory_pool.py": ("KV Cache is allocated. #tokens: ",),
        "model_runner.py": (
            "Disable piecewise CUDA graph because piecewise_cuda_graph has conflict with torch compile",
            "Load weight begin. avail mem=",
        ),
        "cuda_graph_runner.py": ("Capture cuda graph bs ",),
        "piecewise_cuda_graph_runner.py": ("Capture cuda graph num tokens ",),
        "scheduler.py": ("max_total_num_tokens=", "chunked_prefill_size=", "max_running_requests="),
    },
    "sglang-0.5.12": {
        "fused_moe_triton_config.py": (
            "Using MoE kernel config from ",
            "Using MoE kernel config with down_moe=False. Performance might be sub-optimal! ",
            "Deterministic inference is enabled, using default MoE kernel config.",
        ),
        "memory_pool.py": ("KV Cache is allocated. #tokens: ",),
        "model_runner.py": ("Disable piecewise CUDA graph because --disable-piecewise-cuda-graph is set",),
        "cuda_graph_runner.py": ("Capture cuda graph bs ",),
        "piecewise_cuda_graph_runner.py": ("Capture cuda graph num tokens ",),
    },
    "sglang-0.5.23": {
        "fused_moe_triton_config.py": (
            "Using MoE kernel config from ",
            "Down MoE config file not found at ",
            "reusing the tuned up-projection config ",
            "Deterministic inference is enabled, using default MoE kernel config.",
        ),
        "cuda_graph_setup.py": (" CUDA graph begin. ", "num_tokens_per_req=", "elapsed="),
        "cuda_graph_hook.py": (
            "Breakable CUDA graph is incompatible with %s; disabling prefill CUDA graph.",
        ),
        "flashinfer_comm_fusion.py": (
            "cuMemCreate probe failed on at least one rank",
            "FlashInfer allreduce fusion disabled globally because workspace initialization failed",
        ),
    },
    "vllm-0.33.0": {
        "fused_moe.py": (
            "Using configuration from %s for MoE layer.",
            "Using default MoE config. Performance might be sub-optimal! ",
        ),
        "kv_cache_utils.py": (" KV cache size: %s tokens, Maximum concurrency",),
        "core.py": ("Initializing a V1 LLM engine (v%s) with config: %s",),
        "allreduce_rms_fusion.py": ("Failed to initialize Flashinfer allreduce workspace. ",),
        "scheduler.py": ("Chunked prefill is enabled with max_num_batched_tokens=%d.",),
    },
}


def recording(release: str) -> dict[str, object]:
    document: dict[str, object] = json.loads((EVENING / "recordings" / f"{release}.json").read_text())
    return document


@pytest.mark.parametrize("release", RELEASES)
def test_words_of_a_recording_are_the_releases_own(release: str) -> None:
    package, _, version = release.partition("-")
    said = _plain(json.dumps(recording(release), ensure_ascii=False))
    for name, texts in WORDS[release].items():
        sources = "".join(
            read_member(package, version, member)
            for member in members(package, version)
            if member.endswith(f"/{name}")
        )
        for text in texts:
            assert _plain(text) in _plain(sources), f"{release} does not print {text!r} in {name}"
            assert _printed(text) in said, f"the recording of {release} lacks {text!r}"


def _plain(source: str) -> str:
    """Sources break their texts into several literals."""
    return re.sub(r"\s+", " ", re.sub(r"\"\s*\n\s*f?\"", "", source))


def _printed(text: str) -> str:
    """The longest part of a format that stands for itself."""
    return max(re.split(r"%[sd]", text), key=len).strip()


@pytest.mark.parametrize("release", RELEASES)
def test_doctor_reads_what_a_recording_prints(release: str, tmp_path: Path) -> None:
    with start(release, tmp_path) as running:
        lines = running.log.read_text().splitlines()
    assert "recorded server" in lines[0]
    assert "no token is computed" in lines[0]
    events = {type(event).__name__ for line in lines for g in GRAMMARS for event in g.read(body(line))}
    wanted = {"Arguments", "ConfigMissing", "Limit", "GraphSizes", "Ready", "Architecture"}
    assert wanted <= events


@pytest.mark.parametrize("release", RELEASES)
def test_same_seed_and_start_give_the_same_times(release: str, tmp_path: Path) -> None:
    found = []
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        with start(release, tmp_path / folder, seed=seed) as running:
            found.append([running.one_pass() for _ in range(3)])
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_starts_differ_by_their_number_and_a_little(tmp_path: Path) -> None:
    speeds = []
    for _ in range(3):
        with start("sglang-0.5.23", tmp_path) as running:
            running.one_pass()
            speeds.append(running.one_pass()["output_tokens_per_s"])
    assert len(set(speeds)) == 3
    assert max(speeds) / min(speeds) < 1.05
    assert (tmp_path / "recorded-starts").read_text() == "3\n"


def test_first_pass_is_slow_and_is_to_be_discarded(tmp_path: Path) -> None:
    with start("sglang-0.5.23", tmp_path) as running:
        passes = [running.one_pass()["output_tokens_per_s"] for _ in range(3)]
    assert passes[0] < 0.9 * passes[1]
    assert passes[2] == pytest.approx(passes[1], rel=0.02)


@pytest.mark.parametrize("release", RELEASES)
def test_a_file_changes_the_line_and_the_speed(release: str, tmp_path: Path) -> None:
    """And what the file says matters: a good tile is faster, a bad one slower."""
    found = {}
    for name, tile in (("none", None), ("good", {}), ("bad", {"block_m": 128, "block_k": 32, "group_m": 1})):
        root = tmp_path / name
        config_folder(release, root).mkdir(parents=True)
        files = write_configs(release, root, **tile) if tile is not None else []
        with start(release, tmp_path / f"run-{name}", configs=root) as running:
            running.one_pass()
            found[name] = running.one_pass()
            text = running.log.read_text()
        assert all(file in text for file in files)
        assert ("Performance might be sub-optimal" in text) == (tile is None)
    speed = {name: result["output_tokens_per_s"] for name, result in found.items()}
    assert speed["good"] > 1.05 * speed["none"]
    assert speed["bad"] < 0.9 * speed["none"]


@pytest.mark.parametrize("release", ["sglang-0.5.12", "sglang-0.5.23"])
def test_halved_requests_cost_throughput_and_first_tokens(release: str, tmp_path: Path) -> None:
    with start(release, tmp_path / "a") as running:
        running.one_pass()
        before = running.one_pass()
    with start(release, tmp_path / "b", ["--enable-fused-moe-sum-all-reduce"]) as running:
        running.one_pass()
        after = running.one_pass()
    assert (before["running"], after["running"]) == (48, 26)
    assert after["output_tokens_per_s"] < 0.8 * before["output_tokens_per_s"]
    assert after["ttft_ms"]["p50"] > 5 * before["ttft_ms"]["p50"]


def ended(release: str, folder: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    with start(release, folder, arguments, variables) as running:
        assert running.process.poll() is not None, "it is still there"
        return int(running.process.returncode), running.log.read_text()


@pytest.mark.parametrize("release", RELEASES)
def test_unknown_flag_ends_it_as_argparse_does(release: str, tmp_path: Path) -> None:
    code, text = ended(release, tmp_path, "--enable-something-else")
    assert code == 2
    assert "unrecognized arguments: --enable-something-else" in text


def test_flag_that_came_later_is_unknown_to_0_5_9(tmp_path: Path) -> None:
    code, _ = ended("sglang-0.5.9", tmp_path, "--enable-fused-moe-sum-all-reduce")
    assert code == 2


@pytest.mark.parametrize(
    "flag", ["--enable-flashinfer-allreduce-fusion", "--flashinfer-allreduce-fusion-backend=auto"]
)
def test_fusion_kills_0_5_23_on_this_gpu(flag: str, tmp_path: Path) -> None:
    code, text = ended("sglang-0.5.23", tmp_path, flag)
    assert code == 1
    assert "requires SM90 or SM10X" in text


@pytest.mark.parametrize("release", SGLANG[1:])
def test_case_35_a_directory_without_configs_kills_it(release: str, tmp_path: Path) -> None:
    code, text = ended(release, tmp_path, SGLANG_MOE_CONFIG_DIR=str(tmp_path / "empty"))
    assert code == 1
    assert "FileNotFoundError" in text


@pytest.mark.parametrize("release", SGLANG)
def test_file_that_is_no_json_kills_it(release: str, tmp_path: Path) -> None:
    for path in write_configs(release, tmp_path / "root"):
        Path(path).write_text("{")
    code, text = ended(release, tmp_path, SGLANG_MOE_CONFIG_DIR=str(tmp_path / "root"))
    assert code == 1
    assert "JSONDecodeError" in text


@pytest.mark.parametrize("release", RELEASES)
def test_faults(release: str, tmp_path: Path) -> None:
    code, text = ended(release, tmp_path / "1", RECORDED_FAULT="die-at-start")
    assert code == 1
    assert "out of memory" in text
    with start(release, tmp_path / "2", variables={"RECORDED_FAULT": "requests-fail"}) as running:
        result = running.one_pass(requests=100)
        assert (result["requested"], result["completed"]) == (100, 75)
    with start(release, tmp_path / "3", variables={"RECORDED_FAULT": "die-under-load"}) as running:
        running.one_pass()
        with pytest.raises(subprocess.CalledProcessError):
            running.one_pass()
        assert running.process.wait(LIMIT_S) == -signal.SIGKILL
    with start(release, tmp_path / "4", variables={"RECORDED_FAULT": "answer-500"}) as running:
        with pytest.raises(subprocess.CalledProcessError) as error:
            running.one_pass()
        assert b"500" in error.value.stderr


def test_it_stops_when_it_is_asked_to_and_not_when_it_is_told_to_ignore_it(tmp_path: Path) -> None:
    with start("sglang-0.5.23", tmp_path / "a") as running:
        running.process.terminate()
        assert running.process.wait(LIMIT_S) == 0
    with start("sglang-0.5.23", tmp_path / "b", variables={"RECORDED_FAULT": "ignore-sigterm"}) as running:
        running.process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            running.process.wait(0.5)


def test_what_is_no_pass_is_refused(tmp_path: Path) -> None:
    with start("sglang-0.5.23", tmp_path) as running:
        for body_ in (
            b"{}",
            b"[",
            b'{"requests": -1, "concurrency": 1, "input_tokens": 1, "output_tokens": 1}',
        ):
            request = urllib.request.Request(f"{running.url}/recorded/pass", data=body_)
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with pytest.raises(urllib.error.HTTPError) as error:
                opener.open(request, timeout=LIMIT_S)
            assert error.value.code == 422


@pytest.mark.parametrize("release", RELEASES)
def test_recorded_server_needs_nothing_but_python(release: str, tmp_path: Path) -> None:
    """No package of the environment, no variable of it: it is an example that anyone can run."""
    server = release.partition("-")[0]
    command = [
        *(sys.executable, "-E", "-s", "-S", str(EVENING / "recorded_server.py")),
        *("--recording", str(EVENING / "recordings" / f"{release}.json"), "--log", str(tmp_path / "log")),
        *("--", *COMMANDS[server], "--no-such-flag"),
    ]
    ran = subprocess.run(command, capture_output=True, timeout=LIMIT_S, env={}, check=False)
    assert ran.returncode == 2
    assert "--no-such-flag" in (tmp_path / "log").read_text()
    assert ran.stdout == ran.stderr == b""
