"""Made-up data for the kernel: a run of one case on any device, against the fp32 reference."""

from __future__ import annotations

import ctypes
import mmap

import torch

from moetune.domain.config import KernelConfig
from moetune.domain.launch import Launch
from moetune.measure.alignment import ELSEWHERE, align
from moetune.measure.kernels import run_grouped_gemm
from moetune.measure.reference import grouped_gemm, relative_error
from tests.measure.interpreted import Case, Outcome

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8e4nv": torch.float8_e4m3fn}
_GUARD = 64
_GUARD_VALUE = 12345.0


_PROT_NONE = 0
_guards: list[mmap.mmap] = []


def _guarded(values: torch.Tensor) -> torch.Tensor:
    """The same values in memory that ends where reading is a fault, each row followed by NaN.

    A masked column may be read and thrown away without a trace in the result; here it shows.
    """
    *lead, columns = values.shape
    padding = torch.full((*lead, 16), float("nan")).to(values.dtype)
    # Row by row with NaN between, but for the last row, which ends at the guard.
    wide = torch.cat((values, padding), dim=-1).contiguous()
    used = wide.numel() - 16
    size = used * values.element_size()
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    region = mmap.mmap(-1, pages + mmap.PAGESIZE)
    _guards.append(region)  # a tensor does not keep it alive
    raw = torch.frombuffer(region, dtype=torch.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mprotect(
        ctypes.c_void_p(raw.data_ptr() + pages), ctypes.c_size_t(mmap.PAGESIZE), ctypes.c_int(_PROT_NONE)
    )
    assert not failed, ctypes.get_errno()
    raw[pages - size : pages] = wide.view(torch.uint8).reshape(-1)[:size]
    strides = list(wide.stride())
    result = raw[pages - size : pages].view(values.dtype).as_strided((*lead, columns), strides)
    assert torch.equal(result.float(), values.float())
    return result


def run_case(case: Case, device: str, num_warps: int = 4, num_stages: int = 2) -> Outcome:
    """Run the kernel once and compare."""
    random = torch.Generator().manual_seed(hash((case.tokens, case.experts, case.n, case.k)) % 2**31)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    def scales(*shape: int) -> torch.Tensor:
        # Of very different sizes: a scale that is taken from the neighbour shows.
        return torch.exp2(torch.randint(-4, 5, shape, generator=random).float()) * 0.75

    choices = torch.stack(
        [
            torch.randperm(case.experts - case.idle_experts, generator=random)[: case.topk]
            for _ in range(case.tokens)
        ]
    )
    expert_of_slot = choices + case.idle_experts
    if case.elsewhere is not None:
        expert_of_slot[expert_of_slot >= case.elsewhere] = ELSEWHERE
    slots = expert_of_slot.numel()
    up = case.kernel == "up"
    rows, top_k = (case.tokens, case.topk) if up else (slots, 1)

    operand = _TYPES[case.operand]
    output = torch.float16 if case.operand == "fp16" else torch.bfloat16
    x = normal(rows, case.k).to(operand)
    weights = normal(case.experts, case.n, case.k).to(operand)
    if device == "cpu":
        x, weights = _guarded(x), _guarded(weights)
    x, weights = x.to(device), weights.to(device)
    x_scales = weight_scales = None
    if case.block:
        groups, blocks = -(-case.k // case.block), -(-case.n // case.block)
        x_scales = scales(rows, groups).to(device)
        weight_scales = scales(case.experts, blocks, groups).to(device)
    bias = normal(case.experts, case.n).to(output).to(device) * 10 if case.bias else None
    slot_weights = torch.rand(slots, generator=random).to(device)

    # NaN everywhere: a value that is not written, or that is read before, shows. Beyond it a guard.
    buffer = torch.full((slots * case.n + _GUARD,), float("nan"), dtype=output, device=device)
    buffer[-_GUARD:] = _GUARD_VALUE
    out = buffer[:-_GUARD].view(slots, case.n)

    m, n, k, group = case.config
    launch = Launch(
        kernel="up" if up else "down",
        config=KernelConfig(m, n, k, group, num_warps, num_stages),
        a_bits=8 * x.element_size(),
        b_bits=8 * weights.element_size(),
        block_k=case.block,
        swap_ab=case.swap_ab,
    )
    run_grouped_gemm(
        launch,
        x,
        weights,
        out,
        align(expert_of_slot.to(device), case.experts, m, case.padded_multiple),
        top_k=top_k,
        slot_weights=slot_weights,
        bias=bias,
        x_scales=x_scales,
        weight_scales=weight_scales,
        block_n=case.block,
    )
    expected = grouped_gemm(
        x,
        weights,
        expert_of_slot.to(device),
        top_k,
        slot_weights=None if up else slot_weights,
        bias=bias,
        x_scales=x_scales,
        weight_scales=weight_scales,
        block_shape=(case.block, case.block) if case.block else None,
    )
    by_row = [relative_error(out[s], expected[s]) for s in range(slots)]
    return Outcome(
        relative_error=relative_error(out, expected),
        worst_row_error=max(by_row, key=lambda error: (error != error, error)),
        untouched=bool((buffer[-_GUARD:] == torch.tensor(_GUARD_VALUE, dtype=output)).all()),
        reference_norm=float(expected.norm()),
    )
