"""What Triton's release changes: one kernel and one list of configs, compiled by several, timed side by side.

    python -m benchmarks.h200.triton_versions compile --triton 3.5.1=FOLDER ... --out FOLDER     # no GPU
    python -m benchmarks.h200.triton_versions measure --cubins FOLDER --out times.json           # on the H200

A release lies in a folder of its own: `pip download --no-deps triton==3.5.1`, unzip. That of this environment
takes part without one. `compile` leaves `compiled.json` (what each release made of each config) and the
machine code. `measure` launches the machine code through the CUDA driver, with the data, the routings, the
cold weights and the programmatic dependent launch of `moetune tune`; all configs and releases of one kernel
and m share the rounds, in a new random order each round, and one release runs twice: what the two differ by
is the noise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.h200.common import PROBLEMS, binary, gpu_backend, server_of
from benchmarks.h200.cubins import ARCHIVE, Binary, compile_with, key_of, read_archive, write_archive
from moetune.domain.compiler_failures import compiler_failures
from moetune.domain.config import KernelConfig
from moetune.domain.landscape import read_landscape
from moetune.domain.problem import KERNELS
from moetune.domain.space import COMPILER_FAILURE, sglang_grid, violations
from moetune.domain.version import parse_release
from moetune.servers.registry import open_server

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.h200.cubin_launch import Driver
    from benchmarks.h200.cubins import Compiled
    from moetune.domain.compilation import CompileTask
    from moetune.domain.problem import Kernel, Problem
    from moetune.measure.layer import GpuBackend
    from moetune.measure.timing import Graph

CELLS = {"seed": (8, 64, 1024), "qwen3.5-35b-fp8": (8, 128, 1024)}
"""Problems and m: those with a landscape of moetune's kernel under Triton 3.6.0."""
LANDSCAPES = {
    "seed": "qwen3.5-122b-a10b_tp4_bf16_h200_own-kernel_18m",
    "qwen3.5-35b-fp8": "qwen3.5-35b-a3b_tp1_fp8-block_h200_own-kernel_6m",
}
RESULTS = Path(__file__).parents[1] / "results"
FASTEST, OTHERS, WITHIN = 28, 8, 2.0
"""The fastest of the landscape, and some drawn from those within twice the best."""
WIDE = 48
"""Configs of the grid that are compiled only, for each problem and kernel."""
OWN = "3.6.0"
AGAIN = f"{OWN} again"
ROUNDS = 8
INDEX = "index.json"
"""What is timed, to the name of its files, which comes from the task as that checkout words it."""


def contestants(name: str, kernel: Kernel, m: int) -> list[KernelConfig]:
    """What is timed: the fastest under Triton 3.6.0, some others, both servers' defaults."""
    times = read_landscape(RESULTS / f"{LANDSCAPES[name]}.csv.gz").times_us[kernel, m]
    ran = {config: time_us for config, time_us in times.items() if time_us is not None}
    order = sorted(ran, key=lambda config: (ran[config], config.sort_key()))
    near = [config for config in order[FASTEST:] if ran[config] <= WITHIN * ran[order[0]]]
    drawn = random.Random(f"{name} {kernel} {m}").sample(near, min(OTHERS, len(near)))
    problem = PROBLEMS[name]
    vllm = open_server("vllm", "0.33.0", problem.triton_version)
    # vLLM gives the kernel a further key, which is a constant of its own kernel.
    defaults = [server.default_config(problem, kernel, m) for server in (server_of(problem), vllm)]
    plain = [KernelConfig(*config.sort_key()[:6]) for config in defaults]  # type: ignore[arg-type]
    return list(dict.fromkeys([*order[:FASTEST], *drawn, *plain]))


def sampled(problem: Problem, name: str, kernel: Kernel) -> list[KernelConfig]:
    """What is compiled only: a sample of what is worth trying, and all that fail in Triton 3.6.0."""
    server, triton = server_of(problem), parse_release(problem.triton_version)
    fits, fails = [], []
    for config in sglang_grid():
        found = {
            one.constraint for one in violations(server.launch(problem, kernel, config), problem.gpu, triton)
        }
        if not found:
            fits.append(config)
        elif found == {COMPILER_FAILURE}:
            fails.append(config)
    return random.Random(f"{name} {kernel}").sample(fits, WIDE) + fails


def _wanted() -> list[dict[str, Any]]:
    """Rows to compile: timed ones with their m, others with none."""
    rows: list[dict[str, Any]] = []
    for name, ms in CELLS.items():
        for kernel in KERNELS:
            for m in ms:
                timed = contestants(name, kernel, m)
                rows += [{"problem": name, "kernel": kernel, "m": m, "config": one} for one in timed]
            wide = sampled(PROBLEMS[name], name, kernel)
            rows += [{"problem": name, "kernel": kernel, "m": None, "config": one} for one in wide]
    return rows


