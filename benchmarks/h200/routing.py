"""Whether the best config changes with the routing: the same problem searched under several of them.

    python -m benchmarks.h200.routing --state DIR --out DIR [--problem seed] [--m 16 64 256 1024 4096]
        [--recording DIR_OR_DUMP ...] [--count 160] [--budget 500]

Under each routing the first configs of the ranking and the server's default are measured on their own, up
and down, in one laboratory a routing. The best config under A, timed under B, over the best under B is the
regret of tuning on A and serving B. The best of each routing are then measured once more with another seed:
what is written is that second look, so that no one is the winner by luck. Exit code 3: the budget ended; run
it again and it goes on.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.h200.common import PROBLEMS, server_of, uuid
from moetune.applications.compiling import CompilePool
from moetune.applications.journal import Journal
from moetune.applications.measuring import Laboratory
from moetune.applications.predicting import forecast
from moetune.applications.routing_store import AskedRouting, ask_routing, check_fits, keep
from moetune.applications.targets import Target
from moetune.domain.compilation import Depth
from moetune.domain.launch import Launch
from moetune.domain.predict import PerformanceModel
from moetune.domain.problem import KERNELS
from moetune.domain.recording import Recording
from moetune.domain.routing_statistics import layer_statistics
from moetune.domain.synthetic_routing import synthetic_recording

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moetune.domain.config import KernelConfig
    from moetune.domain.problem import Kernel, Problem

LAWS = ("uniform", "zipf:0.8", "zipf:1.2")
_SKEWS = (0.3, 0.6, 0.9, 1.2)
"""Of the synthetic recording: layers of a real model differ in how skewed they are."""
_FINALISTS = 6

Times = dict[tuple[str, int], dict["KernelConfig", float]]


def mixed_recording(problem: Problem, seed: int = 0) -> Recording:
    """Layers of different skew, two calls of 8,192 tokens each."""
    parts = [
        synthetic_recording(
            range(first, first + 4),
            8192,
            2,
            problem.global_experts,
            problem.topk - problem.fused_shared_experts,
            skew,
            seed,
        )
        for first, skew in zip(range(0, 4 * len(_SKEWS), 4), _SKEWS, strict=True)
    ]
    layers = tuple(layer for part in parts for layer in part.layers)
    return replace(parts[0], layers=layers)


def asked_routings(arguments: argparse.Namespace, problem: Problem) -> dict[str, AskedRouting]:
    """What is compared, by the name that the tables have."""
    found = {law: ask_routing(law, arguments.state) for law in LAWS}
    mixed = mixed_recording(problem)
    found["synthetic recording"] = AskedRouting(mixed.routing, mixed, str(keep(arguments.state, mixed)))
    for path in arguments.recording:
        found[Path(path).name] = ask_routing(str(path), arguments.state)
    for asked in found.values():
        if asked.recording is not None:
            check_fits(asked.recording, problem)
    return found


def candidates(
    problem: Problem, ms: Sequence[int], count: int
) -> dict[tuple[Kernel, int], list[KernelConfig]]:
    """The first of the ranking and the default; the same under every routing, as the model knows one."""
    server, model = server_of(problem), PerformanceModel.load()
    launches: dict[Kernel, Sequence[Launch]] = {
        kernel: forecast(server, problem).launches(kernel) for kernel in KERNELS
    }
    found: dict[tuple[Kernel, int], list[KernelConfig]] = {}
    for kernel in KERNELS:
        for m in ms:
            times = model.predict(problem, kernel, m, launches[kernel]).time_us
            ordered = sorted(zip(times.tolist(), launches[kernel], strict=True), key=lambda pair: pair[0])
            configs = dict.fromkeys(launch.config for _, launch in ordered[:count])
            configs[server.default_config(problem, kernel, m)] = None
            found[kernel, m] = list(configs)
    return found


def times_under(
    problem: Problem,
    asked: AskedRouting,
    wanted: dict[tuple[Kernel, int], list[KernelConfig]],
    state: Path,
    seed: int,
    deadline: float,
) -> Times:
    """Times of configs under one routing; what the journal has is not measured again."""
    routed = replace(problem, routing=asked.name)
    ms = sorted({m for _, m in wanted})
    pool = CompilePool(Depth.BINARY, seconds_each=60.0)
    found: Times = {}
    with (
        Journal.open(state / f"seed-{seed}", routed, uuid()) as journal,
        Laboratory(
            server_of(routed), routed, journal, ms, [uuid()], pool=pool, seed=seed, recording=asked.path
        ) as laboratory,
    ):
        targets = [Target(kernel, m, config) for (kernel, m), configs in wanted.items() for config in configs]
        laboratory.want(targets)
        laboratory.run(deadline)
        for target in targets:
            time_us = laboratory.known.times.get(target)
            if time_us is not None:
                found.setdefault((target.kernel, target.m), {})[target.config] = time_us
    return found


def first_looks(
    arguments: argparse.Namespace,
    problem: Problem,
    routings: dict[str, AskedRouting],
    wanted: dict[tuple[Kernel, int], list[KernelConfig]],
) -> dict[str, Times]:
    """Every candidate under every routing."""
    found, deadline = {}, time.monotonic() + arguments.budget
    for name, asked in routings.items():
        found[name] = times_under(problem, asked, wanted, arguments.state, 0, deadline)
        count = sum(map(len, found[name].values()))
        print(f"{name}: {count} of {sum(map(len, wanted.values()))} times", flush=True)
    return found


def finalists(looks: dict[str, Times], key: tuple[Kernel, int]) -> list[KernelConfig]:
    """The best few of each routing."""
    best: dict[KernelConfig, None] = {}
    for times in looks.values():
        of_key = times.get(key, {})
        best.update(dict.fromkeys(sorted(of_key, key=lambda config: of_key[config])[:_FINALISTS]))
    return list(best)


def regrets(
    looks: dict[str, Times], seconds: dict[str, Times], key: tuple[Kernel, int]
) -> list[dict[str, Any]]:
    """For each routing that is tuned on: what its choice costs under each that is served.

    The choice is made by the first look, its cost taken from the second.
    """
    rows = []
    for tuned, times in looks.items():
        again = {config for other in seconds.values() for config in other.get(key, {})}
        known = {config: time_us for config, time_us in times.get(key, {}).items() if config in again}
        if not known:
            continue
        chosen = min(known, key=lambda config: (known[config], config.sort_key()))
        row: dict[str, Any] = {
            "kernel": key[0],
            "m": key[1],
            "tuned": tuned,
            "config": chosen.to_json(),
            "serves": {},
        }
        for served, second in seconds.items():
            of_key = second.get(key, {})
            if chosen in of_key:
                row["serves"][served] = {
                    "time_us": round(of_key[chosen], 3),
                    "regret": round(of_key[chosen] / min(of_key.values()), 5),
                }
        rows.append(row)
    return rows


def blocks_of(asked: AskedRouting, problem: Problem, ms: Sequence[int]) -> list[dict[str, Any]]:
    """Blocks of the layers against uniform routing, for the text beside the table."""
    if asked.recording is None:
        return []
    return [
        {"layer": layer.number, "m": blocks.m, "block_m": blocks.block_m, "ratio": round(blocks.ratio, 4)}
        for layer in asked.recording.layers
        for blocks in layer_statistics(layer, problem.global_experts, asked.recording.topk, ms=ms).blocks
    ]


def main() -> int:
    """Measure, and write `routing.json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problem", choices=PROBLEMS, default="seed")
    parser.add_argument("--m", type=int, nargs="+", default=[16, 64, 256, 1024, 4096])
    parser.add_argument("--recording", nargs="*", default=[])
    parser.add_argument("--count", type=int, default=160, help="configs of the ranking for each kernel and m")
    parser.add_argument("--budget", type=float, default=500.0)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    problem = PROBLEMS[arguments.problem]
    routings = asked_routings(arguments, problem)
    wanted = candidates(problem, arguments.m, arguments.count)
    looks = first_looks(arguments, problem, routings, wanted)
    again = {key: finalists(looks, key) for key in wanted}
    deadline = time.monotonic() + arguments.budget
    seconds = {
        name: times_under(problem, asked, again, arguments.state, 1, deadline)
        for name, asked in routings.items()
    }
    rows = [row for key in wanted for row in regrets(looks, seconds, key)]
    whole = all(len(looks[name].get(key, {})) for name in routings for key in wanted)
    arguments.out.mkdir(parents=True, exist_ok=True)
    document = {
        "problem": arguments.problem,
        "configs": {f"{kernel} {m}": len(configs) for (kernel, m), configs in wanted.items()},
        "times": {name: sum(map(len, times.values())) for name, times in looks.items()},
        "routings": {name: asked.name for name, asked in routings.items()},
        "blocks": {name: blocks_of(asked, problem, arguments.m) for name, asked in routings.items()},
        "rows": rows,
    }
    (arguments.out / "routing.json").write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    for row in rows:
        costs = "  ".join(f"{name} {found['regret']:.3f}" for name, found in row["serves"].items())
        print(f"{row['kernel']} m={row['m']} tuned on {row['tuned']}: {costs}")
    return 0 if whole else 3


if __name__ == "__main__":
    raise SystemExit(main())
