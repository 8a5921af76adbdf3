"""Our launches of vLLM's kernels against the launchers of its published wheels."""

from __future__ import annotations

import inspect
import random
from typing import Any
from unittest.mock import MagicMock

from moetune.domain.problem import KERNELS, Kernel
from moetune.domain.quantization import Dtype
from moetune.servers.vllm import open_vllm
from moetune.servers.vllm.defaults import is_grouped
from moetune.servers.vllm.launch import padded_length, skips_alignment
from moetune.servers.vllm.rules import Change, has
from tests.servers.vllm_cases import (
    FLAGS,
    Case,
    cases,
    config_of,
    every_version,
)
from tests.servers.vllm_loader import (
    FUSED_MOE,
    FakeTensor,
    Real,
    function_node,
    real,
)


@every_version
def test_the_wheel_launches_what_we_say(version: str) -> None:
    """EM, the number of rows, the clamped BLOCK_SIZE_K, the transposed dot and the naive path."""
    functions, server = real(version), open_vllm(version, None)
    rng = random.Random(version)
    seen: set[tuple[str, bool, bool]] = set()
    for case in cases(version, 400, "launch"):
        problem, m = case.problem, min(case.m, 3000)
        if problem.quantization.dtype in (Dtype.FP8_W8A16, Dtype.MXFP4):
            continue
        between = has(server.release, Change.NAIVE_FUNCTIONAL) and not has(
            server.release, Change.NAIVE_MODULAR
        )
        if between and problem.quantization.dtype is Dtype.INT8_W8A8:
            continue  # its condition stands inside fused_experts_impl, which cannot be taken out
        config = {
            "BLOCK_SIZE_M": rng.choice((16, 32, 64, 128)),
            "BLOCK_SIZE_N": rng.choice((32, 64, 128)),
            "BLOCK_SIZE_K": rng.choice((32, 64, 128, 256)),
            "GROUP_SIZE_M": rng.choice((1, 8)),
            **({"SPLIT_K": 1} if has(server.release, Change.SPLIT_K) else {}),
        }
        with functions.world(
            problem.gpu.torch_name, vendor=problem.gpu.vendor, capability=problem.gpu.compute_capability
        ):
            for kernel in KERNELS:
                captured = launch_really(functions, case, m, kernel, config)
                if not captured:
                    assert server.launch_classes(problem, kernel, [m], config["BLOCK_SIZE_M"]) == ()
                    continue
                name, parameters = captured
                ours = server.launch(problem, kernel, config_of(config, problem))
                assert (name == "fused_moe_kernel_gptq_awq") == is_grouped(problem)
                length = padded_length(server.release, problem, kernel, m, config["BLOCK_SIZE_M"])
                rows = m * problem.topk
                naive = skips_alignment(server.release, problem, m)
                assert (parameters["EM"], parameters["num_valid_tokens"]) == (length, rows), case
                assert parameters["BLOCK_SIZE_K"] == ours.config.block_size_k
                assert parameters.get("SWAP_AB", False) == ours.swap_ab
                assert parameters.get("naive_block_assignment", False) == naive
                group_k = 0 if is_grouped(problem) else (case.block or [0, 0])[1]
                assert ours.block_k == group_k == parameters.get("group_k", group_k)
                (launched,) = server.launch_classes(problem, kernel, [m], config["BLOCK_SIZE_M"])
                assert dict(launched.constexprs).get("naive_block_assignment") == parameters.get(
                    "naive_block_assignment"
                )
                assert length % launched.padded_length_divisible_by == 0
                assert (launched.padded_length_divisible_by == 16) == (length % 16 == 0)
                assert launched.num_valid_tokens_divisible_by_16 == (rows % 16 == 0)
                assert launched.num_valid_tokens_is_one == (rows == 1)
                seen.add((name, naive, ours.swap_ab))
    assert ("fused_moe_kernel", True, False) in seen or not has(server.release, Change.NAIVE_MODULAR)
    assert any(swap for _, _, swap in seen) == has(server.release, Change.SWAP_AB)
    assert any(name == "fused_moe_kernel_gptq_awq" for name, _, _ in seen)


