"""Expert layers, GPUs and trees of config files that the tests of the SGLang module share."""

from __future__ import annotations

from dataclasses import replace

from moetune.domain.gpu import Gpu
from moetune.domain.model import ExpertLayer
from moetune.domain.problem import Parallelism, Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.servers.protocol import ConfigTree, ServerOptions
from moetune.servers.sglang import open_sglang

H200 = Gpu("NVIDIA H200", compute_capability=(9, 0), smem_optin_bytes=232_448)
RTX4090 = Gpu("NVIDIA GeForce RTX 4090", compute_capability=(8, 9), smem_optin_bytes=101_376)
MI300 = Gpu("AMD Instinct MI300X", vendor="AMD", gfx="gfx942")
FP8_BLOCK = Quantization(Dtype.FP8_W8A8, "fp8", block_shape=(128, 128))
ENTRY = {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8}
DEFAULTS = ServerOptions()


def layer(
    experts: int = 128,
    intermediate: int = 768,
    topk: int = 8,
    architecture: str = "Qwen3MoeForCausalLM",
    **changes: object,
) -> ExpertLayer:
    made = ExpertLayer("test", architecture, experts, topk, 2048, intermediate)
    return replace(made, **changes)  # type: ignore[arg-type]


def shard(
    of: ExpertLayer,
    parallelism: Parallelism = Parallelism(),  # noqa: B008
    gpu: Gpu = H200,
    options: ServerOptions = DEFAULTS,
    version: str | None = None,
) -> Problem:
    return open_sglang(version).problem(of, parallelism, gpu, options)


def tree(root: str = "/root", /, **directories: tuple[str, ...]) -> ConfigTree:
    return ConfigTree(root, {name: frozenset(files) for name, files in directories.items()})
