"""moetune's kernel for int4 weights in groups beside the servers', compiled for sm_90: what each holds.

    python -m benchmarks.grouped_binaries sglang-0.5.23=DIR vllm-0.33.0=DIR

DIR is a folder that a wheel was unpacked into (docs/measuring.md). Needs torch and Triton, no GPU.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.applications.server_kernels import kernel_in
from moetune.domain.compilation import CompileTask, compile_task
from moetune.domain.config import KernelConfig
from moetune.domain.gpu import find_gpu
from moetune.domain.problem import Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.servers.registry import open_server

if TYPE_CHECKING:
    from moetune.domain.server_kernel import KernelFile

_CONFIGS = (
    KernelConfig(16, 32, 64, 1, 4, 3),
    KernelConfig(16, 32, 256, 16, 4, 5),
    KernelConfig(64, 64, 64, 4, 4, 3),
)
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9]+)", re.M)
_DOTS = ("HMMA", "HGMMA")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME-VERSION=DIR")
    print("| server | zero points | config | kernel | shared bytes | instructions | loads | dots |")
    print("|---|---|---|---|---|---|---|---|")
    for named in parser.parse_args().servers:
        who, _, folder = named.partition("=")
        name, _, version = who.rpartition("-")
        server = open_server(name, version, "3.6.0")
        file = kernel_in(server, Path(folder))
        for zero_point in (False, True):
            method = "awq" if zero_point else "gptq"
            problem = Problem(
                *(384, 384, 8, 7168, 256, 256, find_gpu("NVIDIA H200"), name, version, "3.6.0"),
                quantization=Quantization(Dtype.INT4_W4A16, method, group_size=128, zero_point=zero_point),
            )
            for config in _CONFIGS:
                launch = server.launch(problem, "up", config)
                (kind, *_) = server.launch_classes(problem, "up", (1024,), config.block_size_m)
                whose: tuple[tuple[str, KernelFile | None], ...] = (("moetune's", None), ("its own", file))
                for kernel, of_file in whose:
                    task = compile_task(launch, problem, kind, of_file)
                    assert isinstance(task, CompileTask), task
                    cells = (who, "yes" if zero_point else "no", str(config), kernel, *_held(task))
                    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def _held(task: CompileTask) -> tuple[int, int, int, int]:
    """Shared bytes, instructions, loads from memory, multiplications of tiles."""
    import triton
    from triton.backends.compiler import GPUTarget

    from moetune.measure.compile import kernel_source

    config = task.launch.config
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    made = triton.compile(kernel_source(task), target=GPUTarget("cuda", task.arch, 32), options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(made.asm["cubin"])
        binary.flush()
        shown = subprocess.run([tool, "-c", binary.name], capture_output=True, text=True, check=True)
    found = Counter(_INSTRUCTION.findall(shown.stdout))
    return made.metadata.shared, found.total(), found["LDG"], sum(found[name] for name in _DOTS)


if __name__ == "__main__":
    main()
