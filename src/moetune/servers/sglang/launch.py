"""How SGLang launches its fused-MoE kernel: overrides, transposition, PDL, and what compiles again.

Source: sglang wheels, `invoke_fused_moe_kernel` and `should_enable_swap_ab` of
`fused_moe_triton_kernels.py`, `_prepare_fused_moe_run` and `fused_experts_impl` of `fused_moe.py`,
`moe_align_block_size.py`, and `try_get_optimal_moe_config`.

USE_TMA in the entry of the down kernel: both its operands are loaded through tensor descriptors, and the
up kernel writes its rows in sorted order, padding between them (`c_sorted`), for the activation and the
down kernel to read them so. In the entry of the up kernel: its weights are loaded so, nothing else changes.
No release looks at the GPU: where Triton can be imported with descriptors, they are used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moetune.domain.errors import ConfigFileError
from moetune.domain.launch import Launch, LaunchClass, is_single_step
from moetune.domain.quantization import Dtype
from moetune.servers.sglang.defaults import DETERMINISTIC_FLAG
from moetune.servers.sglang.releases import Feature, Rules
from moetune.servers.sglang.sharding import FUSED_SUM_FLAG
from moetune.servers.sglang.table_json import check_tma

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from moetune.domain.config import KernelConfig
    from moetune.domain.gpu import Gpu
    from moetune.domain.problem import Kernel, Problem

_SPECIALISED_DIVISOR = 16  # triton 3.6.0, backends/compiler.py: integers divisible by it are another binary
_DESCRIPTOR_BYTES = 16
_EARLY_ROWS = 512  # GDC_EARLY: A.shape[0] <= 512
_CHUNK_TOKENS = 64 * 1024
_UPCAST = frozenset({Dtype.MXFP4, Dtype.BITSANDBYTES})
_SCALED_BLOCKS = frozenset({Dtype.FP8_W8A8, Dtype.INT8_W8A8})


def make_launch(
    rules: Rules,
    problem: Problem,
    kernel: Kernel,
    config: KernelConfig,
    up: KernelConfig | None,
    down: KernelConfig | None = None,
) -> Launch:
    """The launch of a config.

    Args:
        rules: of the release.
        problem: the problem.
        kernel: `up` or `down`.
        config: its entry.
        up: the up kernel's entry at the same m, where it overrides the down kernel's.
        down: the down kernel's entry at the same m, where it says how the up kernel writes.

    Raises:
        ConfigFileError: where the release would die of the config or of the pair.
    """
    config = _overridden(rules, kernel, config, up)
    check_tma(rules, kernel, config)
    a_bits, b_bits = _bits(problem)
    quantization = problem.quantization
    is_grouped = _is_grouped(problem)
    if config.use_tma and not is_grouped:
        _check_rows(rules, problem, kernel, min(a_bits, b_bits))
    sorted_input = kernel == "down" and config.use_tma and not is_grouped
    sorted_output = kernel == "up" and down is not None and down.use_tma and not is_grouped
    has_block_scales = quantization.dtype in _SCALED_BLOCKS and quantization.block_shape is not None
    return Launch(
        kernel=kernel,
        config=config,
        a_bits=a_bits,
        b_bits=b_bits,
        # The grouped int4/int8 kernel loads a scale for each element, whatever BLOCK_SIZE_K is.
        block_k=quantization.block_shape[1] if has_block_scales and quantization.block_shape else 0,
        swap_ab=_swaps(rules, problem, config),
        per_channel=quantization.per_channel,
        pdl=_has_pdl(rules, problem),
        integers=quantization.dtype is Dtype.INT8_W8A8,
        grouped=is_grouped,
        single_step=is_grouped and is_single_step(problem.gemm(kernel).k, config),
        sum_topk=problem.topk if kernel == "down" and FUSED_SUM_FLAG in problem.flags else 0,
        weights_by_tma=config.use_tma and not is_grouped,
        sorted_input=sorted_input,
        sorted_output=sorted_output,
        skips_padding=sorted_input and rules.has(Feature.PADDING_SKIPPED),
        scales_by_column=has_block_scales and not rules.has(Feature.TILE_SCALES),
        wrong_numbers=_why_wrong(rules, problem) if sorted_input or sorted_output else "",
    )


def chunk_tokens(rules: Rules, m: int) -> int:
    """M of the lookup for a call of m tokens: up to 0.5.10 calls are cut into chunks."""
    return m if rules.has(Feature.WHOLE_BATCH) else min(m, _CHUNK_TOKENS)


def launch_classes(
    rules: Rules, problem: Problem, kernel: Kernel, ms: Sequence[int], block_size_m: int
) -> tuple[LaunchClass, ...]:
    """The binaries of one config that those m use, in the order in which the m first ask for them."""
    classes: dict[LaunchClass, list[int]] = {}
    for m in ms:
        classes.setdefault(_class_of(rules, problem, kernel, m, block_size_m), []).append(m)
    return tuple(replace(kind, ms=tuple(_unique(members))) for kind, members in classes.items())


def padded_length(rules: Rules, experts: int, rows: int, block_size_m: int) -> int:
    """Length of the sorted row ids, which is the kernel's argument EM.

    Args:
        rules: the release.
        experts: of the rank.
        rows: tokens times topk.
        block_size_m: of the up config.
    """
    # From 0.5.1 on one more bucket takes what belongs to other ranks.
    buckets = experts + (1 if rules.at_least((0, 5, 1)) else 0)
    if rules.has(Feature.SMALL_BATCH_PADDING) and rows < buckets:
        length = rows * block_size_m
    else:
        length = rows + buckets * (block_size_m - 1)
    step = _length_step(rules)
    return -(-length // step) * step


def _class_of(rules: Rules, problem: Problem, kernel: Kernel, m: int, block_size_m: int) -> LaunchClass:
    rows = m * problem.topk
    length = padded_length(rules, problem.E, rows, block_size_m)
    input_rows = m if kernel == "up" else rows
    constexprs = (("GDC_EARLY", input_rows <= _EARLY_ROWS),) if _has_pdl(rules, problem) else ()
    return LaunchClass(
        kernel=kernel,
        padded_length_divisible_by=(
            _length_step(rules) if length % _SPECIALISED_DIVISOR else _SPECIALISED_DIVISOR
        ),
        num_valid_tokens_divisible_by_16=rows % _SPECIALISED_DIVISOR == 0,
        num_valid_tokens_is_one=rows == 1,
        constexprs=constexprs,
    )


def _length_step(rules: Rules) -> int:
    return 4 if rules.has(Feature.PADDING_BY_FOUR) else 1


def _overridden(rules: Rules, kernel: Kernel, config: KernelConfig, up: KernelConfig | None) -> KernelConfig:
    if kernel == "up" or up is None:
        return config
    if not rules.has(Feature.DOWN_FILE):
        return up
    if config.block_size_m == up.block_size_m:
        return config
    if rules.has(Feature.DOWN_OVERRIDE):
        return replace(config, block_size_m=up.block_size_m)
    raise ConfigFileError(
        f"SGLang {rules.version} dies with AssertionError: BLOCK_SIZE_M is {up.block_size_m} for up and "
        f"{config.block_size_m} for down at the same m",
        "give both kernels one BLOCK_SIZE_M",
    )


def _bits(problem: Problem) -> tuple[int, int]:
    dtype = problem.quantization.dtype
    if dtype in _UPCAST:
        dtype = problem.activation_dtype
    if dtype.weight_bits == 16 and problem.activation_dtype is Dtype.FP32:
        dtype = Dtype.FP32
    return dtype.activation_bits, dtype.weight_bits


def _swaps(rules: Rules, problem: Problem, config: KernelConfig) -> bool:
    return (
        rules.has(Feature.SWAP_AB)
        and problem.quantization.dtype is Dtype.FP8_W8A8
        and DETERMINISTIC_FLAG not in problem.flags
        and _is_nvidia(problem.gpu)
        and (problem.gpu.compute_capability or (0, 0))[0] == 9
        and config.block_size_m < 64
        and config.block_size_n >= 64
    )


def _has_pdl(rules: Rules, problem: Problem) -> bool:
    """`is_arch_support_pdl` asks for compute capability 9 or more; the grouped kernel never has it."""
    return (
        rules.has(Feature.PDL)
        and _is_nvidia(problem.gpu)
        and (problem.gpu.compute_capability or (0, 0)) >= (9, 0)
        and not _is_grouped(problem)
    )


def _check_rows(rules: Rules, problem: Problem, kernel: Kernel, bits: int) -> None:
    """Refuse rows that no descriptor can stand for (triton 3.6.0: tools/tensor_descriptor.py)."""
    row_bytes = problem.gemm(kernel).k * bits // 8
    if row_bytes % _DESCRIPTOR_BYTES:
        raise ConfigFileError(
            f"SGLang {rules.version} dies with AssertionError: with USE_TMA the rows of the {kernel} weights "
            f"must be whole {_DESCRIPTOR_BYTES} bytes, and they are {row_bytes}",
            "remove USE_TMA",
        )


def _why_wrong(rules: Rules, problem: Problem) -> str:
    """What the release gets wrong with rows in sorted order; empty: nothing.

    Source: `fused_moe_kernel` of the wheels. A scale by row is read at the slot's place
    (`offs_token // top_k`), and one for all rows is computed over padding that nobody wrote. Up to 0.5.22
    the zeros for experts of other ranks are written at the slots' places, where sorted rows lie.
    """
    quantization = problem.quantization
    if problem.ep > 1 and not rules.has(Feature.ELSEWHERE_UNTOUCHED):
        return (
            f"with USE_TMA in the down config and ep {problem.ep}, SGLang {rules.version} writes zeros where "
            "rows of other experts lie, in a race with the programs that write those"
        )
    if quantization.dtype not in _SCALED_BLOCKS or quantization.block_shape is not None:
        return ""
    if quantization.per_channel:
        return "with USE_TMA in the down config SGLang multiplies rows by the scales of other rows"
    if quantization.dynamic_activation is False:
        return ""
    unless = "" if quantization.dynamic_activation else ", unless the checkpoint has static scales"
    return (
        f"with USE_TMA in the down config SGLang scales activations by what unwritten rows hold too{unless}"
    )


def _is_grouped(problem: Problem) -> bool:
    """Whether the int4/int8 kernel with scales for groups along K runs instead."""
    quantization = problem.quantization
    return quantization.dtype in (Dtype.INT4_W4A16, Dtype.INT8_W8A16) and bool(quantization.group_size)


def _is_nvidia(gpu: Gpu) -> bool:
    return gpu.vendor == "NVIDIA"


def _unique(values: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(values))
