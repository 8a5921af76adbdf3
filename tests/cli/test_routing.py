"""`moetune routing` as a person runs it: each option changes what is said, and the page's commands run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from moetune.cli.routing import routing
from tests.cli.conftest import Result, moetune
from tests.cli.test_schemas import validate

PAGE = Path(__file__).parents[2] / "docs" / "routing.md"
MADE = ("--synthetic", "zipf:1.2", "--layers", "4", "--tokens", "96", "--experts", "32", "--topk", "4")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic recording of four layers, as files."""
    folder = tmp_path_factory.mktemp("routing")
    result = moetune("routing", *MADE, "--out", "ids", cwd=folder)
    assert result.code == 0, result.err
    return folder / "ids"


def said(folder: Path, *arguments: str) -> dict[str, Any]:
    """The document of a call."""
    result = moetune("routing", *arguments, "--json", cwd=folder)
    assert result.code == 0, result.err
    document: dict[str, Any] = json.loads(result.out)
    validate(document, "routing")
    return document


def test_a_recording_is_written_as_sglangs_tuner_reads_it(recording: Path) -> None:
    assert sorted(path.name for path in recording.iterdir()) == [
        f"topk_ids_layer{layer}_idx{call}.pt" for layer in range(4) for call in range(2)
    ]


def test_what_was_made_is_what_is_read(recording: Path, tmp_path: Path) -> None:
    made, read = said(tmp_path, *MADE), said(tmp_path, str(recording), "--experts", "32")
    assert made["layers"] == read["layers"]
    assert [layer["number"] for layer in read["layers"]] == [0, 1, 2, 3]
    shown = moetune("routing", str(recording), "--experts", "32", cwd=tmp_path)
    assert shown.code == 0
    for text in ("worst", "median", "best", "never hit", "BLOCK_SIZE_M 64", "--layers all shows each"):
        assert text in shown.out


OPTIONS: dict[str, tuple[str, ...]] = {
    "--layers": ("--layers", "1-2"),
    "--tokens": ("--tokens", "48"),
    "--calls": ("--calls", "3"),
    "--experts": ("--experts", "64"),
    "--topk": ("--topk", "2"),
    "--seed": ("--seed", "7"),
    "--ep": ("--ep", "4"),
    "--rank": ("--ep", "4", "--rank", "1"),
    "--m": ("--m", "8"),
    "--block-m": ("--block-m", "32"),
    "--synthetic": ("--synthetic", "uniform"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_changes_what_is_said(option: str, tmp_path: Path) -> None:
    before = said(tmp_path, *MADE, *(("--ep", "4") if option == "--rank" else ()))
    assert said(tmp_path, *MADE, *OPTIONS[option]) != before


def test_every_option_is_here() -> None:
    known = {name for parameter in routing.params for name in parameter.opts if name.startswith("--")}
    assert known == set(OPTIONS) | {"--out", "--python", "--json", "--no-color", "--exit-zero"}


def test_files_are_read_by_the_interpreter_that_is_named(recording: Path, tmp_path: Path) -> None:
    result = moetune("routing", str(recording), "--python", str(tmp_path / "none"), cwd=tmp_path)
    assert result.code == 2
    assert "none" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layers", "x"), "names no layers"),
        (("--m", "many"), "whole numbers"),
        (("--block-m", "1e3"), "whole numbers"),
        (("--synthetic", "pareto"), "no routing"),
        (("--rank", "4", "--ep", "4"), "rank"),
        (("--topk", "64"), "topk"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result: Result = moetune("routing", *MADE, *arguments, cwd=tmp_path)
    assert result.code == 2
    assert message in result.err


def test_nothing_to_look_at_is_an_error_with_the_next_step(tmp_path: Path) -> None:
    result = moetune("routing", "missing", cwd=tmp_path)
    assert result.code == 2
    assert "missing" in result.err
    assert moetune("routing", cwd=tmp_path).code == 2


def test_the_commands_of_the_page_and_of_the_help_run(tmp_path: Path) -> None:
    page = re.findall(r"^\$ (moetune routing .*)$", PAGE.read_text("utf-8"), re.M)
    commands = [*page, *re.findall(r"^  (moetune .*)$", routing.epilog or "", re.M)]
    assert len(commands) >= 5
    for number, command in enumerate(commands):
        place = tmp_path if number < len(page) else tmp_path / f"help{number}"
        place.mkdir(exist_ok=True)
        result = moetune(*shlex.split(command)[1:], cwd=place)
        assert result.code == 0, (command, result.err)
