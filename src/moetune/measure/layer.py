"""The GPU as a backend of the measuring process: launches on the data of one problem, the whole layer."""

from __future__ import annotations

import math
import random
import sys
import time
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

import torch
import triton

from moetune.domain.kernel_format import kernel_format
from moetune.domain.problem import KERNELS
from moetune.measure import timing
from moetune.measure.alignment import ELSEWHERE, Alignment, align, each_alone, padded_length
from moetune.measure.between import HELPERS
from moetune.measure.data import Data
from moetune.measure.protocol import (
    Checked,
    CheckTask,
    DeviceFacts,
    LayerTask,
    LayerTimed,
    Opened,
    Peaks,
    PeakTask,
    Timed,
    TimeTask,
    Workload,
)
from moetune.measure.recorded_routing import Routings
from moetune.measure.reference import relative_error
from moetune.measure.server_kernel import covered_length, longest_covered
from moetune.measure.tolerance import tolerance_of
from moetune.measure.worker import ConfigError, SetupError
from moetune.measure.workload import (
    MAX_COPIES,
    Circle,
    ample_copies,
    expert_bytes,
    least_launches,
    needed_bytes,
    plan_circle,
    relabelled,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moetune.domain.compilation import CompileTask
    from moetune.domain.problem import Kernel, Problem
    from moetune.domain.server_kernel import KernelFile

_FREE_SHARE = 0.95
_TRIED_ROUTINGS = 16
_DIVISOR = 16  # on which Triton specialises integers
_NOT_WRITTEN = 1e30
_LEAST_US = 0.1
_LONG_US = 50.0
"""A launch beside which what the host takes to launch the next one is hidden."""
_IDLE_SECONDS = 0.1
_LOOKS = 2
"""Launches that show whether a candidate is hopeless."""
_PEAK_BYTES = 4 << 30  # three matrices, two buffers of half a GiB, and as much again


@dataclass(frozen=True, slots=True)
class Routed:
    """The routings of one circle, and which copy of the weights each launch uses."""

    experts: tuple[torch.Tensor, ...]
    circle: Circle


class Compilations:
    """Counts the kernels that this process compiles instead of finding them in the cache.

    What stands between the grouped GEMMs belongs to no config and is compiled where it is needed.
    """

    def __init__(self) -> None:
        self.count = 0
        triton.knobs.compilation.listener = self._heard

    def _heard(self, *, cache_hit: bool, metadata: Mapping[str, object], **_: object) -> None:
        self.count += not cache_hit and metadata["name"] not in HELPERS


def padded_length_like(slots: int, experts: int, task: CompileTask) -> int:
    """A padded length of the divisibility that the binary was specialised on."""
    config = task.launch.config
    if task.padded_length_divisible:
        return padded_length(slots, experts, config.block_size_m, _DIVISOR)
    length = padded_length(slots, experts, config.block_size_m, 4)
    return length + 4 if length % _DIVISOR == 0 else length


def aligned_for(task: CompileTask, problem: Problem, experts: torch.Tensor) -> Alignment:
    """The slots of a routing as a binary wants them: sorted, or each alone."""
    size, slots = task.launch.config.block_size_m, experts.numel()
    if task.slots_alone:
        return each_alone(experts, size)
    length = padded_length_like(slots, problem.E, task)
    if task.kernel_file is not None:
        length = max(length, longest_covered(task, problem, slots // problem.topk))
    return align(experts, problem.E, size, length=length)


def check_class(task: CompileTask, problem: Problem, m: int) -> None:
    """Refuse a binary that m would not launch: it would be compiled here, and the time would be another's.

    Raises:
        ConfigError: naming what does not fit.
    """
    slots = m * problem.topk
    if task.num_slots_divisible != (slots % 16 == 0) or task.num_slots_is_one != (slots == 1):
        raise ConfigError(f"the binary is for another divisibility than that of {slots} slots")
    if task.kernel_file is None:
        return
    covered = covered_length(task, problem, m)
    if task.padded_length_divisible != (covered % _DIVISOR == 0):
        raise ConfigError(f"the binary is for another divisibility than that of {covered} padded rows")


class GpuBackend:
    """The GPU that CUDA shows first. See `worker.Backend`."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise SetupError("torch finds no CUDA GPU in this environment")
        torch.backends.cuda.matmul.allow_tf32 = False
        self._device = torch.device("cuda", 0)
        self._properties = torch.cuda.get_device_properties(self._device)
        self._compilations = Compilations()
        self._data: Data | None = None
        self._workload: Workload | None = None
        self._routed: dict[tuple[Kernel, int, str, int], Routed] = {}
        self._aligned: dict[tuple[Kernel, int, int, KernelFile | bool, bool], list[Alignment]] = {}
        self._tick: torch.Tensor | None = None
        self._between_us: dict[int, float] = {}
        self._busy_until = 0.0

    def facts(self) -> DeviceFacts:
        """See `Backend`."""
        free, total = torch.cuda.mem_get_info(self._device)
        found = self._properties
        return DeviceFacts(
            name=found.name,
            uuid=sys.argv[1] if len(sys.argv) > 1 else "",
            compute_capability=f"{found.major}.{found.minor}",
            sm_count=found.multi_processor_count,
            l2_bytes=found.L2_cache_size,
            memory_total_bytes=total,
            memory_free_bytes=free,
            torch=torch.__version__,
            triton=triton.__version__,
        )

    def healthy(self) -> bool:
        """See `Backend`."""
        try:
            torch.cuda.synchronize()
            return int(torch.ones(1, device=self._device).sum()) == 1
        except RuntimeError:
            return False

    def open(self, workload: Workload) -> Opened:
        """See `Backend`."""
        problem = workload.problem
        self._data, self._workload, self._routings = None, workload, Routings.of(workload)
        self._routed.clear()
        self._aligned.clear()
        torch.cuda.empty_cache()
        copies: dict[Kernel, int] = {
            kernel: max(self._circle(kernel, m, problem.routing, workload.seed).copies for m in workload.ms)
            for kernel in KERNELS
        }
        # For what lies between these m, where there is room.
        ample: dict[Kernel, int] = {
            kernel: max(
                copies[kernel],
                ample_copies(problem.E, expert_bytes(problem, kernel), self._properties.L2_cache_size),
            )
            for kernel in KERNELS
        }
        free, _ = torch.cuda.mem_get_info(self._device)
        largest = max(workload.ms)
        if needed_bytes(problem, largest, ample["up"], ample["down"]) <= free * _FREE_SHARE:
            copies = ample
        needed = needed_bytes(problem, largest, copies["up"], copies["down"])
        if needed > free * _FREE_SHARE:
            raise MemoryError(f"the problem needs {needed >> 20:,} MiB, the GPU has {free >> 20:,} MiB free")
        kind = kernel_format(problem)
        if isinstance(kind, str):
            raise SetupError(kind)
        self._data = Data(problem, largest, copies, kind, self._device, workload.seed)
        torch.cuda.synchronize()
        return Opened(torch.cuda.memory_allocated(self._device), copies["up"], copies["down"])

    def time(self, task: TimeTask) -> Timed:
        """See `Backend`."""
        launch, circle = self.launcher(task.task, task.m)
        count = len(circle.experts)
        between_us = self.between_us(count)
        launch(0)
        torch.cuda.synchronize()
        self._stay_awake()
        give_up_us = task.give_up_us and task.give_up_us + between_us
        found = self._looked_at(launch, count, give_up_us) or timing.sample(
            timing.capture(launch, count),
            count,
            give_up_us=give_up_us,
            clear_us=task.clear_us and task.clear_us + between_us,
            tolerance=task.tolerance,
            least=task.least_samples,
            most=task.most_samples,
        )
        self._busy_until = time.monotonic()
        return Timed(
            time_us=max(found.median_us - between_us, _LEAST_US),
            between_us=between_us,
            spread=found.spread,
            samples=found.count,
            launches=count,
            copies=circle.copies,
            reuse_bytes=circle.reuse_bytes,
            l2_bytes=self._properties.L2_cache_size,
            hopeless=found.hopeless,
            compilations=self._compilations.count,
        )

    def _stay_awake(self) -> None:
        """Wake the GPU when nothing was timed for a while."""
        if time.monotonic() - self._busy_until > _IDLE_SECONDS:
            timing.wake()

    @property
    def compilations(self) -> int:
        """Kernels that this process compiled itself."""
        return self._compilations.count

    def use_seed(self, seed: int) -> None:
        """Launch on other routings from now on."""
        assert self._workload is not None
        self._workload = replace(self._workload, seed=seed)
        self._aligned.clear()

    def launcher(self, task: CompileTask, m: int) -> tuple[Callable[[int], None], Circle]:
        """What launches a binary by its number in the circle, a small kernel behind it; and the circle."""
        data = self._opened()
        check_class(task, data.problem, m)
        routed = self._routing(task.launch.kernel, m)
        alignments = self._alignments(task, m, routed)

        def launch(number: int) -> None:
            data.clear(task, m, alignments[number])
            data.launch(task, m, alignments[number], number % routed.circle.copies)
            self._separator().add_(1)

        return launch, routed.circle

    @staticmethod
    def _looked_at(launch: Callable[[int], None], count: int, give_up_us: float) -> timing.Sampled | None:
        """What is hopeless and long shows it without a graph; None for what has to be sampled."""
        if give_up_us < _LONG_US:
            return None
        seen = []
        for number in range(1, 1 + _LOOKS):
            seen.append(timing.direct_us(launch, number % count))
            if seen[-1] <= give_up_us:
                return None
        return timing.Sampled(min(seen), 0.0, len(seen), hopeless=True)

    def layer(self, task: LayerTask) -> LayerTimed:
        """See `Backend`."""
        data = self._opened()
        circle = self._layer_circle(data, task)
        routed = self._fresh(circle, task.m, task.routing, task.seed)
        source = torch.empty(task.m, data.problem.K, dtype=data.output, device=self._device)
        source.normal_(0.0, 0.5)
        # The same memory for all: nothing but their kernels tells them apart.
        graphs, pool = [], timing.new_pool()
        for pair in task.pairs:
            launch = self._layer_launch(data, pair.up, pair.down, task.m, routed, source)
            launch(0)
            torch.cuda.synchronize()
            graphs.append(timing.capture(launch, len(routed.experts), pool))
        self._stay_awake()
        samples = timing.interleave(graphs, len(routed.experts), task.rounds, task.seed)
        self._busy_until = time.monotonic()
        del graphs
        torch.cuda.empty_cache()
        return LayerTimed(samples, circle.reuse_bytes, self._compilations.count)

    def check(self, task: CheckTask) -> Checked:
        """See `Backend`."""
        data, binary = self._opened(), task.task
        check_class(binary, data.problem, task.m)
        generator = torch.Generator(device=self._device).manual_seed(task.seed)
        experts = self._routings.draw(task.m, data.problem.routing, generator)
        alignment = self._align(binary, experts)
        data.output_rows(binary, task.m, alignment).fill_(float("nan"))
        data.clear(binary, task.m, alignment)
        out = data.launch(binary, task.m, alignment, 0)
        torch.cuda.synchronize()
        expected = data.reference(binary, task.m, experts, alignment)
        error = relative_error(data.by_slot(binary, out, alignment, experts), expected)
        # What was not written is NaN still; JSON has neither that nor infinity.
        return Checked(error if math.isfinite(error) else _NOT_WRITTEN, tolerance_of(binary))

    def peaks(self, task: PeakTask) -> Peaks:
        """See `Backend`."""
        free, _ = torch.cuda.mem_get_info(self._device)
        if free < _PEAK_BYTES:
            raise SetupError("no room to measure the GPU's rates")
        generator = torch.Generator(device=self._device).manual_seed(task.seed)
        size = 8192
        a, b = (
            torch.empty(size, size, dtype=torch.bfloat16, device=self._device).normal_(generator=generator)
            for _ in range(2)
        )
        out = torch.empty_like(a)
        self._stay_awake()
        product = timing.sample(self._captured(lambda _: torch.mm(a, b, out=out)), 1, most=9)
        source = torch.empty(1 << 28, device=self._device).normal_(generator=generator)
        target, least = torch.empty_like(source), torch.empty((), device=self._device)
        # Not copy_(): in a graph that is done by a copy engine, at two thirds of the rate.
        moved = {
            2: timing.sample(self._captured(lambda _: torch.add(source, 1.0, out=target)), 1, most=9),
            1: timing.sample(self._captured(lambda _: torch.amin(source, dim=(), out=least)), 1, most=9),
        }
        return Peaks(
            tflops=2 * size**3 / product.median_us / 1e6,
            gbps=max(times * source.nbytes / found.median_us / 1e3 for times, found in moved.items()),
        )

    def _separator(self) -> torch.Tensor:
        """What a tiny kernel between two launches works on.

        With programmatic dependent launch the programs of a kernel move in while the one before still
        runs. Behind another launch of the same kernel they find room on the multiprocessors that were
        done first, all in one place, and some configs were 30% slower for it (H200, m up to 16). In a
        server no grouped GEMM follows another: a small kernel stands between, and so it does here.
        """
        if self._tick is None:
            self._tick = torch.zeros(1, dtype=torch.int32, device=self._device)
        return self._tick

    def between_us(self, count: int) -> float:
        """What a small kernel between two launches takes in a graph of nothing else; it is taken off."""

        def separate(_: int) -> None:
            self._separator().add_(1)

        if count not in self._between_us:
            separate(0)
            torch.cuda.synchronize()
            found = timing.sample(timing.capture(separate, count), count, most=9)
            self._between_us[count] = found.median_us
        return self._between_us[count]

    def _captured(self, launch: Callable[[int], object]) -> timing.Graph:
        launch(0)
        torch.cuda.synchronize()
        return timing.capture(lambda number: (launch(number), None)[1], 1)

    def _opened(self) -> Data:
        if self._data is None:
            raise SetupError("no problem is open")
        return self._data

    def _layer_circle(self, data: Data, task: LayerTask) -> Circle:
        """Both kernels touch their weights in each pass, and rotate their copies together."""
        touched = sum(expert_bytes(data.problem, kernel) for kernel in KERNELS)
        copies = min(len(data.weights[kernel]) for kernel in KERNELS)
        counts = self._counts(task.m, task.routing, task.seed)
        return plan_circle(
            counts,
            data.problem.E,
            touched,
            self._properties.L2_cache_size,
            # A pass through the layer is longer than a launch.
            max(least_launches(task.m, touched * fmean(counts)) // 2, 4),
            copies,
        )

    def _circle(self, kernel: Kernel, m: int, routing: str, seed: int) -> Circle:
        """How many experts launches touch is drawn; which, is planned."""
        assert self._workload is not None
        problem = self._workload.problem
        counts, each = self._counts(m, routing, seed), expert_bytes(problem, kernel)
        return plan_circle(
            counts,
            problem.E,
            each,
            self._properties.L2_cache_size,
            least_launches(m, each * fmean(counts)),
            MAX_COPIES if self._data is None else len(self._data.weights[kernel]),
        )

    def _counts(self, m: int, routing: str, seed: int) -> list[int]:
        """How many different experts some routings touch."""
        assert self._workload is not None
        generator = torch.Generator(device=self._device).manual_seed(seed * 1_000_003 + m)
        counts = []
        # At large m every routing touches all experts: a few tell as much as many.
        for _ in range(_TRIED_ROUTINGS if m <= 512 else 4):
            ids = self._routings.draw(m, routing, generator)
            counts.append(len(torch.unique(ids[ids != ELSEWHERE])))
        return counts

    def _routing(self, kernel: Kernel, m: int) -> Routed:
        assert self._workload is not None
        routing, seed = self._workload.problem.routing, self._workload.seed
        key = (kernel, m, routing, seed)
        if key not in self._routed:
            circle = self._circle(kernel, m, routing, seed)
            self._routed[key] = self._fresh(circle, m, routing, seed)
        return self._routed[key]

    def _fresh(self, circle: Circle, m: int, routing: str, seed: int) -> Routed:
        """New routings, their experts renamed to those that the circle names."""
        assert self._workload is not None
        problem = self._workload.problem
        generator = torch.Generator(device=self._device).manual_seed(seed * 7_368_787 + m + 1)
        rng = random.Random(seed * 31 + m)
        found = []
        for targets in circle.experts:
            ids = self._routings.draw(m, routing, generator)
            distinct = torch.unique(ids[ids != ELSEWHERE]).tolist()
            # This draw may touch other numbers of experts than the one that was planned with.
            wanted = list(targets[: len(distinct)])
            spare = [expert for expert in range(problem.E) if expert not in set(wanted)]
            wanted += spare[: len(distinct) - len(wanted)]
            table = torch.full((problem.E + 1,), ELSEWHERE, dtype=torch.int64)
            for old, new in relabelled(distinct, wanted, rng).items():
                table[old] = new
            found.append(table.to(self._device)[ids])
        return Routed(tuple(found), circle)

    def _alignments(self, task: CompileTask, m: int, routed: Routed) -> list[Alignment]:
        config = task.launch.config
        # The server's launches say themselves how much of the sorted ids they cover.
        length = task.kernel_file or task.padded_length_divisible
        key = (task.launch.kernel, m, config.block_size_m, length, task.slots_alone)
        if key not in self._aligned:
            self._aligned[key] = [self._align(task, experts) for experts in routed.experts]
        return self._aligned[key]

    def _align(self, task: CompileTask, experts: torch.Tensor) -> Alignment:
        return aligned_for(task, self._opened().problem, experts)

    def _layer_launch(
        self, data: Data, up: CompileTask, down: CompileTask, m: int, routed: Routed, source: torch.Tensor
    ) -> Callable[[int], None]:
        check_class(up, data.problem, m)
        check_class(down, data.problem, m)
        slots = m * data.problem.topk

        def launch(number: int) -> None:
            alignment = self._align(up, routed.experts[number])
            data.launch(up, m, alignment, number % routed.circle.copies, data.quantized(source))
            narrow, only = data.between(down, m, alignment)
            data.clear(down, m, alignment)
            data.launch(down, m, alignment, number, data.quantized(narrow, only))
            if not down.launch.sum_topk:
                data.outputs["down"][:slots].view(m, data.problem.topk, -1).sum(1)

        return launch
