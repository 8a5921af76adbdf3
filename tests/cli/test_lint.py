"""`moetune lint` on the command line: reports, formats, exit codes, and an image built in CI."""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import click
import pytest
from jsonschema import ValidationError

from moetune.cli.borrow import borrow as borrow_command
from moetune.cli.lint import lint as lint_command
from tests.cli.conftest import MODEL, RTX, moetune
from tests.cli.test_schemas import validate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Result

NAME = "E=8,N=64,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json"
ENTRY = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
}
GOOD = {str(2**power): ENTRY for power in range(14)}
WRONG = GOOD | {"64": ENTRY | {"BLOCK_SIZE_K": 256}}
SHORT = dict.fromkeys(("1", "2", "4"), ENTRY)
DEAD: Any = {**GOOD, "triton_version": "3.8.0"}
TABLES: tuple[Any, ...] = (GOOD, SHORT, WRONG, DEAD, {}, [])


def lay(root: Path, table: Any, name: str = NAME) -> Path:
    path = root / "configs" / "triton_3_8_0" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table))
    return path


@pytest.mark.parametrize(
    ("table", "fail_on", "code"),
    [
        (GOOD, "info", 0),
        (SHORT, "never-read", 0),
        (SHORT, "costs-speed", 1),
        (WRONG, "wrong-numbers", 1),
        (WRONG, "cannot-run", 0),
        (WRONG, "crash", 0),
        (WRONG, "nothing", 0),
        (DEAD, "crash", 1),
        (DEAD, "nothing", 0),
    ],
)
def test_exit_codes(
    command: Callable[..., Result], tmp_path: Path, table: Any, fail_on: str, code: int
) -> None:
    lay(tmp_path, table)
    assert command("lint", ".", "--fail-on", fail_on).code == code
    assert command("lint", ".", "--fail-on", fail_on, "--json").code == code
    assert command("lint", ".", "--fail-on", fail_on, "--exit-zero").code == 0


