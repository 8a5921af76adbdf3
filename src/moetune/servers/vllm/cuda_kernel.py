"""What vLLM's CUDA kernel for grouped int4 weights makes of a config.

Before 0.27 it runs in place of the Triton kernel where few rows meet an expert, and takes BLOCK_SIZE_M,
BLOCK_SIZE_N and BLOCK_SIZE_K from the entry that the lookup picked. An entry without BLOCK_SIZE_N or
BLOCK_SIZE_K leaves both to vLLM, as where there is no file.

Sources: `fused_moe.py:should_moe_wna16_use_cuda`, `get_moe_wna16_block_config`; the checks are those of
`moe_wna16_gemm` (csrc/moe/moe_wna16.cu; their texts stand in `vllm/_moe_C.abi3.so` of the vllm 0.10.2,
0.13.0 and 0.20.0 wheels).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetune.domain.problem import KERNELS
from moetune.servers.vllm.defaults import filled_tile

if TYPE_CHECKING:
    from moetune.domain.config import KernelConfig
    from moetune.domain.problem import Problem
    from moetune.domain.version import Release

_MOST_ROWS = 64
_GROUPS_OF_A_BLOCK = (1, 2, 4, 8)
_MOST_THREADS = 1024  # a thread a column, and no launch has more in a block
_SHARED_BYTES = 48 << 10  # what a launch gets that does not ask for more (CUDA C++ Programming Guide)
_BYTES = 2


def cuda_kernel_fault(release: Release, problem: Problem, m: int, config: KernelConfig) -> str:
    """Why the CUDA kernel cannot run the entry of a key, and what the server dies of; empty where it can.

    A tile as vLLM fills it in passes: that is how an entry is read which leaves its tile to vLLM.
    """
    tile = (config.block_size_n, config.block_size_k)
    if m >= 1 and tile == filled_tile(release, problem, m, config.block_size_m):
        return ""
    group = problem.quantization.group_size or 1
    block_m, block_n, block_k = config.block_size_m, config.block_size_n, config.block_size_k
    cut = next((size for kernel in KERNELS if (size := problem.gemm(kernel).k) % block_k), None)
    shared = block_m * block_k * _BYTES
    dies, fails = "(RuntimeError)", "(the launch fails)"
    faults = {
        f"{cut} columns are no multiple of BLOCK_SIZE_K {block_k} {dies}": cut is not None,
        f"BLOCK_SIZE_K {block_k} is no multiple of the group of {group} {dies}": block_k % group != 0,
        f"BLOCK_SIZE_M {block_m} is more than {_MOST_ROWS} {dies}": block_m > _MOST_ROWS,
        f"BLOCK_SIZE_K {block_k} holds {block_k // group} groups of {group}, not 1, 2, 4 or 8 {dies}": (
            block_k // group not in _GROUPS_OF_A_BLOCK
        ),
        f"BLOCK_SIZE_N {block_n} is more than {_MOST_THREADS} threads {fails}": block_n > _MOST_THREADS,
        f"it needs {shared} bytes of shared memory, {_SHARED_BYTES} are there {fails}": shared
        > _SHARED_BYTES,
    }
    return next((text for text, wrong in faults.items() if wrong), "")
