"""A real trace of torch's profiler with known times, to hold the reader of traces to.

    python -m benchmarks.h200.trace FILE.trace.json.gz

Layers of kernels with the names that a server's have, replayed as a CUDA graph under step annotations as
SGLang gives them, and once launched one by one. The time of the up and down kernels is also taken with
events, each alone; the share that `moetune plan --trace` reads must agree.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch.profiler import ProfilerActivity, profile, record_function

from moetune.applications.trace import read_trace

_LAYERS, _STEPS = 8, 12


@triton.jit  # type: ignore[untyped-decorator]
def fused_moe_kernel(x_ptr, y_ptr, rounds, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Takes as long as it is told to."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + offsets)
    for _ in range(rounds):
        value = value * 1.0001 + 0.5
    tl.store(y_ptr + offsets, value)


@triton.jit  # type: ignore[untyped-decorator]
def act_and_mul_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """A kernel between the two."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets) * 2.0)


def main(path: str) -> int:
    """Write the trace, read it, and compare."""
    x = torch.randn(1 << 20, device="cuda")
    y = torch.empty_like(x)
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    grid = (x.numel() // 1024,)

    def up() -> None:
        fused_moe_kernel[grid](x, y, 4000, BLOCK=1024)

    def down() -> None:
        fused_moe_kernel[grid](y, x, 2000, BLOCK=1024)

    def step() -> None:
        for _ in range(_LAYERS):
            torch.mm(a, a)
            up()
            act_and_mul_kernel[grid](x, y, BLOCK=1024)
            down()

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def alone_us(function: Callable[[], None]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        single = torch.cuda.CUDAGraph()
        with torch.cuda.graph(single):
            for _ in range(20):
                function()
        single.replay()
        begin.record()
        single.replay()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / 20

    expected = {"up": alone_us(up), "down": alone_us(down)}
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(_STEPS):
            with record_function("step[DECODE bs=64]"):
                graph.replay()
        torch.cuda.synchronize()
        with record_function("step[EXTEND bs=1 toks=2048]"):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "t.json"
        profiler.export_chrome_trace(str(plain))
        Path(path).write_bytes(gzip.compress(plain.read_bytes(), 9))

    found = read_trace(path)
    decodes = [one for one in found.steps if one.phase == "decode"]
    prefills = [one for one in found.steps if one.phase == "prefill"]
    print(f"{found.how}, {len(decodes)} decode and {len(prefills)} prefill steps, runners {found.runners}")
    right = len(decodes) == _STEPS and len(prefills) == 1
    for name in ("up", "down"):
        values = sorted((getattr(one.time, f"{name}_us") or 0.0) / _LAYERS for one in decodes)
        median = values[len(values) // 2] if values else 0.0
        right = right and abs(median / expected[name] - 1.0) < 0.05
        print(f"{name}: {median:.2f} us in the trace, {expected[name]:.2f} us by events")
    print(json.dumps({"right": right, "torch": torch.__version__, "triton": triton.__version__}))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
