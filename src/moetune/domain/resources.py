"""What a launch of the fused-MoE kernel needs of the hardware, in closed form.

The form was fitted to what Triton 3.6.0 allocates for the fused_moe_kernel of the sglang 0.5.23 and
vllm 0.33.0 wheels and for moetune's own kernel, compiled for sm_80 to sm_121, and is held to it by
tests/measure/test_shared_memory.py. Where one number cannot fit all three kernels it is the largest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from moetune.domain.errors import UnknownGpuError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moetune.domain.launch import Launch

WARP = 32
"""Threads of a warp."""

MAX_THREADS = 1024
"""Threads that a block can have on any NVIDIA GPU (CUDA programming guide, technical specifications)."""

MAX_REGISTERS = 255
"""Registers that a thread can have (CUDA programming guide, technical specifications)."""

_REGISTER_FILE = 65_536
_WARP_GROUP = 4
_WGMMA_COLUMNS = 256
_WGMMA_OTHER_REGISTERS = 26
"""What ptxas 12.9 asks for beyond the accumulators of one wgmma: "insufficient registers (128) to compile
instruction, try 154 or higher" for 128 accumulators, (64) and 90 for 64."""

TENSOR_MEMORY_ACCUMULATORS = 128 * 512
"""fp32 accumulators that the tensor memory of one multiprocessor holds: 128 lanes, 512 columns."""

_CP_ASYNC_BYTES = 4
"""Smallest asynchronous copy of a thread (PTX, cp.async): a tile with less for each is not pipelined."""

_MIN_TENSOR_CORE_ROWS = 64
"""Rows of the left operand that wgmma and tcgen05 take at once."""

_MIN_TENSOR_CORE_COLUMNS = 16
"""Columns below which Triton does not use wgmma or tcgen05."""

_BARRIER_BYTES = 16
"""Barriers that a tcgen05 loop waits on."""

_FIRST_WITH_TMA = (9, 0)
"""Before it Triton turns descriptors into pointers."""

_MBARRIER_BYTES = 8
"""What one stage of a tile that comes through a descriptor waits on."""

_TMA_EPILOGUE_THREAD_BYTES = 128
"""Seen with tcgen05, one stage and 256x256 in block fp8, where weights alone come through a descriptor."""

_SCALE_SCRATCH_ROWS = 64
"""From this length on a vector of scales changes its layout through shared memory, below by shuffles."""


class DotPath(str, Enum):
    """Tensor-core instructions that Triton uses for a dot."""

    MMA_SYNC = "mma.sync"
    WGMMA = "wgmma"
    TCGEN05 = "tcgen05"


@dataclass(frozen=True, slots=True)
class Architecture:
    """What an NVIDIA architecture offers to one block.

    Attributes:
        smem_limit_bytes: shared memory that a block can ask for (cudaDevAttrMaxSharedMemoryPerBlockOptin).
        dot_path: the best instructions for a dot.
        dot_warps: numbers of warps with which Triton uses them.
        epilogue_thread_bytes: shared memory of a thread, at most, through which the result changes its
            layout before it is stored.
        epilogue_thread_bytes_by_warps: the same where the number of warps matters.
    """

    smem_limit_bytes: int
    dot_path: DotPath = DotPath.MMA_SYNC
    dot_warps: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    epilogue_thread_bytes: int = 64
    epilogue_thread_bytes_by_warps: Mapping[int, int] = field(default_factory=dict)


def _mma_sync_only(smem_limit_bytes: int) -> Architecture:
    """sm_8x."""
    return Architecture(smem_limit_bytes, epilogue_thread_bytes=256, epilogue_thread_bytes_by_warps={16: 128})


_SMALL = 101_376
_A100 = 166_912
_LARGE = 232_448

# Limits: CUDA programming guide, "technical specifications per compute capability", less the 1 KB
# that the system reserves in each block. 11.0 (Thor) has tcgen05, but Triton 3.6.0 does not use it there.
ARCHITECTURES: Mapping[tuple[int, int], Architecture] = {
    (8, 0): _mma_sync_only(_A100),
    (8, 6): _mma_sync_only(_SMALL),
    (8, 7): _mma_sync_only(_A100),
    (8, 9): _mma_sync_only(_SMALL),
    (9, 0): Architecture(_LARGE, DotPath.WGMMA, (4, 8, 16, 32), epilogue_thread_bytes=256),
    (10, 0): Architecture(_LARGE, DotPath.TCGEN05, (4, 8)),
    (10, 3): Architecture(_LARGE, DotPath.TCGEN05, (4, 8)),
    (11, 0): Architecture(_LARGE),
    (12, 0): Architecture(_SMALL),
    (12, 1): Architecture(_SMALL),
}
"""Compute capability to what it offers."""

