"""Candidates, compilers, memory, a disk and a kill that go wrong on a real GPU, among good configs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.h200.common import PROBLEMS, laboratory, python_path, server_of, uuid
from moetune.applications.compiling import CompilePool
from moetune.applications.journal import Journal
from moetune.applications.measuring import Laboratory
from moetune.applications.questions import check_target
from moetune.applications.targets import Target
from moetune.applications.worker_pool import WorkerCommand
from moetune.domain.compilation import Depth
from moetune.domain.config import KernelConfig
from moetune.domain.errors import MoetuneError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

PROBLEM = PROBLEMS["seed"]
M = 64
_BAD = {
    "ABORT": KernelConfig(16, 32, 128, 1, 4, 2),
    "ENDLESS": KernelConfig(16, 32, 128, 1, 4, 3),
    "HANG": KernelConfig(16, 32, 64, 1, 4, 3),
    "WILD": KernelConfig(16, 64, 128, 16, 4, 4),
}
"""What each does wrong; see tests/measure/faulty_gpu.py and faulty_compiler.py."""
_LARGE = KernelConfig(256, 256, 128, 1, 8, 5)
"""Over the shared memory of an H200."""
_WRONG, _GONE = KernelConfig(32, 64, 64, 1, 4, 3), KernelConfig(32, 64, 64, 8, 4, 3)
_GOOD = (KernelConfig(32, 128, 64, 32, 8, 2), KernelConfig(64, 64, 128, 1, 4, 3))
_RUN = ("-m", "moetune", "tune", "Qwen/Qwen3.5-122B-A10B", "--tp", "4", "--server", "sglang")
_SMALL_RUN = (*_RUN, "--server-version", "0.5.23", "--m", "16,256", "--offline", "--no-color")


def _laboratory(journal: Journal, **variables: str) -> Laboratory:
    given = {f"MOETUNE_TEST_{name}": value for name, value in variables.items()}
    given["PYTHONPATH"] = python_path()
    command = WorkerCommand(arguments=("-m", "tests.measure.faulty_gpu"), variables=given, answer_seconds=4.0)
    pool = CompilePool(
        Depth.BINARY, seconds_each=8.0, variables=given, worker=("-m", "tests.measure.faulty_compiler")
    )
    return Laboratory(server_of(PROBLEM), PROBLEM, journal, (M,), [uuid()], command=command, pool=pool)


def _targets(configs: Sequence[KernelConfig]) -> list[Target]:
    return [Target("up", M, config) for config in configs]


def candidates(folder: Path) -> bool:
    """A compiler that aborts, one that never ends, a hang, a write out of bounds, too much shared memory."""
    bad = _targets((*_BAD.values(), _LARGE))
    good = _targets(_GOOD)
    with Journal.open(folder, PROBLEM, uuid()) as journal:
        named = {name: str(config) for name, config in _BAD.items()}
        with _laboratory(journal, **named) as lab:
            lab.want([*bad, *good])
            lab.run()
            for target in (*bad, *good):
                why = lab.known.failed.get((target.kernel, target.config))
                print(f"  {target.config}: {lab.known.times[target] if why is None else why}")
            failed = lab.known.failed.keys() == {(target.kernel, target.config) for target in bad}
            return failed and all(lab.known.times[target] is not None for target in good)


def wrong_numbers(folder: Path) -> bool:
    """A kernel whose results are a tenth too large."""
    with Journal.open(folder, PROBLEM, uuid()) as journal, _laboratory(journal, WRONG=str(_WRONG)) as lab:
        found = {config: check_target(lab, Target("up", M, config)) for config in (_WRONG, *_GOOD)}
        for config, checked in found.items():
            print(f"  {config}: {checked}")
        return all(
            checked is not None and checked.passed == (config != _WRONG) for config, checked in found.items()
        )


def disappears(folder: Path) -> bool:
    """The GPU disappears in the middle of a run, and is there again for the next one."""
    flag = folder / "gone"
    with Journal.open(folder, PROBLEM, uuid()) as journal:
        with _laboratory(journal, GONE=str(_GONE), GONE_FILE=str(flag)) as lab:
            lab.want(_targets((*_GOOD, _GONE)))
            if not _ends_with_an_error(lab.run):
                return False
        flag.unlink()
    with Journal.open(folder, PROBLEM, uuid()) as journal, laboratory(PROBLEM, journal, (M,)) as lab:
        lab.want(_targets((*_GOOD, _GONE)))
        lab.run()
        print(f"  then: {len(lab.known.times)} times, {len(lab.known.failed)} failed")
        return all(time_us is not None for time_us in lab.known.times.values()) and not lab.known.failed


_TAKE_MEMORY = textwrap.dedent("""
    import sys, torch
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(free - (1 << 30), dtype=torch.uint8, device="cuda")
    print("taken", flush=True)
    sys.stdin.read()
