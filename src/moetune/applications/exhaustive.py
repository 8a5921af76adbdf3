"""Writes what was measured as a landscape, in the format that `moetune replay` reads."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from typing import TYPE_CHECKING, Any

from moetune.domain.errors import OutputError
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from moetune.applications.measuring import Laboratory
    from moetune.domain.problem import Problem

_COLUMNS = (
    "kernel",
    "m",
    "block_size_m",
    "block_size_n",
    "block_size_k",
    "group_size_m",
    "num_warps",
    "num_stages",
    "median_us",
    "error",
)


def landscape_facts(problem: Problem, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON beside a landscape: the problem, and how it was measured."""
    shape = problem.quantization.block_shape
    return {
        "device": problem.gpu.torch_name,
        "compute_capability": ".".join(map(str, problem.gpu.compute_capability or ())),
        "triton": problem.triton_version,
        "server": problem.server,
        "server_version": problem.server_version,
        "kernel": problem.kernel_source,
        "dtype": problem.quantization.dtype.value,
        "block_shape": list(shape) if shape else None,
        "per_channel": problem.quantization.per_channel,
        "group_size": problem.quantization.group_size,
        "zero_point": problem.quantization.zero_point,
        "num_experts": problem.E,
        "global_experts": problem.global_experts,
        "ep": problem.ep,
        "topk": problem.topk,
        "hidden_size": problem.K,
        "intermediate_per_rank": problem.N,
        "routing": problem.routing,
        "l2": "cold: at least three times the L2 touched between two uses of the same weights",
        "time": "median of replays of a CUDA graph over its launches, each on a routing of its own",
        **facts,
    }


def write_landscape(
    folder: Path,
    problem: Problem,
    laboratory: Laboratory,
    ms: Collection[int],
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write `landscape.csv.gz` and `landscape.json`; the path of the first.

    Args:
        folder: where.
        problem: what was measured.
        laboratory: holds the times.
        ms: those at which all was measured; what lies between them is no landscape.
        facts: more about how it was measured.

    Raises:
        OutputError: when they cannot be written; what was there before is left as it was.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for target, time_us in sorted(laboratory.known.times.items(), key=lambda item: item[0]):
        if target.m not in ms or target.in_order:
            continue
        config = target.config
        why = laboratory.known.failed.get((target.kernel, config), "cannot run") if time_us is None else ""
        writer.writerow(
            (
                target.kernel,
                target.m,
                config.block_size_m,
                config.block_size_n,
                config.block_size_k,
                config.group_size_m,
                config.num_warps,
                config.num_stages,
                "" if time_us is None else f"{time_us:.6g}",
                why,
            )
        )
    # No time of day in it: the same times give the same bytes.
    packed = gzip.compress(text.getvalue().encode(), mtime=0)
    document = json.dumps(landscape_facts(problem, facts or {}), indent=2, sort_keys=True) + "\n"
    _replace(folder / "landscape.json", document.encode())
    _replace(folder / "landscape.csv.gz", packed)
    return folder / "landscape.csv.gz"


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise OutputError(f"{printable(str(path), 400)} cannot be written: {error.strerror}") from error
