"""The stock way: compile one config, capture, replay, next; scaled to the whole grid.

How often the stock tuners replay a CUDA graph of ten calls for a config: SGLang's
`tuning_fused_moe_triton.py` five times and ten times more (tune, num_iters=10), its
`tuning_fused_moe_triton_sep.py` seven times and twenty times more for each of the two kernels
(num_iters=100 in graphs of ten, the better of two tries), vLLM's `benchmark_moe.py` five times and
twenty times more. What they do besides (new weights for each config, the rest of the layer, TMA) is not
counted here.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.h200.common import PROBLEMS, USUAL_MS, binary, gpu_backend
from moetune.applications.replay import declared_space
from moetune.domain.problem import KERNELS

if TYPE_CHECKING:
    import argparse

CALLS = 10
REPLAYS = {"sglang": 15, "vllm": 25, "sglang, kernels apart": 27}
"""Warm-up and timed replays of a graph, ascending."""


def stock(arguments: argparse.Namespace) -> int:
    """Random configs that can run, both kernels, at some m of different launch classes."""
    import torch

    from moetune.measure import timing
    from moetune.measure.protocol import Workload

    problem = PROBLEMS["seed"]
    runnable = declared_space(problem, "up")
    sample = random.Random(3).sample(runnable, arguments.count)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        backend = gpu_backend(Path(folder))
        backend.open(Workload(problem, tuple(arguments.m)))
        for m in arguments.m:
            for launch_of in sample:
                for kernel in KERNELS:
                    begun = time.monotonic()
                    launch, circle = backend.launcher(binary(problem, kernel, m, launch_of.config), m)
                    count = len(circle.experts)
                    launch(0)
                    torch.cuda.synchronize()
                    compiled = time.monotonic()
                    graph = timing.capture(lambda n, run=launch, of=count: run(n % of), CALLS)  # type: ignore[misc]
                    captured = time.monotonic()
                    ends = []
                    for number in range(1, max(REPLAYS.values()) + 1):
                        graph.sample_us(1)
                        if number in REPLAYS.values():
                            ends.append(time.monotonic() - captured)
                    rows.append(
                        {
                            "m": m,
                            "kernel": kernel,
                            "config": str(launch_of.config),
                            "compile_s": compiled - begun,
                            "capture_s": captured - compiled,
                            **dict(zip(REPLAYS, ends, strict=True)),
                        }
                    )
    arguments.out.write_text(json.dumps({"runnable": len(runnable), "rows": rows}) + "\n")
    report(rows, len(runnable))
    return 0


def report(rows: list[dict[str, float]], runnable: int) -> None:
    """What the sample took, and what the whole would take."""
    ms = sorted({row["m"] for row in rows})
    count = len(rows) // len(ms) // len(KERNELS)
    for row in rows:
        assert row["compile_s"] > 0
    compiling = sum(row["compile_s"] for row in rows)
    print(f"{count} configs, both kernels, m = {ms}: compiling {compiling:.1f} s")
    # A process compiles a config once for each launch class. The usual m have three; these m have one each.
    whole_compile = compiling / len(ms) / count * runnable * 3
    for name in REPLAYS:
        timing_s = {m: sum(row["capture_s"] + row[name] for row in rows if row["m"] == m) for m in ms}
        each = statistics.fmean(timing_s.values()) / count
        whole = whole_compile + each * runnable * len(USUAL_MS)
        measured = compiling + sum(timing_s.values())
        print(
            f"{name}: {measured:.1f} s measured; {runnable} configs at {len(USUAL_MS)} m:"
            f" {whole / 60:.0f} min SCALED ({whole_compile / 60:.0f} min compiling)"
        )
