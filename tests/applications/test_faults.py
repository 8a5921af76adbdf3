"""Candidates that abort, hang, read out of bounds or lie cost themselves; the run goes on or resumes."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from moetune.applications.measuring import Laboratory
from moetune.applications.targets import Target
from moetune.domain.config import KernelConfig
from moetune.domain.errors import MoetuneError, OutputError
from moetune.domain.problem import Kernel
from tests.applications.fake_machine import ROOT, FakeMachine

MS = (1, 64, 1024)


def config(block_size_m: int, block_size_n: int = 64) -> KernelConfig:
    return KernelConfig(block_size_m, block_size_n, 64, 1, 4, 3)


GOOD, BAD, OTHER = config(16), config(32), config(64)


def targets(*configs: KernelConfig, kernel: Kernel = "up", ms: tuple[int, ...] = MS) -> list[Target]:
    return [Target(kernel, m, item) for item in configs for m in ms]


def measure(machine: FakeMachine, wanted: list[Target]) -> Laboratory:
    with machine.journal() as journal, machine.laboratory(journal, MS) as laboratory:
        laboratory.want(wanted)
        laboratory.run()
    return laboratory


def journalled(machine: FakeMachine, kind: str) -> list[dict[str, object]]:
    with machine.journal() as journal:
        return [line for line in journal.lines if line["kind"] == kind]


def assert_costs_itself(machine: FakeMachine, reason: str) -> Laboratory:
    """BAD cannot be measured, everything else is; the journal says why; BAD is never tried again."""
    laboratory = measure(machine, targets(GOOD, BAD, OTHER))
    assert [laboratory.known.times[target] for target in targets(BAD)] == [None] * len(MS)
    assert all(laboratory.known.times[target] is not None for target in targets(GOOD, OTHER))
    (failure,) = journalled(machine, "failed")
    assert failure["config"] == BAD.to_json()
    assert reason in str(failure["why"])
    assert "\n" not in str(failure["why"])
    tried = Counter(line["config"] for line in machine.log("time"))
    assert tried[str(BAD)] <= 1, "a culprit was tried again"
    # A second run knows it.
    again = measure(machine, targets(GOOD, BAD, OTHER))
    assert again.known.times == laboratory.known.times
    assert Counter(line["config"] for line in machine.log("time")) == tried
    return laboratory


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("compile abort", "crashed: the compiling process ended with signal 6"),
        ("compile failure", "PassManager::run failed"),
        ("too much shared memory", "needs 400000 bytes of shared memory"),
        ("abort", "killed the worker: ended with signal 6"),
        ("out of bounds", "killed the worker: ended with signal 11"),
        ("sticky error", "lost the CUDA context: RuntimeError: CUDA error: an illegal memory access"),
        ("over shared memory", "out of resource: shared memory"),
    ],
)
def test_a_bad_candidate_costs_itself(fault: str, reason: str, tmp_path: Path) -> None:
    assert_costs_itself(FakeMachine(tmp_path, settings={"faults": {f"up {BAD}": fault}}), reason)


def test_a_compiler_that_never_ends_costs_its_candidate(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, settings={"faults": {f"up {BAD}": "compile hang"}}, compile_seconds=2)
    assert_costs_itself(machine, "timed out: still compiling after 2 s")


def test_a_kernel_that_hangs_costs_itself_and_its_process_is_gone(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, settings={"faults": {f"up {BAD}": "hang"}}, answer_seconds=2)
    assert_costs_itself(machine, "hung the worker: no answer within 2 s")
    assert journalled(machine, "restarted")
    for line in machine.log("open"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(line["pid"]), 0)


def test_a_candidate_that_fails_as_up_may_still_run_as_down(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, settings={"faults": {f"up {BAD}": "abort"}})
    laboratory = measure(machine, [*targets(BAD), *targets(BAD, kernel="down")])
    assert all(laboratory.known.times[target] is not None for target in targets(BAD, kernel="down"))


def test_memory_that_is_short_once_is_no_fault_of_the_candidate(tmp_path: Path) -> None:
    machine = FakeMachine(
        tmp_path, settings={"faults": {f"up {BAD}": "memory once"}, "once": str(tmp_path / "once")}
    )
    laboratory = measure(machine, targets(GOOD, BAD))
    assert all(time_us is not None for time_us in laboratory.known.times.values())
    assert not laboratory.known.failed


def test_memory_that_another_process_takes_ends_the_run_and_keeps_what_was_measured(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    measure(machine, targets(GOOD))
    machine.set(faults={f"up {BAD}": "memory"})
    with pytest.raises(MoetuneError, match="no memory left") as caught:
        measure(machine, targets(GOOD, BAD))
    assert "run the same command again" in str(caught.value.hint)
    assert not journalled(machine, "failed"), "the candidate is not at fault"
    machine.set(faults={})
    laboratory = measure(machine, targets(GOOD, BAD))
    assert all(time_us is not None for time_us in laboratory.known.times.values())


def test_a_gpu_without_room_says_so(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, settings={"no room": True})
    with pytest.raises(MoetuneError, match=r"cannot hold the problem.*needs 999 MiB"):
        measure(machine, targets(GOOD))


def test_a_gpu_that_disappears_is_no_fault_of_the_candidate(tmp_path: Path) -> None:
    machine = FakeMachine(
        tmp_path, settings={"faults": {f"up {BAD}": "gone"}, "gone": str(tmp_path / "gone")}
    )
    with pytest.raises(MoetuneError, match="No CUDA GPUs are available") as caught:
        measure(machine, targets(GOOD, BAD))
    assert "run the same command again" in str(caught.value.hint)
    assert not journalled(machine, "failed")
    (tmp_path / "gone").unlink()
    machine.set(faults={})
    laboratory = measure(machine, targets(GOOD, BAD))
    assert all(time_us is not None for time_us in laboratory.known.times.values())


def test_the_other_gpu_takes_over_from_one_that_disappears(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, gpus=2)
    machine.set(faults={f"up {BAD}": "gone once"}, once=str(tmp_path / "once"))
    laboratory = measure(machine, targets(GOOD, BAD, OTHER))
    assert all(time_us is not None for time_us in laboratory.known.times.values())
    assert len(journalled(machine, "gone")) == 1


def test_what_a_worker_prints_is_no_answer(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, settings={"faults": {f"up {GOOD}": "chatter"}})
    laboratory = measure(machine, targets(GOOD))
    assert all(time_us is not None for time_us in laboratory.known.times.values())


RUN = textwrap.dedent("""
    import json, sys
    from pathlib import Path
    from tests.applications.fake_machine import FakeMachine
    from tests.applications.test_faults import GOOD, OTHER, BAD, measure, targets
    folder = Path(sys.argv[1])
    machine = FakeMachine(folder, settings=json.loads((folder / "settings.json").read_text()))
    measure(machine, targets(GOOD, BAD, OTHER) + targets(GOOD, BAD, OTHER, kernel="down"))
