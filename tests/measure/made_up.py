"""Made-up data for the kernel: a run of one case on any device, against the fp32 reference."""

from __future__ import annotations

import ctypes
import mmap

import torch

from moetune.domain.config import KernelConfig
from moetune.domain.kernel_format import Scales
from moetune.domain.launch import Launch
from moetune.measure.alignment import ELSEWHERE, align, in_order, places_of_slots
from moetune.measure.dequantizing_kernel import run_dequantizing_gemm
from moetune.measure.kernels import run_grouped_gemm
from moetune.measure.reference import grouped_gemm, relative_error, summed
from tests.measure.interpreted import Case, Outcome

_TYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8e4nv": torch.float8_e4m3fn,
    "i8": torch.int8,
    "u8": torch.uint8,
    "u4": torch.uint8,
}
_GUARD = 64
_GUARD_VALUE = 12345.0


_PROT_NONE = 0
_guards: list[mmap.mmap] = []


def _guarded(values: torch.Tensor) -> torch.Tensor:
    """The same values in memory that ends where reading is a fault, each row followed by NaN.

    A masked column may be read and thrown away without a trace in the result; here it shows.
    """
    *lead, columns = values.shape
    other = float("nan") if values.dtype.is_floating_point else 113
    padding = torch.full((*lead, 16), other).to(values.dtype)
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


def _routing(case: Case, random: torch.Generator) -> torch.Tensor:
    choices = torch.stack(
        [
            torch.randperm(case.experts - case.idle_experts, generator=random)[: case.topk]
            for _ in range(case.tokens)
        ]
    )
    expert_of_slot = choices + case.idle_experts
    if case.elsewhere is not None:
        expert_of_slot[expert_of_slot >= case.elsewhere] = ELSEWHERE
    return expert_of_slot


