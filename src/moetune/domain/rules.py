"""What lint says about configs and borrow repairs: pure rules on tables, launches and trees.

What differs by server comes in as values: launches with the server's clamps and overrides applied, the
directories in the order in which the server tries them, the keys that it accepts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moetune.domain.resources import lds_bytes, lds_limit_bytes
from moetune.domain.space import (
    MAYBE_SHARED_MEMORY,
    SCALE_GROUP,
    SERVER_WRONG,
    SHARED_MEMORY,
    Kind,
    violations,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from moetune.domain.config import ConfigTable, KernelConfig, Span
    from moetune.domain.gpu import Gpu
    from moetune.domain.launch import Launch
    from moetune.domain.version import Release

FAR = 2
"""An entry serves an m that is up to this factor from its key without a remark: the servers' own tuners
step by a factor of two, so that no m they cover is farther than 1.5 times from its key."""

_CODE_OF_CONSTRAINT = {
    SHARED_MEMORY.name: "MOE111",
    SCALE_GROUP.name: "MOE121",
    SERVER_WRONG.name: "MOE122",
    MAYBE_SHARED_MEMORY.name: "MOE152",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a launch.

    Attributes:
        code: `MOE111`, ...
        text: with the numbers.
    """

    code: str
    text: str

    @property
    def fatal(self) -> bool:
        """Whether an entry with this fault must not be written."""
        return self.code not in ("MOE152",)


def launch_faults(launch: Launch, gpu: Gpu, triton: Release) -> tuple[Fault, ...]:
    """Why a launch cannot run or computes wrong numbers; what merely wastes time is left out.

    Raises:
        UnknownGpuError: when the compute capability has no rule.
    """
    faults = []
    for violation in violations(launch, gpu, triton):
        constraint = violation.constraint
        if constraint is SCALE_GROUP and _has_scale_for_each_weight(launch):
            continue
        if constraint is SHARED_MEMORY and _one_copy_fits(launch, gpu):
            faults.append(Fault("MOE152", violation.text))
        elif constraint.name in _CODE_OF_CONSTRAINT:
            faults.append(Fault(_CODE_OF_CONSTRAINT[constraint.name], violation.text))
        elif constraint.kind is not Kind.NOT_WORTH_TRYING:
            faults.append(Fault("MOE112", violation.text))
    return tuple(faults)


def _one_copy_fits(launch: Launch, gpu: Gpu) -> bool:
    """Whether an AMD launch of two stages fits if Triton keeps one of them in registers.

    222 entries of files that ship for AMD GPUs (sglang 0.5.23, vllm 0.33.0) have two stages that do not
    fit side by side and one that does; they were timed there, so that "cannot run" would be wrong.
    """
    if gpu.gfx is None or launch.config.num_stages > _STAGES_OF_PUBLISHED:
        return False
    limit = gpu.smem_optin_bytes or lds_limit_bytes(gpu.gfx)
    return limit is not None and lds_bytes(launch) // max(launch.config.num_stages, 1) <= limit


_STAGES_OF_PUBLISHED = 2


def _has_scale_for_each_weight(launch: Launch) -> bool:
    """The grouped int4/int8 kernel indexes the scale of every weight, whatever BLOCK_SIZE_K is.

    Source: `fused_moe_kernel_gptq_awq` of the sglang 0.5.23 and vllm 0.33.0 wheels.
    """
    return launch.b_bits < launch.a_bits


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some m, `first` to `last`, that are served by the entry of a key far from them."""

    first: int
    last: int
    key: int

    def __str__(self) -> str:
        ms = f"m = {self.first}" if self.first == self.last else f"m = {self.first} to {self.last}"
        return f"{ms} with the entry of {self.key}"


def uncovered(table: ConfigTable, last: int) -> tuple[Stretch, ...]:
    """The m from 1 to `last` that are more than `FAR` times from the key that serves them."""
    found = []
    for span in table.spans(last):
        below = -(-span.key // FAR) - 1  # the last m that is too far below
        if span.first <= below:
            found.append(Stretch(span.first, min(below, span.last), span.key))
        above = max(FAR * span.key + 1, span.first)
        if above <= span.last:
            found.append(Stretch(above, span.last, span.key))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Some m at which a server pairs one up entry with one down entry."""

    first: int
    last: int
    up_key: int
    down_key: int


