"""Where the time of a measurement goes, in the measuring process."""

from __future__ import annotations

import cProfile
import io
import json
import pstats
import time
from collections import defaultdict
from typing import TYPE_CHECKING

from benchmarks.h200.common import PROBLEMS, binary, gpu_backend
from moetune.domain.config import KernelConfig

if TYPE_CHECKING:
    import argparse


def profile(arguments: argparse.Namespace) -> int:
    """Measure again what a journal holds, from the kernels compiled beside it."""
    from moetune.measure.protocol import TimeTask, Workload

    problem = PROBLEMS[arguments.problem]
    lines = [json.loads(line) for line in arguments.journal.read_text().splitlines()]
    for line in lines:
        if line["kind"] in ("phase", "device"):
            print({name: value for name, value in line.items() if name in ("name", "seconds", "kind")})
    rows = [line for line in lines if line["kind"] == "time"][: arguments.count]
    backend = gpu_backend(arguments.journal.parent / "cache")
    backend.open(Workload(problem, tuple(sorted({row["m"] for row in rows}))))
    best: dict[tuple[str, int], float] = {}
    spent = defaultdict(list)
    tasks = [
        (row, binary(problem, row["kernel"], row["m"], KernelConfig.from_json(row["config"], "the journal")))
        for row in rows
    ]
    for turn in ("first", "again"):
        profiler = cProfile.Profile()
        for row, task in tasks:
            key = (row["kernel"], row["m"])
            begun = time.monotonic()
            if turn == "again":
                profiler.enable()
            timed = backend.time(TimeTask(task, row["m"], give_up_us=1.3 * best.get(key, 0.0)))
            profiler.disable()
            spent[turn, row["m"], timed.hopeless].append(time.monotonic() - begun)
            best[key] = min(best.get(key, timed.time_us), timed.time_us)
    for (turn, m, hopeless), seconds in sorted(spent.items()):
        mean = 1000 * sum(seconds) / len(seconds)
        print(f"{turn} m={m} {'hopeless' if hopeless else 'sampled'}: {mean:.2f} ms, {len(seconds)} times")
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(25)
    print(text.getvalue())
    return 0