def _task(row: dict[str, Any]) -> CompileTask:
    return binary(PROBLEMS[row["problem"]], row["kernel"], row["m"] or 1024, row["config"])


def kernel_hash() -> str:
    """Hash of the kernel's source."""
    import moetune

    source = Path(moetune.__file__).with_name("measure") / "kernels.py"
    return hashlib.sha256(source.read_bytes()).hexdigest()[:16]


def _name(problem: str, kernel: Kernel, m: int, config: KernelConfig) -> str:
    return f"{problem} {kernel} {m} {config}"


def _said(found: Compiled) -> dict[str, Any]:
    """What a release made of a task, for the file."""
    result = found.result
    said: dict[str, Any] = {"status": result.status.value}
    if found.binary is None:
        return said | {"message": result.message[:120]}
    return said | {
        "shared": result.shared_bytes,
        "registers": result.registers,
        "stack": result.stack_bytes,
        "code": found.binary.code,
    }


def compile_all(arguments: argparse.Namespace) -> int:
    """Compile everything with every release; write what came of it, and the machine code to be timed."""
    assert compiler_failures(), "the failures that are known are part of what is compiled"
    rows = _wanted()
    tasks = [_task(row) for row in rows]
    timed = {task for row, task in zip(rows, tasks, strict=True) if row["m"]}
    releases: dict[str, Path | None] = {OWN: None, **dict(arguments.triton)}
    found: dict[str, dict[CompileTask, Compiled]] = {}
    for release, folder in sorted(releases.items()):
        started = time.monotonic()
        found[release] = compile_with(folder, tasks, arguments.workers)
        seen = {one.binary.triton for one in found[release].values() if one.binary}
        if seen != {release}:
            raise SystemExit(f"{folder} holds Triton {', '.join(sorted(seen))}, not {release}")
        print(f"{release}: {len(found[release])} binaries, {time.monotonic() - started:.0f} s", flush=True)
    index = {
        _name(row["problem"], row["kernel"], row["m"], row["config"]): key_of(task)
        for row, task in zip(rows, tasks, strict=True)
        if row["m"]
    }
    files = {INDEX: json.dumps(index, sort_keys=True).encode()}
    for task in dict.fromkeys(task for task in tasks if task in timed):
        for release in arguments.timed:
            one = found[release][task]
            if one.binary is not None:
                about = json.dumps(one.binary.to_json(), sort_keys=True)
                files[f"{release}/{key_of(task)}.json"] = about.encode()
                files[f"{release}/{key_of(task)}.cubin"] = one.cubin
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_archive(arguments.out / ARCHIVE, files)
    document = {
        "schema": "moetune.triton_versions_compiled/1",
        "releases": sorted(releases),
        "kernel": kernel_hash(),
        "rows": [
            {
                **row,
                "config": list(row["config"].sort_key()[:6]),
                "compiled": {release: _said(found[release][task]) for release in sorted(releases)},
            }
            for row, task in zip(rows, tasks, strict=True)
        ],
    }
    (arguments.out / "compiled.json").write_text(json.dumps(document, sort_keys=True) + "\n")
    size = (arguments.out / ARCHIVE).stat().st_size
    print(f"{len(files) // 2} binaries to be timed, {size / 1e6:.1f} MB")
    return 0


def releases_in(files: Iterable[str]) -> list[str]:
    """Releases whose machine code an archive holds."""
    return sorted({name.split("/")[0] for name in files if name != INDEX})


def measure(arguments: argparse.Namespace) -> int:
    """Time all of it; a cell that does not fit into the budget is left out, and told."""
    started = time.monotonic()
    files = read_archive(arguments.cubins / ARCHIVE)
    releases = releases_in(files)
    backend = gpu_backend(arguments.cubins / "cache")
    import torch

    from benchmarks.h200.cubin_launch import Driver
    from moetune.measure.protocol import Workload

    driver = Driver()
    rows: list[dict[str, Any]] = []
    left_out = []
    for name, ms in CELLS.items():
        backend.open(Workload(PROBLEMS[name], ms))
        for m in ms:
            for kernel in KERNELS:
                if time.monotonic() - started > arguments.budget:
                    left_out.append(f"{name} {kernel} {m}")
                    continue
                rows += measure_cell(backend, driver, files, name, kernel, m)
                _write(arguments.out, rows, left_out, torch.cuda.get_device_name(0))
                print(f"{name} {kernel} m={m}: {time.monotonic() - started:.1f} s", flush=True)
    _write(arguments.out, rows, left_out, torch.cuda.get_device_name(0))
    wrong = [row for row in rows if not all(row["right"].values())]
    print(f"{len(rows)} configs, {len(wrong)} with wrong numbers, left out: {left_out or 'nothing'}")
    for release in (*releases, AGAIN):
        ratios = sorted(min(row["us"][release]) / min(row["us"][OWN]) for row in rows if release in row["us"])
        if ratios:
            low, middle, high = (ratios[int(share * (len(ratios) - 1))] for share in (0.05, 0.5, 0.95))
            print(f"{release:12s} over {OWN}: median {middle:.4f}, 5% {low:.4f}, 95% {high:.4f}")
    return 3 if left_out else 0


