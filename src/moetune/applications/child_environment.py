"""The variables of processes that compile and measure."""

from __future__ import annotations

import os


def without_tritons_own() -> dict[str, str]:
    """This process's variables without those that change what Triton does, but for its tools' paths."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TRITON_", "MLIR_", "LLVM_")) or name.startswith("TRITON_PTXAS")
    }