""")


def test_a_run_killed_at_any_line_goes_on_where_it_was(tmp_path: Path) -> None:
    wanted = targets(GOOD, BAD, OTHER) + targets(GOOD, BAD, OTHER, kernel="down")
    (tmp_path / "whole").mkdir()
    whole = FakeMachine(tmp_path / "whole")
    measure(whole, wanted)
    with whole.journal() as journal:
        lines = journal.path.read_bytes().splitlines(keepends=True)
    # One kill at each line that says a time; a resumed run measures exactly what is missing.
    times = [number for number, line in enumerate(lines) if json.loads(line)["kind"] == "time"]
    for number in times[:: len(times) // 3]:
        folder = tmp_path / f"cut-{number}"
        folder.mkdir()
        machine = FakeMachine(folder)
        with machine.journal() as journal:
            path = journal.path
        path.write_bytes(b"".join(lines[:number]) + lines[number][: len(lines[number]) // 2])
        laboratory = measure(machine, wanted)
        assert laboratory.known.times.keys() == set(wanted)
        known = sum(json.loads(line)["kind"] == "time" for line in lines[:number])
        assert len(machine.log("time")) == len(wanted) - known


def test_sigkill_of_the_run_ends_its_workers_even_those_that_hang_and_loses_nothing(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, settings={"faults": {f"down {BAD}": "hang"}})
    process = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path)], cwd=ROOT)
    deadline = time.monotonic() + 60
    hanging = str(BAD)
    while not any(_hangs(line, hanging) for line in machine.log("time")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    pids = {int(line["pid"]) for line in machine.log("open")}
    assert pids
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in pids), "a measuring process outlived the run"
    known = len(journalled(machine, "time"))
    asked = len(machine.log("time"))
    assert asked - known == 1, "a measurement began before the one before it was on the disk"
    machine.set(faults={})
    wanted = targets(GOOD, BAD, OTHER) + targets(GOOD, BAD, OTHER, kernel="down")
    laboratory = measure(machine, wanted)
    assert laboratory.known.times.keys() == set(wanted)
    assert len(machine.log("time")) == asked + len(wanted) - known


@pytest.mark.parametrize("when", ["while a worker starts", "while a kernel hangs"])
def test_an_interrupt_ends_the_run_at_once_whatever_its_workers_do(when: str, tmp_path: Path) -> None:
    starting = when == "while a worker starts"
    settings = {"slow start": 60} if starting else {"faults": {f"down {BAD}": "hang"}}
    machine = FakeMachine(tmp_path, settings=settings)
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    what, wanted = ("start", lambda _: True) if starting else ("time", lambda line: _hangs(line, str(BAD)))
    while not any(map(wanted, machine.log(what))) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=10)
    assert "KeyboardInterrupt" in said
    pids = {int(line["pid"]) for line in machine.log(what)}
    assert pids
    assert not any(_alive(pid) for pid in pids)


def _hangs(line: dict[str, object], config: str) -> bool:
    return line["kernel"] == "down" and line["config"] == config


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_full_disk_ends_the_run_and_the_next_one_goes_on(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    wanted = targets(GOOD, BAD, OTHER)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with machine.journal() as journal, machine.laboratory(journal, MS) as laboratory:
            laboratory.want(wanted)
            limit = journal.path.stat().st_size + 4000
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            with pytest.raises(OutputError, match="File too large") as caught:
                laboratory.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert "run the same command again" in str(caught.value.hint)
    known = len(journalled(machine, "time"))
    assert 0 < known < len(wanted)
    before = len(machine.log("time"))
    laboratory = measure(machine, wanted)
    assert laboratory.known.times.keys() == set(wanted)
    assert len(machine.log("time")) == before + len(wanted) - known


def test_a_compiler_without_room_ends_the_run_and_blames_no_candidate(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    measure(machine, targets(GOOD))
    machine.set(faults={f"up {BAD}": "compiler without room"})
    with pytest.raises(OutputError, match=r"cannot be written to .*cache: No space left") as caught:
        measure(machine, targets(GOOD, BAD, OTHER))
    assert "run the same command again" in str(caught.value.hint)
    assert not journalled(machine, "failed")
    machine.set(faults={})
    laboratory = measure(machine, targets(GOOD, BAD, OTHER))
    assert all(time_us is not None for time_us in laboratory.known.times.values())


def test_a_worker_of_another_release_is_refused(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, settings={"protocol": 99})
    with pytest.raises(MoetuneError, match="protocol 99"):
        measure(machine, targets(GOOD))


@pytest.mark.parametrize("part", ["command", "pool"])
def test_an_interpreter_that_is_not_there_ends_the_run(part: str, tmp_path: Path) -> None:
    machine, python = FakeMachine(tmp_path), str(tmp_path / "missing")
    command = replace(machine.command, python=python) if part == "command" else None
    pool = replace(machine.pool, python=python) if part == "pool" else None
    with (
        machine.journal() as journal,
        machine.laboratory(journal, MS, command=command, pool=pool) as laboratory,
    ):
        laboratory.want(targets(GOOD))
        with pytest.raises(MoetuneError, match="missing"):
            laboratory.run()


def test_an_interpreter_without_torch_is_named(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    command = replace(machine.command, arguments=("-c", "import sys; sys.exit('no module named torch')"))
    with machine.journal() as journal, machine.laboratory(journal, MS, command=command) as laboratory:
        laboratory.want(targets(GOOD))
        with pytest.raises(MoetuneError, match="no module named torch"):
            laboratory.run()
