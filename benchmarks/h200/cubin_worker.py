"""A compiling process that leaves the machine code, and how it is launched, in a folder.

    python -m benchmarks.h200.cubin_worker FOLDER

It speaks as `moetune.measure.compile` does, under whichever Triton is found first.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton

from benchmarks.h200.cubins import Binary, code_hash, key_of
from moetune.domain.resources import WARP
from moetune.measure import compile as compiling

if TYPE_CHECKING:
    from moetune.domain.compilation import CompileResult, CompileTask, Depth


def launched(kernel: Any, source: Any) -> Binary:  # noqa: ANN401 - Triton's own types
    """How a compiled kernel is launched."""
    about = kernel.metadata
    return Binary(
        name=about.name,
        threads=WARP * about.num_warps,
        shared_bytes=about.shared,
        parameters=tuple((name, kind) for name, kind in source.signature.items() if kind != "constexpr"),
        scratch_bytes=(about.global_scratch_size, about.profile_scratch_size),
        code=code_hash(kernel.asm["cubin"], about.name),
        triton=triton.__version__,
    )


def main() -> None:
    """Serve on stdin and stdout, keeping what is compiled."""
    folder, kept = Path(sys.argv[1]), []
    compile_kernel, compile_launch = triton.compile, compiling.compile_launch

    def remembering(source: Any, **options: Any) -> Any:  # noqa: ANN401 - Triton's own types
        kernel = compile_kernel(source, **options)
        kept.append((kernel, source))
        return kernel

    def keeping(task: CompileTask, depth: Depth) -> CompileResult:
        kept.clear()
        result = compile_launch(task, depth)
        for kernel, source in kept:
            path = folder / key_of(task)
            path.with_suffix(".cubin").write_bytes(kernel.asm["cubin"])
            path.with_suffix(".json").write_text(json.dumps(launched(kernel, source).to_json()))
        return result

    triton.compile = remembering
    compiling.compile_launch = keeping
    compiling.main()


if __name__ == "__main__":
    main()
