"""Sums over topk and rows in sorted order are to SGLang's own kernel what they are to moetune's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.measure.interpreted import ROOT
from tests.measure.server_rows import CASES

if TYPE_CHECKING:
    from pathlib import Path

_WRONG = {"fp8 by channel: down"}
"""A row's scale is read where its slot stood."""


def interpreted(package: str, version: str, folder: Path, names: list[str]) -> dict[str, dict[str, float]]:
    done = subprocess.run(
        # -O: SGLang's kernel asserts block fp8 where activations come through a descriptor; compiled, as it
        # is on a GPU, an assertion is left out, and configs for bf16 with USE_TMA are published.
        [sys.executable, "-O", "-m", "tests.measure.server_rows", package, version, str(folder), *names],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


_OLDER = ["bf16", "experts of other ranks", "fp8 by channel", "summed"]


@pytest.mark.parametrize(("version", "names"), [("0.5.23", list(CASES)), ("0.5.20", _OLDER)])
def test_sglangs_own_kernel_computes_the_same(version: str, names: list[str], tmp_path: Path) -> None:
    found = interpreted("sglang", version, tmp_path, names)
    assert len(found) == 2 * len(names)
    # The same sums in the same order: not a bit differs, be they right or wrong.
    assert {name: one["apart"] for name, one in found.items()} == dict.fromkeys(found, 0.0)
    for name, one in found.items():
        assert (one["error"] > 0.1) is (name in _WRONG), name
        # What is wrong was said to be.
        assert one["error"] < 0.1 or one["said to be wrong"]
    # Up to 0.5.22 zeros for experts of other ranks are written at the slots' places, whatever lies there.
    parallel = found["experts of other ranks: up"]
    assert bool(parallel["strange"]) is bool(parallel["said to be wrong"]) is (version == "0.5.20")
    others = {name: one["strange"] for name, one in found.items() if one is not parallel}
    assert others == dict.fromkeys(others, 0)


@pytest.mark.parametrize(
    ("package", "version"), [("vllm", "0.33.0"), ("sglang", "0.5.4"), ("sglang", "0.5.5")]
)
def test_block_fp8_in_tiles_within_a_scale_is_the_servers(package: str, version: str, tmp_path: Path) -> None:
    # Tiles of 32 columns, scales of 64: vLLM and SGLang 0.5.4 have a scale for each column, 0.5.5 one a tile.
    found = interpreted(package, version, tmp_path, ["fp8 by block, narrow tiles"])
    assert [one["apart"] for one in found.values()] == [0.0, 0.0]
    assert all(one["error"] < 0.1 for one in found.values())
