"""The evenings that begin with a log: from the log to the command, and from the command to files that
the server's own lookup finds.
"""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from moetune.applications.doctor import diagnose
from moetune.domain.config import ConfigTable
from tests.cli.conftest import moetune
from tests.servers.sglang_loader import World, load_lookup

if TYPE_CHECKING:
    from moetune.applications.doctor import Diagnosis

LOGS = Path(__file__).parents[1] / "logs"


def mended(diagnosis: Diagnosis, code: str) -> list[str]:
    """The words of the command that mends the finding with a code."""
    (finding,) = [finding for finding in diagnosis.findings if finding.code.code == code]
    return shlex.split(finding.mend)


def run(words: list[str], folder: Path) -> tuple[dict[str, object], list[Path]]:
    """Run a command as a user would paste it; gives its document and the config files it wrote."""
    assert words[:2] == ["moetune", "tune"]
    result = moetune(*words[1:], "--no-compile", "--json", cwd=folder)
    assert result.code == 0, result.err
    files = [path for path in (folder / "moetune-configs").rglob("*.json") if "provenance" not in path.name]
    return json.loads(result.out), sorted(files)


def test_evening_1_the_warning_on_an_rtx_pro_6000(tmp_path: Path) -> None:
    diagnosis = diagnose([str(LOGS / "sglang-0.5.6-rtx-pro-6000.log")])
    words = mended(diagnosis, "MOE020")
    document, files = run(words, tmp_path)
    asked = {value for key, value in diagnosis.findings[0].facts if key == "file"}
    assert {path.name for path in files} == asked
    assert document["found_by_lookup"] is True
    keys = set(ConfigTable.parse(files[0].read_text(), "up").keys())
    # The batches of the decode graphs, and the prefill chunk.
    assert {1, 12, 88, 160, 8192} <= keys


def test_evening_2_out_of_resources_on_a_4090(tmp_path: Path) -> None:
    diagnosis = diagnose([str(LOGS / "sglang-0.5.12-rtx-4090-crash.log")])
    assert diagnosis.findings[0].code.code == "MOE001"
    document, files = run(mended(diagnosis, "MOE001"), tmp_path)
    assert document["found_by_lookup"] is True
    assert "E=128,N=384,device_name=NVIDIA_GeForce_RTX_4090,dtype=fp8_w8a8.json" in {
        path.name for path in files
    }
    for path in files:
        for m, config in ConfigTable.parse(path.read_text(), path.name).entries:
            stages = max(config.num_stages - 1, 1)
            needs = stages * (config.block_size_m + config.block_size_n) * config.block_size_k
            assert needs <= 101_376, (path.name, m, config)


def test_evening_3_an_upgrade_that_moves_triton(tmp_path: Path) -> None:
    diagnosis = diagnose([str(LOGS / "sglang-0.5.23-h100-upgraded.log")])
    finding = diagnosis.findings[0]
    assert finding.code.code == "MOE021"
    assert sum(f.code.code == "MOE021" for f in diagnosis.findings) == 1
    _, files = run(mended(diagnosis, "MOE021"), tmp_path)
    # In the directory that the upgraded server looks into first.
    assert {path.parent.name for path in files} == {"triton_3_8_0"}


def test_evening_5_awq_under_expert_parallelism_is_moot() -> None:
    diagnosis = diagnose([str(LOGS / "vllm-0.12.0-awq-ep.log")])
    assert [finding.code.code for finding in diagnosis.findings] == ["MOE030"]
    assert not diagnosis.findings[0].mend
    assert dict(diagnosis.servers[0].parallelism)["ep"] == 8


@pytest.mark.parametrize("log", ["vllm-0.11.0-l40s.log", "vllm-0.33.0-h100-nvl-ep.log"])
def test_vllms_file_is_the_one_that_it_asked_for(log: str, tmp_path: Path) -> None:
    diagnosis = diagnose([str(LOGS / log)])
    document, files = run(mended(diagnosis, "MOE020"), tmp_path)
    assert [path.name for path in files] == [
        value for key, value in diagnosis.findings[0].facts if key == "file"
    ]
    assert document["found_by_lookup"] is True


CIRCLES = {
    "evening 1": ("sglang-0.5.6-rtx-pro-6000.log", "MOE020", "0.5.10", 384, None),
    "evening 1, older end": ("sglang-0.5.6-rtx-pro-6000.log", "MOE020", "0.5.6", 384, None),
    "evening 2": ("sglang-0.5.12-rtx-4090-crash.log", "MOE001", "0.5.12", 384, "fp8_w8a8"),
    "evening 3": ("sglang-0.5.23-h100-upgraded.log", "MOE021", "0.5.23", 384, None),
}


@pytest.mark.parametrize(("log", "code", "version", "n", "dtype"), CIRCLES.values(), ids=CIRCLES.keys())
def test_the_wheels_own_loader_then_prints_a_log_without_findings(
    log: str,
    code: str,
    version: str,
    n: int,
    dtype: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Log, command, files, the server's real code, its log, doctor: nothing is left."""
    before = diagnose([str(LOGS / log)])
    run(mended(before, code), tmp_path)
    server = before.servers[0]
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(tmp_path / "moetune-configs"))
    world = World(device=server.gpus[0].replace(" ", "_"), triton=server.triton_version)
    real = load_lookup(version, world)
    for down in (False, True):
        assert real.get_moe_configs(128, n, dtype, 0, 0, False, down_moe=down)
    printed = "".join(f"[2026-12-01 10:00:00 TP0] {text}\n" for _, text in real.logger.lines)
    assert "Using MoE kernel config from" in printed
    after = diagnose(["after.log"], stream=io.BytesIO(printed.encode()))
    assert not after.findings
