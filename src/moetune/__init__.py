"""moetune: tuned configs for the fused-MoE Triton kernels of SGLang and vLLM.

    import moetune

    plan = moetune.plan("Qwen/Qwen3.5-122B-A10B", tp=4, server="sglang", gpu="NVIDIA H200")
    tuned = moetune.tune("Qwen/Qwen3.5-122B-A10B", tp=4, gpu="NVIDIA H200", out="configs")

What they answer are frozen dataclasses with `to_json()`, the documents of `--json`. Errors are
`MoetuneError`, with a message and a hint. Importing this package imports nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moetune.api import MoetuneError, Plan, Request, Tuned, TuneRequest, plan, tune

__version__ = "0.1.0"
__all__ = ["MoetuneError", "Plan", "Request", "TuneRequest", "Tuned", "__version__", "plan", "tune"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from moetune import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
