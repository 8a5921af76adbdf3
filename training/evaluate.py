"""How good the performance model and the search are where they have not been trained.

    python -m training.evaluate SGLANG_WHEEL VLLM_WHEEL --out docs/evaluation.json

holds out shapes (both dtypes of a shape together), a dtype, a regime of E and N, and GPU families,
each apart; trains on the rest; and replays the search on what was held out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moetune.applications.replay import replay
from moetune.domain.config import KernelConfig
from moetune.domain.features import FloatArray
from moetune.domain.landscape import Landscape
from moetune.domain.predict import SPREAD_PENALTY, PerformanceModel, dtype_tag
from moetune.domain.problem import Kernel, Problem
from moetune.domain.space import search_axes, worth_trying
from moetune.domain.version import parse_release
from moetune.servers.registry import open_server
from training.dataset import LANDSCAPES, Group, groups_of, load_landscapes
from training.network import TIME, fit_model
from training.published import Contest, contests, read_published
from training.train import load_contests, thinned

FOLDS = 6
ENOUGH = 40
"""Measured configs of what is searched, below which the best of them is not near the best of all."""
WORST_WANTED = 0.93


def geomean(values: Sequence[float]) -> float:
    """Geometric mean."""
    return math.exp(sum(math.log(max(value, 1e-9)) for value in values) / len(values))


def median_error(model: PerformanceModel, groups: Sequence[Group]) -> float:
    """Median over configs of the relative error of the predicted time."""
    errors = [np.abs(np.exp(_log_time(model, group)) / group.time_us - 1) for group in groups]
    return float(np.median(np.concatenate(errors)))


def _log_time(model: PerformanceModel, group: Group) -> FloatArray:
    inputs = ((group.features - model.mean) / model.scale).astype(np.float32)
    blended = model.blend(inputs, model.winner_weight(group.problem))
    answer: FloatArray = blended.mean(0) + math.log(group.floor_us)
    return answer


def replays(
    model: PerformanceModel, landscapes: Sequence[Landscape], budgets: Sequence[int], strategy: str = "guided"
) -> dict[str, Any]:
    """Fractions of the best over all (kernel, m) of some landscapes, by budget."""
    answers: dict[str, Any] = {}
    for budget in budgets:
        fractions, compiled = [], 0
        for landscape in landscapes:
            done = replay(LANDSCAPES / f"{landscape.name}.csv.gz", budget, 0, strategy=strategy, model=model)
            fractions += [
                (problem.fraction, landscape.name, problem.kernel, problem.m) for problem in done.problems
            ]
            compiled = max(compiled, *(count for _, count in done.compiled))
        worst = min(fractions)
        answers[str(budget)] = {
            "geomean": round(geomean([fraction for fraction, *_ in fractions]), 4),
            "worst": round(worst[0], 4),
            "worst_at": " ".join(map(str, worst[1:])),
            "problems": len(fractions),
            "compiled": compiled,
        }
    return answers


@lru_cache(maxsize=256)
def searched(problem: Problem, kernel: Kernel) -> frozenset[KernelConfig]:
    """What moetune looks at for a problem, less what the constraints rule out."""
    server = open_server(problem.server, problem.server_version, problem.triton_version)
    triton = parse_release(server.triton_version)
    launches = (server.launch(problem, kernel, config) for config in search_axes(problem.gpu).grid())
    return frozenset(launch.config for launch in launches if worth_trying(launch, problem.gpu, triton))


def picks(model: PerformanceModel, groups: Sequence[Group]) -> dict[str, Any]:
    """The model's first pick, and the best of its first 16, among what was measured of what is searched.

    A sample holds good configs and random ones of all sizes. Where there are two passes, the best is chosen
    on one, and all are judged on the other.
    """
    first, sixteen = [], []
    for group in groups:
        space = searched(group.problem, group.kernel)
        inside = np.array([config in space for config in group.configs])
        if inside.sum() < ENOUGH:
            continue
        inputs = ((group.features[inside] - model.mean) / model.scale).astype(np.float32)
        members = model.blend(inputs, model.winner_weight(group.problem))
        order = np.argsort(members.mean(0) + SPREAD_PENALTY * members.std(0))
        shares = group.shares(inside, order[:16].tolist())
        place = (group.landscape, group.kernel, group.m)
        first.append((float(shares[0]), *place))
        # The best of several, chosen on the pass that it is judged on, is never over the best of all.
        sixteen.append((min(float(shares.max()), 1.0), *place))
    return {
        name: _summary(found) for name, found in (("first", first), ("best of first 16", sixteen)) if found
    }


def _summary(found: Sequence[tuple[float, str, Kernel, int]]) -> dict[str, Any]:
    shares = [share for share, *_ in found]
    return {
        "geomean": round(geomean(shares), 4),
        "worst": round(min(shares), 4),
        "worst_at": " ".join(map(str, min(found)[1:])),
        "under 0.93": sum(share < WORST_WANTED for share in shares),
        "problems": len(found),
    }


def percentiles(model: PerformanceModel, held: Sequence[Contest]) -> list[float]:
    """Share of the runnable grid that is ranked before the published winner, for each entry."""
    ranks = []
    for contest in held:
        weight = model.winner_weight(contest.entry.problem)
        total = np.zeros(contest.features.shape[1])
        for matrix, floor_us in zip(contest.features, contest.floor_us, strict=True):
            if floor_us:
                inputs = ((matrix - model.mean) / model.scale).astype(np.float32)
                total += np.exp(model.blend(inputs, weight).mean(0)) * floor_us
        ranks.append(float((total[1:] < total[0]).mean()))
    return ranks


def main() -> None:
    """Evaluate and write the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheels", nargs=2, type=Path, metavar="WHEEL")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="shapes,dtype,regime,families")
    parser.add_argument("--folds", default="", help="only these folds of the shapes, as in 0,3")
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = args.parts.split(",")
    numbers: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    landscapes = load_landscapes()
    full_grids = [
        landscape
        for landscape in landscapes
        if str(landscape.facts.get("space", "")).startswith("SGLang's 1920")
    ]
    groups = [group for landscape in landscapes for group in groups_of(landscape)]
    published = load_contests(args.wheels)

    def rest(test: Sequence[Group]) -> list[Group]:
        out = {id(group) for group in test}
        return [group for group in groups if id(group) not in out]

    def report(name: str, value: Any) -> None:
        numbers[name] = value
        args.out.write_text(json.dumps(numbers, indent=1, sort_keys=True) + "\n")
        print(name, json.dumps(value), f"{time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)

    begun = time.monotonic()
    if "shapes" in parts:
        shapes = sorted({group.shape for group in groups})
        for fold in map(int, args.folds.split(",")) if args.folds else range(FOLDS):
            held = set(shapes[fold::FOLDS])
            test = [group for group in groups if group.shape in held]
            clean = [
                c
                for c in published
                if (c.entry.problem.E, c.entry.problem.N) not in {shape[:2] for shape in held}
            ]
            model = fit_model(rest(test), clean)
            full = [land for land in full_grids if (land.problem.E, land.problem.N, land.problem.K) in held]
            value: dict[str, Any] = {
                "held_out": sorted({group.landscape for group in test}),
                "median_error": round(median_error(model, test), 4),
                "picks": picks(model, test),
            }
            if full:
                value["guided"] = replays(model, full, (0, 16, 64))
                value["random"] = replays(model, full, (16, 64), "random")
            report(f"unseen shapes {fold}", value)
    if "dtype" in parts:
        for dtype in sorted({group.dtype for group in groups} - {"bf16"}):
            test = [group for group in groups if group.dtype == dtype]
            clean = [c for c in published if dtype_tag(c.entry.problem) != dtype]
            model = fit_model(rest(test), clean)
            report(
                f"unseen dtype {dtype}",
                {
                    "held_out": sorted({group.landscape for group in test}),
                    "median_error": round(median_error(model, test), 4),
                    "picks": picks(model, test),
                },
            )
    if "regime" in parts:
        test = [group for group in groups if group.shape[0] <= 32]
        clean = [c for c in published if c.entry.problem.E > 32]
        model = fit_model(rest(test), clean)
        report(
            "unseen regime",
            {
                "held_out": "E of at most 32",
                "median_error": round(median_error(model, test), 4),
                "picks": picks(model, test),
            },
        )
    if "families" in parts:
        entries = read_published(args.wheels)
        for family in ("sm_80", "sm_90", "sm_100", "sm_89", "sm_120"):
            of_family = [
                entry
                for entry in thinned(entries, 2 if family == "sm_90" else 6, 5)
                if entry.family == family
            ]
            held_contests = contests(of_family, others=0, seed=3)
            others = [c for c in published if c.entry.family != family]
            # Far from the landscapes only the winner head answers.
            time_recipe = TIME if family == "sm_90" else replace(TIME, members=1, steps=100)
            model = fit_model(groups, others, time=time_recipe)
            ranks = percentiles(model, held_contests)
            kinds = [c.entry.problem.quantization.dtype.value for c in held_contests]
            report(
                f"family {family}",
                {"entries": len(ranks), "median_percentile": round(float(np.median(ranks)), 4)}
                | {
                    kind: round(
                        float(np.median([r for r, k in zip(ranks, kinds, strict=True) if k == kind])), 4
                    )
                    for kind in sorted(set(kinds))
                },
            )


if __name__ == "__main__":
    main()
