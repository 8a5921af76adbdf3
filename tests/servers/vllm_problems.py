"""Checkpoints, GPUs and problems that the tests of vLLM's rules share."""

from __future__ import annotations

from typing import Any

from moetune.domain.gpu import Gpu
from moetune.domain.model import ExpertLayer
from moetune.domain.problem import Parallelism, Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.servers.protocol import ServerOptions
from moetune.servers.vllm import VLLM, open_vllm

H200 = Gpu("NVIDIA H200", compute_capability=(9, 0))
A100 = Gpu("NVIDIA A100-SXM4-80GB", compute_capability=(8, 0))
MI300X = Gpu("AMD Instinct MI300X", vendor="AMD", gfx="gfx942")
NO_OPTIONS = ServerOptions()
GOOD: dict[str, Any] = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
}
FP8_BLOCK = Quantization(Dtype.FP8_W8A8, method="fp8", block_shape=(128, 128))
RELEASES = (
    "0.10.2",
    "0.11.0",
    "0.11.1",
    "0.13.0",
    "0.14.0",
    "0.17.0",
    "0.20.0",
    "0.25.0",
    "0.26.0",
    "0.33.0",
)


def layer(experts: int, intermediate: int, topk: int = 8, hidden: int = 4096, **more: Any) -> ExpertLayer:
    return ExpertLayer("model", "Arch", experts, topk, hidden, intermediate, **more)


def sharded(
    checkpoint: ExpertLayer, *, version: str | None = None, gpu: Gpu = H200, **sizes: int
) -> tuple[VLLM, Problem]:
    server = open_vllm(version, None)
    return server, server.problem(checkpoint, Parallelism(**sizes), gpu, NO_OPTIONS)
