"""The Python interface: light to import, one list of parameters, the documents of the command line."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from typing import TYPE_CHECKING

import pytest

import moetune
from moetune.domain.predict import PerformanceModel
from tests.doubles import ModelDouble

if TYPE_CHECKING:
    from pathlib import Path

MODEL = "Qwen/Qwen3.5-122B-A10B"
RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PerformanceModel, "load", lambda: ModelDouble())


def test_importing_the_package_imports_nothing_else() -> None:
    code = (
        "import sys; before = set(sys.modules); import moetune; "
        "print(sorted(name for name in set(sys.modules) - before if 'moetune' in name or name == 'numpy'))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "['moetune']"


def test_every_public_name_is_there_and_no_other() -> None:
    assert {name for name in moetune.__all__ if not hasattr(moetune, name)} == set()
    assert dir(moetune) == sorted(moetune.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        moetune.nonsense  # noqa: B018


def test_the_parameters_are_those_of_the_request() -> None:
    assert list(inspect.signature(moetune.plan).parameters) == [item.name for item in fields(moetune.Request)]
    tune_fields = [item.name for item in fields(moetune.TuneRequest)]
    assert list(inspect.signature(moetune.tune).parameters) == tune_fields
    for verb, answer in ((moetune.plan, moetune.Plan), (moetune.tune, moetune.Tuned)):
        assert "tensor-parallel" in (verb.__doc__ or "")
        assert inspect.signature(verb).return_annotation is answer


def test_plan_answers_and_cannot_be_changed() -> None:
    plan = moetune.plan(MODEL, tp=4, server="sglang", gpu=RTX)
    assert plan.gains
    assert plan.gpus[0].problem is not None
    assert plan.gpus[0].problem.N == 256
    with pytest.raises(FrozenInstanceError):
        plan.server = plan.server  # type: ignore[misc]


def test_tune_writes_what_the_command_line_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moetune.cli.main import run

    monkeypatch.chdir(tmp_path)
    tuned = moetune.tune(MODEL, tp=4, server="sglang", gpu=RTX, out="api", compile_configs=False)
    command = ["tune", MODEL, "--tp", "4", "--server", "sglang", "--gpu", RTX, "--no-compile", "--json"]
    assert run([*command, "--out", "api"]) == 0
    printed = json.loads(capsys.readouterr().out)
    for file in printed["written"]:
        assert file.pop("state") == "unchanged"
    document = tuned.to_json()
    for file in document["written"]:
        assert file.pop("state") == "written"
    assert document == printed


def test_errors_carry_a_message_and_a_hint() -> None:
    with pytest.raises(moetune.MoetuneError) as caught:
        moetune.plan(MODEL, tp=3, gpu=RTX)
    assert caught.value.message
    assert caught.value.hint
