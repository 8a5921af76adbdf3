"""How often a busy host hands a graph over late, and what that does to its time."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

_SECONDS = 4.0
_LAUNCHES = 20
_SHORT_CYCLES = 60_000
"""Some 30 us of head start: what was given before late replays were told from others."""
_LONG = 1.1


def gaps(_: argparse.Namespace) -> int:
    """How often a busy host hands a graph over late, and how long the clock runs then."""
    import torch

    from moetune.measure import timing

    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)

    torch.mm(a, a, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _launch in range(_LAUNCHES):
            torch.mm(a, a, out=out)
    graph.replay()
    cores = os.cpu_count() or 1
    for processes, nice in ((0, 0), (cores - 1, 10), (cores - 1, 0), (2 * cores, 10), (2 * cores, 0)):
        context = multiprocessing.get_context("spawn")
        busy = [context.Process(target=_burn, args=(nice,), daemon=True) for _ in range(processes)]
        for process in busy:
            process.start()
        time.sleep(1.0)
        timing.wake(0.3)
        found: list[timing.Replayed] = []
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            found += timing.time_runs(graph.replay, 1, _SHORT_CYCLES)
        for process in busy:
            process.terminate()
        usual_us = statistics.median(one.us for one in found)
        late = [one for one in found if not one.in_time]
        long = [one for one in found if one.us > _LONG * usual_us]
        in_time_us = max((one.us for one in found if one.in_time), default=0.0)
        print(
            f"{processes} busy processes, nice {nice}: {len(found)} replays, median {usual_us:.0f} us, "
            f"{len(late)} late, {len(long)} over {_LONG} times the median, of those "
            f"{sum(not one.in_time for one in long)} late; longest {max(one.us for one in found):.0f} us, "
            f"longest in time {in_time_us:.0f} us",
            flush=True,
        )
    return 0


def _burn(nice: int) -> None:
    os.nice(nice)
    for number in count():
        _ = number * number
