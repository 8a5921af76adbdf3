"""Train the packaged performance model.

    python -m training.train SGLANG_WHEEL VLLM_WHEEL

reads the landscapes of training/landscapes and the published tuned files in the two wheels (sglang
0.5.23 and vllm 0.33.0), and writes src/moetune/domain/data/performance_model.npz. Only derived
weights go into it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from moetune.domain.features import FEATURES
from moetune.domain.predict import PARTS, PerformanceModel
from training.dataset import Group, groups_of, load_landscapes
from training.network import fit_model
from training.published import Contest, Published, contests, read_published

ARTIFACT = Path(__file__).parents[1] / "src" / "moetune" / "domain" / "data" / "performance_model.npz"
LARGEST_M = 16384


def load_groups() -> list[Group]:
    """All recorded (kernel, m)."""
    return [group for landscape in load_landscapes() for group in groups_of(landscape)]


def thinned(entries: Sequence[Published], keys: int, seed: int) -> list[Published]:
    """At most `keys` random entries of each file."""
    rng = np.random.default_rng(seed)
    files: dict[tuple[str, str], list[Published]] = defaultdict(list)
    for entry in entries:
        if entry.m <= LARGEST_M:
            files[entry.server, entry.file].append(entry)
    return [of_file[place] for of_file in files.values() for place in rng.permutation(len(of_file))[:keys]]


def load_contests(wheels: Sequence[Path], *, keys: int = 9, others: int = 48, seed: int = 1) -> list[Contest]:
    """Published winners, each against random others."""
    return contests(thinned(read_published(wheels), keys, seed), others=others, seed=seed)


def save(model: PerformanceModel, path: Path) -> None:
    """Write the artifact: arrays by name."""
    arrays: dict[str, object] = {"features": np.array(FEATURES), "mean": model.mean, "scale": model.scale}
    for name, head in (("time", model.time_head), ("winner", model.winner_head)):
        for part in PARTS:
            # Weights are of half precision already, see network.py.
            half = part not in ("low", "high")
            arrays[f"{name}_{part}"] = getattr(head, part).astype(np.float16 if half else np.float32)
    arrays["ground_shapes"] = model.ground.shapes
    arrays["ground_dtypes"] = np.array(model.ground.dtypes)
    arrays["ground_gpus"] = np.array(model.ground.gpus)
    arrays["ground_compute_capabilities"] = np.array(model.ground.compute_capabilities)
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheels", nargs=2, type=Path, metavar="WHEEL")
    parser.add_argument("--out", type=Path, default=ARTIFACT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.monotonic()
    groups, published = load_groups(), load_contests(args.wheels)
    print(
        f"{len(groups)} groups, {len(published)} published winners, {time.monotonic() - begun:.0f} s",
        file=sys.stderr,
    )
    model = fit_model(groups, published)
    save(model, args.out)
    print(f"{args.out}: {args.out.stat().st_size} bytes, {time.monotonic() - begun:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