def test_by_default_what_costs_speed_does_not_fail(command: Callable[..., Result], tmp_path: Path) -> None:
    lay(tmp_path, SHORT)
    assert command("lint", ".").code == 0
    lay(tmp_path, GOOD, "E=8,N=64,device_name=H200.json")
    assert command("lint", ".").code == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("missing",),
        (),
        (".", "--server", "tgi"),
        (".", "--gpu", "NVIDIA Nothing 1"),
        (".", "--fail-on", "never"),
        (".", "--json", "--format", "sarif"),
        (".", "--max-m", "0"),
        (".", "--server-version", "x"),
    ],
)
def test_what_cannot_be_looked_at_is_2(
    command: Callable[..., Result], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    lay(tmp_path, GOOD)
    result = command("lint", *arguments)
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert "Traceback" not in result.err


def test_the_report_names_file_key_and_mend(command: Callable[..., Result], tmp_path: Path) -> None:
    path = lay(tmp_path, WRONG)
    result = command("lint", "configs")
    assert "MOE121  wrong numbers: a K tile over a quantization group" in result.out
    assert str(path.relative_to(tmp_path)) in result.out
    assert "key 64" in result.out
    assert "moetune borrow" in result.out
    assert "--server-version 0.5.23: the newest whose rules moetune knows" in result.out
    assert result.err == ""


def test_long_lists_are_cut_and_said_so(command: Callable[..., Result], tmp_path: Path) -> None:
    for number in range(20):
        lay(tmp_path, SHORT, f"E=8,N={64 + number},device_name=NVIDIA_H200.json")
    short, whole = command("lint", "."), command("lint", ".", "--all")
    assert short.out.count("E=8,N=") == 13  # twelve, and the mend of the first
    assert "and 8 more: --all shows them" in short.out
    assert whole.out.count("E=8,N=") == 21


def test_json_obeys_its_schema(command: Callable[..., Result], tmp_path: Path) -> None:
    for table in TABLES:
        lay(tmp_path, table)
        document = json.loads(command("lint", ".", "--json", "--gpu", RTX).out)
        validate(document, "lint", strict=False)
        assert document["gpu"] == RTX
    document["findings"][0]["severity"] = "bad"
    with pytest.raises(ValidationError):
        validate(document, "lint", strict=False)


def test_sarif_is_what_its_readers_need(command: Callable[..., Result], tmp_path: Path) -> None:
    lay(tmp_path, WRONG)
    result = command("lint", "configs", "--format", "sarif")
    assert result.code == 1
    document = json.loads(result.out)
    assert (document["version"], len(document["runs"])) == ("2.1.0", 1)
    driver = document["runs"][0]["tool"]["driver"]
    assert driver["name"] == "moetune"
    for found in document["runs"][0]["results"]:
        rule = driver["rules"][found["ruleIndex"]]
        assert rule["id"] == found["ruleId"]
        assert found["level"] == rule["defaultConfiguration"]["level"] == "error"
        assert found["message"]["text"]
        place = found["locations"][0]["physicalLocation"]
        uri = place["artifactLocation"]["uri"]
        assert re.fullmatch(r"[A-Za-z0-9._~:/?#@!$&'()*+,;=%-]+", uri)
        assert (tmp_path / unquote(uri)).is_file()
        assert place["region"]["startLine"] == 1


def test_github_annotations_are_one_line_each(command: Callable[..., Result], tmp_path: Path) -> None:
    lay(tmp_path, WRONG | {"x\n::error::y": ENTRY, "%0A": ENTRY})
    result = command("lint", "configs", "--format", "github")
    lines = result.out.splitlines()
    assert len(lines) == 2
    for line in lines:
        match = re.fullmatch(r"::error file=([^,:]+),line=1,title=(MOE\d{3}) [a-z ]+::(.+)", line)
        assert match is not None
        path = match[1].replace("%2C", ",").replace("%3A", ":").replace("%25", "%")
        assert (tmp_path / path).is_file()
    assert {line.partition("title=")[2][:6] for line in lines} == {"MOE102", "MOE121"}
    assert "%250A" in result.out


def test_evening_an_image_built_in_ci_for_three_kinds_of_gpu(tmp_path: Path) -> None:
    gpus = (RTX, "NVIDIA L40S", "NVIDIA H200")
    names = [word for gpu in gpus for word in ("--gpu", gpu)]
    tune = (
        "tune",
        MODEL,
        "--tp",
        "4",
        "--server",
        "sglang",
        *names,
        "--out",
        "configs-image",
        "--no-compile",
    )
    built = moetune(*tune, "--exit-zero", cwd=tmp_path)
    assert built.code == 0, built.err
    files = sorted((tmp_path / "configs-image").rglob("E=*.json"))
    configs = [path for path in files if not path.name.endswith(".provenance.json")]
    assert {
        path.name.partition("device_name=")[2].partition("_down")[0].removesuffix(".json") for path in configs
    } == {gpu.replace(" ", "_") for gpu in gpus}
    before = {path: path.read_bytes() for path in files}
    assert moetune(*tune, "--exit-zero", cwd=tmp_path).code == 0
    assert {path: path.read_bytes() for path in files} == before
    # The next step of the pipeline: nothing that costs speed or worse.
    checked = moetune("lint", "configs-image", "--fail-on", "costs-speed", "--json", cwd=tmp_path)
    assert checked.code == 0, checked.out
    assert json.loads(checked.out)["files"] == len(configs)
    # Somebody copies a data-centre file over the workstation's name.
    rtx = next(path for path in configs if "RTX_PRO" in path.name and "_down" not in path.name)
    table = json.loads(rtx.read_text())
    table["4096"] = ENTRY | {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 128, "num_stages": 4}
    rtx.write_text(json.dumps(table))
    broken = moetune("lint", "configs-image", "--fail-on", "cannot-run", "--format", "github", cwd=tmp_path)
    assert broken.code == 1
    assert "title=MOE111" in broken.out
    assert "RTX_PRO_6000" in broken.out
    gone = moetune("lint", "configs-image/none", "--fail-on", "cannot-run", cwd=tmp_path)
    assert (gone.code, gone.out) == (2, "")


@pytest.mark.parametrize("table", [SHORT, WRONG, DEAD], ids=["short", "wrong", "dead"])
def test_the_mend_mends(command: Callable[..., Result], tmp_path: Path, table: Any) -> None:
    lay(tmp_path / "theirs", table)
    (found,) = json.loads(command("lint", "theirs", "--json").out)["findings"]
    words = shlex.split(found["mend"])
    assert words[:2] == ["moetune", "borrow"]
    assert command(*words[1:]).code == 0
    assert json.loads(command("lint", "moetune-configs", "--json").out)["findings"] == []


def test_the_mend_of_stale_files_mends(command: Callable[..., Result], tmp_path: Path) -> None:
    path = lay(tmp_path, GOOD)
    path.parent.rename(path.parents[1] / "triton_3_5_1")
    (found,) = json.loads(command("lint", ".", "--json").out)["findings"]
    assert found["code"] == "MOE142"
    assert command(*shlex.split(found["mend"])[1:]).code == 0
    assert json.loads(command("lint", "moetune-configs", "--json").out)["findings"] == []


@pytest.mark.parametrize("verb", [lint_command, borrow_command])
def test_the_examples_of_the_help_texts_parse(verb: click.Command) -> None:
    examples = re.findall(r"^  moetune (.+)$", verb.epilog or "", re.M)
    assert len(examples) == 3
    for example in examples:
        name, *arguments = shlex.split(example)
        assert name == verb.name
        verb.make_context(name, arguments)


def test_every_option_has_a_help_text() -> None:
    for verb in (lint_command, borrow_command):
        assert [p.name for p in verb.params if isinstance(p, click.Option) and not p.help] == []