def _write(path: Path, rows: list[dict[str, Any]], left_out: list[str], device: str) -> None:
    document = {
        "schema": "moetune.triton_versions/1",
        "device": device,
        "rounds": ROUNDS,
        "left_out": left_out,
        "rows": rows,
    }
    path.write_text(json.dumps(document, sort_keys=True) + "\n")


def measure_cell(
    backend: GpuBackend, driver: Driver, files: dict[str, bytes], name: str, kernel: Kernel, m: int
) -> list[dict[str, Any]]:
    """Times of one kernel at one m: every config under every release that compiled it."""
    import torch

    from benchmarks.h200.cubin_launch import CubinKernel, Loaded
    from moetune.measure import kernels, timing
    from moetune.measure.reference import relative_error
    from moetune.measure.tolerance import tolerance_of

    own_kernel = kernels.moe_grouped_gemm
    stand_in = CubinKernel(own_kernel.arg_names, driver, lambda: torch.cuda.current_stream().cuda_stream)
    kernels.moe_grouped_gemm = stand_in
    problem, index, releases = PROBLEMS[name], json.loads(files[INDEX]), releases_in(files)
    graphs: list[Graph] = []
    places: list[tuple[int, str]] = []
    rows: list[dict[str, Any]] = []
    expected = None
    try:
        for config in contestants(name, kernel, m):
            task = binary(problem, kernel, m, config)
            launch, circle = backend.launcher(task, m)
            data = backend._opened()
            if expected is None:
                expected = data.reference(task, m, backend._routing(kernel, m).experts[0])
            row: dict[str, Any] = {
                "problem": name,
                "kernel": kernel,
                "m": m,
                "config": list(config.sort_key()[:6]),
                "right": {},
                "us": {},
            }
            for release in (*releases, AGAIN):
                stem = f"{OWN if release == AGAIN else release}/{index[_name(name, kernel, m, config)]}"
                if f"{stem}.cubin" not in files:
                    continue
                about = Binary.from_json(json.loads(files[f"{stem}.json"]))
                function = driver.load(files[f"{stem}.cubin"], about.name, about.shared_bytes)
                loaded = Loaded(about, function)

                def run(number: int, launch: Any = launch, loaded: Loaded = loaded) -> None:  # noqa: ANN401
                    stand_in.loaded = loaded
                    launch(number)

                out = data.outputs[kernel][: m * problem.topk]
                out.fill_(float("nan"))
                run(0)
                torch.cuda.synchronize()
                error = relative_error(out, expected)
                row["right"][release] = bool(error <= tolerance_of(task))
                graphs.append(timing.capture(run, len(circle.experts)))
                places.append((len(rows), release))
            rows.append(row)
        count = len(circle.experts)
        between_us = backend.between_us(count)
        timing.wake()
        for (place, release), samples in zip(
            places, timing.interleave(graphs, count, ROUNDS, m), strict=True
        ):
            rows[place]["us"][release] = [round(time_us - between_us, 3) for time_us in samples]
    finally:
        kernels.moe_grouped_gemm = own_kernel
    return rows


def _release(text: str) -> tuple[str, Path]:
    release, _, folder = text.partition("=")
    return release, Path(folder).expanduser().resolve()


def main() -> int:
    """Compile, or measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    pieces = parser.add_subparsers(required=True)
    piece = pieces.add_parser("compile")
    piece.add_argument("--triton", type=_release, nargs="+", metavar="RELEASE=FOLDER", required=True)
    piece.add_argument("--timed", nargs="+", default=["3.5.1", "3.6.0", "3.7.0", "3.8.0"])
    piece.add_argument("--workers", type=int, default=2)
    piece.add_argument("--out", type=Path, default=Path("build/triton-versions"))
    piece.set_defaults(function=compile_all)
    piece = pieces.add_parser("measure")
    piece.add_argument("--cubins", type=Path, default=Path("build/triton-versions"))
    piece.add_argument("--budget", type=float, default=80.0)
    piece.add_argument("--out", type=Path, required=True)
    piece.set_defaults(function=measure)
    arguments = parser.parse_args()
    return int(arguments.function(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
