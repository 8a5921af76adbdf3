"""Samples of graphs of launches, and how many of them a decision needs."""

from __future__ import annotations

import math
import random
import statistics
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_Z95 = 1.96
_FEW = 3
"""Samples that tell who cannot win."""


class Graph(Protocol):
    """Launches that are started together."""

    def sample_us(self, count: int) -> list[float]:
        """Replay it so many times; the duration of each."""
        ...


@dataclass(frozen=True, slots=True)
class Sampled:
    """Samples of one launch.

    Attributes:
        median_us: their median.
        spread: relative half-width of the 95% interval of the median.
        count: how many.
        hopeless: given up after two.
    """

    median_us: float
    spread: float
    count: int
    hopeless: bool = False


def median_spread(samples: Sequence[float]) -> float:
    """Relative half-width of the interval in which the median lies with 95%, from order statistics.

    Distribution-free: for n samples the ranks are n/2 -+ 1.96 sqrt(n)/2; with five that is from the
    least to the largest.
    """
    ordered = sorted(samples)
    count = len(ordered)
    if count < 2:
        return math.inf
    reach = _Z95 * math.sqrt(count) / 2
    low = max(math.floor(count / 2 - reach), 0)
    high = min(math.ceil(count / 2 + reach), count - 1)
    return (ordered[high] - ordered[low]) / (2 * statistics.median(ordered))


def sample(
    graph: Graph,
    launches: int,
    *,
    give_up_us: float = 0.0,
    clear_us: float = 0.0,
    tolerance: float = 0.005,
    least: int = 5,
    most: int = 15,
) -> Sampled:
    """Sample a graph until the median is known well enough.

    Args:
        graph: what to replay; the first replay is not counted.
        launches: in it.
        give_up_us: two samples above it are enough to know that the candidate is hopeless; 0: never.
        clear_us: a few samples above it are enough to know that the candidate cannot win; 0: never.
        tolerance: spread at which no more samples are taken.
        least: samples at least.
        most: samples at most.
    """
    graph.sample_us(1)
    samples = [value / launches for value in graph.sample_us(1)]
    if give_up_us and samples[0] > give_up_us:
        # Once more: a host that was held up makes one sample long, and hardly two.
        samples += [value / launches for value in graph.sample_us(1)]
        if min(samples) > give_up_us:
            return Sampled(min(samples), median_spread(samples), 2, hopeless=True)
    samples += [value / launches for value in graph.sample_us(_FEW - len(samples))]
    if clear_us and min(samples) > clear_us:
        return Sampled(statistics.median(samples), median_spread(samples), len(samples))
    samples += [value / launches for value in graph.sample_us(max(least - _FEW, 0))]
    while (spread := median_spread(samples)) > tolerance and len(samples) < most:
        samples += [value / launches for value in graph.sample_us(min(2, most - len(samples)))]
    return Sampled(statistics.median(samples), spread, len(samples))


def interleave(
    graphs: Sequence[Graph], launches: int, rounds: int, seed: int = 0
) -> tuple[tuple[float, ...], ...]:
    """Samples of several graphs, one of each a round, in a new random order each round.

    What the clock does in the meantime it does to all of them alike, and none always follows the same
    other one: with a fixed order two runs of one graph differed by 1% on an H200.
    """
    rng = random.Random(seed)
    for graph in graphs:
        graph.sample_us(1)
    found: list[list[float]] = [[] for _ in graphs]
    for _ in range(rounds):
        for place in rng.sample(range(len(graphs)), len(graphs)):
            found[place].append(graphs[place].sample_us(1)[0] / launches)
    return tuple(tuple(samples) for samples in found)


def new_pool() -> object:
    """Memory for graphs that never run at the same time."""
    import torch

    return torch.cuda.graph_pool_handle()


def wake(seconds: float = 0.04) -> None:
    """Keep the GPU busy for a moment: it lowers its clocks where nothing runs for long."""
    import torch

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.cuda._sleep(_WAKE_CYCLES)
        torch.cuda.synchronize()


