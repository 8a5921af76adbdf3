"""Runs what stands between the kernels in Triton's interpreter, or compiles it for a GPU that is not there.

Run as a program with TRITON_INTERPRET=1 it prints, for each case, how far its results are from torch's and
whether rows of padding were left alone; without, it compiles for sm_90.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import triton

from moetune.domain.kernel_format import KernelFormat, Scales
from moetune.measure import between
from moetune.measure.alignment import ELSEWHERE, align, places_of_slots
from moetune.measure.operands import LARGEST, OperandMaker
from moetune.measure.reference import dequantize_blocks, relative_error
from tests.measure.interpreted import patch_interpreter
from tests.measure.no_gpu_driver import NoGpu, WarmedUp

ROWS, COLUMNS, GROUP, BLOCK_SIZE_M, EXPERTS = 37, 200, 64, 16, 5
_TYPES = {"fp8e4nv": torch.float8_e4m3fn, "i8": torch.int8}


def activated(wide: torch.Tensor, *, gated: bool) -> torch.Tensor:
    gate, up = wide.float().chunk(2, dim=1) if gated else (wide.float(), torch.ones(()))
    return torch.nn.functional.silu(gate) * up


def main() -> None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted:
        patch_interpreter()
    else:
        triton.runtime.driver.set_active(NoGpu(90))
        kernels: Any = between
        for name in between.HELPERS:
            setattr(kernels, name, WarmedUp(getattr(between, name)))
    random = torch.Generator().manual_seed(0)
    experts = torch.randint(-1, EXPERTS, (ROWS,), generator=random)
    alignment = align(experts, EXPERTS, BLOCK_SIZE_M, 4)
    rows = between.SortedRows(alignment, ROWS, BLOCK_SIZE_M)
    here = places_of_slots(alignment, ROWS)[experts != ELSEWHERE]
    padding = torch.ones(alignment.padded_length, dtype=torch.bool)
    padding[here] = False
    found: dict[str, dict[str, Any]] = {}
    for gated in (True, False):
        for only in (None, rows):
            count = ROWS if only is None else alignment.padded_length
            wide = torch.randn(count, COLUMNS * (1 + gated), generator=random).bfloat16()
            narrow = torch.full((count, COLUMNS), float("nan"), dtype=torch.bfloat16)
            between.activate(wide, narrow, gated=gated, only=only)
            meant = slice(None) if only is None else here
            found[f"activate, gated {gated}, some {only is not None}"] = {
                "error": relative_error(narrow[meant], activated(wide, gated=gated)[meant]),
                "untouched": only is None or bool(narrow[padding].isnan().all()),
            }
    for name, dtype in _TYPES.items():
        for only in (None, rows):
            count = ROWS if only is None else alignment.padded_length
            x = torch.randn(count, COLUMNS, generator=random).bfloat16()
            values = torch.full((count, COLUMNS), 7.0).to(dtype)
            scales = torch.full((count, -(-COLUMNS // GROUP)), float("nan"))
            between.quantize(x, values, scales, group_size=GROUP, largest=LARGEST[dtype], only=only)
            maker = OperandMaker(
                KernelFormat(name, name, "bf16", Scales.BLOCK, (GROUP, GROUP), weight_bits=8),
                torch.device("cpu"),
                random,
            )
            meant = slice(None) if only is None else here
            torchs = maker.quantized(x[meant])
            assert torchs.scales is not None
            found[f"quantize to {name}, some {only is not None}"] = {
                "scales": relative_error(scales[meant], torchs.scales),
                "error": relative_error(
                    dequantize_blocks(values[meant], scales[meant], (1, GROUP)), x[meant].float()
                ),
                "untouched": only is None or bool(scales[padding].isnan().all()),
            }
    json.dump(found if interpreted else sorted(between.HELPERS), sys.stdout)


if __name__ == "__main__":
    main()
