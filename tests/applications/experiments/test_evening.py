"""The evening of the examples, whole: on this machine, with recorded servers in the place of four GPUs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from moetune.applications.experiments.plan_file import read_plan
from moetune.servers.flags import consequences_of
from tests.applications.experiments.recorded import (
    COMMANDS,
    DOWN,
    EVENING,
    FILE,
    VARIABLE,
    config_folder,
    write_configs,
)
from tests.cli.conftest import Result, clean_environment, moetune

if TYPE_CHECKING:
    from collections.abc import Mapping

LIMIT_S = 400.0
"""Of one command: an evening takes half a minute here, and more where others compute too."""

SUM, FUSION = "sum-all-reduce in the MoE kernel", "FlashInfer all-reduce fusion"
TUNED, BORROWED = "tuned configs", "borrowed B200 configs"


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@dataclass(frozen=True)
class Evening:
    """One run of the plan.

    Attributes:
        folder: copy of the example, and of nothing else.
        state: of moetune.
        before: files of the server's config directory.
        result: of the command.
    """

    folder: Path
    state: Path
    before: Mapping[str, bytes]
    result: Result

    @property
    def root(self) -> Path:
        return self.folder / "server-root"

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.result.out)
        return document

    def arm(self, name: str) -> dict[str, Any]:
        (found,) = (one for one in self.document["arms"] if one["arm"] == name)
        return dict(found)


def run(folder: Path, state: Path, plan: str = "evening-recorded.toml", *more: str) -> Result:
    """From another directory: the plan's own paths have to do."""
    command = [
        sys.executable,
        "-m",
        "moetune",
        "experiment",
        str(folder / plan),
        "--state",
        str(state),
        *more,
    ]
    ran = subprocess.run(
        [*command, *more],
        cwd=state.parent,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return Result(ran.returncode, ran.stdout, ran.stderr)


@pytest.fixture(scope="module")
def evening(tmp_path_factory: pytest.TempPathFactory) -> Evening:
    base = tmp_path_factory.mktemp("evening")
    folder = base / "example"
    shutil.copytree(EVENING, folder)
    shutil.rmtree(folder / "server-root")
    (folder / "server-root" / "configs" / "triton_3_8_0").mkdir(parents=True)
    before = files_of(folder / "server-root")
    result = run(folder, base / "state", "evening-recorded.toml", "--json")
    return Evening(folder, base / "state", before, result)


def test_the_table_of_verdicts(evening: Evening) -> None:
    assert evening.result.code == 0, evening.result.err
    assert {one["arm"]: one["verdict"] for one in evening.document["arms"]} == {
        SUM: "INVALID",
        FUSION: "cannot activate",
        TUNED: "helps",
        BORROWED: "equivalent",
    }


def test_case_47_the_flag_that_halves_running_requests_is_shown(evening: Evening) -> None:
    validity = evening.arm(SUM)["validity"]
    assert validity["problems"] == [
        "max_running_requests is 26 in this arm and 48 in the baseline, which is no part of the "
        "intervention; to keep it equal give --max-running-requests to all arms"
    ]
    # Its numbers are not looked at, good or bad.
    assert evening.arm(SUM)["comparisons"] == []


def test_fusion_is_refused_before_anything_is_started(evening: Evening) -> None:
    (problem,) = evening.arm(FUSION)["validity"]["problems"]
    assert "sm_120" in problem
    assert FUSION not in {one["result"]["start"]["arm"] for one in evening.document["starts"]}


def test_the_tuned_table_helps_as_planted(evening: Evening) -> None:
    arm = evening.arm(TUNED)
    assert arm["validity"]["proof"] == "active"
    lines = arm["validity"]["evidence"]
    assert any(line.endswith(f"{FILE} (up)") for line in lines)
    assert any(line.endswith(f"{DOWN} (down)") for line in lines)
    assert {one["what"] for one in arm["validity"]["differences"]} == {f"config {FILE}", f"config {DOWN}"}
    by_metric = {one["metric"]: one for one in arm["comparisons"]}
    assert 1.03 < by_metric["output_tokens_per_s"]["low"] < by_metric["output_tokens_per_s"]["high"] < 1.08
    assert by_metric["ttft_ms"]["high"] < 1
    assert by_metric["itl_ms"]["high"] < 1


def test_the_borrowed_table_is_told_as_measured(evening: Evening) -> None:
    arm = evening.arm(BORROWED)
    (decides,) = (one for one in arm["comparisons"] if one["metric"] == "output_tokens_per_s")
    assert 0.99 <= decides["low"] <= decides["high"] <= 1.01
    assert arm["validity"]["proof"] == "active"


def test_only_what_helped_is_left_in_place(evening: Evening) -> None:
    tuned = files_of(evening.folder / "configs" / "tuned")
    left = files_of(evening.root)
    tables = {path: content for path, content in left.items() if not path.endswith(".provenance.json")}
    assert tables == {path: content for path, content in tuned.items() if path in tables}
    assert {Path(path).name for path in tables} == {FILE, DOWN}
    assert evening.document["kept"]["interventions"] == [TUNED]


def test_the_same_command_repeats_no_start(evening: Evening) -> None:
    again = run(evening.folder, evening.state, "evening-recorded.toml", "--json")
    assert again.code == 0
    assert json.loads(again.out) == evening.document


def test_table_for_people_tells_the_story(evening: Evening) -> None:
    text = " ".join(run(evening.folder, evening.state).out.split())
    for words in (
        f"{SUM} INVALID",
        f"{FUSION} cannot activate",
        f"{TUNED} helps",
        "max_running_requests is 26 in this arm and 48 in the baseline",
        "left in place: tuned configs",
    ):
        assert words in text


def test_the_page_shows_this_very_table(evening: Evening) -> None:
    page = (Path(__file__).parents[3] / "docs" / "experiment.md").read_text("utf-8")
    for arm in evening.document["arms"]:
        (row,) = [line for line in page.splitlines() if line.startswith(f"  {arm['arm']}  ")]
        ratios = [f"{one['ratio']:.3f} [{one['low']:.3f}, {one['high']:.3f}]" for one in arm["comparisons"]]
        shown = re.findall(r"[0-9.]+ \[[0-9.]+, [0-9.]+\]", row)
        assert arm["verdict"] in row
        assert set(shown) <= set(ratios)
        assert bool(shown) == bool(ratios)


def test_uninstall_brings_the_bytes_of_before_back(evening: Evening) -> None:
    """The last test of the module: it takes away what the others look at."""
    name = evening.document["id"]
    taken = moetune("uninstall", name, "--state", str(evening.state), cwd=evening.state.parent)
    assert taken.code == 0, taken.err
    assert files_of(evening.root) == evening.before


# --- the plans themselves ---------------------------------------------------------------------------


def test_dry_run_starts_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "example"
    shutil.copytree(EVENING, folder)
    before = files_of(folder)
    result = run(folder, tmp_path / "state", "evening-recorded.toml", "--dry-run")
    assert result.code == 0, result.err
    assert "block 1" in result.out
    assert "sm_120" in result.out
    assert files_of(folder) == before
    assert not list((tmp_path / "state").rglob("*.log"))


def test_the_plan_for_the_gpus_asks_the_same_and_refuses_the_same(tmp_path: Path) -> None:
    real, recorded = (read_plan(EVENING / f"evening{suffix}.toml") for suffix in ("", "-recorded"))
    assert [(one.name, one.arguments, one.configs) for one in real.interventions] == [
        (one.name, one.arguments, one.configs) for one in recorded.interventions
    ]
    assert (real.server.name, real.server.version, real.server.gpu) == (
        recorded.server.name,
        recorded.server.version,
        recorded.server.gpu,
    )
    result = run(EVENING, tmp_path / "state", "evening.toml", "--dry-run")
    assert "sm_120" in result.out
    assert "sglang.launch_server" in result.out


def test_nothing_declares_that_the_flag_halves_running_requests() -> None:
    """If the table of flags ever did, the story of the evening would be another."""
    plan = read_plan(EVENING / "evening-recorded.toml")
    declared = consequences_of("sglang", "0.5.23", plan.intervention(SUM))
    assert "max_running_requests" not in declared


def test_config_files_are_what_moetune_writes(tmp_path: Path) -> None:
    """After a change of the performance model: python examples/evening/make_configs.py."""
    subprocess.run(
        [sys.executable, str(EVENING / "make_configs.py"), str(tmp_path)], check=True, capture_output=True
    )
    for name in ("tuned", "borrowed-b200"):
        ours, theirs = files_of(EVENING / "configs" / name), files_of(tmp_path / name)
        tables = [path for path in theirs if not path.endswith(".provenance.json")]
        assert sorted(Path(path).name for path in tables) == [FILE, DOWN]
        assert {path: ours[path] for path in tables} == {path: theirs[path] for path in tables}


# --- the other releases -----------------------------------------------------------------------------


@pytest.mark.parametrize("release", ["sglang-0.5.9", "sglang-0.5.12", "vllm-0.33.0"])
def test_config_arm_of_other_releases(release: str, tmp_path: Path) -> None:
    """Each finds its own directory and name, is seen to read the file, and gets its state back."""
    server, _, version = release.partition("-")
    root = tmp_path / "root"
    config_folder(release, root).mkdir(parents=True)
    tuned = [str(Path(path).relative_to(tmp_path)) for path in write_configs(release, tmp_path / "tuned")]
    command = [
        *("python3", str(EVENING / "recorded_server.py"), "--log", "{log}"),
        *("--recording", str(EVENING / "recordings" / f"{release}.json")),
        *("--", *COMMANDS[server], "--port", "{port}"),
    ]
    text = (EVENING / "evening-recorded.toml").read_text()
    load = text[text.index("[load]") : text.index("[decision]")].replace(
        'folder = "."', f'folder = "{EVENING}"'
    )
    plan = tmp_path / "plan.toml"
    plan.write_text(
        "\n".join(
            [
                "[server]",
                f'name = "{server}"',
                f'version = "{version}"',
                f"command = {json.dumps(command)}",
                f'environment = {{ {VARIABLE[server]} = "{root}" }}',
                'config_root = "root"',
                'gpu = "NVIDIA RTX PRO 6000 Blackwell Server Edition"',
                load,
                "[budget]",
                "starts = 5",
                "[[intervention]]",
                'name = "tuned"',
                f"configs = {json.dumps(tuned)}",
            ]
        )
    )
    result = run(tmp_path, tmp_path / "state", "plan.toml", "--json")
    document = json.loads(result.out)
    (arm,) = document["arms"]
    assert arm["verdict"] == "inconclusive", result.err
    assert arm["validity"]["proof"] == "active"
    assert arm["validity"]["problems"] == []
    assert any(str(root) in line and FILE in line for line in arm["validity"]["evidence"])
    assert files_of(root) == {}
    (decides,) = (one for one in arm["comparisons"] if one["metric"] == "output_tokens_per_s")
    assert decides["ratio"] > 1.05
