"""The whole layer with a plain pair and with the same pair with USE_TMA for down, in the interpreter.

Run as a program with TRITON_INTERPRET=1: prints for each problem, with the padding left out and not, how far
both outputs are apart.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch

from moetune.measure.protocol import LayerPair, LayerTask, Workload
from moetune.measure.reference import relative_error
from tests.measure.cpu_backend import CpuBackend, stand_in
from tests.measure.interpreted import patch_interpreter
from tests.measure.test_sorted_rows import PAIRS, pair
from tests.measure.test_worker import task

LAYERS = ("bf16", "bf16, not gated", "fp8 by block", "int8 by block", "experts of other ranks", "summed")
M = 5


def main() -> None:
    """Print the differences."""
    patch_interpreter()
    stand_in()
    found = {}
    for name in LAYERS:
        problem = PAIRS[name]
        up, down = pair(problem, M)
        plain = LayerPair(task(problem, "up", M), task(problem, "down", M))
        for skips in (True, False):
            sorted_pair = LayerPair(up, replace(down, launch=replace(down.launch, skips_padding=skips)))
            backend: Any = CpuBackend()
            backend.open(Workload(problem, (M,)))
            data = backend._opened()
            circle = backend._layer_circle(data, LayerTask(M, (plain,)))
            routed = backend._fresh(circle, M, problem.routing, 1)
            source = torch.empty(M, problem.K, dtype=data.output).normal_(0.0, 0.5)
            outputs = []
            for one in (plain, sorted_pair):
                data.outputs["down"].fill_(float("nan"))
                backend._layer_launch(data, one.up, one.down, M, routed, source)(0)
                rows = M if "summed" in name else M * problem.topk
                outputs.append(data.outputs["down"][:rows].clone())
            found[f"{name}, padding {'left out' if skips else 'in'}"] = {
                "apart": relative_error(outputs[1], outputs[0]),
                "norm": float(outputs[0].float().norm()),
            }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
