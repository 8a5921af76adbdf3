"""Compiling and launching the server's own kernel: one mapping by parameter name for both."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from moetune.domain.problem import KERNELS
from moetune.measure.kernel_file import load_kernel
from moetune.measure.kernels import described
from moetune.measure.worker import SetupError
from moetune.servers.kernel_values import Descriptor, Lengths, Part, Pointer, TypeConstant, function_name
from moetune.servers.protocol import KernelServer
from moetune.servers.registry import open_server

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from moetune.domain.compilation import CompileTask
    from moetune.domain.problem import Problem
    from moetune.measure.alignment import Alignment
    from moetune.measure.operands import Operand

_TYPES = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
"""Types that a kernel may compute in, by Triton's names."""


@lru_cache(maxsize=16)
def kernel_server(name: str, version: str) -> KernelServer:
    """The rules of a server whose kernels are to be launched.

    Raises:
        SetupError: for a server that does not say how.
    """
    server = open_server(name, version)
    if not isinstance(server, KernelServer):
        raise SetupError(f"it is not known how the kernels of {name} are launched: --kernel own")
    return server


def server_kernel(task: CompileTask) -> Any:  # noqa: ANN401 - Triton's own type
    """The kernel that a task of a server's file launches."""
    assert task.kernel_file is not None
    return load_kernel(task.kernel_file, function_name(task))


def compile_arguments(task: CompileTask, kernel: Any) -> dict[str, Any]:  # noqa: ANN401 - Triton's own type
    """For each parameter the type of a pointer, or a value like the one that the launch gives it."""
    lengths = Lengths(
        covered=16 if task.padded_length_divisible else 4,
        slots=1 if task.num_slots_is_one else 16 if task.num_slots_divisible else 8,
    )
    return {name: _to_compile(value) for name, value in _values(task, kernel, lengths).items()}


def covered_length(task: CompileTask, problem: Problem, m: int) -> int:
    """Rows that the grid of the server's launch covers."""
    assert task.kernel_file is not None
    server = kernel_server(task.kernel_file.server, task.kernel_file.version)
    return server.covered_length(problem, task.launch.kernel, m, task.launch.config.block_size_m)


def longest_covered(task: CompileTask, problem: Problem, m: int) -> int:
    """The same, of the kernel that covers more: both read the ids that are sorted once."""
    launches = (replace(task, launch=replace(task.launch, kernel=kernel)) for kernel in KERNELS)
    return max(covered_length(launch, problem, m) for launch in launches)


def run_server_kernel(
    task: CompileTask,
    problem: Problem,
    x: Operand,
    weights: Operand,
    out: torch.Tensor,
    alignment: Alignment,
    *,
    slot_weights: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """Launch the server's kernel as the server does.

    Args:
        task: which binary.
        problem: of the data.
        x: activations.
        weights: of all experts.
        out: a row for each slot.
        alignment: of the slots; at least as long as the grid is.
        slot_weights: routing weights.
        bias: `[E, N]`.
    """
    slots = slot_weights.numel()
    covered = covered_length(task, problem, slots // problem.topk)
    assert covered <= alignment.padded_length, "the grid would read past the sorted ids"
    tensors: dict[Part, torch.Tensor | None] = {
        Part.ACTIVATIONS: x.values,
        Part.WEIGHTS: weights.values,
        Part.OUTPUT: out,
        Part.BIAS: bias,
        Part.ACTIVATION_SCALES: x.scales,
        Part.WEIGHT_SCALES: weights.scales,
        Part.WEIGHT_ZEROS: weights.zeros,
        Part.ROUTING_WEIGHTS: slot_weights,
        Part.SLOT_IDS: alignment.slot_ids,
        Part.TILE_EXPERTS: alignment.tile_experts,
        Part.USED_LENGTH: alignment.used_length,
    }
    kernel, config = server_kernel(task), task.launch.config
    values = _values(task, kernel, Lengths(covered, slots))
    options: dict[str, int | bool] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if task.launch.pdl:
        options["launch_pdl"] = True
    grid = triton.cdiv(covered, config.block_size_m) * triton.cdiv(task.n, config.block_size_n)
    kernel[(grid,)](**{name: _to_launch(value, tensors) for name, value in values.items()}, **options)


def _values(task: CompileTask, kernel: Any, lengths: Lengths) -> Mapping[str, object]:  # noqa: ANN401 - Triton's own type
    assert task.kernel_file is not None
    server = kernel_server(task.kernel_file.server, task.kernel_file.version)
    return server.kernel_values(tuple(kernel.arg_names), task, lengths)


def _to_compile(value: object) -> object:
    if isinstance(value, Pointer):
        return f"*{value.type}"
    if isinstance(value, Descriptor):
        return f"tensordesc<{value.type}[{', '.join(map(str, value.tile))}]>"
    return _TYPES[value.type] if isinstance(value, TypeConstant) else value


def _to_launch(value: object, tensors: Mapping[Part, torch.Tensor | None]) -> object:
    if isinstance(value, Pointer):
        return tensors[value.part]
    if isinstance(value, Descriptor):
        whole = tensors[value.part]
        assert whole is not None
        return described(whole, *value.tile)
    return _TYPES[value.type] if isinstance(value, TypeConstant) else value
