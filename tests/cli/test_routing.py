"""`moetune routing` on the command line: tables, the document and its schema, the page, faults."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np
import pytest
import torch

from moetune.cli.routing import routing as routing_command
from moetune.domain.synthetic_routing import draw_ids
from tests.cli.conftest import moetune
from tests.cli.test_schemas import validate

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.conftest import Result

PAGE = Path(__file__).parents[2] / "docs" / "routing.md"
SYNTHETIC = ("routing", "--synthetic", "zipf:1.2", "--tokens", "256", "--experts", "32", "--topk", "4")


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    folder = tmp_path / "ids"
    folder.mkdir()
    for layer in (3, 4, 6, 7):
        ids = draw_ids(200, 32, 4, 0.2 * layer, np.random.default_rng(layer))
        torch.save(torch.from_numpy(ids), folder / f"topk_ids_layer{layer}_idx0.pt")
    return folder


def test_worst_median_and_best_stand_for_all(recorded: Path, command: Callable[..., Result]) -> None:
    result = command("routing", str(recorded), "--experts", "32", "--ep", "4")
    assert result.code == 0
    assert result.err == ""
    assert "4, from 3 to 7, 1 between them without experts" in result.out
    assert re.search(r"^ +worst +7 ", result.out, re.M)
    assert re.search(r"^ +best +3 ", result.out, re.M)
    assert "--layers all" in result.out
    assert "BLOCK_SIZE_M 64" in result.out
    assert "recorded:" in result.out
    assert "over 4 ranks" in result.out


def test_every_layer_is_shown_where_it_is_asked_for(recorded: Path, command: Callable[..., Result]) -> None:
    result = command("routing", str(recorded), "--experts", "32", "--layers", "all")
    assert re.findall(r"^ +(\d) +200 ", result.out, re.M) == ["3", "4", "6", "7"]
    result = command("routing", str(recorded), "--experts", "32", "--layers", "4-6")
    assert re.findall(r"^ +(\d) +200 ", result.out, re.M) == ["4", "6"]


def test_the_document_obeys_its_schema(recorded: Path, command: Callable[..., Result]) -> None:
    for more in ((), ("--ep", "4"), ("--ep", "4", "--rank", "1"), ("--experts", "32", "--m", "16")):
        result = command("routing", str(recorded), "--json", "--experts", "32", *more)
        assert result.code == 0, result.err
        document = json.loads(result.out)
        validate(document, "routing")
        assert [layer["number"] for layer in document["layers"]] == [3, 4, 6, 7]
        assert document["experts"] == (8 if "--rank" in more else 32)
        assert document["global_experts"] == 32
        assert document["summary"]["worst_layer"] == 7
    assert command("routing", str(recorded), "--json", "--experts", "32").out == (
        command("routing", str(recorded), "--json", "--experts", "32").out
    )


def test_counts_have_a_document_too(tmp_path: Path, command: Callable[..., Result]) -> None:
    counts = torch.randint(0, 50, (3, 5, 16), dtype=torch.int32)
    counts[:, 0] = 0  # dense
    path = tmp_path / "expert_distribution_recorder_1700000000.5.pt"
    torch.save({"rank": 0, "logical_count": counts, "average_utilization_rate_over_window": None}, path)
    result = command("routing", str(path), "--json")
    document = json.loads(result.out)
    validate(document, "routing")
    assert document["form"] == "stat"
    assert document["routing"] is None
    assert [layer["number"] for layer in document["layers"]] == [1, 2, 3, 4]
    assert document["layers"][0]["blocks"] == []
    assert "counts only" in document["remarks"][0]
    shown = command("routing", str(path))
    assert "?" in shown.out
    assert "counts only" in shown.err


def test_a_synthetic_recording_is_written_and_read_again(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    result = command(*SYNTHETIC, "--layers", "3-4", "--out", "made")
    assert result.code == 0
    assert "4 files in made" in result.out
    assert "as zipf:1." in result.out
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == [
        f"topk_ids_layer{layer}_idx{index}.pt" for layer in (3, 4) for index in (0, 1)
    ]
    again = command("routing", "made", "--experts", "32", "--json")
    made = command(*SYNTHETIC, "--layers", "3-4", "--json")
    one, other = json.loads(again.out), json.loads(made.out)
    assert one["routing"] == other["routing"]
    assert one["layers"] == other["layers"]
    validate(other, "routing")


def test_a_number_of_layers_is_how_many_a_synthetic_one_has(command: Callable[..., Result]) -> None:
    document = json.loads(command(*SYNTHETIC, "--layers", "5", "--calls", "1", "--json").out)
    assert [layer["number"] for layer in document["layers"]] == [0, 1, 2, 3, 4]
    assert document["layers"][0]["calls"] == 1


FAULTS = {
    "nothing": (("routing",), "give the files of a recording"),
    "both": ((*SYNTHETIC, "--layers", "2", "ids"), "give the files of a recording"),
    "tokens of what is recorded": (("routing", "ids", "--tokens", "4"), "--tokens says"),
    "no sizes": (("routing", "--synthetic", "uniform"), "needs --layers"),
    "no law": (("routing", "--synthetic", "gauss", "--layers", "2", *SYNTHETIC[3:]), "is no routing"),
    "layers that are none": ((*SYNTHETIC, "--layers", "a-b"), "names no layers"),
    "m that is none": ((*SYNTHETIC, "--layers", "2", "--m", "x"), "whole numbers"),
    "m of nothing": ((*SYNTHETIC, "--layers", "2", "--m", "0"), "--m names no calls"),
    "a block that is none": ((*SYNTHETIC, "--layers", "2", "--block-m", "0"), "no BLOCK_SIZE_M"),
    "a rank without ranks": ((*SYNTHETIC, "--layers", "2", "--rank", "0"), "add --ep"),
    "a rank too many": ((*SYNTHETIC, "--layers", "2", "--ep", "2", "--rank", "2"), "no rank 2"),
    "ranks that do not divide": ((*SYNTHETIC, "--layers", "2", "--ep", "3"), "cannot be spread"),
    "what is not there": (("routing", "none"), "cannot be read"),
    "an escape": (("routing", "\x1b[31mred"), "cannot be read"),
}


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_fault_is_a_line_and_what_to_do(name: str, command: Callable[..., Result]) -> None:
    arguments, why = FAULTS[name]
    result = command(*arguments)
    assert result.code == 2
    assert why in result.err
    assert result.out == ""
    assert "\x1b" not in result.err
    assert "Traceback" not in result.err


def test_layers_that_were_not_recorded_are_named(recorded: Path, command: Callable[..., Result]) -> None:
    result = command("routing", str(recorded), "--layers", "40-50")
    assert result.code == 2
    assert "from 3 to 7" in result.err


MADE = (*SYNTHETIC, "--layers", "2")
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
def test_an_option_changes_what_is_said(option: str, command: Callable[..., Result]) -> None:
    before = command(*MADE, "--json", *(("--ep", "4") if option == "--rank" else ()))
    after = command(*MADE, "--json", *OPTIONS[option])
    assert (before.code, after.code) == (0, 0)
    assert before.out != after.out


def test_every_option_is_here() -> None:
    known = {name for parameter in routing_command.params for name in parameter.opts if name.startswith("--")}
    assert known == set(OPTIONS) | {"--out", "--python", "--json", "--no-color", "--exit-zero"}


def test_files_are_read_by_the_interpreter_that_is_named(
    recorded: Path, command: Callable[..., Result]
) -> None:
    result = command("routing", str(recorded), "--python", "/nowhere/python")
    assert result.code == 2
    assert "/nowhere/python" in result.err


def examples() -> list[str]:
    return [
        *re.findall(r"^\$ (moetune routing.*)$", PAGE.read_text("utf-8"), re.M),
        *re.findall(r"^  (moetune .*)$", routing_command.epilog or "", re.M),
    ]


def test_the_examples_run(tmp_path: Path) -> None:
    """Those of the page one after another in one folder, those of the help in another."""
    found = examples()
    assert len(found) >= 6
    for number, example in enumerate(found):
        folder = tmp_path / ("page" if number < len(found) - 2 else "help")
        folder.mkdir(exist_ok=True)
        result = moetune(*shlex.split(example)[1:], cwd=folder)
        assert result.code == 0, f"{example}: {result.err}"
        assert result.out


def test_every_option_stands_in_the_page_or_the_help(tmp_path: Path) -> None:
    del tmp_path
    text = PAGE.read_text("utf-8")
    options = {
        name
        for parameter in routing_command.params
        if isinstance(parameter, click.Option)
        for name in parameter.opts
    }
    assert {name for name in options if name not in text} <= {"--no-color", "--exit-zero"}


def test_help_fits_100_columns(tmp_path: Path) -> None:
    result = moetune("routing", "--help", cwd=tmp_path, COLUMNS="100")
    assert result.code == 0
    assert max(map(len, result.out.splitlines())) <= 100


def test_tune_predicts_under_no_other_routing(command: Callable[..., Result]) -> None:
    result = command(
        *(
            "tune",
            "Qwen/Qwen3-30B-A3B",
            "--gpu",
            "NVIDIA H200",
            "--effort",
            "predict",
            "--routing",
            "zipf:1.2",
        )
    )
    assert result.code == 2
    assert "--routing" in result.err
