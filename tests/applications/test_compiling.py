"""Compiling in worker processes: one bad candidate costs one candidate."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from moetune.applications.compiling import WORKER, CompilePool, compile_check
from moetune.domain.compilation import CompileStatus, CompileTask
from moetune.domain.config import KernelConfig
from moetune.domain.gpu import Gpu
from moetune.domain.launch import Launch
from moetune.domain.problem import Problem
from moetune.domain.quantization import Dtype, Quantization

if TYPE_CHECKING:
    from collections.abc import Sequence

RTX = Gpu("NVIDIA RTX PRO 6000", compute_capability=(12, 0))
PROBLEM = Problem(
    E=256,
    global_experts=256,
    topk=8,
    K=3072,
    N=256,
    file_n=256,
    gpu=RTX,
    server="sglang",
    server_version="0.5.23",
    triton_version="3.6.0",
)

# A compiler that says hello and does what BLOCK_SIZE_N tells it to: 16 aborts, 32 never ends,
# 64 prints what is no JSON, 128 says what its working directory and variables are, 256 answers after 0.2 s.
FAKE = textwrap.dedent("""
    import json, os, resource, sys, time
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps({"triton": "fake"}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        config = request["task"]["launch"]["config"]
        size = config["block_size_n"]
        if size == 16:
            os.abort()
        if size == 32:
            time.sleep(1000)
        if size == 64:
            print("no JSON", flush=True)
            continue
        message = ""
        if size == 128:
            variables = {n: v for n, v in os.environ.items() if n.startswith(("TRITON_", "PYTHONSAFE"))}
            message = json.dumps({"cwd": os.getcwd(), "mode": os.stat(".").st_mode & 0o777,
                                  "files": os.listdir("."), "variables": variables})
        if size == 256:
            time.sleep(0.2)
        result = {"status": "ok", "shared_bytes": config["block_size_m"], "registers": None,
                  "stack_bytes": None, "seconds": 0.0, "message": message, "noise": ""}
        print(json.dumps({"number": request["number"], "result": result}), flush=True)
""")


def fake_pool(
    script: str = FAKE, *, budget: float | None = None, each: float = 20.0, workers: int = 2
) -> CompilePool:
    return CompilePool(budget_seconds=budget, seconds_each=each, workers=workers, worker=("-c", script))


def launch(m: int, n: int, k: int = 64, group: int = 1, kernel: str = "up") -> Launch:
    return Launch("up" if kernel == "up" else "down", KernelConfig(m, n, k, group, 4, 3))


def test_the_real_compiler_answers_for_a_gpu_that_is_not_here() -> None:
    good, bad = launch(16, 64), launch(256, 64)
    results = compile_check([good, bad], PROBLEM)
    assert results[good].status is CompileStatus.OK
    assert results[good].shared_bytes == 2 * (16 + 64) * 64 * 2
    assert results[bad].status is CompileStatus.COMPILER_FAILURE


def test_case_40_a_crash_and_a_hang_cost_one_candidate_each() -> None:
    aborts, hangs, talks = launch(16, 16), launch(16, 32), launch(16, 64)
    fine = [launch(2**i, 512) for i in range(4, 9)]
    results = compile_check([aborts, hangs, talks, *fine], PROBLEM, fake_pool(each=10.0))
    assert len(results) == 8
    assert results[aborts].status is CompileStatus.CRASHED
    assert f"signal {signal.SIGABRT.value}" in results[aborts].message
    assert results[hangs].status is CompileStatus.TIMED_OUT
    assert "10 s" in results[hangs].message
    assert results[talks].status is CompileStatus.CRASHED
    for good in fine:
        assert results[good].status is CompileStatus.OK
        assert results[good].shared_bytes == good.config.block_size_m, "answers went to the wrong tasks"


def test_the_budget_ends_it_and_says_so() -> None:
    launches = [launch(2**i, 256, k=k) for i in range(4, 9) for k in (16, 32, 64, 128, 256)]
    results = compile_check(launches, PROBLEM, fake_pool(budget=0.8, workers=1))
    states = [results[one].status for one in launches]
    assert len(states) == 25
    assert CompileStatus.NOT_CHECKED in states
    assert set(states) <= {CompileStatus.OK, CompileStatus.NOT_CHECKED}
    left = next(result for result in results.values() if result.status is CompileStatus.NOT_CHECKED)
    assert left.message == "not reached within 0.8 s"


def test_a_budget_of_nothing_starts_nothing_that_counts() -> None:
    results = compile_check([launch(16, 256)], PROBLEM, fake_pool(budget=0.0))
    assert [result.status for result in results.values()] == [CompileStatus.NOT_CHECKED]


@pytest.mark.parametrize("script", ["raise SystemExit(3)", "import os; os.abort()", "print('hello')"])
def test_a_worker_that_cannot_start_is_not_started_for_ever(script: str) -> None:
    results = compile_check([launch(16, 256), launch(32, 256)], PROBLEM, fake_pool(script))
    assert {result.status for result in results.values()} <= {
        CompileStatus.NOT_CHECKED,
        CompileStatus.CRASHED,
    }
    assert len(results) == 2


def test_without_triton_nothing_is_checked_and_nothing_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str, package: str | None = None) -> object:
        return None if name == "triton" else importlib.util.find_spec(name, package)

    monkeypatch.setattr("moetune.applications.compiling.importlib.util.find_spec", find_spec)
    results = compile_check([launch(16, 64)], PROBLEM)
    assert [(result.status, result.message) for result in results.values()] == [
        (CompileStatus.NOT_CHECKED, "no Triton here")
    ]


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (Quantization(Dtype.INT4_W4A16), "int4 with groups only"),
        (Quantization(Dtype.FP8_W8A8, per_channel=True, dynamic_activation=False), "by tensor only"),
    ],
)
def test_what_our_kernel_does_not_have_is_not_checked(problem: Quantization, reason: str) -> None:
    results = compile_check([launch(16, 64)], replace(PROBLEM, quantization=problem))
    (result,) = results.values()
    assert result.status is CompileStatus.NOT_CHECKED
    assert reason in result.message


def test_an_amd_gpu_is_not_checked() -> None:
    amd = replace(PROBLEM, gpu=Gpu("AMD Instinct MI300X", vendor="AMD", gfx="gfx942"))
    (result,) = compile_check([launch(16, 64)], amd).values()
    assert result.status is CompileStatus.NOT_CHECKED


def test_launches_that_make_the_same_binary_are_compiled_once() -> None:
    counting = FAKE.replace('message = ""', "message = str(os.getpid())")
    groups = [launch(16, 512, group=g) for g in (2, 4, 8, 16, 32, 64)]
    tasks: list[Sequence[CompileTask]] = []

    class Counting(CompilePool):
        __slots__ = ()

        def compile(self, wanted):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
            tasks.append(list(wanted))
            return super().compile(wanted)

    pool = Counting(workers=1, worker=("-c", counting))
    results = pool.check([*groups, launch(16, 512, group=1), launch(16, 512, kernel="down")], PROBLEM)
    assert len(results) == 8
    assert len(tasks[0]) == 3


def test_workers_see_an_empty_private_folder_and_no_triton_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "users"))
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/somewhere/ptxas")
    monkeypatch.chdir(tmp_path)
    (result,) = compile_check([launch(16, 128)], PROBLEM, fake_pool()).values()
    seen = json.loads(result.message)
    assert seen["mode"] == 0o700
    assert seen["files"] == []
    assert seen["variables"] == {
        "TRITON_CACHE_DIR": seen["cwd"],
        "TRITON_PTXAS_PATH": "/somewhere/ptxas",
        "TRITON_STORE_BINARY_ONLY": "1",
        "PYTHONSAFEPATH": "1",
    }
    assert Path(seen["cwd"]) != tmp_path
    assert not Path(seen["cwd"]).exists(), "the folder is left behind"


def test_a_file_in_the_users_directory_is_never_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("triton.py", "json.py", "moetune.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    (result,) = compile_check([launch(16, 64)], PROBLEM).values()
    assert result.status is CompileStatus.OK
    assert not (tmp_path / "ran").exists()


def _children_of(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def test_no_worker_outlives_an_interrupt_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _children_of(os.getpid())

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moetune.applications.compiling._Run._kill_overdue", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compile_check([launch(16, 32)], PROBLEM, fake_pool())
    assert _children_of(os.getpid()) == before


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_worker_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Even when it is deep in LLVM and nobody closes its stdin."""
    read_end, write_end = os.pipe()
    starter = textwrap.dedent(f"""
        import subprocess, sys, time
        worker = subprocess.Popen([sys.executable, *{WORKER!r}], stdin={read_end}, stdout=subprocess.PIPE)
        worker.stdout.readline()
        print(worker.pid, flush=True)
        time.sleep(1000)
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", starter], stdout=subprocess.PIPE, pass_fds=[read_end], cwd=tmp_path
    )
    try:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        process.kill()
        process.wait()
        deadline = time.monotonic() + 20
        while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
            state = Path(f"/proc/{worker}/stat")
            try:
                if state.read_text().rpartition(")")[2].split()[0] == "Z":
                    break
            except OSError:
                break
            time.sleep(0.05)
        else:
            assert not Path(f"/proc/{worker}").exists(), "the worker goes on without its parent"
    finally:
        os.close(read_end)
        os.close(write_end)
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
