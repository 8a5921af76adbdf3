"""docs/experiment.md: its commands run, and it names every option, verdict and exit code."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import click
import pytest

from moetune.applications.experiments.report import HEADINGS
from moetune.cli.experiment import experiment
from moetune.domain.experiment import Verdict
from tests.cli.conftest import moetune

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "experiment.md").read_text("utf-8")
COMMANDS = re.findall(r"^\$ (moetune .*)$", PAGE, re.M)
RUN = "examples/evening/evening-recorded.toml"
"""Run whole by tests/applications/experiments/test_evening.py, which compares the table of the page too."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "examples" / "evening", tmp_path / "examples" / "evening")
    return tmp_path


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 5
    assert f"moetune experiment {RUN}" in COMMANDS


@pytest.mark.parametrize("command", [one for one in COMMANDS if not one.endswith((RUN, "uninstall RUN"))])
def test_a_command_of_the_page_runs(command: str, folder: Path) -> None:
    result = moetune(*shlex.split(command)[1:], cwd=folder)
    assert result.code == 0, result.err
    assert result.out


def test_examples_of_the_help_run_too(folder: Path) -> None:
    examples = re.findall(r"^  (moetune experiment .*)$", experiment.epilog or "", re.M)
    assert len(examples) == 4
    _, *suggest = shlex.split(next(one for one in examples if "--suggest" in one))
    written = moetune(*suggest, "--server", "sglang", "--server-version", "0.5.23", "--offline", cwd=folder)
    assert written.code == 0, written.err
    text = (folder / "evening.toml").read_text()
    # The directories of files that the suggested plan says to write first.
    for name in re.findall(r'^configs = \["(.*)"\]', text, re.M):
        shutil.copytree(folder / "examples" / "evening" / "configs" / "tuned", folder / name)
    dry = moetune(*shlex.split(next(one for one in examples if "--dry-run" in one))[1:], cwd=folder)
    assert dry.code == 0, dry.err
    again = moetune(*suggest, "--server", "sglang", "--offline", cwd=folder)
    assert again.code == 2
    assert "is there already" in again.err


def test_a_suggestion_needs_a_server_and_a_gpu(tmp_path: Path) -> None:
    result = moetune("experiment", "x.toml", "--suggest", "Qwen/Qwen3-30B-A3B", "--offline", cwd=tmp_path)
    assert result.code == 2
    assert "--server" in result.err
    assert not (tmp_path / "x.toml").exists()


def test_the_page_names_every_verdict_and_heading() -> None:
    assert all(verdict.value in PAGE for verdict in Verdict)
    assert all(heading in PAGE for heading in HEADINGS)
    assert all(f"| {code} |" in PAGE for code in (0, 1, 2, 130))


def test_the_page_names_no_option_that_is_not_there() -> None:
    known = {
        name
        for parameter in experiment.params
        if isinstance(parameter, click.Option)
        for name in parameter.opts
    }
    assert set(re.findall(r"--[a-z][a-z-]*", PAGE)) <= known


def test_its_help_names_the_page_of_the_plan() -> None:
    assert "docs/experiment-plan.md" in (experiment.help or "")
    assert (ROOT / "docs" / "experiment-plan.md").is_file()
