"""Whether a tuned file matters for what a log shows: other runners and modes that open no file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetune.domain.text import printable

if TYPE_CHECKING:
    from moetune.applications.doctor_records import ServerFacts

# Quantizations that both servers convert to Marlin's layout (sglang and vllm wheels, quantization/awq*.py
# and gptq*.py), the tags that their experts would have, and all-to-all backends under which SGLang's fp8
# experts run on DeepGEMM (quantization/fp8.py:create_moe_runner).
_MARLIN = frozenset({"awq", "gptq", "awq_marlin", "gptq_marlin"})
_INT_TAGS = ("int4_w4a16", "int8_w8a16")
_DEEPGEMM_A2A = frozenset({"deepep", "mooncake", "nixl"})
_FP8_TAG = "fp8_w8a8"
_ARGUMENTS = ("quantization", "moe_runner_backend", "moe_backend", "moe_a2a_backend", "ep_size", "tp_size")


def other_runner(facts: ServerFacts, dtype: str) -> str:
    """Another runner that computes experts of this type; empty when the Triton kernel does.

    Args:
        facts: of the server.
        dtype: tag of the file names, empty for bf16.
    """
    said = [runner for runner in facts.runners.values() if not runner.dtypes or dtype in runner.dtypes]
    # What is said of this type alone stands above what is said of all.
    special = [runner for runner in said if runner.dtypes] or said
    if special:
        return "" if any(runner.reads_file for runner in special) else special[0].runner
    start = facts.start
    if start is None:
        return ""
    if dtype in _INT_TAGS and start.text("quantization").lower() in _MARLIN:
        return "marlin"
    if dtype == _FP8_TAG and start.text("moe_a2a_backend").lower() in _DEEPGEMM_A2A:
        return "deep_gemm"
    return ""


def runner_by_arguments(facts: ServerFacts) -> str:
    """Another runner that the arguments alone tell of."""
    return next((runner for tag in (*_INT_TAGS, _FP8_TAG) if (runner := other_runner(facts, tag))), "")


def telling_arguments(facts: ServerFacts) -> tuple[tuple[str, str], ...]:
    """The arguments that choose a runner."""
    start = facts.start
    if start is None:
        return ()
    return tuple((name, printable(start.values[name], 80)) for name in _ARGUMENTS if name in start.values)


def evidence(facts: ServerFacts, runner: str) -> str:
    """What in the log says that this runner computes the experts."""
    for chosen in facts.runners.values():
        if chosen.runner == runner and chosen.text:
            return chosen.text
    return ", ".join(f"{name}={value}" for name, value in telling_arguments(facts))


def is_partial(runner: str) -> bool:
    """Whether that runner leaves calls with few tokens to the Triton kernel."""
    return any(word in runner.lower().replace("_", "") for word in ("deepgemm", "vllmcutlass"))
