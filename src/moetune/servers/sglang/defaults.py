"""SGLang's own configs for a shape without a file.

Source: `get_default_config` of `fused_moe_triton_config.py` in the sglang wheels (0.5.1 and before:
`fused_moe.py`). Both kernels run with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetune.domain.config import KernelConfig
from moetune.domain.quantization import Dtype
from moetune.servers.sglang.releases import Feature, Rules

if TYPE_CHECKING:
    from moetune.domain.gpu import Gpu
    from moetune.domain.problem import Problem

DETERMINISTIC_FLAG = "deterministic"
_SMALL_SHARED_MEMORY_BYTES = 128 * 1024
# Opt-in shared memory of one block by compute capability (CUDA programming guide, technical
# specifications), for a GPU whose own number is not known.
_SHARED_MEMORY_BYTES = {
    (7, 5): 65_536,
    (8, 0): 166_912,
    (8, 6): 101_376,
    (8, 7): 166_912,
    (8, 9): 101_376,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (10, 3): 232_448,
    (12, 0): 101_376,
    (12, 1): 101_376,
}
# Each pair: for up to E tokens, and beyond.
_FP8_SMALL = (KernelConfig(32, 64, 256, 1, 4, 4), KernelConfig(64, 128, 256, 64, 4, 2))
_FP8 = (KernelConfig(64, 128, 128, 1, 4, 4), KernelConfig(128, 256, 128, 32, 8, 4))
_FP8_ROCM = (KernelConfig(64, 128, 128, 1, 4, 2), KernelConfig(128, 256, 128, 32, 8, 2))
# These lack num_warps and num_stages: Triton's own stand in, 4 and 3 on CUDA, 4 and 2 on ROCm
# (triton 3.6.0, backends/nvidia/compiler.py:CUDAOptions, backends/amd/compiler.py:HIPOptions).
_OTHER = (KernelConfig(16, 32, 64, 1, 4, 3), KernelConfig(64, 64, 32, 8, 4, 3))
_OTHER_ROCM = (KernelConfig(16, 32, 64, 1, 4, 2), KernelConfig(64, 64, 32, 8, 4, 2))


def default_config(rules: Rules, problem: Problem, m: int) -> KernelConfig:
    """What the server uses for m when it finds no file."""
    if _is_deterministic(rules, problem):
        return _regimes(rules, problem)[1]
    block = problem.quantization.block_shape
    if problem.quantization.dtype is Dtype.FP8_W8A8 and block is not None:
        stages = 2 if _is_rocm(problem.gpu) else 3
        return KernelConfig(64, block[0], block[1], 32, 4, stages)
    few, many = _regimes(rules, problem)
    return few if m <= problem.E else many


def default_switches(rules: Rules, problem: Problem) -> tuple[int, ...]:
    """The m at which the default changes: the last m of its regime."""
    changes = default_config(rules, problem, problem.E) != default_config(rules, problem, problem.E + 1)
    return (problem.E,) if changes else ()


def _regimes(rules: Rules, problem: Problem) -> tuple[KernelConfig, KernelConfig]:
    rocm = _is_rocm(problem.gpu)
    if problem.quantization.dtype is not Dtype.FP8_W8A8 or _is_deterministic(rules, problem):
        return _OTHER_ROCM if rocm else _OTHER
    if rules.has(Feature.SMALL_SHARED_MEMORY_DEFAULT) and _has_small_shared_memory(problem.gpu):
        return _FP8_SMALL
    return _FP8_ROCM if rocm else _FP8


def _is_deterministic(rules: Rules, problem: Problem) -> bool:
    return rules.has(Feature.DETERMINISTIC) and DETERMINISTIC_FLAG in problem.flags


def _is_rocm(gpu: Gpu) -> bool:
    return gpu.vendor == "AMD"


def _has_small_shared_memory(gpu: Gpu) -> bool:
    """The server asks CUDA only, and takes a device that gives no answer for a large one."""
    if gpu.vendor != "NVIDIA":
        return False
    size = gpu.smem_optin_bytes or _SHARED_MEMORY_BYTES.get(gpu.compute_capability or (0, 0))
    return size is not None and size < _SMALL_SHARED_MEMORY_BYTES
