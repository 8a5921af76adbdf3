"""One place that makes configs, tables and problems: hypothesis strategies and seeded generators."""

from __future__ import annotations

import random
from itertools import product
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from moetune.domain.choose import Choice, Choices, Pair, Reason
from moetune.domain.config import ConfigTable, KernelConfig
from moetune.domain.gpu import Gpu
from moetune.domain.problem import Problem
from moetune.domain.quantization import Dtype, Quantization

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# SGLang's search space for CUDA (source: benchmark/kernels/fused_moe_triton of sglang).
GRID: Mapping[str, tuple[int, ...]] = {
    "block_size_m": (16, 32, 64, 128, 256),
    "block_size_n": (32, 64, 128, 256),
    "block_size_k": (64, 128, 256),
    "group_size_m": (1, 16, 32, 64),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
}
# Wider axes that a recorded landscape of an H200 shows worth having.
WIDER: Mapping[str, tuple[int, ...]] = {
    "block_size_m": (16, 32, 64, 128, 256),
    "block_size_n": (16, 32, 64, 128, 256),
    "block_size_k": (32, 64, 128, 256),
    "group_size_m": (1, 2, 4, 8, 16, 32, 64),
    "num_warps": (2, 4, 8),
    "num_stages": (2, 3, 4, 5, 6),
}

H200 = Gpu(
    torch_name="NVIDIA H200",
    family="Hopper",
    compute_capability=(9, 0),
    sm_count=132,
    smem_optin_bytes=232_448,
    smem_per_sm_bytes=233_472,
    l2_bytes=62_914_560,
    memory_gib=141,
    mem_bw_gbps=4800,
    bf16_dense_tflops=989,
    fp8_dense_tflops=1979,
    confidence="high",
)
RTX_PRO_6000 = Gpu(
    torch_name="NVIDIA RTX PRO 6000 Blackwell Server Edition",
    family="Blackwell",
    compute_capability=(12, 0),
    sm_count=188,
    smem_optin_bytes=101_376,
    smem_per_sm_bytes=102_400,
    l2_bytes=134_217_728,
    memory_gib=96,
    mem_bw_gbps=1597,
    bf16_dense_tflops=503,
    fp8_dense_tflops=1007,
    confidence="medium",
)


def grid(axes: Mapping[str, tuple[int, ...]] = GRID) -> tuple[KernelConfig, ...]:
    """Every config of a grid, in a fixed order."""
    return tuple(KernelConfig(m, n, k, group, w, s) for m, n, k, group, w, s in product(*axes.values()))


def random_configs(count: int, seed: int, axes: Mapping[str, tuple[int, ...]] = WIDER) -> list[KernelConfig]:
    """`count` different configs of a grid."""
    return random.Random(seed).sample(grid(axes), count)


def times_us(configs: int, seed: int, floor_us: float = 20.0) -> list[float]:
    """Times with a long tail, as a landscape has: few good ones, many bad ones."""
    rng = random.Random(seed)
    return [floor_us * (1 + rng.paretovariate(1.5) - 1) for _ in range(configs)]


def problem(
    *,
    E: int = 256,
    topk: int = 8,
    K: int = 3072,
    N: int = 256,
    gpu: Gpu = H200,
    quantization: Quantization | None = None,
    server: str = "sglang",
    server_version: str = "0.5.23",
    triton_version: str = "3.6.0",
    routing: str = "uniform",
    gated: bool = True,
) -> Problem:
    """A problem that differs from Qwen3.5-122B-A10B at tp 4 on an H200 only where told."""
    return Problem(
        E=E,
        global_experts=E,
        topk=topk,
        K=K,
        N=N,
        file_n=N,
        gpu=gpu,
        server=server,
        server_version=server_version,
        triton_version=triton_version,
        quantization=quantization or Quantization(),
        routing=routing,
        gated=gated,
    )


def problems() -> Iterator[Problem]:
    """A few problems that differ in every way that matters."""
    yield problem()
    yield problem(gpu=RTX_PRO_6000)
    yield problem(E=8, topk=2, K=4096, N=7168)
    yield problem(quantization=Quantization(Dtype.FP8_W8A8, "fp8", (128, 128), dynamic_activation=True))
    yield problem(quantization=Quantization(Dtype.FP8_W8A8, "compressed-tensors", per_channel=True))
    yield problem(quantization=Quantization(Dtype.INT4_W4A16, "gptq", group_size=128))
    yield problem(E=512, topk=22, K=1024, N=2688, gated=False)
    yield problem(server="vllm", server_version="0.33.0", triton_version="3.8.0")


_POWERS = st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 256])
_EXTRA_NAMES = st.sampled_from(["SPLIT_K", "waves_per_eu", "kpack", "matrix_instr_nonkdim", "num_ctas"])


def configs(*, extra: bool = True, tma: bool = True) -> st.SearchStrategy[KernelConfig]:
    """Configs of the wider grid, with further keys as files hold them."""
    further: st.SearchStrategy[tuple[tuple[str, int | bool | str], ...]] = st.just(())
    if extra:
        values = st.integers(0, 64) | st.booleans() | st.sampled_from(["256", "auto"])
        further = st.dictionaries(_EXTRA_NAMES, values, max_size=2).map(lambda d: tuple(sorted(d.items())))
    return st.builds(
        KernelConfig,
        **{name: st.sampled_from(values) for name, values in WIDER.items()},
        use_tma=st.booleans() if tma else st.just(False),
        extra=further,
    )


def ms(largest: int = 20_000) -> st.SearchStrategy[int]:
    """Numbers of tokens, small and usual ones more often."""
    usual = st.sampled_from([1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192])
    return usual | st.integers(1, 64) | st.integers(1, largest)


def tables(*, min_size: int = 0, max_size: int = 12) -> st.SearchStrategy[ConfigTable]:
    """Tables in any order of their keys, as people write them."""
    entries = st.lists(
        st.tuples(ms(), configs()), min_size=min_size, max_size=max_size, unique_by=lambda entry: entry[0]
    )
    return entries.map(lambda found: ConfigTable(tuple(found)))


def choices(seed: int = 0, *, one_file: bool = False, ms: tuple[int, ...] = (1, 64, 8192)) -> Choices:
    """Choices as a tuning run makes them, for tests of what is done with them."""
    entries = []
    for m, config in zip(ms, random_configs(len(ms), seed), strict=True):
        pair = Pair(config, config)
        entries.append(Choice(m, pair, 10.0 + m / 3, 9.0 + m / 7, 25.0 + m, Reason.FASTER))
    return Choices(tuple(entries), one_file)
