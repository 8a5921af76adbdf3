"""Problems, the GPU, laboratories and binaries that the pieces share."""

from __future__ import annotations

import os
import queue
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetune.applications.compile_service import CompileBroken, Compiled, CompileService
from moetune.applications.compiling import CompilePool
from moetune.applications.measuring import Laboratory
from moetune.applications.nvml import detect_gpus
from moetune.domain.compilation import CompileStatus, CompileTask, Depth, compile_task
from moetune.domain.gpu import find_gpu
from moetune.domain.problem import Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.servers.registry import open_server

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from moetune.applications.journal import Journal
    from moetune.domain.config import KernelConfig
    from moetune.domain.problem import Kernel
    from moetune.measure.layer import GpuBackend
    from moetune.servers.protocol import Server

USUAL_MS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
"""The batch sizes of both servers' tuners."""


def _problem(**shape: Any) -> Problem:  # noqa: ANN401 - fields of a problem
    return Problem(
        gpu=find_gpu("NVIDIA H200"),
        server="sglang",
        server_version="0.5.23",
        triton_version="3.6.0",
        **{"topk": 8, "global_experts": shape["E"], "file_n": shape["N"], **shape},
    )


PROBLEMS = {
    "seed": _problem(E=256, K=3072, N=256),
    "qwen3-30b": _problem(E=128, K=2048, N=768),
    "mixtral": _problem(E=8, K=4096, N=7168, topk=2),
    "qwen3.5-35b-fp8": _problem(
        E=256,
        K=2048,
        N=512,
        quantization=Quantization(Dtype.FP8_W8A8, "fp8", (128, 128), dynamic_activation=True),
    ),
}
"""The seed problem is Qwen3.5-122B-A10B at tp 4; Qwen3-30B-A3B tp 1; Mixtral-8x7B tp 2; Qwen3.5-35B-A3B."""


def server_of(problem: Problem) -> Server:
    """The release whose launches count."""
    return open_server(problem.server, problem.server_version, problem.triton_version)


def uuid() -> str:
    """The GPU that comes first."""
    devices = detect_gpus().devices
    return devices[0].uuid if devices else "0"


def python_path() -> str:
    """Where moetune and the tests are, for processes with another working directory."""
    import moetune

    source = Path(moetune.__file__).resolve().parents[1]
    return os.pathsep.join([str(source), str(Path(__file__).resolve().parents[2])])


def laboratory(problem: Problem, journal: Journal, ms: Sequence[int]) -> Laboratory:
    """A laboratory on that GPU."""
    pool = CompilePool(Depth.BINARY, seconds_each=60.0)
    return Laboratory(server_of(problem), problem, journal, ms, [uuid()], pool=pool)


def share_cache(folder: Path, cache: Path | None) -> None:
    """Have the journal of a folder use compiled kernels of another place."""
    if cache is not None and not (folder / "cache").exists():
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "cache").symlink_to(cache.resolve(), target_is_directory=True)


def binary(
    problem: Problem, kernel: Kernel, m: int, config: KernelConfig, down: KernelConfig | None = None
) -> CompileTask:
    """What the server would launch at that m; the down config may say how the up kernel writes."""
    server = server_of(problem)
    launch = server.launch(problem, kernel, config, down=down)
    (kind,) = server.launch_classes(problem, kernel, (m,), config.block_size_m)
    task = compile_task(launch, problem, kind)
    assert isinstance(task, CompileTask), task
    return task


def compile_all(tasks: Iterable[CompileTask], cache: Path, workers: int | None = None) -> set[CompileTask]:
    """Have binaries in a cache; those that can be launched on an H200."""
    wanted = set(tasks)
    events: queue.SimpleQueue[Compiled | CompileBroken] = queue.SimpleQueue()
    pool = CompilePool(
        Depth.BINARY, seconds_each=60.0, workers=workers, variables={"PYTHONPATH": python_path()}
    )
    service = CompileService(pool, cache, events.put)
    good = set()
    try:
        service.submit(wanted)
        for _ in wanted:
            event = events.get()
            if isinstance(event, CompileBroken):
                raise event.error
            limit = find_gpu("NVIDIA H200").smem_optin_bytes or 0
            if event.result.status is CompileStatus.OK and (event.result.shared_bytes or 0) <= limit:
                good.add(event.task)
    finally:
        service.close()
    return good


def gpu_backend(cache: Path) -> GpuBackend:
    """The GPU in this process, with compiled kernels from a cache."""
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    sys.argv[1:] = [uuid()]
    from moetune.measure.layer import GpuBackend

    return GpuBackend()
