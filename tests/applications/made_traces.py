"""Traces as torch's profiler writes them, made of layers with known times."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAYER = (
    ("attention_kernel", 30.0),
    ("void vllm::moe::topkGating<8, 256>(float const*)", 3.0),
    ("moe_align_block_size_kernel", 4.0),
    ("fused_moe_kernel", 12.0),
    ("act_and_mul_kernel", 3.0),
    ("fused_moe_kernel", 8.0),
    ("_moe_sum_reduce_kernel", 4.0),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 16.0),
)
"""80 us, of which the up kernel takes 12 and the down kernel 8: a quarter."""


@dataclass(frozen=True, slots=True)
class MadeStep:
    """A step of a made trace.

    Attributes:
        name: annotation, empty: the server names no steps.
        layers: copies of `kernels`.
        kernels: name and microseconds of one layer's kernels.
        wait_us: idle time after the step.
        graph: the kernels are one replay of a CUDA graph.
    """

    name: str = "step[DECODE bs=64]"
    layers: int = 4
    kernels: Sequence[tuple[str, float]] = LAYER
    wait_us: float = 0.0
    graph: bool = True


def events(
    steps: Sequence[MadeStep], *, launches: bool = True, gpu_spans: bool = False
) -> list[dict[str, Any]]:
    """Events in the order in which torch writes them: by kind, not by time."""
    found: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}}]
    clock, correlation = 1000.0, 0
    for step in steps:
        begin = clock
        correlation += 1
        if step.name:
            found.append(_event("user_annotation", step.name, begin - 40, 30))
        if launches and step.graph:
            found.append(_event("cuda_runtime", "cudaGraphLaunch", begin - 30, 10, correlation))
        for _ in range(step.layers):
            for name, duration in step.kernels:
                if launches and not step.graph:
                    correlation += 1
                    found.append(_event("cuda_runtime", "cudaLaunchKernel", begin - 30, 2, correlation))
                found.append(_event("kernel", name, clock, duration, correlation))
                clock += duration
        if gpu_spans and step.name:
            found.append(_event("gpu_user_annotation", step.name, begin, clock - begin))
        clock += step.wait_us
    return sorted(found, key=lambda event: str(event.get("cat", "")))


def _event(
    category: str, name: str, begin: float, duration: float, correlation: int | None = None
) -> dict[str, Any]:
    event: dict[str, Any] = {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 0,
        "tid": 7,
        "ts": begin,
        "dur": duration,
    }
    if correlation is not None:
        event["args"] = {"correlation": correlation, "stream": 7, "grid": [1, 2, 3]}
    return event


def write_trace(path: Path, found: Sequence[dict[str, Any]]) -> Path:
    """A trace file, gzip where its name says so."""
    document = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0}],
        "traceEvents": list(found),
        "traceName": "t",
    }
    text = json.dumps(document, indent=1)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path
