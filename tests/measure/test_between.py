"""Activation and quantization between the kernels: as torch computes them, padding left out or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.measure.interpreted import ROOT
from tests.measure.layer_pairs import LAYERS


def run(*, interpreted: bool, cache: str = "") -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "tests.measure.between_rows"],
        env=os.environ | {"TRITON_INTERPRET": "1" if interpreted else "0", "TRITON_CACHE_DIR": cache},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_rows_are_activated_and_quantized_as_torch_does() -> None:
    found = run(interpreted=True)
    assert len(found) == 8
    for name, one in found.items():
        assert one["untouched"], f"{name}: padding was written"
        # A bf16 result; 8-bit floats have 4 bits, which the interpreter cuts off; integers are whole.
        limit = 0.005 if name.startswith("activate") else 0.06 if "fp8" in name else 0.01
        assert 1e-4 < one["error"] < limit, name
        assert one.get("scales", 0.0) == pytest.approx(0.0, abs=1e-6), name


def test_they_compile_for_a_gpu(tmp_path: Any) -> None:
    assert run(interpreted=False, cache=str(tmp_path)) == ["activate_rows", "quantize_groups"]


def test_a_pair_with_sorted_rows_gives_what_the_plain_pair_gives_through_the_whole_layer() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.measure.layer_pairs"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert len(found) == 2 * len(LAYERS)
    for name, one in found.items():
        # The same products in the same order; in a sum over topk they are added in another.
        assert one["apart"] <= (0.01 if "summed" in name else 0.0), name
        assert one["norm"] > 1e-3, "nothing was computed"
