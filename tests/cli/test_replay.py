"""`moetune replay`: the budget, the seed and the strategy reach the search."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.cli.conftest import LANDSCAPE, Result, moetune

if TYPE_CHECKING:
    from pathlib import Path


def replay(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    result = moetune("replay", str(LANDSCAPE), *arguments, "--json", cwd=tmp_path)
    assert result.code == 0, result.err
    document: dict[str, Any] = json.loads(result.out)
    return document


def test_the_budget_is_the_most_that_is_measured(tmp_path: Path) -> None:
    def most(budget: int) -> int:
        problems = replay(tmp_path, "--measurements", str(budget))["problems"]
        return max(int(problem["measurements"]) for problem in problems)

    assert [most(budget) for budget in (0, 3, 8)] == [0, 3, 8]


def test_the_seed_and_the_strategy_count(tmp_path: Path) -> None:
    random = ("--strategy", "random", "--measurements", "2")
    first, again, other = (replay(tmp_path, *random, "--seed", seed) for seed in ("1", "1", "2"))
    assert first == again
    assert first["problems"] != other["problems"]
    assert first["strategy"] != replay(tmp_path, "--measurements", "2")["strategy"]


def test_the_table_is_for_people(tmp_path: Path) -> None:
    result = moetune("replay", str(LANDSCAPE), "--measurements", "1", cwd=tmp_path)
    assert result.code == 0
    assert result.out.splitlines()[1].split() == [
        *("kernel", "m", "best", "us", "chosen", "us", "fraction", "measurements")
    ]
    assert "distinct configs" in result.out


def test_bad_values_are_errors(tmp_path: Path) -> None:
    def run(*arguments: str) -> Result:
        return moetune("replay", str(LANDSCAPE), *arguments, cwd=tmp_path)

    assert run("--measurements", "-1").code == 2
    result = run("--strategy", "luck")
    assert result.code == 2
    assert "guided" in result.err
