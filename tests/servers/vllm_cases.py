"""Problems for the tests of vLLM: generated at random, and always the same."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from moetune.domain.config import KernelConfig
from moetune.domain.gpu import Gpu
from moetune.domain.problem import Kernel, Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.servers.protocol import ConfigTree, ServerOptions
from moetune.servers.vllm import open_vllm
from moetune.servers.vllm.defaults import is_grouped
from moetune.servers.vllm.rules import BATCH_INVARIANT_VARIABLE, Change, has

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers.vllm_loader import (
        Real,
    )

VERSIONS = tuple(os.environ.get("MOETUNE_VLLM_VERSIONS", "0.10.2 0.12.0 0.20.0 0.33.0").split())
every_version = pytest.mark.parametrize("version", VERSIONS)

GPUS = (
    ("NVIDIA H200", "NVIDIA", (9, 0)),
    ("NVIDIA H200 NVL", "NVIDIA", (9, 0)),
    ("NVIDIA GH200 480GB", "NVIDIA", (9, 0)),
    ("NVIDIA H100 80GB HBM3", "NVIDIA", (9, 0)),
    ("NVIDIA A100-SXM4-80GB", "NVIDIA", (8, 0)),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "NVIDIA", (12, 0)),
    ("NVIDIA  two  spaces", "NVIDIA", (8, 9)),
    ("NVIDIA Odd/Name", "NVIDIA", (8, 9)),
    ("NVIDIA\tTab", "NVIDIA", (10, 0)),
    ("Orin (nvgpu)", "NVIDIA", (8, 7)),
    ("AMD Instinct MI300X", "AMD", None),
    ("AMD_Instinct_MI300X_HF", "AMD", None),
    ("Intel(R) Arc(TM) Pro B60 Graphics", "Intel", None),
)
DTYPES = (
    Dtype.BF16,
    Dtype.FP16,
    Dtype.FP32,
    Dtype.FP8_W8A8,
    Dtype.FP8_W8A8,
    Dtype.FP8_W8A16,
    Dtype.INT8_W8A8,
    Dtype.INT8_W8A16,
    Dtype.INT4_W4A16,
    Dtype.INT4_W4A16,
    Dtype.MXFP4,
)
FLAGS = {
    Dtype.FP8_W8A8: {"use_fp8_w8a8"},
    Dtype.FP8_W8A16: {"use_fp8_w8a16"},
    Dtype.INT8_W8A16: {"use_int8_w8a16"},
    Dtype.INT4_W4A16: {"use_int4_w4a16"},
    Dtype.MXFP4: {"ocp_mx"},
}
BLOCKS = (None, (128, 128), (128, 128), (64, 64), (64, 128), (128, 64), (32, 32), (96, 128))


@dataclass(frozen=True)
class Case:
    problem: Problem
    m: int

    @property
    def tensor_dtype(self) -> str:
        dtype = self.problem.quantization.dtype
        if dtype is Dtype.INT8_W8A8:
            return "int8"
        return "float32" if self.problem.activation_dtype is Dtype.FP32 else "bfloat16"

    @property
    def block(self) -> list[int] | None:
        quantization = self.problem.quantization
        if is_grouped(self.problem):
            return [0, quantization.group_size or 0]
        return list(quantization.block_shape) if quantization.block_shape else None

    def shapes(self, version: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of w1 and w2 as the layer of that release holds them."""
        problem, release = self.problem, open_vllm(version, None).release
        dtype = problem.quantization.dtype
        packed = dtype is Dtype.INT4_W4A16
        packed |= dtype is Dtype.MXFP4 and not has(release, Change.OCP_MX_UNPACKED)
        factor = 2 if packed else 1
        columns = problem.gemm("up").n
        return (problem.E, columns, problem.K // factor), (problem.E, problem.K, problem.N // factor)


def cases(version: str, count: int, seed: str = "") -> list[Case]:
    """Problems of one release, and an m for each, at random but always the same."""
    rng = random.Random(f"{version}{seed}")
    server = open_vllm(version, None)
    found: list[Case] = []
    while len(found) < count:
        name, vendor, capability = rng.choice(GPUS)
        dtype = rng.choice(DTYPES)
        grouped = dtype in (Dtype.INT4_W4A16, Dtype.INT8_W8A16)
        blocked = dtype in (Dtype.FP8_W8A8, Dtype.FP8_W8A16, Dtype.INT8_W8A8)
        experts = rng.choice((1, 8, 16, 60, 64, 128, 256, 257, 512))
        ep = rng.choice((1, 1, 1, 4))
        N = rng.choice((64, 96, 192, 352, 512, 704, 768, 1024, 1408, 2048, 4096))
        topk = min(rng.choice((1, 2, 4, 6, 8, 10, 22)), experts)
        problem = Problem(
            E=experts,
            global_experts=experts * ep,
            topk=topk,
            K=rng.choice((512, 1024, 2048, 2688, 2816, 3072, 4096, 7168)),
            N=N,
            file_n=N,
            gpu=Gpu(torch_name=name, vendor=vendor, compute_capability=capability),
            server="vllm",
            server_version=version,
            triton_version=server.triton_version,
            gated=rng.random() < 0.8,
            ep=ep,
            activation_dtype=Dtype.FP32 if dtype is Dtype.FP32 else Dtype.BF16,
            quantization=Quantization(
                dtype,
                block_shape=rng.choice(BLOCKS) if blocked else None,
                group_size=rng.choice((32, 64, 128, 256)) if grouped else None,
            ),
            flags=(BATCH_INVARIANT_VARIABLE,)
            if rng.random() < 0.1 and has(server.release, Change.BATCH_INVARIANT)
            else (),
        )
        packed = dtype is Dtype.MXFP4 and not has(server.release, Change.OCP_MX_UNPACKED)
        problem = replace(problem, file_n=N // 2) if packed else problem
        m = rng.choice(
            (1, 2, 3, 4, 5, 8, 9, 16, 17, 20, 24, 32, 33, 40, 41, 64, 65, 96, 97, 100, 128, 129, 512)
        )
        m = rng.choice((m, m, rng.randint(1, 20000)))
        found.append(Case(problem, m))
    return found


def options(problem: Problem) -> ServerOptions:
    return ServerOptions(deterministic=BATCH_INVARIANT_VARIABLE in problem.flags)


def same(found: dict[str, Any], ours: KernelConfig, problem: Problem) -> bool:
    """Whether the server's dict and our config are one config; what a dict lacks is Triton's default."""
    stages = 2 if problem.gpu.vendor == "AMD" else 3
    expected = (
        found["BLOCK_SIZE_M"],
        found["BLOCK_SIZE_N"],
        found["BLOCK_SIZE_K"],
        found.get("GROUP_SIZE_M", 1),
        found.get("num_warps", 4),
        found.get("num_stages", stages),
    )
    got = (
        ours.block_size_m,
        ours.block_size_n,
        ours.block_size_k,
        ours.group_size_m,
        ours.num_warps,
        ours.num_stages,
    )
    extra = {key: value for key, value in found.items() if key == "SPLIT_K" and is_grouped(problem)}
    return expected == got and dict(ours.extra) == extra


def fill(functions: Real, version: str, case: Case, kernel: Kernel, config: dict[str, Any]) -> dict[str, Any]:
    """Let the real heuristic of the grouped kernel add what the launch adds."""
    if not is_grouped(case.problem):
        return config
    release, problem = open_vllm(version, None).release, case.problem
    group, rows, gemm = problem.quantization.group_size, case.m * problem.topk, problem.gemm(kernel)
    bit = 4 if problem.quantization.dtype is Dtype.INT4_W4A16 else 8
    cuda = functions.should_moe_wna16_use_cuda(rows, group, problem.E, bit)
    added = functions.get_moe_wna16_block_config(
        config=config,
        use_moe_wna16_cuda=cuda and not has(release, Change.WNA16_TRITON_ONLY),
        num_valid_tokens=rows,
        size_k=gemm.k,
        size_n=gemm.n,
        num_experts=gemm.n,
        group_size=group,
        real_top_k=problem.topk if kernel == "up" else 1,
        block_size_m=config["BLOCK_SIZE_M"],
    )
    return {**config, **added}


def tree(folder: Path) -> ConfigTree:
    return ConfigTree(str(folder), {"": frozenset(path.name for path in folder.iterdir())})


def config_of(entry: dict[str, int], problem: Problem) -> KernelConfig:
    extra = tuple((key, value) for key, value in entry.items() if key == "SPLIT_K" and is_grouped(problem))
    return KernelConfig(
        entry["BLOCK_SIZE_M"],
        entry["BLOCK_SIZE_N"],
        entry["BLOCK_SIZE_K"],
        entry["GROUP_SIZE_M"],
        extra=extra,
    )


def outcome_of(function: Any, *arguments: Any) -> tuple[Any, Exception | None]:
    try:
        return function(*arguments), None
    except Exception as error:  # noqa: BLE001 any of them is an answer
        return None, error
