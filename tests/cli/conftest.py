"""Runs the command line: in this process with a model double, or for real in its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from moetune.cli.main import run
from moetune.domain.predict import PerformanceModel
from tests.doubles import ModelDouble

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = "Qwen/Qwen3.5-122B-A10B"
LANDSCAPE = Path(__file__).parents[2] / "training" / "landscapes" / "qwen3.5-122b-a10b_tp4_bf16_h200.csv.gz"
RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"


@dataclass(frozen=True, slots=True)
class Result:
    """What a command line left."""

    code: int
    out: str
    err: str


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ModelDouble:
    """The performance model of commands in this process."""
    double = ModelDouble()
    monkeypatch.setattr(PerformanceModel, "load", lambda: double)
    return double


@pytest.fixture
def command(
    model: ModelDouble, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """Run a command line in this process, in an empty folder."""
    del model
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SGLANG_MOE_CONFIG_DIR", raising=False)
    monkeypatch.delenv("VLLM_TUNED_CONFIG_FOLDER", raising=False)

    def execute(*arguments: str) -> Result:
        code = run(arguments)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return execute


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's variables without those that would change an answer."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SGLANG_", "VLLM_", "MOETUNE_", "NO_COLOR", "FORCE_COLOR", "COLUMNS"))
    }
    return {**kept, **variables}


def moetune(*arguments: str, cwd: Path, **variables: str) -> Result:
    """Run the real command line in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-m", "moetune.cli.main", *arguments],
        cwd=cwd,
        # What is installed is recorded in the user's state directory: not in that of the tests' user.
        env=clean_environment(**{"XDG_STATE_HOME": str(cwd / "state"), **variables}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Result(result.returncode, result.stdout, result.stderr)
