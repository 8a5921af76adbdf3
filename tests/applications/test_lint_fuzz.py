"""lint of files that are broken at random: findings or clear errors, never a traceback."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from moetune.applications import lint, planning
from moetune.applications.lint_file import FileJudge
from moetune.applications.lint_report import LintRequest
from moetune.domain.errors import MoetuneError
from moetune.servers.registry import open_server
from tests.applications.mutated_files import is_safe, mutated


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lint, planning):
        monkeypatch.setattr(module, "find_installed", lambda _: None)


@pytest.mark.parametrize("server", ["sglang", "vllm"])
def test_five_thousand_mutated_files_end_in_findings(server: str) -> None:
    rng = random.Random(20261202)
    judge = FileJudge(open_server(server), max_m=8192)
    seen: Counter[str] = Counter()
    for _ in range(5000):
        name, content = mutated(rng)
        judged = judge.judge(name, name, content)
        seen.update({found.code.code for found in judged.findings} or {"nothing"})
        assert all(is_safe(found.message) for found in judged.findings)
    assert {"MOE101", "MOE102", "MOE103", "MOE108", "MOE131", "MOE135", "MOE141"} <= set(seen)


def test_mutated_files_on_disk_end_in_findings_or_clear_errors(tmp_path: Path) -> None:
    rng = random.Random(20261203)
    for number in range(100):
        directory = rng.choice(("triton_3_8_0", "triton_3_5_1", "triton_x", "x"))
        folder = tmp_path / str(number) / "configs" / directory
        folder.mkdir(parents=True)
        for _ in range(3):
            name, content = mutated(rng)
            if "/" not in name and "\x00" not in name and name not in ("", ".", ".."):
                (folder / name).write_bytes(content)
        try:
            request = LintRequest(paths=folder.parents[1], server=rng.choice((None, "sglang", "vllm")))
            lint.lint(request, {})
        except MoetuneError:
            continue  # a clear error; anything else fails here
