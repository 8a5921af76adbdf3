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
    from moetune.api import (
        Borrow,
        BorrowRequest,
        Diagnosis,
        DoctorRequest,
        Installed,
        InstallRequest,
        Linted,
        LintRequest,
        Machine,
        MeasuredTuning,
        MeasureRequest,
        MoetuneError,
        Outlook,
        Plan,
        Prepared,
        Progress,
        Replay,
        Report,
        Request,
        RoutingAnswer,
        RoutingRequest,
        Status,
        TakenBack,
        Tuned,
        TuneRequest,
        Uninstalled,
        UninstallRequest,
        Verification,
        VerifyRequest,
        borrow,
        doctor,
        experiment,
        install,
        lint,
        machine,
        plan,
        preview_experiment,
        preview_install,
        preview_uninstall,
        replay,
        routing,
        status,
        take_experiment_back,
        tune,
        tune_measured,
        uninstall,
        verify,
    )

__version__ = "0.1.0"
__all__ = [
    "Borrow",
    "BorrowRequest",
    "Diagnosis",
    "DoctorRequest",
    "InstallRequest",
    "Installed",
    "LintRequest",
    "Linted",
    "Machine",
    "MeasureRequest",
    "MeasuredTuning",
    "MoetuneError",
    "Outlook",
    "Plan",
    "Prepared",
    "Progress",
    "Replay",
    "Report",
    "Request",
    "RoutingAnswer",
    "RoutingRequest",
    "Status",
    "TakenBack",
    "TuneRequest",
    "Tuned",
    "UninstallRequest",
    "Uninstalled",
    "Verification",
    "VerifyRequest",
    "__version__",
    "borrow",
    "doctor",
    "experiment",
    "install",
    "lint",
    "machine",
    "plan",
    "preview_experiment",
    "preview_install",
    "preview_uninstall",
    "replay",
    "routing",
    "status",
    "take_experiment_back",
    "tune",
    "tune_measured",
    "uninstall",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from moetune import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
