"""Wall time and memory of the commands that must feel instant.

Run: python benchmarks/speed.py [--repeats 7]

Each command runs in a fresh process, caches warm after the first run, which is printed apart. The
goals are issue 2's: `--help` under 0.15 s, `plan` and `tune --effort predict` of one model under 2 s
and 200 MB on 2 cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

MODEL = ("Qwen/Qwen3.5-122B-A10B", "--tp", "4", "--server", "sglang", "--offline")
GPU = ("--gpu", "NVIDIA RTX PRO 6000 Blackwell Server Edition")


@dataclass(frozen=True, slots=True)
class Case:
    """A command and its goals."""

    name: str
    arguments: tuple[str, ...]
    seconds: float
    megabytes: float = 200


CASES = (
    Case("--help", ("--help",), 0.15),
    Case("plan", ("plan", *MODEL, *GPU), 2),
    Case("tune, not compiled", ("tune", *MODEL, *GPU, "--no-compile", "--out"), 2),
    Case("tune", ("tune", *MODEL, *GPU, "--out"), 2),
)


def run_once(arguments: tuple[str, ...]) -> tuple[float, float]:
    """Seconds and peak megabytes (of the largest process) of one run in a fresh process."""
    start = time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "moetune.cli.main", *arguments], stdout=subprocess.DEVNULL, stderr=errors
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in (0, 1):
            errors.seek(0)
            raise SystemExit(f"{' '.join(arguments)} failed:\n{errors.read().decode()}")
    return time.perf_counter() - start, usage.ru_maxrss / 1024


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    print("command               first s  median s  worst s  goal s  peak MB  goal")
    for case in CASES:
        folder = Path(tempfile.mkdtemp(prefix="moetune-speed-"))
        try:
            arguments = (
                (*case.arguments, str(folder / "out")) if case.arguments[-1] == "--out" else case.arguments
            )
            runs = [run_once(arguments) for _ in range(1 + repeats)]
        finally:
            shutil.rmtree(folder)
        first, *times = [seconds for seconds, _ in runs]
        peak = max(megabytes for _, megabytes in runs)
        print(
            f"{case.name:<20} {first:8.3f} {statistics.median(times):9.3f} {max(times):8.3f} "
            f"{case.seconds:7.2f} {peak:8.1f} {case.megabytes:5.0f}"
        )


if __name__ == "__main__":
    main()
