"""Wall time and CPU time of `moetune lint` over all tuned files of the two published wheels.

Run: python benchmarks/lint_speed.py [--repeats 5]

Each run is a fresh process, held to one core where the system allows it. The goal is issue 4's: 728
files in under 2 s.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.published_trees import unpack

GOAL_SECONDS = 2.0
RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
CASES = {"each for its own GPU": (), "all for one GPU": ("--gpu", RTX), "as JSON": ("--json",)}


def run_once(site: Path, arguments: tuple[str, ...]) -> tuple[float, float]:
    """Seconds on the wall and on the processor of one run."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "moetune.cli.main", "lint", str(site), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 1:  # the published trees hold findings at --fail-on's default
        raise SystemExit(f"lint ended with {process.returncode}")
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        for package in ("sglang", "vllm"):
            unpack(package, site)
        print(f"728 files, one core, {repeats} runs each, goal {GOAL_SECONDS} s")
        for name, arguments in CASES.items():
            runs = [run_once(site, arguments) for _ in range(repeats)]
            wall, processor = (statistics.median(values) for values in zip(*runs, strict=True))
            print(f"{name:22} {wall:6.2f} s wall {processor:6.2f} s CPU  best {min(runs)[0]:.2f} s")


if __name__ == "__main__":
    main()
