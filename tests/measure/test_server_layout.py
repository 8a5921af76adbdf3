"""Operands as moetune lays them out mean to the servers' own kernels what they mean to moetune's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.measure.interpreted import ROOT

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("package", "version"), [("sglang", "0.5.23"), ("vllm", "0.33.0")])
def test_the_servers_own_kernels_compute_the_same(package: str, version: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.measure.server_layout", package, version, str(tmp_path)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    errors = json.loads(done.stdout)
    assert len(errors) == 9
    # The same sums in the same order: not a bit differs.
    assert errors == dict.fromkeys(errors, 0.0)
