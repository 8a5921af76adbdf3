"""Differences that may be worth a try on a server, simplest first.

Which of them a release, a GPU and a model take is not said here: the table of flags is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FUSED = "fused all-reduce"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A difference that may be worth a try.

    Attributes:
        name: of the arm.
        arguments: that it adds.
        why: what it does and what to expect.
        unless_default: it switches something off that another candidate would switch on: tried only
            where that one is on by default.
    """

    name: str
    arguments: tuple[str, ...]
    why: str
    unless_default: str = ""


# A flag before another kernel, and that before other sizes.
CANDIDATES: Mapping[str, tuple[Candidate, ...]] = {
    "sglang": (
        Candidate(
            "sum inside the MoE kernel",
            ("--enable-fused-moe-sum-all-reduce",),
            "Adds a token's experts inside the down kernel instead of in a kernel of its own; no line of the "
            "log shows it, so its resolved argument counts. Compare answers too: sums come in another order.",
        ),
        Candidate(
            FUSED,
            ("--flashinfer-allreduce-fusion-backend", "auto"),
            "FlashInfer's all-reduce fused with the norm behind it, for steps of at most 2,048 tokens.",
        ),
        Candidate(
            FUSED,
            ("--enable-flashinfer-allreduce-fusion",),
            "FlashInfer's all-reduce fused with the norm behind it, for steps of at most 2,048 tokens.",
        ),
        Candidate(
            "no fused all-reduce",
            ("--enforce-disable-flashinfer-allreduce-fusion",),
            "FlashInfer's fused all-reduce is on by default for this model on this GPU: what is it worth?",
            unless_default=FUSED,
        ),
        Candidate(
            "prefill graphs",
            ("--enable-piecewise-cuda-graph",),
            "Graphs for prefill too, which this release does not capture by default.",
        ),
        Candidate(
            "the Triton MoE runner",
            ("--moe-runner-backend", "triton"),
            "Another MoE runner is the default here; tuned files matter only with this one.",
        ),
        Candidate(
            "FlashInfer's TRT-LLM MoE runner",
            ("--moe-runner-backend", "flashinfer_trtllm"),
            "On GPUs of sm_10x another runner can be faster than a tuned Triton kernel.",
        ),
        Candidate(
            "prefill steps of 16384 tokens",
            ("--chunked-prefill-size", "16384"),
            "Larger prefill steps: throughput against the time to the first token, and less room for KV.",
        ),
    ),
    "vllm": (
        Candidate(
            FUSED,
            ("--compilation-config", '{"pass_config": {"fuse_allreduce_rms": true}}'),
            "FlashInfer's all-reduce fused with the norm behind it.",
        ),
        Candidate(
            "no fused all-reduce",
            ("--compilation-config", '{"pass_config": {"fuse_allreduce_rms": false}}'),
            "FlashInfer's fused all-reduce is on by default on this GPU: what is it worth?",
            unless_default=FUSED,
        ),
        Candidate(
            "the Triton MoE backend",
            ("--moe-backend", "triton"),
            "Another MoE backend is the default here; tuned files matter only with this one.",
        ),
        Candidate(
            "steps of 16384 tokens",
            ("--max-num-batched-tokens", "16384"),
            "Larger steps: throughput against the time to the first token, and less room for KV.",
        ),
    ),
}

# Runners that are offered only where they were published to be ahead: majors of compute capabilities.
ONLY_ON: Mapping[str, tuple[int, ...]] = {"flashinfer_trtllm": (10,)}