_LDS_LIMIT_BYTES = {"gfx90a": 65_536, "gfx942": 65_536, "gfx950": 163_840}


def architecture(compute_capability: tuple[int, int]) -> Architecture:
    """What a compute capability offers.

    Raises:
        UnknownGpuError: when it has no rule here.
    """
    found = ARCHITECTURES.get(compute_capability)
    if found is None:
        known = ", ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
        major, minor = compute_capability
        raise UnknownGpuError(
            f"moetune does not know what a kernel needs on compute capability {major}.{minor}",
            f"known are {known}",
        )
    return found


def smem_limit_bytes(compute_capability: tuple[int, int]) -> int:
    """Shared memory that one block can ask for.

    Raises:
        UnknownGpuError: when the compute capability has no rule here.
    """
    return architecture(compute_capability).smem_limit_bytes


def dot_path(launch: Launch, compute_capability: tuple[int, int]) -> DotPath:
    """The tensor-core instructions that Triton uses for this launch.

    wgmma and tcgen05 take 64 rows at least, as many threads as a warp group has, and their operands
    from shared memory: an operand that is converted in registers (a 16-bit activation with 8-bit or
    4-bit weights) still goes there afterwards. Triton has no tcgen05 for integers.

    Raises:
        UnknownGpuError: when the compute capability has no rule here.
    """
    offered = architecture(compute_capability)
    config = launch.config
    rows, columns = config.block_size_m, config.block_size_n
    if launch.swap_ab:
        rows, columns = columns, rows
    fits = (
        rows >= _MIN_TENSOR_CORE_ROWS
        and columns >= _MIN_TENSOR_CORE_COLUMNS
        and config.num_warps in offered.dot_warps
        and not (launch.integers and offered.dot_path is DotPath.TCGEN05)
    )
    return offered.dot_path if fits else DotPath.MMA_SYNC


def shared_memory_is_exact(launch: Launch, compute_capability: tuple[int, int] | None = None) -> bool:
    """Whether the closed form is the number and not an upper bound.

    Where descriptors are turned into pointers, their tiles are not copied ahead and take less. Else it is
    known for operands of the same bits, for 8-bit weights with 16-bit activations, and for weights
    in groups, but for 8-bit ones in a tile as long as K; for others, which no kernel here has, the
    conversion of the weights is bounded.
    """
    by_descriptor = launch.sorted_input or launch.weights_by_tma
    if by_descriptor and compute_capability is not None and compute_capability < _FIRST_WITH_TMA:
        return False
    if launch.single_step:
        return launch.b_bits < 8
    return launch.a_bits == launch.b_bits or launch.grouped or (launch.a_bits, launch.b_bits) == (16, 8)


def shared_memory_bytes(launch: Launch, compute_capability: tuple[int, int]) -> int:
    """Dynamic shared memory that a launch asks for.

    The K loop copies tiles of activations and weights ahead, asynchronously: `num_stages - 1` of
    them where mma.sync reads its operands into registers first, `num_stages` where wgmma or tcgen05
    reads the tile that it works on from shared memory. What follows the loop reuses that memory. Tiles
    that come through descriptors are copied ahead however small they are, and each stage has a barrier.
    Where one tile is as long as K there is no loop: nothing is copied ahead, whatever `num_stages` says.

    Raises:
        UnknownGpuError: when the compute capability has no rule here.
    """
    offered = architecture(compute_capability)
    config = launch.config
    path = dot_path(launch, compute_capability)
    copies = 1 if launch.single_step else max(config.num_stages - (path is DotPath.MMA_SYNC), 1)
    threads = WARP * config.num_warps
    has_tma = compute_capability >= _FIRST_WITH_TMA
    by_tma = has_tma and launch.sorted_input, has_tma and launch.weights_by_tma
    activations = config.block_size_m * config.block_size_k * launch.a_bits // 8
    loop = (
        (activations * copies if by_tma[0] else _copied_bytes(activations, copies, path, threads))
        + _weight_bytes(launch, path, copies, threads, by_tma[1])
        + _scale_scratch_bytes(launch, path)
    )
    if any(by_tma):
        loop += _MBARRIER_BYTES * (sum(by_tma) * copies + 1)
    if path is DotPath.TCGEN05:
        loop += _BARRIER_BYTES

    thread_bytes = offered.epilogue_thread_bytes_by_warps.get(config.num_warps, offered.epilogue_thread_bytes)
    if any(by_tma) and path is DotPath.TCGEN05:
        thread_bytes = max(thread_bytes, _TMA_EPILOGUE_THREAD_BYTES)
    epilogue = min(config.block_size_m * config.block_size_n * 2, thread_bytes * threads)
    return max(loop, epilogue)


