"""The servers' own kernels, read from their published wheels at run time and compiled with no GPU."""

from __future__ import annotations

import ast
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

import triton.language as tl
from triton.compiler import ASTSource

from moetune.domain.kernel_format import Scales
from tests.wheels import read_member

if TYPE_CHECKING:
    from pathlib import Path

    from moetune.domain.compilation import CompileTask

_HOMES = {
    ("sglang", "0.5.23"): "sglang/kernels/ops/moe/fused_moe_triton_kernels.py",
    ("vllm", "0.33.0"): "vllm/model_executor/layers/fused_moe/fused_moe.py",
}
_FUNCTIONS = ("write_zeros_to_output", "fused_moe_kernel", "fused_moe_kernel_gptq_awq")


def load_kernel(package: str, version: str, folder: Path, name: str = "fused_moe_kernel") -> Any:
    """A kernel of a wheel. Triton wants a file, so its text goes into a folder that is lost."""
    text = read_member(package, version, _HOMES[package, version])
    lines = text.splitlines()
    parts = [
        "\n".join(lines[node.decorator_list[0].lineno - 1 : node.end_lineno])
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name in _FUNCTIONS
    ]
    path = folder / f"{package}_kernel.py"
    path.write_text("import triton\nimport triton.language as tl\n\n\n" + "\n\n\n".join(parts) + "\n")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def server_source(kernel: Any, task: CompileTask) -> ASTSource:
    """The server's kernel with the arguments with which it would be launched for a task."""
    values = _arguments(task)
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(kernel.arg_names):
        parameter = kernel.params[index]
        value = values.get(name, parameter.default)
        if parameter.is_constexpr or value is None or value == 1:
            signature[name] = "constexpr"
            constants[(index,)] = value
        else:
            signature[name] = value if isinstance(value, str) else "i32"
            if isinstance(value, str) or value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def _arguments(task: CompileTask) -> dict[str, Any]:
    launch, config = task.launch, task.launch.config
    blocks = launch.block_k > 0
    by_channel = task.scales is Scales.CHANNEL
    scaled = blocks or task.scales is not Scales.NONE
    groups = task.k // launch.block_k if blocks else -(-task.k // task.group_size) if task.grouped else 1
    w_rows = task.n // task.block_n if blocks else task.n if by_channel or task.grouped else 1
    per_byte = 8 // launch.b_bits if task.grouped else 1
    operand = f"*{task.operand_type}"
    weights_only = bool(task.weight_type)
    both = launch.a_bits == launch.b_bits == 8
    return {
        # Pointers; None for what this launch does not have, TMA descriptors among it.
        "a_ptr": operand,
        "b_ptr": f"*{task.weight_type or task.operand_type}",
        "c_ptr": f"*{task.output_type}",
        "a_desc": None,
        "b_desc": None,
        "bias_ptr": None,
        "b_bias_ptr": None,
        "add_mask_ptr": None,
        "a_scale_ptr": "*fp32" if task.quantizes_activations else None,
        "b_scale_ptr": None if not scaled else f"*{task.output_type}" if task.grouped else "*fp32",
        "b_zp_ptr": "*u8" if task.zero_point else None,
        "topk_weights_ptr": "*fp32",
        "sorted_token_ids_ptr": "*i32",
        "expert_ids_ptr": "*i32",
        "num_tokens_post_padded_ptr": "*i32",
        # Sizes and strides.
        "N": task.n,
        "K": task.k,
        "EM": 4,
        "num_valid_tokens": 16,
        "stride_am": task.k,
        "stride_ak": 1,
        "stride_be": task.n * task.k // per_byte,
        "stride_bk": 1,
        "stride_bn": task.k // per_byte,
        "stride_cm": task.n,
        "stride_cn": 1,
        "stride_bias_e": 0,
        "stride_bias_n": 0,
        "stride_bbe": 0,
        "stride_bbn": 0,
        "stride_asm": groups if task.quantizes_activations else 0,
        "stride_ask": int(task.quantizes_activations),
        "stride_bse": groups * w_rows if scaled else 0,
        "stride_bsk": int(blocks or task.grouped),
        "stride_bsn": groups if scaled else 0,
        "stride_bze": task.n // per_byte * groups if task.zero_point else 0,
        "stride_bzk": int(task.zero_point),
        "stride_bzn": groups if task.zero_point else 0,
        # Constants.
        "group_n": task.block_n,
        "group_k": launch.block_k,
        "group_size": task.group_size,
        "block_k_diviable": task.k % config.block_size_k == 0,
        "has_zp": task.zero_point,
        "use_int4_w4a16": launch.b_bits == 4,
        "BLOCK_SIZE_M": config.block_size_m,
        "BLOCK_SIZE_N": config.block_size_n,
        "BLOCK_SIZE_K": config.block_size_k,
        "GROUP_SIZE_M": config.group_size_m,
        "MUL_ROUTED_WEIGHT": launch.kernel == "down",
        "top_k": task.top_k,
        "compute_type": tl.bfloat16,
        "use_fp8_w8a8": both and not launch.integers,
        "use_int8_w8a8": both and launch.integers,
        "use_int8_w8a16": weights_only and launch.b_bits == 8,
        "per_channel_quant": by_channel and not weights_only,
        "even_Ks": task.k % config.block_size_k == 0,
        "swap_ab": launch.swap_ab,
        "SWAP_AB": launch.swap_ab,
        "c_sorted": False,
        "FUSE_ADD_TO_OUTPUT": False,
        "MASK_OUTPUT": False,
        "FUSE_SUM_ALL_REDUCE": launch.sum_topk > 0,
        "ROUTER_TOPK": launch.sum_topk or 1,
        "naive_block_assignment": False,
        "SPLIT_K": 1,
        "HAS_BIAS": False,
    }
