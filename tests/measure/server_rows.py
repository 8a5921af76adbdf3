"""Pairs through a server's own kernel and through moetune's on the same operands, in Triton's interpreter.

Run as a program with TRITON_INTERPRET=1: a server, its version, a folder, and cases as arguments. For each it
prints how far the results of both are apart (apart), those of the server from the fp32 reference (error), and
how many rows the server wrote that no slot of this rank has (strange).
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moetune.domain.compilation import CompileTask, compile_task
from moetune.domain.config import KernelConfig
from moetune.domain.kernel_format import KernelFormat, kernel_format
from moetune.domain.problem import KERNELS, Kernel, Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.measure.alignment import ELSEWHERE, places_of_slots
from moetune.measure.data import Data
from moetune.measure.layer import aligned_for
from moetune.measure.reference import relative_error
from moetune.servers.registry import open_server
from tests.measure.interpreted import patch_interpreter
from tests.measure.server_files import kernel_file
from tests.measure.test_worker import SMALL

if TYPE_CHECKING:
    from moetune.domain.server_kernel import KernelFile

M = 7
CONFIG = KernelConfig(16, 32, 64, 1, 4, 2)


def _quantized(dtype: Dtype, **rest: Any) -> Problem:
    return replace(SMALL, K=128, N=64, quantization=Quantization(dtype, "made", **rest))


_PARALLEL = replace(SMALL, E=4, global_experts=9, ep=3, topk=3)
CASES: dict[str, tuple[Problem, bool, bool]] = {
    # the problem, USE_TMA in the down entry, and in the up entry
    "bf16": (SMALL, True, False),
    "bf16, both": (SMALL, True, True),
    "bf16, up alone": (SMALL, False, True),
    "fp8 by block": (_quantized(Dtype.FP8_W8A8, block_shape=(64, 64), dynamic_activation=True), True, False),
    "int8 by block": (_quantized(Dtype.INT8_W8A8, block_shape=(64, 64)), True, False),
    "int8 weights by channel": (_quantized(Dtype.INT8_W8A16, per_channel=True), True, False),
    "fp8 by tensor, static": (_quantized(Dtype.FP8_W8A8, dynamic_activation=False), True, False),
    "fp8 by channel": (_quantized(Dtype.FP8_W8A8, per_channel=True, dynamic_activation=True), True, False),
    "fp8 by block, narrow tiles": (
        _quantized(Dtype.FP8_W8A8, block_shape=(64, 64), dynamic_activation=True),
        False,
        False,
    ),
    "experts of other ranks": (_PARALLEL, True, False),
    "summed": (replace(SMALL, topk=3, flags=("fused_sum",)), False, False),
    "summed, USE_TMA": (replace(SMALL, topk=3, flags=("fused_sum",)), True, False),
    "fp8 by block, summed": (
        replace(
            _quantized(Dtype.FP8_W8A8, block_shape=(64, 64), dynamic_activation=True),
            topk=3,
            flags=("fused_sum",),
        ),
        False,
        False,
    ),
    "experts of other ranks, summed": (replace(_PARALLEL, flags=("fused_sum",)), False, False),
}


def task_of(problem: Problem, kernel: Kernel, up_tma: bool, down_tma: bool) -> CompileTask:
    server = open_server(problem.server, problem.server_version, "3.6.0")
    up, down = replace(CONFIG, use_tma=up_tma), replace(CONFIG, use_tma=down_tma)
    launch = server.launch(problem, kernel, up if kernel == "up" else down, up, down)
    (kind,) = server.launch_classes(problem, kernel, (M,), CONFIG.block_size_m)
    # The interpreter has no programmatic launch.
    made = compile_task(replace(launch, pdl=False), problem, kind)
    assert isinstance(made, CompileTask)
    return made


def compare(problem: Problem, task: CompileTask, file: KernelFile) -> dict[str, float]:
    kind = kernel_format(problem)
    assert isinstance(kind, KernelFormat)
    data = Data(problem, M, {"up": 1, "down": 1}, kind, torch.device("cpu"), 3)
    random = torch.Generator().manual_seed(5)
    experts = torch.stack(
        [torch.randperm(problem.global_experts, generator=random)[: problem.topk] for _ in range(M)]
    )
    experts[experts >= problem.E] = ELSEWHERE
    found, strange = {}, 0
    for name, one in {"ours": task, "theirs": replace(task, kernel_file=file)}.items():
        alignment = aligned_for(one, problem, experts)
        data.output_rows(one, M, alignment).fill_(float("nan"))
        data.clear(one, M, alignment)
        out = data.launch(one, M, alignment, 0)
        if one.launch.sorted_output and one.kernel_file is not None:
            places = places_of_slots(alignment, experts.numel())
            here = places[experts.reshape(-1) != ELSEWHERE]
            strange = int((~out[:, 0].isnan()).sum()) - len(here)
        found[name] = data.by_slot(one, out, alignment, experts).clone()
    expected = data.reference(task, M, experts, aligned_for(task, problem, experts))
    return {
        "apart": relative_error(found["ours"], found["theirs"]),
        "error": relative_error(found["theirs"], expected),
        "strange": strange,
        "said to be wrong": float(bool(task.launch.wrong_numbers)),
    }


def main() -> None:
    """Print the errors."""
    patch_interpreter()
    package, version, folder, *names = sys.argv[1:]
    file = kernel_file(package, version, Path(folder))
    found: dict[str, dict[str, float]] = {}
    for name in names:
        shape, down_tma, up_tma = CASES[name]
        problem = replace(shape, server=package, server_version=version)
        for kernel in KERNELS:
            task = task_of(problem, kernel, up_tma, down_tma)
            found[f"{name}: {kernel}"] = compare(problem, task, file)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
