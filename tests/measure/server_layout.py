"""Launches a server's own kernels and moetune's on the same made-up operands, in Triton's interpreter.

Run as a program with TRITON_INTERPRET=1: package, version and a folder as arguments; it prints for each
format the relative error between the two results.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moetune.domain.config import KernelConfig
from moetune.domain.kernel_format import KernelFormat, Scales, kernel_format
from moetune.domain.problem import Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.measure.alignment import align
from moetune.measure.dequantizing_kernel import run_dequantizing_gemm
from moetune.measure.kernels import run_grouped_gemm
from moetune.measure.operands import Operand, OperandMaker
from moetune.measure.reference import relative_error
from moetune.servers.registry import open_server
from tests.measure.interpreted import patch_interpreter
from tests.measure.server_kernels import load_kernel
from tests.measure.test_worker import SMALL

FORMATS = {
    "fp8 by tensor": Quantization(Dtype.FP8_W8A8, "made", dynamic_activation=True),
    "fp8 by channel": Quantization(Dtype.FP8_W8A8, "made", per_channel=True, dynamic_activation=True),
    "int8 by channel": Quantization(Dtype.INT8_W8A8, "made", per_channel=True, dynamic_activation=True),
    "int8 by block": Quantization(Dtype.INT8_W8A8, "made", (64, 64), dynamic_activation=True),
    "int8 weights by channel": Quantization(Dtype.INT8_W8A16, "made", per_channel=True),
    "int8 weights by group": Quantization(Dtype.INT8_W8A16, "made", group_size=32),
    "int8 weights by group, zero points": Quantization(
        Dtype.INT8_W8A16, "made", group_size=32, zero_point=True
    ),
    "int4": Quantization(Dtype.INT4_W4A16, "made", group_size=64),
    "int4 with zero points": Quantization(Dtype.INT4_W4A16, "made", group_size=32, zero_point=True),
}
TOKENS = 7
CONFIG = KernelConfig(16, 32, 64, 1, 4, 2)


def _strides(values: torch.Tensor | None, names: tuple[str, ...]) -> dict[str, int]:
    return {name: 0 if values is None else values.stride(at) for at, name in enumerate(names)}


def _theirs(
    kernel: Any, kind: KernelFormat, problem: Problem, x: Operand, w: Operand, slots: torch.Tensor
) -> torch.Tensor:
    import triton.language as tl

    alignment = align(slots, problem.E, CONFIG.block_size_m, 4)
    n, k = w.values.shape[1], x.values.shape[1]
    out = torch.full((slots.numel(), n), float("nan"), dtype=torch.bfloat16)
    grouped = kind.scales is Scales.GROUP
    weights_only = not kind.quantizes_activations
    flat_w = w.scales if w.scales is None or kind.scales is not Scales.TENSOR else w.scales.reshape(-1)
    by_row = kind.scales in (Scales.CHANNEL, Scales.BLOCK)
    values: dict[str, Any] = {
        "a_ptr": x.values, "b_ptr": w.values, "c_ptr": out, "a_desc": None, "b_desc": None, "bias_ptr": None,
        "b_bias_ptr": None, "add_mask_ptr": None, "a_scale_ptr": x.scales, "b_scale_ptr": flat_w,
        "b_zp_ptr": w.zeros, "topk_weights_ptr": torch.ones(slots.numel()),
        "sorted_token_ids_ptr": alignment.slot_ids, "expert_ids_ptr": alignment.tile_experts,
        "num_tokens_post_padded_ptr": alignment.used_length, "N": n, "K": k,
        "EM": alignment.padded_length, "num_valid_tokens": slots.numel(),
        **_strides(x.values, ("stride_am", "stride_ak")),
        **_strides(w.values, ("stride_be", "stride_bn", "stride_bk")),
        **_strides(out, ("stride_cm", "stride_cn")),
        **_strides(x.scales if by_row else None, ("stride_asm", "stride_ask")),
        **_strides(w.scales if kind.scales is not Scales.TENSOR else None,
                   ("stride_bse", "stride_bsn", "stride_bsk")),
        **_strides(w.zeros, ("stride_bze", "stride_bzn", "stride_bzk")),
        "stride_bias_e": 0, "stride_bias_n": 0, "stride_bbe": 0, "stride_bbn": 0,
        "group_n": kind.block_shape[0], "group_k": kind.block_shape[1], "group_size": kind.group_size,
        "block_k_diviable": k % CONFIG.block_size_k == 0, "even_Ks": k % CONFIG.block_size_k == 0,
        "has_zp": w.zeros is not None, "use_int4_w4a16": kind.weight_bits == 4,
        "use_int8_w8a16": weights_only and kind.weight_bits == 8,
        "use_fp8_w8a8": kind.operand_type == "fp8e4nv", "use_int8_w8a8": kind.operand_type == "i8",
        "per_channel_quant": kind.scales is Scales.CHANNEL and not weights_only,
        "BLOCK_SIZE_M": CONFIG.block_size_m, "BLOCK_SIZE_N": CONFIG.block_size_n,
        "BLOCK_SIZE_K": CONFIG.block_size_k, "GROUP_SIZE_M": 1, "MUL_ROUTED_WEIGHT": False,
        "top_k": problem.topk, "compute_type": tl.bfloat16, "swap_ab": False, "SWAP_AB": False,
        "c_sorted": False, "FUSE_ADD_TO_OUTPUT": False, "MASK_OUTPUT": False, "FUSE_SUM_ALL_REDUCE": False,
        "ROUTER_TOPK": 1, "naive_block_assignment": False, "SPLIT_K": 1, "HAS_BIAS": False,
    }  # fmt: skip
    assert not grouped or w.scales is not None
    tiles = alignment.padded_length // CONFIG.block_size_m + 1
    given = {name: value for name, value in values.items() if name in kernel.arg_names}
    kernel[(tiles * -(-n // CONFIG.block_size_n),)](**given)
    return out


def _ours(kind: KernelFormat, problem: Problem, x: Operand, w: Operand, slots: torch.Tensor) -> torch.Tensor:
    launch = replace(open_server("sglang", "0.5.23", "3.6.0").launch(problem, "up", CONFIG), pdl=False)
    out = torch.full((slots.numel(), w.values.shape[1]), float("nan"), dtype=torch.bfloat16)
    shared: dict[str, Any] = {"top_k": problem.topk, "slot_weights": torch.ones(slots.numel())}
    alignment = align(slots, problem.E, CONFIG.block_size_m, 4)
    if kind.scales is Scales.GROUP:
        assert w.scales is not None
        shared |= {"weight_scales": w.scales, "weight_zeros": w.zeros, "group_size": kind.group_size}
        run_dequantizing_gemm(launch, x.values, w.values, out, alignment, **shared)
    else:
        shared |= {"x_scales": x.scales, "weight_scales": w.scales, "block_n": kind.block_shape[0]}
        shared["channel_scales"] = kind.scales is Scales.CHANNEL
        run_grouped_gemm(launch, x.values, w.values, out, alignment, **shared)
    return out


def main() -> None:
    """Print the errors."""
    patch_interpreter()
    package, version, folder = sys.argv[1:]
    kernels = {
        grouped: load_kernel(package, version, Path(folder), name)
        for grouped, name in ((False, "fused_moe_kernel"), (True, "fused_moe_kernel_gptq_awq"))
    }
    errors = {}
    for name, quantization in FORMATS.items():
        problem = replace(SMALL, K=128, N=64, quantization=quantization)
        kind = kernel_format(problem)
        assert isinstance(kind, KernelFormat)
        random = torch.Generator().manual_seed(len(name))
        maker = OperandMaker(kind, torch.device("cpu"), random)
        gemm = problem.gemm("up")
        w, x = maker.weights(problem.E, gemm.n, gemm.k), maker.activations(TOKENS, gemm.k)
        slots = torch.stack(
            [torch.randperm(problem.E, generator=random)[: problem.topk] for _ in range(TOKENS)]
        )
        theirs = _theirs(kernels[kind.scales is Scales.GROUP], kind, problem, x, w, slots)
        errors[name] = relative_error(_ours(kind, problem, x, w, slots), theirs)
    json.dump(errors, sys.stdout)


if __name__ == "__main__":
    main()