""")


def memory(folder: Path) -> bool:
    """Another process has all of the memory but one GiB; then it is gone."""
    other = subprocess.Popen(
        [sys.executable, "-c", _TAKE_MEMORY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    other.stdout.readline()
    try:
        with Journal.open(folder, PROBLEM, uuid()) as journal, laboratory(PROBLEM, journal, (M,)) as lab:
            lab.want(_targets(_GOOD))
            told = _ends_with_an_error(lab.run)
    finally:
        other.communicate()
    with Journal.open(folder, PROBLEM, uuid()) as journal, laboratory(PROBLEM, journal, (M,)) as lab:
        lab.want(_targets(_GOOD))
        lab.run()
        return told and all(time_us is not None for time_us in lab.known.times.values())


def _ends_with_an_error(run: Callable[[], None]) -> bool:
    try:
        run()
    except MoetuneError as error:
        print(f"  error: {error}\n  hint: {error.hint}")
        return True
    print("  no error")
    return False


def _moetune(folder: Path, state: Path) -> list[str]:
    return [sys.executable, *_SMALL_RUN, "--state", str(state), "--out", str(folder / "configs")]


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": python_path()}


def _times(state: Path) -> list[str]:
    lines = [line for path in state.rglob("*.jsonl") for line in path.read_text().splitlines()]
    return [line for line in lines if '"kind":"time"' in line.replace(" ", "")]


def killed(folder: Path) -> bool:
    """SIGKILL of the whole run while it measures; the same command goes on and writes its files."""
    state = folder / "state"
    process = subprocess.Popen(
        _moetune(folder, state), env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while len(_times(state)) < 30 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    ended = process.wait()
    before = _times(state)
    done = subprocess.run(
        _moetune(folder, state), env=_environment(), capture_output=True, text=True, timeout=120, check=False
    )
    after = _times(state)
    print(f"  killed with {len(before)} times ({ended}), then exit {done.returncode} with {len(after)}")
    kept = after[: len(before)] == before or set(before) <= set(after)
    return ended == -signal.SIGKILL and len(before) >= 30 and kept and done.returncode == 0


def full_disk(folder: Path) -> bool:
    """The disk that the journal is on has room for some of its lines; then for all of them."""
    state = folder / "small"
    state.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(state)], check=False)
    if mounted.returncode != 0:
        print("  not run: no disk of a size of one's own can be mounted here")
        return True
    try:
        first = subprocess.run(
            _moetune(folder, state), env=_environment(), capture_output=True, text=True, check=False
        )
        print("  " + first.stderr.strip().replace("\n", "\n  ")[-400:])
        subprocess.run(["mount", "-o", "remount,size=300m", str(state)], check=True)
        second = subprocess.run(
            _moetune(folder, state), env=_environment(), capture_output=True, text=True, check=False
        )
        print(f"  exit {first.returncode}, then {second.returncode}")
        return first.returncode == 2 and second.returncode == 0 and "Traceback" not in first.stderr
    finally:
        subprocess.run(["umount", str(state)], check=False)


def faults(_: argparse.Namespace) -> int:
    """Candidates that misbehave, memory, a disappearing GPU, SIGKILL, a full disk; the rest goes on."""
    bad = 0
    for one in (candidates, wrong_numbers, disappears, memory, killed, full_disk):
        started = time.monotonic()
        print(f"{one.__name__}: {one.__doc__}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            right = one(Path(folder))
        bad += not right
        print(f"  {'ok' if right else 'BAD'}, {time.monotonic() - started:.1f} s", flush=True)
    return bad