def _copied_bytes(tile: int, copies: int, path: DotPath, threads: int) -> int:
    """Shared memory of a tile that the pipeline copies ahead, or loads in its turn where it is too small."""
    if tile >= _CP_ASYNC_BYTES * threads:
        return tile * copies
    return tile * (2 if path is DotPath.TCGEN05 else 1)


def _weight_bytes(launch: Launch, path: DotPath, copies: int, threads: int, by_tma: bool) -> int:
    """Shared memory of the weights in the K loop.

    Weights that are converted go through registers. What the pipeline holds of them is never read by
    the dot itself, and where the dot reads shared memory, or the kernel for groups lays them out anew, the
    converted tile has a buffer of its own. Two weights of 4 bits share a byte: the addresses of a tile are
    not one after the other, and no asynchronous copy takes them.
    """
    config = launch.config
    weights = config.block_size_n * config.block_size_k
    stored, converted = weights * max(launch.b_bits, 8) // 8, weights * launch.a_bits // 8
    if launch.a_bits == launch.b_bits and by_tma:
        return stored * copies
    if launch.a_bits == launch.b_bits:
        return _copied_bytes(stored, copies, path, threads)
    if launch.single_step:
        # For wgmma 8-bit weights change their layout once more after they are converted, at times.
        return converted * (2 if launch.b_bits == 8 and path is DotPath.WGMMA else 1)
    if not shared_memory_is_exact(launch):
        # The converted weights, and their scales at their finest: one of 16 bits for each weight.
        return _copied_bytes(stored, copies, path, threads) + 2 * converted
    if not launch.grouped and path is DotPath.MMA_SYNC:
        return _copied_bytes(stored, copies, path, threads)
    is_copied = launch.b_bits == 8 and stored >= _CP_ASYNC_BYTES * threads
    return converted + (stored * (config.num_stages - 1) if is_copied else 0)


def _scale_scratch_bytes(launch: Launch, path: DotPath) -> int:
    """Shared memory through which block scales get from the layout of the load to that of the dot."""
    if not launch.block_k:
        return 0
    vectors = [4 * launch.config.block_size_m, 4 * launch.config.block_size_n]
    if path is DotPath.TCGEN05:
        return sum(vectors)
    # One after the other through the same scratch.
    return max((size for size in vectors if size >= 4 * _SCALE_SCRATCH_ROWS), default=0)


def accumulators_per_thread(launch: Launch) -> int:
    """fp32 accumulators that one thread holds when they lie in registers.

    With block scales each K tile has a result of its own, scaled before it is added: twice as many.
    """
    tile = launch.config.block_size_m * launch.config.block_size_n // (WARP * launch.config.num_warps)
    return 2 * tile if launch.block_k else tile


def register_limit(launch: Launch) -> int:
    """Registers that a thread can have with so many threads in its block."""
    return min(MAX_REGISTERS, _REGISTER_FILE // (WARP * launch.config.num_warps))


def wgmma_registers(launch: Launch) -> int:
    """Registers that one wgmma instruction needs, which cannot spill in the middle of it.

    A warp group of 4 warps takes 64 rows; groups without rows of their own share the columns. One
    instruction computes up to 256 columns of that, half an accumulator a thread for each.
    """
    rows, columns = launch.config.block_size_m, launch.config.block_size_n
    if launch.swap_ab:
        rows, columns = columns, rows
    groups = launch.config.num_warps // _WARP_GROUP
    column_groups = max(groups * _MIN_TENSOR_CORE_ROWS // rows, 1)
    return min(columns // column_groups, _WGMMA_COLUMNS) // 2 + _WGMMA_OTHER_REGISTERS


def lds_bytes(launch: Launch) -> int:
    """LDS that a launch asks for on an AMD GPU: every stage of the pipeline lies there."""
    config = launch.config
    row_bits = config.block_size_m * launch.a_bits + config.block_size_n * max(launch.b_bits, 8)
    return config.num_stages * row_bits * config.block_size_k // 8


def lds_limit_bytes(gfx: str) -> int | None:
    """LDS that one workgroup can have on an AMD GPU, None when unknown."""
    return _LDS_LIMIT_BYTES.get(gfx)