@lru_cache(maxsize=1)
def _capture_stream() -> Any:  # noqa: ANN401 - torch is imported late
    """Always the same: the allocator gives freed memory to the stream that it was freed on."""
    import torch

    return torch.cuda.Stream()


def capture(launch: Callable[[int], None], count: int, pool: object = None) -> Graph:
    """Capture launches 0 to count - 1 into a CUDA graph; `launch(0)` must have run before.

    Graphs that share a pool have their temporaries at the same addresses. With memory of their own, two
    layers of equal kernels differed by up to 3% at m = 4096 on an H200, by their place among the others.
    """
    import torch

    graph = torch.cuda.CUDAGraph()
    stream = _capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    # Not torch.cuda.graph(): that collects garbage and empties the allocator each time.
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            for number in range(count):
                launch(number)
        finally:
            graph.capture_end()
    return Gapless(lambda replays, cycles: time_runs(graph.replay, replays, cycles))


_HEAD_START_CYCLES = 200_000
"""Some 100 us that the GPU spins while the host hands a graph over. An H200's host needed over 30 us for four
of five replays of 20 launches."""
_WAKE_CYCLES = 2_000_000
_LAUNCH_CYCLES = 300_000
"""Some 150 us while the host launches a kernel without a graph."""
_MOST_TRIES = 8
"""With the head start doubled each time: 13 ms for a graph, longer than a scheduler takes a core away."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """One run of a graph or a kernel.

    Attributes:
        us: its duration.
        in_time: all was handed over while the GPU still spun, so nothing of the host is in `us`.
    """

    us: float
    in_time: bool


class Gapless:
    """A graph of which only replays count in which the GPU never waited for the host.

    A host whose core is taken away between the event that starts the clock and the graph makes a sample
    longer by milliseconds, and all the samples of a short graph may fall into one such time.

    Args:
        replay: runs the graph so many times, each after so many cycles of head start.
        cycles: the first head start; doubled where it was too short, for as long as the graph is sampled.
        uploaded: the first replay is like any other.
    """

    def __init__(
        self,
        replay: Callable[[int, int], Sequence[Replayed]],
        cycles: int = _HEAD_START_CYCLES,
        *,
        uploaded: bool = False,
    ) -> None:
        self._replay = replay
        self._cycles = cycles
        self._uploaded = uploaded

    def sample_us(self, count: int) -> list[float]:
        """See `Graph`.

        The first replay of all takes a graph to the GPU and counts as it is. Where the host is late in
        every try, the shortest of the late ones count.
        """
        kept: list[float] = []
        late: list[float] = []
        for _ in range(_MOST_TRIES):
            for replayed in self._replay(count - len(kept), self._cycles):
                (kept if replayed.in_time or not self._uploaded else late).append(replayed.us)
                self._uploaded = True
            if len(kept) >= count:
                break
            self._cycles *= 2
        return kept + sorted(late)[: count - len(kept)]


def direct_us(launch: Callable[[int], None], number: int) -> float:
    """How long a launch takes without a graph; exact to a few microseconds."""
    looked = Gapless(
        lambda count, cycles: time_runs(lambda: launch(number), count, cycles), _LAUNCH_CYCLES, uploaded=True
    )
    return looked.sample_us(1)[0]


def time_runs(run: Callable[[], object], count: int, cycles: int) -> list[Replayed]:
    """Time what a function hands over, a number of times, with no regard to whether the host was in time.

    Args:
        run: hands over to the current stream.
        count: times.
        cycles: that the GPU spins first, each time.
    """
    import torch

    runs = []
    for _ in range(count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        start.record()
        run()
        end.record()
        # What was handed over before the clock started cannot have been waited for.
        runs.append((start, end, not start.query()))
    torch.cuda.synchronize()
    return [Replayed(1000.0 * start.elapsed_time(end), in_time) for start, end, in_time in runs]
