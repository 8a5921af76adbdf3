"""Record landscapes of many shapes in every format on one H200, for training the performance model.

    python -m training.record measure --cache CACHE --out RECORD.jsonl --budget 520
    python -m training.record measure --cache CACHE --out RECORD.jsonl --missing
    python -m training.record measure --cache CACHE --out PICKS.jsonl --only PICKS.json
    python -m training.record doubtful --out PICKS.json
    python -m training.record collect RECORD.jsonl... --out training/landscapes

`measure` times moetune's own kernel as `moetune tune` does (cold weights, a routing for each launch, the
launches of a CUDA graph, PDL and divisibility as SGLang 0.5.23 has them), in two passes with routings of
their own. It compiles beside the measuring, appends each time to its file at once, and goes on from what
the file and the cache hold. It needs a GPU, torch and Triton. With `--only` it times the configs that a
file names, `{"LANDSCAPE": {"up 64": [[16, 32, 64, 1, 4, 3], ...]}}`; `doubtful` writes such a file, of what
in training/landscapes should be timed once more (training/doubtful.py). With `--missing` it leaves alone the
landscapes of the file that are whole: a newer model picks other configs, and they would be timed in them
too. `collect` writes `NAME.csv.gz` and `NAME.json` a shape and format, in the form that `moetune replay`
reads: `median_us` is the first pass, `second_us` the second, so that what is chosen on one can be judged on
the other. Of two times of the same the later counts; `timed_again` in the JSON says how many there are.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import os
import queue
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks.h200.common import gpu_backend, python_path

from moetune.applications.compile_service import CompileBroken, Compiled, CompileService
from moetune.applications.compiling import CompilePool
from moetune.domain.compilation import CompileResult, CompileTask, Depth
from moetune.domain.config import KernelConfig
from moetune.domain.predict import PerformanceModel
from moetune.domain.problem import KERNELS, Kernel
from training.dataset import LANDSCAPES, groups_of, load_landscapes
from training.doubtful import named
from training.record_plan import (
    Job,
    Key,
    Unit,
    Where,
    binary_key,
    configs_of,
    jobs,
    named_units,
    units_of,
    with_what_shares,
)
from training.recorder import BrokenGpuError, Record, Recorder, left

PASSES = 2
_COMPILE_SECONDS = 60.0
_EXIT_NOT_DONE = 3
_COLUMNS = (
    *(
        "block_size_m",
        "block_size_n",
        "block_size_k",
        "group_size_m",
        "num_warps",
        "num_stages",
        "kernel",
        "m",
    ),
    *("median_us", "second_us", "shared_bytes", "registers", "stack_bytes", "compile_s", "error"),
)


class Binaries:
    """Compiles what the units need, each different binary once, in the order of the units."""

    def __init__(self, cache: Path, workers: int) -> None:
        self._events: queue.SimpleQueue[Compiled | CompileBroken] = queue.SimpleQueue()
        pool = CompilePool(
            Depth.BINARY,
            seconds_each=_COMPILE_SECONDS,
            workers=workers,
            variables={"PYTHONPATH": python_path()},
        )
        self._service = CompileService(pool, cache, self._events.put)
        self._results: dict[Key, CompileResult] = {}
        self._submitted: set[Key] = set()
        self._keys: dict[Where, dict[KernelConfig, Key]] = {}
        self._missing: dict[Where, set[Key]] = {}

    def submit(self, unit: Unit, priority: int) -> None:
        """Have the binaries of a unit, or of a part of it, compiled after those of a lower priority."""
        keys = {config: binary_key(task) for config, task in unit.tasks.items()}
        self._keys.setdefault(unit.where, {}).update(keys)
        self._missing.setdefault(unit.where, set()).update(set(keys.values()) - self._results.keys())
        first: dict[Key, CompileTask] = {}
        for config, key in keys.items():
            if key not in self._submitted:
                first.setdefault(key, unit.tasks[config])
        self._submitted.update(first)
        self._service.submit(first.values(), priority)

    def ready(self, unit: Unit) -> bool:
        """See `recorder.Compiler`."""
        while not self._events.empty():
            self._hear(1.0)
        return not self._missing[unit.where]

    def wait(self, unit: Unit, deadline: float) -> bool:
        """See `recorder.Compiler`."""
        while self._missing[unit.where] and time.monotonic() < deadline:
            self._hear(deadline - time.monotonic())
        return not self._missing[unit.where]

    def result(self, unit: Unit, config: KernelConfig) -> CompileResult:
        """See `recorder.Compiler`."""
        return self._results[self._keys[unit.where][config]]

    def progress(self) -> str:
        """See `recorder.Compiler`."""
        seconds = sum(result.seconds for result in self._results.values())
        return f"{len(self._results)} of {len(self._submitted)} binaries, {seconds:.0f} core seconds"

    def close(self) -> None:
        """End the processes."""
        self._service.close()

    def _hear(self, seconds: float) -> None:
        try:
            event = self._events.get(timeout=max(seconds, 0.001))
        except queue.Empty:
            return
        if isinstance(event, CompileBroken):
            raise event.error
        key = binary_key(event.task)
        self._results[key] = event.result
        for missing in self._missing.values():
            missing.discard(key)


def collect(paths: Sequence[Path], out: Path) -> list[Path]:
    """Write the landscapes that records hold."""
    facts: dict[str, dict[str, Any]] = {}
    rows: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = defaultdict(dict)
    again: Counter[str] = Counter()
    for path in paths:
        for line in path.read_text().rpartition("\n")[0].splitlines():
            row = json.loads(line)
            if "facts" in row:
                facts.setdefault(row["job"], row["facts"])
            elif "us" in row:
                key = (row["kernel"], row["m"], *row["config"])
                found = rows[row["job"]].setdefault(key, {})
                again[row["job"]] += f"us {row['pass']}" in found
                found[f"us {row['pass']}"] = row["us"]
                found |= {name: row[name] for name in ("binary", "error") if name in row}
    written = []
    for job in sorted(rows):
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for (kernel, m, *config), found in sorted(rows[job].items()):
            times = ["" if found.get(f"us {number}") is None else found[f"us {number}"] for number in (1, 2)]
            binary = ["" if value is None else value for value in found.get("binary", [None] * 4)]
            writer.writerow([*config, kernel, m, *times, *binary, found.get("error", "")])
        written.append(out / f"{job}_h200_own-kernel.csv.gz")
        written[-1].write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
        beside = out / f"{job}_h200_own-kernel.json"
        beside.write_text(json.dumps({**facts[job], "timed_again": again[job]}, indent=1) + "\n")
    return written


class Submits(Protocol):
    """What `Binaries` offers to those who plan."""

    def submit(self, unit: Unit, priority: int) -> None:
        """Have the binaries of a unit, or of a part of it, compiled after those of a lower priority."""
        ...


def submit_left(
    binaries: Submits, record: Record, plan: Mapping[Job, Sequence[Unit]], wanted: Iterable[Job]
) -> None:
    """Have compiled what is still to be timed, one job after the other."""
    for number, job in enumerate(wanted):
        for place, unit in enumerate(plan[job]):
            tasks = {config: unit.tasks[config] for config in left(record, unit)}
            binaries.submit(replace(unit, tasks=tasks), 1000 * number + place)


def missing(record: Record, plan: Mapping[Job, Sequence[Unit]]) -> list[Job]:
    """The jobs of which a kernel has, at some m in some pass, no time at all."""
    return [
        job for job, units in plan.items() if not all(record.best_us(unit, unit.number) for unit in units)
    ]


def named_plan(path: Path) -> dict[Job, list[Unit]]:
    """The jobs, kernels, m and configs that a file names."""
    named = json.loads(path.read_text())
    kernels: dict[str, Kernel] = {kernel: kernel for kernel in KERNELS}
    plan = {}
    for job in jobs():
        wanted = {}
        for place, configs in named.get(job.name, {}).items():
            kernel, m = place.split()
            wanted[kernels[kernel], int(m)] = [KernelConfig(*values) for values in configs]
        if wanted:
            plan[job] = named_units(job, wanted, PASSES)
    return plan


def measure(arguments: argparse.Namespace) -> int:
    """Compile and time until all is done or the time is up."""
    started = time.monotonic()
    deadline = started + arguments.budget - (time.time() - arguments.since if arguments.since else 0.0)
    known = [land for land in load_landscapes() if "own-kernel" not in land.name]
    cache = arguments.cache.resolve()
    record, binaries = Record(arguments.out), Binaries(cache, arguments.workers)
    try:
        plan: dict[Job, list[Unit]] = named_plan(arguments.only) if arguments.only else {}
        configs: dict[str, list[KernelConfig]] = {}
        for job in [] if arguments.only else jobs():
            if job.format not in configs:
                configs[job.format] = configs_of(job.format, known)
            plan[job] = units_of(job, configs[job.format], PASSES)
            if arguments.missing and not missing(record, {job: plan[job]}):
                del plan[job]
            elif len(plan) == 1:  # at once: to plan the others takes a while
                submit_left(binaries, record, plan, plan)
        plan = {job: plan[job] for job in with_what_shares(plan)}
        submit_left(binaries, record, plan, plan)
        planned = time.monotonic() - started
        print(f"planned {len(plan)} landscapes in {planned:.1f} s; {binaries.progress()}", flush=True)
        if arguments.compile_only:
            done = all(binaries.wait(unit, deadline) for units in plan.values() for unit in units)
            print(binaries.progress())
            return 0 if done else _EXIT_NOT_DONE
        recorder = Recorder(gpu_backend(cache), binaries, record, deadline, signal.alarm)
        done = recorder.run(plan)
        print(f"{'all done' if done else 'not done yet: run it again'}; {binaries.progress()}")
        return 0 if done else _EXIT_NOT_DONE
    finally:
        binaries.close()


def main() -> int:
    """Record or collect."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("measure")
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--cache", type=Path, required=True, help="of compiled kernels")
    one.add_argument("--budget", type=float, default=520.0, help="seconds in all")
    one.add_argument("--workers", type=int, default=max((os.cpu_count() or 2) - 1, 1))
    one.add_argument("--only", type=Path, metavar="JSON", help="time what this file names")
    one.add_argument("--missing", action="store_true", help="only landscapes that are not whole")
    one.add_argument("--compile-only", action="store_true")
    one.add_argument("--since", type=float, help=argparse.SUPPRESS)
    other = verbs.add_parser("collect")
    other.add_argument("records", type=Path, nargs="+")
    other.add_argument("--out", type=Path, default=LANDSCAPES)
    third = verbs.add_parser("doubtful")
    third.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.verb == "doubtful":
        groups = [group for landscape in load_landscapes() for group in groups_of(landscape)]
        found = named(groups, PerformanceModel.load())
        arguments.out.write_text(json.dumps(found))
        print(sum(len(configs) for places in found.values() for configs in places.values()))
        return 0
    if arguments.verb == "collect":
        for path in collect(arguments.records, arguments.out):
            print(path)
        return 0
    begun = arguments.since or time.time()
    given = list(sys.argv[1:])
    try:
        return measure(arguments)
    except BrokenGpuError as error:
        print(f"the GPU is lost ({error}); once more in a new process", flush=True)
        again = given if arguments.since else [*given, "--since", str(begun)]
        os.execv(sys.executable, [sys.executable, "-m", "training.record", *again])
    return _EXIT_NOT_DONE


if __name__ == "__main__":
    sys.exit(main())
