"""Candidates that really hang and really write out of bounds, among good ones."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.h200.checks import CHECKED
from benchmarks.h200.common import PROBLEMS, python_path, server_of, uuid
from moetune.applications.compiling import CompilePool
from moetune.applications.journal import Journal
from moetune.applications.measuring import Laboratory
from moetune.applications.targets import Target
from moetune.applications.worker_pool import WorkerCommand
from moetune.domain.compilation import Depth

if TYPE_CHECKING:
    import argparse


def faults(_: argparse.Namespace) -> int:
    """A kernel that spins for a minute and one that writes out of bounds, among good ones."""
    problem = PROBLEMS["seed"]
    hang, wild, good = CHECKED[0], CHECKED[1], CHECKED[2:4]
    variables = {"MOETUNE_TEST_HANG": str(hang), "MOETUNE_TEST_WILD": str(wild)}
    command = WorkerCommand(
        arguments=("-m", "tests.measure.faulty_gpu"),
        variables={**variables, "PYTHONPATH": python_path()},
        answer_seconds=4.0,
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        Journal.open(Path(folder), problem, uuid()) as journal,
        Laboratory(
            server_of(problem),
            problem,
            journal,
            (64,),
            [uuid()],
            command=command,
            pool=CompilePool(Depth.BINARY, variables=dict(command.variables)),
        ) as lab,
    ):
        wanted = [Target("up", 64, config) for config in (hang, wild, *good)]
        lab.want(wanted)
        lab.run()
        for target in wanted:
            why = lab.known.failed.get((target.kernel, target.config))
            print(f"{target.config}: {lab.known.times[target] or why}")
        named = {(target.kernel, target.config) for target in wanted[:2]}
        return int(
            lab.known.failed.keys() != named or any(lab.known.times[target] is None for target in wanted[2:])
        )
