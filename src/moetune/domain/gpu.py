"""GPUs: names as torch gives them, limits, rates and siblings, from a packaged registry."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU. None means unknown.

    Attributes:
        torch_name: as `torch.cuda.get_device_name` returns it.
        vendor: `NVIDIA`, `AMD` or `Intel`.
        family: architecture name (`Hopper`, `Blackwell`, ...).
        compute_capability: `(9, 0)` for an NVIDIA GPU, None for others.
        gfx: `gfx942` for an AMD GPU, None for others.
        smem_optin_bytes: shared memory that one block can ask for.
        smem_per_sm_bytes: shared memory of one multiprocessor.
        mem_bw_gbps: memory bandwidth in 10^9 bytes a second.
        bf16_dense_tflops: dense bf16 rate with fp32 accumulation in 10^12 a second.
        siblings: free text of the registry that names like silicon.
        confidence: how far to trust the row: `high`, `medium` or `low`.
        mig_slice: name of the MIG profile when this is a slice of a GPU.
    """

    torch_name: str
    vendor: str = "NVIDIA"
    family: str = ""
    compute_capability: tuple[int, int] | None = None
    gfx: str | None = None
    sm_count: int | None = None
    smem_optin_bytes: int | None = None
    smem_per_sm_bytes: int | None = None
    l2_bytes: int | None = None
    memory_gib: float | None = None
    mem_bw_gbps: float | None = None
    bf16_dense_tflops: float | None = None
    fp8_dense_tflops: float | None = None
    siblings: str = ""
    confidence: str = "low"
    mig_slice: str | None = None

    @property
    def sm(self) -> str:
        """`sm_90` for compute capability 9.0; the gfx name for AMD; empty when unknown."""
        if self.compute_capability is not None:
            major, minor = self.compute_capability
            return f"sm_{major}{minor}"
        return self.gfx or ""
