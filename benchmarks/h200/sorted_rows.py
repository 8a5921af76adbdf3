"""What USE_TMA in the down config gains: the best pair with it beside the best plain one, in the layer."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.h200.common import PROBLEMS, laboratory, server_of, uuid
from moetune.applications.journal import Journal
from moetune.applications.questions import time_layer
from moetune.applications.targets import targets_of
from moetune.applications.tuning_efforts import EFFORTS
from moetune.applications.tuning_finals import Finals
from moetune.applications.tuning_search import Search
from moetune.domain.choose import Pair
from moetune.domain.predict import PerformanceModel
from moetune.domain.problem import KERNELS
from moetune.domain.space import sglang_grid, worth_trying

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from moetune.applications.measuring import Laboratory
    from moetune.domain.problem import Problem

_ROUNDS = 21
_TRITON = (3, 6, 0)


def sorted_rows(arguments: argparse.Namespace) -> int:
    """Search, try USE_TMA, and time the best of both through the layer; run it again and it goes on."""
    problem, ms, rows = PROBLEMS[arguments.problem], sorted(arguments.m), []
    started = time.monotonic()
    with (
        Journal.open(arguments.state, problem, uuid()) as journal,
        laboratory(problem, journal, ms) as lab,
    ):
        finals = _searched(problem, lab, ms, arguments.budget, started)
        for m in ms:
            row = _row(lab, finals, m)
            rows.append(row)
            print(json.dumps(row), flush=True)
            arguments.out.write_text(
                json.dumps({"problem": arguments.problem, "rows": rows}, indent=1) + "\n"
            )
    return 0


def _searched(problem: Problem, lab: Laboratory, ms: Sequence[int], budget: float, started: float) -> Finals:
    server = server_of(problem)
    effort = replace(EFFORTS["full"], rounds=(6, 6, 8), limit=96, budget_seconds=budget, wide=False)
    launches = {
        kernel: [
            launch
            for config in sglang_grid()
            if worth_trying(launch := server.launch(problem, kernel, config), problem.gpu, _TRITON)
        ]
        for kernel in KERNELS
    }
    model, finals = PerformanceModel.load(), Finals(server, problem, lab, effort)
    lab.want(target for m in ms for target in targets_of(m, finals.default(m)))
    search = Search(lab, problem, ms, effort, launches, model, one_file=False, only=None, started=started)
    search.run()
    search.complete_pairs()
    finals.sorted_pairs.measure(ms, started + budget)
    return finals


def _row(lab: Laboratory, finals: Finals, m: int) -> dict[str, Any]:
    plain = finals.choose([m]).entries[0].pair
    best = finals.sorted_pairs.best(m, 1)
    row: dict[str, Any] = {"m": m, "plain": _told(lab, m, plain)}
    if not best:
        return row
    row["use_tma"] = _told(lab, m, best[0])
    timed = time_layer(lab, m, (plain, best[0], plain), "uniform", _ROUNDS)
    if timed is not None:
        first, other, again = timed.samples_us
        ratios = [b / ((a + c) / 2) for a, b, c in zip(first, other, again, strict=True)]
        row["layer_us"] = [round(statistics.median(samples), 3) for samples in timed.samples_us]
        row["use_tma_over_plain"] = round(statistics.median(ratios), 4)
        row["noise"] = round(abs(statistics.median(c / a for a, c in zip(first, again, strict=True)) - 1), 4)
    return row


def _told(lab: Laboratory, m: int, pair: Pair) -> dict[str, Any]:
    times = [lab.known.times[target] for target in targets_of(m, pair)]
    return {"up": str(pair.up), "down": str(pair.down), "kernels_us": times}
