"""The Python interface: light to import, one list of parameters, the documents of the command line."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

import moetune
from moetune import api
from moetune.applications.path_arguments import AnyPaths
from moetune.domain.predict import PerformanceModel
from tests.applications.experiments.stub_world import World
from tests.cli.test_experiment import free_port
from tests.doubles import ModelDouble

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
    assert {*api.__all__, "__version__"} == set(moetune.__all__)
    assert len(set(api.__all__)) == len(api.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        moetune.nonsense  # noqa: B018


VERBS: list[tuple[Callable[..., object], type, type]] = [
    (moetune.plan, moetune.Request, moetune.Plan),
    (moetune.tune, moetune.TuneRequest, moetune.Tuned),
    (moetune.tune_measured, moetune.MeasureRequest, moetune.MeasuredTuning),
    (moetune.lint, moetune.LintRequest, moetune.Linted),
    (moetune.borrow, moetune.BorrowRequest, moetune.Borrow),
    (moetune.verify, moetune.VerifyRequest, moetune.Verification),
    (moetune.preview_install, moetune.InstallRequest, moetune.Prepared),
    (moetune.install, moetune.InstallRequest, moetune.Installed),
    (moetune.preview_uninstall, moetune.UninstallRequest, moetune.Uninstalled),
    (moetune.uninstall, moetune.UninstallRequest, moetune.Uninstalled),
    (moetune.doctor, moetune.DoctorRequest, moetune.Diagnosis),
    (moetune.routing, moetune.RoutingRequest, moetune.RoutingAnswer),
]


@pytest.mark.parametrize(("verb", "request_", "answer"), VERBS)
def test_the_parameters_are_those_of_the_request_and_documented(
    verb: Callable[..., object], request_: type, answer: type
) -> None:
    assert getattr(moetune, verb.__name__) is verb
    signature = inspect.signature(verb)
    assert list(signature.parameters) == [item.name for item in fields(request_)]
    assert signature.return_annotation is answer
    described = set(re.findall(r"^ +(\w+):", verb.__doc__ or "", re.M))
    assert described >= set(signature.parameters)


def test_every_verb_of_the_command_line_is_a_function() -> None:
    from moetune.cli.main import VERBS as OF_THE_COMMAND_LINE

    # What a finding means is a page; report is told by another verb's document.
    missing = {verb for verb in OF_THE_COMMAND_LINE if not hasattr(moetune, verb)}
    assert missing <= {"explain", "report"}


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


def test_the_page_names_every_function_and_its_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOETUNE_STATE", str(tmp_path / "state"))
    _, section = (ROOT / "docs" / "cli.md").read_text("utf-8").split("## From Python\n")
    rows = re.findall(r"^\| (`[a-z].*?) \| (.*?) \|", section, re.M)
    functions, answers = (set(re.findall(r"`(\w+)`", " ".join(row[i] for row in rows))) for i in (0, 1))
    assert functions == {name for name in moetune.__all__ if name.islower() and name != "__version__"}
    classes = {name for name in moetune.__all__ if name[0].isupper() and not name.endswith("Request")}
    assert answers == classes - {"MoetuneError", "Progress"}
    blocks = re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "docs/cli.md", "exec"), {})


# the other verbs: each answers with the document that the command line prints


ENTRY = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
NAME = "E=128,N=192,device_name=NVIDIA_H200.json"
ROOT = Path(__file__).parents[1]
LOG = ROOT / "tests" / "logs" / "public" / "vllm-28709.log"
LANDSCAPE = ROOT / "benchmarks" / "results" / "mixtral-8x7b_tp2_bf16_h200_own-kernel_6m.csv.gz"
VLLM: dict[str, Any] = {"server": "vllm", "server_version": "0.20.0"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config file, and nothing of this machine's own."""
    monkeypatch.chdir(tmp_path)
    for variable in ("SGLANG_MOE_CONFIG_DIR", "VLLM_TUNED_CONFIG_FOLDER"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MOETUNE_STATE", str(tmp_path / "state"))
    configs = tmp_path / "configs"
    configs.mkdir()
    (configs / NAME).write_text(json.dumps(dict.fromkeys(("1", "64", "4096"), ENTRY)))
    return configs


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The document of a command."""
    from moetune.cli.main import run

    capsys.readouterr()
    run([*words, "--json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_lint_and_verify(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--server", "vllm", "--server-version", "0.20.0")
    asked: list[AnyPaths] = [str(place), place, [place], (place / NAME,)]
    for paths in asked:
        linted = moetune.lint(paths, **VLLM)
        assert linted.files == 1
        assert [found.code.code for found in linted.findings] == ["MOE141"]
    assert moetune.lint(place, **VLLM).to_json() == printed(capsys, "lint", str(place), *words)
    verified = moetune.verify(place / NAME, lookup_only=True, **VLLM)
    expected = printed(capsys, "verify", str(place / NAME), "--lookup-only", *words)
    assert json.loads(json.dumps(verified.to_json())) == expected


def test_borrow_takes_one_gpu_or_several(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes: dict[str, Any] = {"hidden": 2048, "topk": 8}
    one = moetune.borrow(place, gpu="NVIDIA H100 80GB HBM3", out="one", **VLLM, **sizes)
    several = moetune.borrow(
        place, gpu=("NVIDIA H100 80GB HBM3", "NVIDIA H20"), out="several", **VLLM, **sizes
    )
    assert [len(answer.lent) for answer in (one, several)] == [1, 2]
    words = ("--server", "vllm", "--server-version", "0.20.0", "--hidden", "2048", "--topk", "8")
    expected = printed(capsys, "borrow", str(place), "--gpu", "NVIDIA H100 80GB HBM3", "--out", "one", *words)
    document = json.loads(json.dumps(one.to_json()))
    for lent in (*document["lent"], *expected["lent"]):
        for file in lent["files"]:
            file.pop("state")
    assert document == expected


def test_install_status_and_uninstall(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = place.parent / "root"
    root.mkdir()
    asked: dict[str, Any] = {"root": root, **VLLM}
    preview = moetune.preview_install(place, **asked)
    assert preview.changes_something
    assert not list(root.iterdir())
    assert not moetune.status().installs
    installed = moetune.install(place, **asked)
    assert (root / NAME).read_bytes() == (place / NAME).read_bytes()
    (standing,) = moetune.status().installs
    assert standing.to_json()["id"] == installed.id
    assert moetune.status().to_json() == printed(capsys, "status")
    assert moetune.status(state=place.parent / "elsewhere").installs == ()
    assert moetune.preview_uninstall(root=root).dry_run
    assert (root / NAME).exists()
    assert moetune.uninstall(installed.id, root=root).did_something
    assert not (root / NAME).exists()
    assert not moetune.status().installs


def test_doctor_and_this_machine(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diagnosis = moetune.doctor(LOG, offline=True)
    assert diagnosis.findings
    assert diagnosis.to_json() == printed(capsys, "doctor", str(LOG), "--offline")
    assert moetune.doctor([str(LOG)], offline=True, configs=place / NAME) == diagnosis
    assert moetune.machine().to_json()["schema"] == printed(capsys, "doctor")["schema"]
    with pytest.raises(moetune.MoetuneError, match="cannot be read"):
        moetune.doctor(LOG, configs=place / "missing")


def test_replay_and_routing(capsys: pytest.CaptureFixture[str]) -> None:
    replayed = moetune.replay(LANDSCAPE, measurements=0)
    assert json.loads(json.dumps(replayed.to_json())) == printed(
        capsys, "replay", str(LANDSCAPE), "--measurements", "0"
    )
    made = moetune.routing(synthetic="uniform", layers=(0, 1), tokens=64, experts=16, topk=2)
    assert [layer.number for layer in made.layers] == [0, 1]


def test_a_measurement_without_a_gpu_says_so(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del place
    from moetune.applications import nvml

    monkeypatch.setattr(nvml, "detect_gpus", lambda: nvml.Detected(reasons=("no driver",)))
    with pytest.raises(moetune.MoetuneError, match="this machine has no GPU"):
        moetune.tune_measured(MODEL, tp=4, server="sglang", offline=True)


def test_an_experiment_is_looked_at_and_refused_where_it_cannot_run(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = place.parent / "evening"
    shutil.copytree(ROOT / "examples" / "evening", folder)
    plan = folder / "evening-recorded.toml"
    outlook = moetune.preview_experiment(plan)
    assert outlook.to_json() == printed(capsys, "experiment", str(plan), "--dry-run")
    for call in (moetune.experiment, moetune.preview_experiment):
        with pytest.raises(moetune.MoetuneError):
            call(place / "missing.toml")
    with pytest.raises(moetune.MoetuneError):
        moetune.take_experiment_back("experiment-0000000000000000")


def test_an_experiment_runs_and_is_taken_back(tmp_path: Path) -> None:
    world = World(tmp_path, free_port())
    world.budget = {"starts": 6}
    world.write_plan([{"name": "slower", "environment": {"STUB_FAST": "0.8"}, "proof": "stub FAST"}])
    told: list[moetune.Progress] = []
    state = tmp_path / "state"
    report = moetune.experiment(world.plan, state=state, show=told.append)
    assert not report.helps
    assert told
    taken = moetune.take_experiment_back(report.id, state=state, dry_run=True)
    assert taken.dry_run
    assert taken.id == report.id