def meetings(up: ConfigTable, down: ConfigTable, last: int) -> tuple[Meeting, ...]:
    """Which entries of a pair of tables meet, over all m from 1 to `last`."""
    if not up.entries or not down.entries:
        return ()
    found = []
    of_down = iter(down.spans(last))
    there: Span | None = next(of_down, None)
    for here in up.spans(last):
        while there is not None and there.first <= here.last:
            first, end = max(here.first, there.first), min(here.last, there.last)
            found.append(Meeting(first, end, here.key, there.key))
            if there.last > here.last:
                break
            there = next(of_down, None)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Found:
    """Where a server finds a name.

    Attributes:
        directory: the one whose file it reads; None: none that it tries has it.
        exact: that directory is the running Triton's own.
        behind: further directories that hold the name, in the order in which they would be tried.
    """

    directory: str | None
    exact: bool
    behind: tuple[str, ...] = ()


def find(name: str, directories: Mapping[str, Iterable[str]], order: tuple[str, ...]) -> Found:
    """Find a name as a server does.

    Args:
        name: of the file.
        directories: directory name to the names in it.
        order: directories in the order in which the server tries them, the running Triton's first.
    """
    holding = tuple(directory for directory in order if name in directories.get(directory, ()))
    if not holding:
        return Found(None, False)
    return Found(holding[0], holding[0] == order[0], holding[1:])


_STEPS: tuple[Callable[[KernelConfig], KernelConfig], ...] = (
    lambda config: replace(config, num_stages=config.num_stages - 1),
    lambda config: replace(config, block_size_k=config.block_size_k // 2),
    lambda config: replace(config, block_size_n=config.block_size_n // 2),
    lambda config: replace(config, block_size_m=config.block_size_m // 2),
    lambda config: replace(config, num_warps=config.num_warps * 2),
    lambda config: replace(config, num_warps=config.num_warps // 2),
)
_LEAST_BLOCK, _MOST_WARPS, _FARTHEST = 16, 32, 12


def nearest_runnable(
    config: KernelConfig,
    runs: Callable[[KernelConfig], bool],
    *,
    keep_block_m: bool = False,
    further: int = 1,
) -> tuple[KernelConfig, ...]:
    """The configs that run and lie nearest to one that does not.

    A step is one pipeline stage less, half a block size, or another number of warps: what makes a
    launch ask for less. GROUP_SIZE_M costs nothing and stays.

    Args:
        config: what cannot run.
        runs: whether a config runs and computes the right numbers.
        keep_block_m: BLOCK_SIZE_M is given by the other kernel.
        further: steps beyond the nearest that are still taken in, so that there is a choice.

    Returns:
        Nearest first; empty when none within a dozen steps runs.
    """
    reached = {config}
    front = [config]
    found: list[KernelConfig] = []
    left = _FARTHEST
    while front and left >= 0:
        ring = []
        for start in front:
            for step in _STEPS:
                new = step(start)
                if new in reached or not _sensible(new, config, keep_block_m):
                    continue
                reached.add(new)
                ring.append(new)
        runnable = sorted((new for new in ring if runs(new)), key=lambda new: _loss(new, config))
        if runnable and not found:
            left = further
        found += runnable
        front = ring
        left -= 1
    return tuple(found)


def _loss(new: KernelConfig, old: KernelConfig) -> tuple[object, ...]:
    """Of two equally near configs the one with the larger tile first."""
    tile = new.block_size_m * new.block_size_n
    return (-tile, -new.block_size_k, -new.num_stages, abs(new.num_warps - old.num_warps), new.sort_key())


def _sensible(new: KernelConfig, old: KernelConfig, keep_block_m: bool) -> bool:
    blocks = (new.block_size_m, new.block_size_n, new.block_size_k)
    return (
        min(blocks) >= _LEAST_BLOCK
        and new.num_stages >= 1
        and 1 <= new.num_warps <= _MOST_WARPS
        and (not keep_block_m or new.block_size_m == old.block_size_m)
    )
