"""A problem: everything that fixes the best config table.

Symbols: `M` tokens in one call, `E` experts of one rank (fused shared ones included), `topk`
experts a token goes to, `K` columns into the up kernel, `N` intermediate columns of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from moetune.domain.gpu import Gpu
from moetune.domain.quantization import Dtype, Quantization

Kernel = Literal["up", "down"]
KERNELS: tuple[Kernel, Kernel] = ("up", "down")


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How the server is split: sizes as the user gives them to it.

    Attributes:
        tp: tensor-parallel size.
        ep: expert-parallel size as SGLang's `--ep-size`; for vLLM 1, or more than 1 to say
            `--enable-expert-parallel` (its size is then tp * dp).
        dp: data-parallel size.
        redundant_experts: experts held twice (EPLB).
    """

    tp: int = 1
    ep: int = 1
    dp: int = 1
    redundant_experts: int = 0


@dataclass(frozen=True, slots=True)
class Gemm:
    """One grouped GEMM: `[rows, k] x [E, n, k]`, rows spread over E experts."""

    n: int
    k: int


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything that fixes the best table.

    Attributes:
        E: experts of one rank, fused shared experts included.
        global_experts: routed experts over all ranks, redundant ones included.
        topk: experts a token goes to in the kernel, fused shared experts included.
        K: columns into the up kernel.
        N: intermediate columns of one rank, in elements (never packed).
        file_n: N as the server writes it into the file name (packed or padded where it does).
        fused_shared_experts: shared experts among E.
        gated: the up kernel writes 2N columns.
        ep: ranks over which the routed experts are spread.
        routing: `uniform`, `zipf:S` or `recorded:ID`.
        kernel_source: `moetune` or the server whose own kernel is meant.
        flags: server flags that change the kernel, sorted.
    """

    E: int
    global_experts: int
    topk: int
    K: int
    N: int
    file_n: int
    gpu: Gpu
    server: str
    server_version: str
    triton_version: str
    fused_shared_experts: int = 0
    gated: bool = True
    bias: bool = False
    ep: int = 1
    activation_dtype: Dtype = Dtype.BF16
    quantization: Quantization = field(default_factory=Quantization)
    routing: str = "uniform"
    kernel_source: str = "moetune"
    flags: tuple[str, ...] = ()

    def gemm(self, kernel: Kernel) -> Gemm:
        """Sizes of the grouped GEMM of a kernel."""
        if kernel == "up":
            return Gemm(n=2 * self.N if self.gated else self.N, k=self.K)
        return Gemm(n=self.K, k=self.N)

    @property
    def routed_experts(self) -> int:
        """Routed experts of this rank."""
        return self.E - self.fused_shared_experts
