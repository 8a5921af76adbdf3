"""The configs worth looking at, and the named constraints that say why a config is out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from typing import TYPE_CHECKING

from moetune.domain import resources
from moetune.domain.compiler_failures import compiler_failures
from moetune.domain.config import KernelConfig
from moetune.domain.quantization import Dtype
from moetune.domain.resources import DotPath

if TYPE_CHECKING:
    from moetune.domain.gpu import Gpu
    from moetune.domain.launch import Launch
    from moetune.domain.version import Release


@dataclass(frozen=True, slots=True)
class Axes:
    """Values of each key of a config; the grid is all their combinations."""

    block_size_m: tuple[int, ...]
    block_size_n: tuple[int, ...]
    block_size_k: tuple[int, ...]
    group_size_m: tuple[int, ...]
    num_warps: tuple[int, ...]
    num_stages: tuple[int, ...]

    def grid(self) -> Iterator[KernelConfig]:
        """All combinations, the last axis fastest."""
        axes = (
            self.block_size_m,
            self.block_size_n,
            self.block_size_k,
            self.group_size_m,
            self.num_warps,
            self.num_stages,
        )
        return (KernelConfig(*values) for values in product(*axes))


SGLANG_AXES = Axes(
    block_size_m=(16, 32, 64, 128, 256),
    block_size_n=(32, 64, 128, 256),
    block_size_k=(64, 128, 256),
    group_size_m=(1, 16, 32, 64),
    num_warps=(4, 8),
    num_stages=(2, 3, 4, 5),
)
"""What SGLang's tuner tries on NVIDIA (benchmark/kernels/fused_moe_triton/common_utils.py:
get_configs_compute_bound): 1,920 configs."""

WIDER_AXES = Axes(
    block_size_m=SGLANG_AXES.block_size_m,
    block_size_n=SGLANG_AXES.block_size_n,
    block_size_k=SGLANG_AXES.block_size_k,
    group_size_m=(1, 2, 4, 8, 16, 32, 64),
    num_warps=(2, 4, 8),
    num_stages=(2, 3, 4, 5, 6),
)
"""SGLang's axes and the values outside them that beat the grid's best in the recorded wider space
(Qwen3.5-35B-A3B up kernel, bf16, H200): GROUP_SIZE_M 2 and 4 at m = 2, 256 and 1024 (up to 1.2%),
num_warps 2 at m = 2, num_stages 6 at m = 256. GROUP_SIZE_M 8 was the best of that space at m = 4096.
Not worth it there: BLOCK_SIZE_N 16 (0.1% off at best) and 512 (1.5%), BLOCK_SIZE_K 32 (10%), num_warps 16
(0.9%), num_stages 7 (within the noise of 6) and 8."""

SMALL_SHARED_MEMORY_AXES = Axes(
    block_size_m=WIDER_AXES.block_size_m,
    block_size_n=WIDER_AXES.block_size_n,
    block_size_k=(32, *WIDER_AXES.block_size_k),
    group_size_m=WIDER_AXES.group_size_m,
    num_warps=WIDER_AXES.num_warps,
    num_stages=WIDER_AXES.num_stages,
)
"""With BLOCK_SIZE_K 32 for GPUs whose blocks have less than half of the H200's shared memory, where a large
tile leaves no stages otherwise: 13 of the 92 bf16 entries that ship for sm_120 in the sglang 0.5.23 and vllm
0.33.0 wheels use it."""

UNMEASURED_AXES = replace(
    WIDER_AXES, group_size_m=(1, 8, 16, 32, 64), num_warps=(4, 8), num_stages=(2, 3, 4, 5)
)
"""What published tuned files of every GPU family hold (sglang 0.5.23 and vllm 0.33.0 wheels; GROUP_SIZE_M 8
is the servers' default): where nothing was measured, a prediction for any other value would rest on one GPU
of another architecture."""

_SMALL_SHARED_MEMORY_BYTES = 128 * 1024


def sglang_grid() -> Iterator[KernelConfig]:
    """SGLang's grid of 1,920 configs."""
    return SGLANG_AXES.grid()


def search_axes(gpu: Gpu, *, measured: bool = True) -> Axes:
    """The axes worth searching on a GPU: SGLang's and what measurements or published files add.

    Args:
        gpu: the GPU.
        measured: whether anything was, or can be, measured on such a GPU.
    """
    limit = _smem_limit_bytes(gpu)
    axes = WIDER_AXES if measured else UNMEASURED_AXES
    small = limit is not None and limit < _SMALL_SHARED_MEMORY_BYTES
    return replace(axes, block_size_k=SMALL_SHARED_MEMORY_AXES.block_size_k) if small else axes


class Kind(str, Enum):
    """What breaks when a constraint is violated."""

    CANNOT_RUN = "cannot run"
    WRONG_NUMBERS = "wrong numbers"
    NOT_WORTH_TRYING = "not worth trying"


@dataclass(frozen=True, slots=True)
class Constraint:
    """A named reason for which a config is out.

    Attributes:
        name: short, stable, in the plural of reports.
        kind: what breaks.
        reason: the hardware or compiler rule behind it.
    """

    name: str
    kind: Kind
    reason: str


@dataclass(frozen=True, slots=True)
class Violation:
    """A constraint that a launch violates, with the numbers.

    Attributes:
        text: what is wrong with this launch, in one sentence.
    """

    constraint: Constraint
    text: str


@dataclass(frozen=True, slots=True)
class _Target:
    gpu: Gpu
    compute_capability: tuple[int, int] | None
    triton: Release


def violations(launch: Launch, gpu: Gpu, triton: Release) -> tuple[Violation, ...]:
    """All constraints that a launch violates, those that keep it from running first.

    Args:
        launch: with the server's clamps and overrides applied.
        gpu: what it runs on.
        triton: release of Triton that compiles it.

    Raises:
        UnknownGpuError: when the compute capability has no rule.
    """
    target = _Target(gpu, gpu.compute_capability, triton)
    shape = _violations(_SHAPE_CHECKS, launch, target)
    # A tile that Triton refuses has no size in shared memory.
    return shape or _violations(_CHECKS, launch, target)


def can_run(launch: Launch, gpu: Gpu, triton: Release) -> bool:
    """Whether a launch compiles, fits and computes the right numbers."""
    found = violations(launch, gpu, triton)
    return all(violation.constraint.kind is Kind.NOT_WORTH_TRYING for violation in found)


def worth_trying(launch: Launch, gpu: Gpu, triton: Release) -> bool:
    """Whether a launch violates nothing."""
    return not violations(launch, gpu, triton)


def dtype_violation(dtype: Dtype, gpu: Gpu) -> Violation | None:
    """Why no config at all runs for a type of weights on a GPU; None when there is no such reason."""
    if dtype is Dtype.FP8_W8A8 and gpu.compute_capability and gpu.compute_capability < (8, 9):
        return Violation(
            FP8_DOT, f"{gpu.sm} has no fp8 tensor cores, and Triton refuses an fp8 e4m3 dot there"
        )
    return None


def _violations(checks: tuple[_Check, ...], launch: Launch, target: _Target) -> tuple[Violation, ...]:
    found = ((constraint, check(launch, target)) for constraint, check in checks)
    return tuple(Violation(constraint, text) for constraint, text in found if text is not None)


def _smem_limit_bytes(gpu: Gpu) -> int | None:
    if gpu.smem_optin_bytes is not None:
        return gpu.smem_optin_bytes
    if gpu.compute_capability is not None:
        return resources.smem_limit_bytes(gpu.compute_capability)
    return resources.lds_limit_bytes(gpu.gfx) if gpu.gfx else None


_MAX_TENSOR_ELEMENTS = 1_048_576
_MIN_DOT_K = {16: 16, 8: 32}
_MIN_DOT_SIDE = 16
_PADDED_DOT: Release = (3, 5)
"""The release from which Triton pads the other two sides of a dot."""


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _tile_is_odd(launch: Launch, _: _Target) -> str | None:
    config = launch.config
    sizes = {
        "BLOCK_SIZE_M": config.block_size_m,
        "BLOCK_SIZE_N": config.block_size_n,
        "BLOCK_SIZE_K": config.block_size_k,
        "num_warps": config.num_warps,
    }
    odd = [f"{name} {value}" for name, value in sizes.items() if not _is_power_of_two(value)]
    return f"{' and '.join(odd)} is no power of two" if odd else None


def _count_is_not_positive(launch: Launch, _: _Target) -> str | None:
    counts = {"GROUP_SIZE_M": launch.config.group_size_m, "num_stages": launch.config.num_stages}
    bad = [f"{name} {value}" for name, value in counts.items() if value < 1]
    return f"{' and '.join(bad)} is less than 1" if bad else None


def _tile_is_flat(launch: Launch, target: _Target) -> str | None:
    config, bits = launch.config, launch.a_bits
    least = _MIN_DOT_K.get(bits, 16)
    if config.block_size_k < least:
        return f"BLOCK_SIZE_K {config.block_size_k} is under the {least} of a {bits}-bit dot"
    sides = {"BLOCK_SIZE_M": config.block_size_m, "BLOCK_SIZE_N": config.block_size_n}
    if target.triton < _PADDED_DOT:
        for name, size in sides.items():
            if size < _MIN_DOT_SIDE:
                return f"{name} {size} is under the {_MIN_DOT_SIDE} of a dot before Triton 3.5"
    return None


def _tile_is_huge(launch: Launch, _: _Target) -> str | None:
    config = launch.config
    m, n, k = config.block_size_m, config.block_size_n, config.block_size_k
    largest = max(m * n, m * k, n * k)
    if largest <= _MAX_TENSOR_ELEMENTS:
        return None
    return f"a tile of {largest:,} elements, Triton's limit is {_MAX_TENSOR_ELEMENTS:,}"


def _too_many_threads(launch: Launch, target: _Target) -> str | None:
    if target.compute_capability is None:
        return None
    threads = resources.WARP * launch.config.num_warps
    if threads <= resources.MAX_THREADS:
        return None
    return f"{launch.config.num_warps} warps are {threads} threads, a block can have {resources.MAX_THREADS}"


def _shared_memory(launch: Launch, target: _Target, *, exact: bool) -> str | None:
    limit = _smem_limit_bytes(target.gpu)
    on_nvidia = target.compute_capability is not None
    known = (
        resources.shared_memory_is_exact(launch, target.compute_capability)
        if on_nvidia
        else launch.a_bits == launch.b_bits
    )
    if limit is None or known is not exact:
        return None
    if target.compute_capability is not None:
        needed, memory = resources.shared_memory_bytes(launch, target.compute_capability), "shared memory"
    else:
        needed, memory = resources.lds_bytes(launch), "LDS"
    if needed <= limit:
        return None
    verb = "needs" if exact else "may need up to"
    return f"{verb} {needed:,} bytes of {memory}, a block on {target.gpu.torch_name} can have {limit:,}"


def _over_shared_memory(launch: Launch, target: _Target) -> str | None:
    return _shared_memory(launch, target, exact=True)


def _maybe_over_shared_memory(launch: Launch, target: _Target) -> str | None:
    return _shared_memory(launch, target, exact=False)


def _over_tensor_memory(launch: Launch, target: _Target) -> str | None:
    if target.compute_capability is None:
        return None
    if resources.dot_path(launch, target.compute_capability) is not DotPath.TCGEN05:
        return None
    accumulators = launch.config.block_size_m * launch.config.block_size_n
    limit = resources.TENSOR_MEMORY_ACCUMULATORS
    if accumulators <= limit:
        return None
    return f"{accumulators:,} accumulators, the tensor memory of a multiprocessor holds {limit:,}"


def _wgmma_short_of_registers(launch: Launch, target: _Target) -> str | None:
    if target.compute_capability is None:
        return None
    if resources.dot_path(launch, target.compute_capability) is not DotPath.WGMMA:
        return None
    needed, limit = resources.wgmma_registers(launch), resources.register_limit(launch)
    if needed <= limit:
        return None
    return f"one wgmma needs {needed} registers, with {launch.config.num_warps} warps a thread has {limit}"


def _compiler_fails(launch: Launch, target: _Target) -> str | None:
    if target.compute_capability is None:
        return None
    for failure in compiler_failures():
        if failure.affects(launch, target.compute_capability, target.triton):
            return failure.text
    return None


def _scale_group_cut(launch: Launch, _: _Target) -> str | None:
    block_k, size = launch.block_k, launch.config.block_size_k
    if not block_k or block_k % size == 0:
        return None
    return (
        f"BLOCK_SIZE_K {size} does not divide the quantization group of {block_k}: "
        "one scale is applied to a whole tile"
    )


def _server_is_wrong(launch: Launch, _: _Target) -> str | None:
    return launch.wrong_numbers or None


def _registers_short(launch: Launch, target: _Target) -> str | None:
    if target.compute_capability is None:
        return None
    path = resources.dot_path(launch, target.compute_capability)
    if path is DotPath.TCGEN05 and not launch.block_k:
        return None  # they lie in tensor memory
    accumulators = resources.accumulators_per_thread(launch)
    if accumulators <= resources.MAX_REGISTERS:
        return None
    return f"{accumulators} accumulators a thread, which has {resources.MAX_REGISTERS} registers: they spill"


_MMA_TILE = 16 * 8


def _warps_idle(launch: Launch, target: _Target) -> str | None:
    if target.compute_capability is None:
        return None
    config = launch.config
    tiles = config.block_size_m * config.block_size_n // _MMA_TILE
    if tiles >= config.num_warps:
        return None
    return f"{tiles} tensor-core tiles of 16x8 for {config.num_warps} warps: the others repeat the work"


_Check = tuple[Constraint, Callable[["Launch", _Target], "str | None"]]

POWER_OF_TWO = Constraint(
    "sizes that are no power of two",
    Kind.CANNOT_RUN,
    "tl.arange and num_warps take powers of two only (triton 3.6.0: language/semantic.py:arange, "
    "backends/nvidia/compiler.py:CUDAOptions)",
)
POSITIVE = Constraint(
    "counts under 1", Kind.CANNOT_RUN, "the kernel divides by GROUP_SIZE_M, and a pipeline has a stage"
)
DOT_SIZE = Constraint(
    "tiles too small for a dot",
    Kind.CANNOT_RUN,
    "K of a dot is 16 at least, 32 with 8-bit operands, and before Triton 3.5 the other sides are 16 at "
    "least (triton 3.4.0, 3.5.1, 3.6.0: backends/nvidia/compiler.py:min_dot_size)",
)
TENSOR_SIZE = Constraint(
    "tiles too large for Triton",
    Kind.CANNOT_RUN,
    "a Triton tensor has 1,048,576 elements at most (triton 3.6.0: _utils.py:TRITON_MAX_TENSOR_NUMEL)",
)
THREADS = Constraint(
    "more threads than a block can have", Kind.CANNOT_RUN, "a block has 1,024 threads at most on NVIDIA"
)
SHARED_MEMORY = Constraint(
    "over the shared memory",
    Kind.CANNOT_RUN,
    "the stages of the pipeline lie in the shared memory of one block; the launch fails with OutOfResources",
)
TENSOR_MEMORY = Constraint(
    "over the tensor memory",
    Kind.CANNOT_RUN,
    "tcgen05 accumulates in tensor memory: 128 lanes by 512 columns of 32 bits",
)
WGMMA_REGISTERS = Constraint(
    "a wgmma over the registers",
    Kind.CANNOT_RUN,
    "the 65,536 registers of a multiprocessor are shared by the threads of a block, and ptxas refuses a "
    "wgmma whose accumulators do not fit (C7602; seen on sm_90 for 128x512 and 256x256 with 16 warps)",
)
COMPILER_FAILURE = Constraint(
    "Triton cannot compile",
    Kind.CANNOT_RUN,
    "a defect of some Triton versions, seen when compiling (domain/data/compiler_failures.json)",
)
SCALE_GROUP = Constraint(
    "K tiles over a quantization group",
    Kind.WRONG_NUMBERS,
    "the kernel reads one scale for each K tile, so BLOCK_SIZE_K has to divide the group",
)
SERVER_WRONG = Constraint(
    "the server's own fault",
    Kind.WRONG_NUMBERS,
    "the server reads or writes rows in sorted order at the wrong places (sglang 0.5.23 wheel and older: "
    "fused_moe_triton_kernels.py, fused_moe.py)",
)
MAYBE_SHARED_MEMORY = Constraint(
    "perhaps over the shared memory",
    Kind.NOT_WORTH_TRYING,
    "how much the conversion of weights to 16 bits takes is bounded, not known, but for int8 and for groups "
    "on NVIDIA; and USE_TMA before compute capability 9.0, where descriptors are pointers",
)
REGISTERS = Constraint(
    "accumulators over the registers",
    Kind.NOT_WORTH_TRYING,
    "fp32 accumulators beyond the 255 registers of a thread spill to memory in the K loop; the best such "
    "config was 2.7 times slower than the best of the recorded landscapes in bf16, 1.27 times in block fp8",
)
IDLE_WARPS = Constraint(
    "warps without work",
    Kind.NOT_WORTH_TRYING,
    "one mma gives a warp a 16x8 tile; with fewer tiles than warps the best config was 11% slower than "
    "the best of the recorded landscapes",
)
FP8_DOT = Constraint(
    "fp8 without fp8 tensor cores",
    Kind.CANNOT_RUN,
    "fp8 e4m3 exists in Triton from compute capability 8.9 (triton 3.6.0: "
    "backends/nvidia/compiler.py:parse_options)",
)

_SHAPE_CHECKS: tuple[_Check, ...] = (
    (POWER_OF_TWO, _tile_is_odd),
    (POSITIVE, _count_is_not_positive),
    (DOT_SIZE, _tile_is_flat),
    (TENSOR_SIZE, _tile_is_huge),
    (THREADS, _too_many_threads),
)
_CHECKS: tuple[_Check, ...] = (
    (SHARED_MEMORY, _over_shared_memory),
    (TENSOR_MEMORY, _over_tensor_memory),
    (WGMMA_REGISTERS, _wgmma_short_of_registers),
    (COMPILER_FAILURE, _compiler_fails),
    (SCALE_GROUP, _scale_group_cut),
    (SERVER_WRONG, _server_is_wrong),
    (MAYBE_SHARED_MEMORY, _maybe_over_shared_memory),
    (REGISTERS, _registers_short),
    (IDLE_WARPS, _warps_idle),
)

CONSTRAINTS: tuple[Constraint, ...] = (
    *(constraint for constraint, _ in _SHAPE_CHECKS),
    *(constraint for constraint, _ in _CHECKS),
    FP8_DOT,
)
"""Every constraint that there is."""
