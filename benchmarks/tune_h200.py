"""What is measured on an H200, in pieces of under ten minutes. Needs a GPU, torch and Triton.

    python -m benchmarks.tune_h200 kernels            # the kernel against its reference, all cases
    python -m benchmarks.tune_h200 sanity LANDSCAPE   # times against a recorded landscape
    python -m benchmarks.tune_h200 faults             # candidates that really hang and read out of bounds
    python -m benchmarks.tune_h200 side JSON JSON     # winners of two runs and the default, interleaved
    python -m benchmarks.tune_h200 exhaust JSON --m 1024 4096  # the whole grid, resumable with --state
    python -m benchmarks.tune_h200 stock --m 64       # the stock way on a sample of the grid, scaled

`moetune tune` itself is timed from outside: `time moetune tune ... --effort quick`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetune.applications.compiling import CompilePool
from moetune.applications.journal import Journal
from moetune.applications.measuring import Laboratory, Target
from moetune.applications.replay import declared_space
from moetune.applications.worker_pool import WorkerCommand
from moetune.domain.choose import Pair
from moetune.domain.compilation import CompileTask, Depth, compile_task
from moetune.domain.config import KernelConfig
from moetune.domain.gpu import find_gpu
from moetune.domain.landscape import read_landscape
from moetune.domain.problem import KERNELS, Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.servers.registry import open_server

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moetune.measure.alignment import Alignment

GPU = "NVIDIA H200"


def seed_problem(**changes: Any) -> Problem:  # noqa: ANN401 - fields of a problem
    """Qwen3.5-122B-A10B at tp 4, bf16."""
    values: dict[str, Any] = {
        "E": 256,
        "global_experts": 256,
        "topk": 8,
        "K": 3072,
        "N": 256,
        "file_n": 256,
        "gpu": find_gpu(GPU),
        "server": "sglang",
        "server_version": "0.5.23",
        "triton_version": "3.6.0",
    }
    return Problem(**{**values, **changes})


def fp8_problem() -> Problem:
    """Qwen3.5-35B-A3B, block fp8."""
    quantization = Quantization(Dtype.FP8_W8A8, "fp8", (128, 128), dynamic_activation=True)
    return seed_problem(K=2048, N=512, file_n=512, quantization=quantization)


def _python_path() -> str:
    """Where moetune and the tests are, for processes with another working directory."""
    import moetune

    source = Path(moetune.__file__).resolve().parents[1]
    return os.pathsep.join([str(source), str(Path(__file__).resolve().parents[1])])


def uuid() -> str:
    """The GPU that CUDA shows first."""
    from moetune.applications.nvml import detect_gpus

    devices = detect_gpus().devices
    return devices[0].uuid if devices else os.environ.get("CUDA_VISIBLE_DEVICES", "0")


def laboratory(problem: Problem, journal: Journal, ms: Sequence[int]) -> Laboratory:
    """A laboratory on that GPU."""
    server = open_server(problem.server, problem.server_version, problem.triton_version)
    return Laboratory(
        server, problem, journal, ms, [uuid()], pool=CompilePool(Depth.BINARY, seconds_each=60.0)
    )


def kernels(_: argparse.Namespace) -> int:
    """Every case of the interpreter's test, on the GPU."""
    from tests.measure.made_up import run_case
    from tests.measure.test_kernels import CORRECT
    from tests.tolerances import RELATIVE_ERROR

    bad = 0
    for name, case in CORRECT.items():
        outcome = run_case(case, "cuda")
        limit = RELATIVE_ERROR[case.operand]
        right = outcome.relative_error <= limit and outcome.worst_row_error <= 2 * limit and outcome.untouched
        bad += not right
        print(
            f"{'ok ' if right else 'BAD'} {outcome.relative_error:.2e} {outcome.worst_row_error:.2e} {name}"
        )
    print(f"{len(CORRECT) - bad} of {len(CORRECT)} cases are right")
    return bool(bad)


CHECKED = (
    KernelConfig(16, 32, 64, 1, 4, 3),
    KernelConfig(16, 64, 128, 16, 4, 4),
    KernelConfig(32, 128, 64, 32, 8, 2),
    KernelConfig(64, 64, 128, 1, 4, 3),
    KernelConfig(128, 128, 64, 16, 8, 3),
    KernelConfig(128, 256, 64, 1, 8, 4),
)


def numerics(_: argparse.Namespace) -> int:
    """Real shapes, both kernels, one, few and many tokens, against the fp32 reference."""
    bad = 0
    for name, problem in (("bf16", seed_problem()), ("fp8", fp8_problem())):
        with (
            tempfile.TemporaryDirectory() as folder,
            Journal.open(Path(folder), problem, uuid()) as journal,
            laboratory(problem, journal, (1, 7, 300)) as lab,
        ):
            for kernel in KERNELS:
                for config in CHECKED:
                    for m in (1, 7, 300):
                        checked = lab.check(kernel, m, config)
                        right = checked is not None and checked.passed
                        bad += not right
                        error = "none" if checked is None else f"{checked.relative_error:.2e}"
                        print(f"{'ok ' if right else 'BAD'} {name} {kernel} m={m} {config}: {error}")
            print(f"failed: {lab.failed}; compiled while measuring: {lab.compilations}")
    return bool(bad)