def _poisoned(slots: int, n: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN everywhere: a value that is not written, or that is read before, shows. Beyond it a guard."""
    buffer = torch.full((slots * n + _GUARD,), float("nan"), dtype=dtype, device=device)
    buffer[-_GUARD:] = _GUARD_VALUE
    return buffer, buffer[:-_GUARD].view(slots, n)


def run_case(case: Case, device: str, num_warps: int = 4, num_stages: int = 2) -> Outcome:
    """Run the kernel once and compare."""
    if case.scales == "group":
        return _run_grouped(case, device, num_warps, num_stages)
    random = torch.Generator().manual_seed(hash((case.tokens, case.experts, case.n, case.k)) % 2**31)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    def scales(*shape: int) -> torch.Tensor:
        # Of very different sizes: a scale that is taken from the neighbour shows.
        return torch.exp2(torch.randint(-4, 5, shape, generator=random).float()) * 0.75

    expert_of_slot = _routing(case, random)
    slots = expert_of_slot.numel()
    up = case.kernel == "up"
    rows, top_k = (case.tokens, case.topk) if up else (slots, 1)

    operand = _TYPES[case.operand]
    output = torch.float16 if case.operand == "fp16" else torch.bfloat16

    def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        if dtype is torch.int8:
            return torch.randint(-127, 128, shape, generator=random).to(dtype)
        return normal(*shape).to(dtype)

    x = numbers(operand, rows, case.k)
    weights = numbers(_TYPES[case.weight or case.operand], case.experts, case.n, case.k)
    x_scales = weight_scales = None
    if case.block:
        groups, blocks = -(-case.k // case.block), -(-case.n // case.block)
        x_scales = scales(rows, groups).to(device)
        weight_scales = scales(case.experts, blocks, groups).to(device)
    if case.scales != "none":
        by_channel = case.scales == "channel"
        weight_scales = scales(case.experts, case.n if by_channel else 1, 1).to(device)
        x_scales = None if case.weight else scales(rows if by_channel else 1, 1).to(device)
    bias = normal(case.experts, case.n).to(output).to(device) * 10 if case.bias else None
    slot_weights = torch.rand(slots, generator=random).to(device)

    m, n, k, group = case.config
    alignment = align(expert_of_slot.to(device), case.experts, m, case.padded_multiple)
    places = places_of_slots(alignment, slots)
    given, given_scales = x.to(device), x_scales
    if case.in_order and not up:
        given = in_order(given, places, alignment.padded_length)
        if x_scales is not None and len(x_scales) == slots:
            given_scales = in_order(x_scales, places, alignment.padded_length)
    stored = weights.to(device)
    if device == "cpu":
        # What Triton reads through a descriptor it may read whole: its interpreter does so.
        whole = case.by_descriptor, case.by_descriptor and case.in_order and not up
        given, stored = (
            values if is_whole else _guarded(values)
            for values, is_whole in ((given, whole[1]), (stored, whole[0]))
        )

    out_rows = case.tokens if case.summed else alignment.padded_length if case.in_order and up else slots
    buffer, out = _poisoned(out_rows, case.n, output, device)
    if case.summed:
        out.zero_()
    launch = Launch(
        kernel="up" if up else "down",
        config=KernelConfig(m, n, k, group, num_warps, num_stages, use_tma=case.by_descriptor),
        a_bits=8 * x.element_size(),
        b_bits=8 * weights.element_size(),
        block_k=case.block,
        swap_ab=case.swap_ab,
        sum_topk=case.topk if case.summed else 0,
        weights_by_tma=case.by_descriptor,
        sorted_input=case.in_order and not up,
        sorted_output=case.in_order and up,
    )
    run_grouped_gemm(
        launch,
        given,
        stored,
        out,
        alignment,
        top_k=top_k,
        slot_weights=slot_weights,
        bias=bias,
        x_scales=given_scales,
        weight_scales=weight_scales,
        block_n=case.block,
        channel_scales=case.scales == Scales.CHANNEL.value,
    )
    expected = grouped_gemm(
        x.to(device),
        weights.to(device),
        expert_of_slot.to(device),
        top_k,
        slot_weights=None if up else slot_weights,
        bias=bias,
        x_scales=x_scales,
        weight_scales=weight_scales,
        block_shape=(case.block, case.block) if case.block else None,
    )
    if case.in_order and up:
        out, expected = _written_in_order(out, expected, places, expert_of_slot.reshape(-1).to(device))
    return _outcome(buffer, out, summed(expected, case.topk) if case.summed else expected)


def _written_in_order(
    out: torch.Tensor, expected: torch.Tensor, places: torch.Tensor, experts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of this rank's slots; NaN where a row that is no slot's was written."""
    here = experts != ELSEWHERE
    others = torch.ones(len(out), dtype=torch.bool, device=out.device)
    others[places[here]] = False
    assert out[others].isnan().all(), "a row of padding, or of another rank, was written"
    return out[places[here]], expected[here]


def _outcome(buffer: torch.Tensor, out: torch.Tensor, expected: torch.Tensor) -> Outcome:
    by_row = [relative_error(out[s], expected[s]) for s in range(len(out))]
    guard = torch.tensor(_GUARD_VALUE, dtype=out.dtype)
    return Outcome(
        relative_error=relative_error(out, expected),
        worst_row_error=max(by_row, key=lambda error: (error != error, error)),
        untouched=bool((buffer[-_GUARD:] == guard).all()),
        reference_norm=float(expected.norm()),
    )


def _run_grouped(case: Case, device: str, num_warps: int, num_stages: int) -> Outcome:
    """Run the kernel for weights in groups. What they mean is computed here, from numbers not yet packed."""
    random = torch.Generator().manual_seed(hash((case.tokens, case.experts, case.n, case.k)) % 2**31)
    bits, groups = int(case.weight[1:]), -(-case.k // case.group_size)
    expert_of_slot = _routing(case, random)
    slots, up = expert_of_slot.numel(), case.kernel == "up"
    rows, top_k = (case.tokens, case.topk) if up else (slots, 1)
    output = _TYPES[case.operand]

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(0, 1 << bits, shape, generator=random)

    x = torch.randn(rows, case.k, generator=random).to(output)
    whole = integers(case.experts, case.n, case.k)
    zeros = integers(case.experts, case.n, groups) if case.zero_point else None
    # Of very different sizes, and whole powers of two: a scale that is taken from the neighbour shows.
    exponents = torch.randint(-4, 5, (case.experts, case.n, groups), generator=random)
    scales = (torch.exp2(exponents.float()) * 0.75 / (1 << bits)).to(output)
    meaning = torch.empty(case.experts, case.n, case.k)
    for column in range(case.k):
        group = column // case.group_size
        zero = (1 << (bits - 1)) if zeros is None else zeros[:, :, group]
        meaning[:, :, column] = (whole[:, :, column] - zero) * scales[:, :, group].float()

    weights = (whole[..., 0::2] + 16 * whole[..., 1::2]) if bits == 4 else whole
    if zeros is not None and bits == 4:
        zeros = zeros[:, 0::2] + 16 * zeros[:, 1::2]

    def stored(values: torch.Tensor) -> torch.Tensor:
        return _guarded(values) if device == "cpu" else values.to(device)

    slot_weights = torch.rand(slots, generator=random).to(device)
    buffer, out = _poisoned(slots, case.n, output, device)
    m, n, k, group = case.config
    run_dequantizing_gemm(
        Launch("up" if up else "down", KernelConfig(m, n, k, group, num_warps, num_stages), 16, bits),
        stored(x),
        stored(weights.to(torch.uint8)),
        out,
        align(expert_of_slot.to(device), case.experts, m, case.padded_multiple),
        top_k=top_k,
        slot_weights=slot_weights,
        weight_scales=stored(scales),
        weight_zeros=None if zeros is None else stored(zeros.to(torch.uint8)),
        group_size=case.group_size,
    )
    expected = grouped_gemm(
        x.to(device),
        meaning.to(device),
        expert_of_slot.to(device),
        top_k,
        slot_weights=None if up else slot_weights,
    )
    return _outcome(buffer, out, expected)
