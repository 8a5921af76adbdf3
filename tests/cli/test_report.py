"""What `plan` and `tune` tell a person: all that issue 2 asks for, at 80 columns, safe for a terminal."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from tests.cli.conftest import MODEL, RTX
from tests.doubles import padded_rows_us

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from moetune.domain.launch import Launch
    from moetune.domain.problem import Kernel
    from tests.cli.conftest import Result
    from tests.doubles import ModelDouble

    Command = Callable[..., Result]

SGLANG = (MODEL, "--tp", "4", "--server", "sglang", "--gpu", RTX)
NAME = "E=256,N=256,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition"


def table_of(out: str) -> list[str]:
    """The lines of the table of configs."""
    lines = out.splitlines()
    start = next(
        number for number, line in enumerate(lines) if line.split()[:2] in (["m", "up"], ["m", "up and"])
    )
    rows = [lines[start]]
    for line in lines[start + 1 :]:
        if not re.match(r" +\d+  ", line):
            break
        rows.append(line)
    return rows


def test_tune_says_all_that_was_asked_for(command: Command) -> None:
    result = command("tune", *SGLANG, "--no-compile")
    assert result.code == 0
    for words in (
        "256 experts and 1 shared, topk 8, hidden 3072",
        "tp 4: E=256, N=256, K=3072, topk 8, bf16",
        "the Triton fused-MoE kernel",
        "auto resolves to Triton for unquantized experts",
        "sglang/srt/layers/quantization/unquant.py",
        f"up: {NAME}.json",
        f"down: {NAME}_down.json",
        "1. sglang/srt/layers/moe/moe_runner/triton_utils/configs/triton_3_8_0",
        "2. sglang/srt/layers/moe/moe_runner/triton_utils/configs/triton_3_7_1",
        "up: missing",
        "the published wheel of sglang 0.5.23",
        "m from 1 to 256: 16x32x64 g1 w4 s3",
        "predicted, not measured",
        "geometric mean",
        "a stand-in of the tests",
        "predicted files",
        f"moetune-configs/configs/triton_3_8_0/{NAME}.json",
        f"moetune-configs/configs/triton_3_8_0/{NAME}_down.json",
        "provenance.json",
        "not compiled: --no-compile",
        "export SGLANG_MOE_CONFIG_DIR=",
        f"moetune tune {MODEL} --tp 4 --server sglang # on a machine with that GPU",
    ):
        assert words in " ".join(result.out.split()), words
    assert result.err == ""


def test_plan_says_the_same_and_writes_nothing(command: Command, tmp_path: Path) -> None:
    plan = command("plan", *SGLANG)
    assert list(tmp_path.iterdir()) == []
    tune = command("tune", *SGLANG, "--no-compile")
    assert tune.out.startswith(plan.out)


def test_the_table_has_a_row_for_each_m_with_configs_time_gain_and_limit(command: Command) -> None:
    heading, *rows = table_of(command("plan", *SGLANG).out)
    assert heading.split() == ["m", "up", "down", "us", "gain", "limit"]
    assert [int(row.split()[0]) for row in rows][:4] == [1, 2, 4, 8]
    for row in rows:
        assert re.fullmatch(
            r" +\d+(  \d+x\d+x\d+ g\d+ w\d+ s\d+ *){2} +\d+\.\d +(\d+\.\d\dx|default|cannot run)  memory", row
        ), row


def test_vllm_has_one_column_for_both_kernels(command: Command) -> None:
    result = command("plan", MODEL, "--tp", "4", "--server", "vllm", "--gpu", "NVIDIA H200")
    assert "  up and down " in result.out
    assert "down: " not in result.out


def test_the_table_fits_80_columns_with_the_longest_configs(command: Command, model: ModelDouble) -> None:
    def long_us(kernel: Kernel, m: int, launch: Launch) -> float:
        config = launch.config
        sizes = (config.block_size_m, config.block_size_n, config.block_size_k, 10 * config.group_size_m)
        return padded_rows_us(kernel, m, launch) / (1 + sum(size >= 100 for size in sizes))

    model.time_us = long_us
    lines = table_of(command("plan", *SGLANG[:-1], "NVIDIA H200").out)
    assert max(map(len, lines)) <= 80
    assert any("128x128x128 g" in line or "256x128x128 g" in line for line in lines)


def test_prose_is_broken_at_80_columns_and_names_are_not(command: Command) -> None:
    lines = command("plan", "deepseek-ai/DeepSeek-V3", "--tp", "8", "--gpu", "NVIDIA B200").out.splitlines()
    long = [line for line in lines if len(line) > 80]
    assert all("/" in line or ".json" in line for line in long), long
    assert any(line.endswith("block_shape=[128, 128]_down.json") for line in lines)


def test_a_default_that_cannot_run_is_said(command: Command) -> None:
    out = command(
        "plan", MODEL, "--tp", "4", "--quant", "fp8", "--server", "sglang", "--server-version", "0.5.13",
        "--gpu", "NVIDIA GeForce RTX 4090",
    ).out  # fmt: skip
    assert any("cannot run" in line for line in table_of(out))
    assert "the server's default cannot run on this GPU" in " ".join(out.split())


def test_no_gain_says_so_plainly(command: Command, model: ModelDouble) -> None:
    def default_us(kernel: Kernel, m: int, launch: Launch) -> float:
        del kernel, m
        return 1.0 if str(launch.config) in ("16x32x64 g1 w4 s3", "64x64x32 g8 w4 s3") else 2.0

    model.time_us = default_us
    result = command("tune", *SGLANG, "--no-compile")
    assert result.code == 1
    assert "nothing beats the server's default" in result.out
    assert "nothing was written" in result.out
    assert command("tune", *SGLANG, "--no-compile", "--exit-zero").code == 0


def test_another_runner_says_how_to_go_on(command: Command) -> None:
    out = command("plan", "deepseek-ai/DeepSeek-V3", "--tp", "8", "--gpu", "NVIDIA B200").out
    assert "for Triton    --moe-runner-backend triton" in out
    assert "--runner-backend triton if the server is told so, or with --assume-triton" in " ".join(
        out.split()
    )


def test_an_unknown_place_for_triton_is_marked_as_assumed(command: Command) -> None:
    out = command(
        "plan", "deepseek-ai/DeepSeek-V3", "--tp", "8", "--gpu", "NVIDIA B200", "--assume-triton"
    ).out
    assert "NOT APPLICABLE" in out
    assert "--assume-triton says" in out
    assert table_of(out)


def test_words_of_a_config_reach_the_report_as_plain_text(command: Command, tmp_path: Path) -> None:
    config = {
        "architectures": ["\x1b[31mQwen3MoeForCausalLM\x1b[0m[bold]"],
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = command("plan", "config.json", "--gpu", RTX, "--assume-triton")
    assert result.code == 0
    assert "\x1b" not in result.out
    assert "Qwen3MoeForCausalLM" in result.out
    assert "[bold]" in result.out


def test_colours_only_on_a_terminal(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in command("plan", *SGLANG).out
    monkeypatch.setattr("moetune.cli.output.Sink._is_terminal", staticmethod(lambda _: True))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1m" in command("plan", *SGLANG).out
    assert "\x1b" not in command("plan", *SGLANG, "--no-color").out


def test_three_gpus_are_three_parts(command: Command) -> None:
    out = command("plan", *SGLANG, "--gpu", "NVIDIA H200", "--gpu", "NVIDIA L40S").out
    assert [line for line in out.splitlines() if line.startswith("NVIDIA ")] == [
        f"{RTX} (sm_120)",
        "NVIDIA H200 (sm_90)",
        "NVIDIA L40S (sm_89)",
    ]