def sanity(arguments: argparse.Namespace) -> int:
    """Times of random configs of a recorded landscape, ours over the recorded ones."""
    found = read_landscape(arguments.landscape)
    problem = found.problem
    rng = random.Random(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        Journal.open(Path(folder), problem, uuid()) as journal,
        laboratory(problem, journal, sorted({m for _, m in found.times_us})) as lab,
    ):
        for (kernel, m), times in found.times_us.items():
            ran = sorted(config for config, time_us in times.items() if time_us is not None)
            ran.sort(key=lambda config: times[config] or math.inf)
            lab.want(Target(kernel, m, config) for config in [*ran[:4], *rng.sample(ran[: len(ran) // 2], 6)])
        lab.run()
        for (kernel, m), times in found.times_us.items():
            ratios = [
                time_us / recorded
                for target, time_us in lab.times.items()
                if target.kernel == kernel and target.m == m and time_us
                if (recorded := times.get(target.config))
            ]
            print(
                f"{kernel} m={m}: ours over recorded {statistics.median(ratios):.3f}"
                f" ({min(ratios):.3f} to {max(ratios):.3f}), {len(ratios)} configs"
            )
        print(f"failed: {lab.failed}; compiled while measuring: {lab.compilations}; drifts: {lab.drifts}")
    return 0


def side(arguments: argparse.Namespace) -> int:
    """The winners of two measured documents and the default, interleaved, on fresh routings."""
    first, second = (json.loads(path.read_text()) for path in (arguments.first, arguments.second))
    problem = fp8_problem() if arguments.fp8 else seed_problem()
    server = open_server(problem.server, problem.server_version, problem.triton_version)
    entries = [{entry["m"]: entry for entry in document["entries"]} for document in (first, second)]
    ms = sorted(entries[0].keys() & entries[1].keys())
    fractions = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Journal.open(Path(folder), problem, uuid()) as journal,
        laboratory(problem, journal, ms) as lab,
    ):
        for m in ms:
            pairs = [
                Pair(*(KernelConfig.from_json(table[m][kernel], "the document") for kernel in KERNELS))
                for table in entries
            ]
            default = Pair(*(server.default_config(problem, kernel, m) for kernel in KERNELS))
            for kernel in KERNELS:
                configs = [getattr(pair, kernel) for pair in (*pairs, default)]
                lab.want(Target(kernel, m, config) for config in configs)
            lab.run()
            timed = lab.layer(m, (*pairs, default), "uniform", 21)
            if timed is None:
                continue
            ratio = statistics.median(
                b / a for a, b in zip(timed.samples_us[0], timed.samples_us[1], strict=True)
            )
            fractions.append(ratio)
            medians = [statistics.median(row) for row in timed.samples_us]
            print(
                f"m={m}: {medians[0]:.1f} {medians[1]:.1f} default {medians[2]:.1f} us, fraction {ratio:.4f}"
            )
    mean = math.exp(statistics.fmean(map(math.log, fractions)))
    print(f"geometric mean {mean:.4f}, worst {min(fractions):.4f}")
    return 0


def exhaust(arguments: argparse.Namespace) -> int:
    """Every config of the grid at some m; what a run chose against the best of it, side by side."""
    problem = fp8_problem() if arguments.fp8 else seed_problem()
    server = open_server(problem.server, problem.server_version, problem.triton_version)
    chosen = {entry["m"]: entry for entry in json.loads(arguments.against.read_text())["entries"]}
    started = time.monotonic()
    with (
        Journal.open(arguments.state, problem, uuid()) as journal,
        laboratory(problem, journal, arguments.m) as lab,
    ):
        lab.use_anchor(Target("up", arguments.m[0], server.default_config(problem, "up", arguments.m[0])))
        for kernel in KERNELS:
            lab.want(
                Target(kernel, m, launch.config)
                for launch in declared_space(problem, kernel)
                for m in arguments.m
            )
        lab.run(started + arguments.budget)
        print(
            f"{lab.measured} times in {time.monotonic() - started:.1f} s, {len(lab.compiled)} binaries,"
            f" failed {len(lab.failed)}, compiled while measuring {lab.compilations}, drifts {lab.drifts}"
        )
        fractions = []
        for m in arguments.m:
            sides = {
                kernel: {
                    target.config: time_us
                    for target, time_us in lab.times.items()
                    if target.kernel == kernel and target.m == m and time_us
                }
                for kernel in KERNELS
            }
            sums = [
                (of_up + of_down, Pair(up, down))
                for up, of_up in sides["up"].items()
                for down, of_down in sides["down"].items()
                if up.block_size_m == down.block_size_m
            ]
            best_us, best = min(sums, key=lambda item: item[0])
            pair = Pair(*(KernelConfig.from_json(chosen[m][kernel], "the document") for kernel in KERNELS))
            default = Pair(*(server.default_config(problem, kernel, m) for kernel in KERNELS))
            pair_us = sides["up"].get(pair.up, math.nan) + sides["down"].get(pair.down, math.nan)
            timed = lab.layer(m, (best, pair, default), "uniform", 31)
            assert timed is not None
            rows = zip(timed.samples_us[0], timed.samples_us[1], strict=True)
            ratio = statistics.median(of_best / of_pair for of_best, of_pair in rows)
            fractions.append(ratio)
            print(f"m={m}: {len(sides['up'])} up and {len(sides['down'])} down configs measured")
            print(f"  best   {best_us:8.1f} us  {best.up} | {best.down}")
            print(f"  chosen {pair_us:8.1f} us  {pair.up} | {pair.down}")
            print(f"  fraction of the best {best_us / pair_us:.4f}, layers side by side {ratio:.4f}")
    mean = math.exp(statistics.fmean(map(math.log, fractions)))
    print(f"side by side: geometric mean {mean:.4f}, worst {min(fractions):.4f} over {len(fractions)} m")
    return 0


def faults(_: argparse.Namespace) -> int:
    """A kernel that spins for a minute and one that writes out of bounds, among good ones."""
    problem = seed_problem()
    server = open_server(problem.server, problem.server_version, problem.triton_version)
    hang, wild, good = CHECKED[0], CHECKED[1], CHECKED[2:4]
    variables = {"MOETUNE_TEST_HANG": str(hang), "MOETUNE_TEST_WILD": str(wild)}
    command = WorkerCommand(
        arguments=("-m", "tests.measure.faulty_gpu"),
        variables={**variables, "PYTHONPATH": _python_path()},
        answer_seconds=4.0,
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        Journal.open(Path(folder), problem, uuid()) as journal,
        Laboratory(
            server,
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
            print(f"{target.config}: {lab.times[target] or lab.failed[target.kernel, target.config]}")
    return 0


def stock(arguments: argparse.Namespace) -> int:
    """Compile one config, capture, time, next: a sample of the grid with the stock iteration counts.

    SGLang's tuner: 10 launches to warm up, graphs of 10 launches, 100 replays; vLLM's: the same graph,
    20 replays (sglang benchmark/kernels/fused_moe_triton, vllm benchmarks/kernels/benchmark_moe.py).
    """
    import torch

    from moetune.measure import timing
    from moetune.measure.layer import GpuBackend
    from moetune.measure.protocol import Workload

    problem = seed_problem()
    server = open_server(problem.server, problem.server_version, problem.triton_version)
    grid = declared_space(problem, "up")
    sample = random.Random(3).sample(grid, arguments.count)
    backend = GpuBackend()
    backend.open(Workload(problem, (arguments.m,)))
    data = backend._opened()
    started = time.monotonic()
    for launch in sample:
        for kernel in KERNELS:
            target = server.launch(problem, kernel, launch.config)
            (kind,) = server.launch_classes(problem, kernel, (arguments.m,), launch.config.block_size_m)
            task = compile_task(target, problem, kind)
            assert isinstance(task, CompileTask)
            routed = backend._routing(kernel, arguments.m)
            alignments = backend._alignments(task, arguments.m, routed)

            def run(number: int, task: CompileTask = task, alignments: list[Alignment] = alignments) -> None:
                data.launch(task, arguments.m, alignments[number % len(alignments)], 0)

            for _ in range(10):
                run(0)
            torch.cuda.synchronize()
            timing.capture(run, 10).sample_us(arguments.replays)
    seconds = time.monotonic() - started
    whole = seconds / arguments.count * len(grid)
    print(
        f"{arguments.count} configs of both kernels at m={arguments.m}: {seconds:.1f} s measured; the"
        f" {len(grid)} that run: {whole / 60:.1f} min SCALED"
    )
    return 0


def main() -> int:
    """Run one piece."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    pieces = parser.add_subparsers(required=True)
    for function in (kernels, numerics, sanity, side, exhaust, faults, stock):
        piece = pieces.add_parser(function.__name__, help=function.__doc__)
        piece.set_defaults(function=function)
        if function is sanity:
            piece.add_argument("landscape", type=Path)
        if function is side:
            piece.add_argument("first", type=Path)
            piece.add_argument("second", type=Path)
            piece.add_argument("--fp8", action="store_true")
        if function is exhaust:
            piece.add_argument("against", type=Path)
            piece.add_argument("--m", type=int, nargs="+", default=[1024, 4096])
            piece.add_argument("--budget", type=float, default=540.0)
            piece.add_argument("--state", type=Path, default=Path("exhaust-state"))
            piece.add_argument("--fp8", action="store_true")
        if function is stock:
            piece.add_argument("--m", type=int, default=64)
            piece.add_argument("--count", type=int, default=60)
            piece.add_argument("--replays", type=int, default=100)
    arguments = parser.parse_args()
    return int(arguments.function(arguments))


if __name__ == "__main__":
    sys.exit(main())
