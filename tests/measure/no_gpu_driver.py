"""Goes through Triton's own launch path with no GPU, up to where the driver would be asked.

Run as a program: reads problems with compile tasks (and the m that launches each) as JSON, warms the
kernels up with tensors of the shapes that the measuring process would hold, and prints how many of them
were compiled and how many were found in the cache.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from moetune.domain.compilation import CompileTask
from moetune.domain.identity import problem_from_json
from moetune.domain.kernel_format import KernelFormat, kernel_format
from moetune.measure import dequantizing_kernel, kernels, layer, server_kernel
from moetune.measure.data import Data

if TYPE_CHECKING:
    from moetune.domain.problem import Kernel

HITS: list[bool] = []


class NoGpu:
    """What Triton asks of a driver before it launches."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        del device
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class WarmedUp:
    """The kernel, compiled and not launched."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    @property
    def arg_names(self) -> list[str]:
        return list(self._kernel.arg_names)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self._kernel.warmup(*args, grid=grid, **kwargs)


def main() -> None:
    documents = json.load(sys.stdin)
    documents = documents if isinstance(documents, list) else [documents]
    triton.runtime.driver.set_active(NoGpu(documents[0]["arch"]))
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: HITS.append(cache_hit)
    kernels.moe_grouped_gemm = WarmedUp(kernels.moe_grouped_gemm)
    dequantizing_kernel.moe_dequantizing_gemm = WarmedUp(dequantizing_kernel.moe_dequantizing_gemm)
    of_server = server_kernel.server_kernel
    server_kernel.server_kernel = lambda task: WarmedUp(of_server(task))
    for document in documents:
        warm_up(document)
    json.dump({"compiled": HITS.count(False), "found": HITS.count(True)}, sys.stdout)


def warm_up(document: dict[str, Any]) -> None:
    problem = problem_from_json(document["problem"], "the test")
    kind = kernel_format(problem)
    assert isinstance(kind, KernelFormat)
    tasks = [(CompileTask.from_json(item["task"]), item["m"]) for item in document["tasks"]]
    copies: dict[Kernel, int] = {"up": 1, "down": 1}
    data = Data(problem, max(m for _, m in tasks), copies, kind, torch.device("cpu"), 0)
    for task, m in tasks:
        layer.check_class(task, problem, m)
        experts = torch.randint(0, problem.E, (m, problem.topk))
        data.launch(task, m, layer.aligned_for(task, problem, experts), 0)


if __name__ == "__main__":
    main()
