"""The compiling process, in which two configs do what a compiler must never do.

The config that MOETUNE_TEST_ABORT names aborts as LLVM does, that of MOETUNE_TEST_ENDLESS is never done.
"""

from __future__ import annotations

import os
import time

from moetune.domain.compilation import CompileResult, CompileTask, Depth
from moetune.measure import compile as compiling

_compile_launch = compiling.compile_launch


def compile_or_fail(task: CompileTask, depth: Depth) -> CompileResult:
    """Compile, but for two configs."""
    config = str(task.launch.config)
    if config == os.environ.get("MOETUNE_TEST_ABORT"):
        os.abort()
    if config == os.environ.get("MOETUNE_TEST_ENDLESS"):
        time.sleep(3600)
    return _compile_launch(task, depth)


if __name__ == "__main__":
    compiling.compile_launch = compile_or_fail
    compiling.main()