def launch_really(
    functions: Real, case: Case, m: int, kernel: Kernel, config: dict[str, int]
) -> tuple[str, dict[str, Any]] | None:
    """The parameters that the real launcher gives the kernel; None where it runs a CUDA kernel."""
    problem, quantization = case.problem, case.problem.quantization
    release = open_vllm(functions.version, None).release
    gemm, rows = problem.gemm(kernel), m * problem.topk
    topk = problem.topk if kernel == "up" else 1
    flags = dict.fromkeys(FLAGS.get(quantization.dtype, set()), True)
    flags |= {"use_int8_w8a8": True} if quantization.dtype is Dtype.INT8_W8A8 else {}
    expert_map = MagicMock() if problem.ep > 1 else None
    ids = FakeTensor((m, problem.topk))
    if "_prepare_expert_assignment" in functions.functions:
        grouped = {name: value for name, value in flags.items() if "16" in name}
        sorted_ids, experts, length = functions._prepare_expert_assignment(
            ids,
            config,
            m,
            problem.topk,
            problem.global_experts,
            expert_map,
            block_shape=case.block,
            **grouped,
        )
    else:
        sorted_ids, experts, length = functions.moe_align_block_size(
            ids, config["BLOCK_SIZE_M"], problem.global_experts, expert_map
        )
    packing = 2 if quantization.dtype is Dtype.INT4_W4A16 else 1
    a = FakeTensor((m if kernel == "up" else rows, gemm.k))
    b = FakeTensor((problem.E, gemm.n, gemm.k // packing))
    block = case.block
    scale: FakeTensor | None = None
    if is_grouped(problem):
        scale = FakeTensor((problem.E, gemm.n, -(-gemm.k // (quantization.group_size or 1))))
    elif block and quantization.dtype in (Dtype.FP8_W8A8, Dtype.INT8_W8A8):
        scale = FakeTensor((problem.E, -(-gemm.n // block[0]), -(-gemm.k // block[1])))
    elif flags:
        scale = FakeTensor((problem.E, gemm.n))
    a_scale = FakeTensor((a.shape[0], 1)) if quantization.dtype in (Dtype.FP8_W8A8, Dtype.INT8_W8A8) else None
    common = {
        "A": a,
        "B": b,
        "C": FakeTensor((m, problem.topk, gemm.n)),
        "A_scale": a_scale,
        "B_scale": scale,
        "B_zp": None,
        "topk_weights": FakeTensor((m, problem.topk)),
        "sorted_token_ids": sorted_ids,
        "expert_ids": experts,
        "num_tokens_post_padded": length,
        "mul_routed_weight": kernel == "down",
        "top_k": topk,
        "config": dict(config),
        "compute_type": "bf16",
        "per_channel_quant": False,
        "block_shape": block,
        "use_fp8_w8a8": False,
        "use_int8_w8a8": False,
        "use_int8_w8a16": False,
        "use_int4_w4a16": False,
    } | flags
    dispatch = (
        functions.functions.get("dispatch_fused_moe_kernel") or functions.functions["invoke_fused_moe_kernel"]
    )
    if is_grouped(problem) and has(release, Change.WNA16_TRITON_ONLY):
        dispatch = functions.functions["invoke_fused_moe_wna16_triton_kernel"]
    functions.captured.kernel = ""
    accepted = inspect.signature(dispatch).parameters
    dispatch(**{name: value for name, value in common.items() if name in accepted})
    if not functions.captured.kernel:
        return None
    parameters = kernel_parameters(functions.version, functions.captured.kernel)
    named = dict(zip(parameters, functions.captured.args, strict=False))
    return functions.captured.kernel, named | functions.captured.kwargs


def kernel_parameters(version: str, name: str) -> list[str]:
    node = function_node(version, FUSED_MOE + "fused_moe.py", name)
    return [argument.arg for argument in node.args.args]
