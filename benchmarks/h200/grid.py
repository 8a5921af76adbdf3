"""All of SGLang's grid at some m, as `tune --effort exhaustive` measures it, in resumable pieces."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.h200.common import PROBLEMS, binary, compile_all, laboratory, server_of, share_cache, uuid
from moetune.applications.exhaustive import write_landscape
from moetune.applications.journal import Journal, run_folder
from moetune.applications.replay import declared_space
from moetune.applications.tuning_efforts import EFFORTS
from moetune.applications.tuning_loop import Tuner
from moetune.domain.keys import Keys
from moetune.domain.predict import PerformanceModel
from moetune.domain.problem import KERNELS

if TYPE_CHECKING:
    import argparse


def grid(arguments: argparse.Namespace) -> int:
    """Measure, choose as an exhaustive run does, write the landscape and the choices; 3: not done yet."""
    problem, ms = PROBLEMS[arguments.problem], tuple(arguments.m)
    started = time.monotonic()
    share_cache(run_folder(arguments.state, problem, uuid()), arguments.cache)
    with (
        Journal.open(arguments.state, problem, uuid()) as journal,
        laboratory(problem, journal, ms) as lab,
    ):
        keys = Keys(ms, tuple((m, 1 / len(ms)) for m in ms))
        effort = replace(EFFORTS["exhaustive"], budget_seconds=arguments.budget)
        tuner = Tuner(server_of(problem), problem, lab, keys, effort, started=started)
        space = {kernel: declared_space(problem, kernel) for kernel in KERNELS}
        choices, _ = tuner.search(space, PerformanceModel.load())
        seconds = time.monotonic() - started
        print(
            f"{arguments.problem}: {lab.measured} times in {seconds:.1f} s,"
            f" {len(lab.binaries.compiled)} binaries, failed {len(lab.known.failed)},"
            f" compiled while measuring {lab.compilations}, drifts {lab.drifts}"
        )
        if not tuner.complete:
            return 3
        write_landscape(journal.folder, problem, lab, ms)
        entries = [
            {"m": entry.m, "up": entry.pair.up.to_json(), "down": entry.pair.down.to_json()}
            for entry in choices.entries
        ]
        arguments.out.write_text(json.dumps({"entries": entries}, indent=1) + "\n")
        print(f"settled after {time.monotonic() - started:.1f} s; landscape in {journal.folder}")
    return 0


def ahead(arguments: argparse.Namespace) -> int:
    """Compile what `grid` will launch, beside something else."""
    problem = PROBLEMS[arguments.problem]
    started = time.monotonic()
    tasks = {
        binary(problem, kernel, m, launch.config)
        for kernel in KERNELS
        for launch in declared_space(problem, kernel)
        for m in arguments.m
    }
    good = compile_all(tasks, arguments.cache)
    print(f"{arguments.problem}: {len(good)} of {len(tasks)} compiled in {time.monotonic() - started:.1f} s")
    return 0
