"""Each parameter of the servers' kernels gets what the server's own launching code gives it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl

from moetune.domain.compilation import CompileTask, compile_task
from moetune.domain.config import KernelConfig
from moetune.domain.errors import ServerError
from moetune.domain.kernel_format import KernelFormat, Scales, kernel_format
from moetune.domain.problem import KERNELS, Kernel, Problem
from moetune.domain.quantization import Dtype
from moetune.measure.alignment import align, each_alone
from moetune.measure.operands import TYPES, OperandMaker
from moetune.servers.kernel_values import Lengths, Pointer, TypeConstant
from moetune.servers.protocol import KernelServer, Server
from moetune.servers.registry import open_server
from tests.measure.server_files import RELEASES
from tests.measure.test_layer import FP8, SEED, quantized
from tests.servers.kernel_calls import Wheel, config_of

CONFIG = KernelConfig(16, 64, 64, 8, 4, 3)
CASES = {
    "bf16": (SEED, CONFIG),
    "bf16, K that BLOCK_SIZE_K does not divide": (replace(SEED, K=288, N=96), CONFIG),
    "fp16": (replace(SEED, activation_dtype=Dtype.FP16), CONFIG),
    "many experts": (replace(SEED, E=64, global_experts=64, K=64, N=64), CONFIG),
    "bias": (replace(SEED, bias=True), CONFIG),
    "fp8 by block": (FP8, CONFIG),
    "fp8 by block, not swapped": (FP8, replace(CONFIG, block_size_m=64)),
    "fp8 by tensor": (quantized(Dtype.FP8_W8A8, dynamic_activation=True), CONFIG),
    "fp8 by channel": (quantized(Dtype.FP8_W8A8, per_channel=True, dynamic_activation=True), CONFIG),
    "int8 by channel": (quantized(Dtype.INT8_W8A8, per_channel=True, dynamic_activation=True), CONFIG),
    "int8 by block": (quantized(Dtype.INT8_W8A8, block_shape=(128, 128), dynamic_activation=True), CONFIG),
    "int8 weights by channel": (quantized(Dtype.INT8_W8A16, per_channel=True), CONFIG),
    "int8 weights by group": (quantized(Dtype.INT8_W8A16, group_size=128), CONFIG),
    "int4": (quantized(Dtype.INT4_W4A16, group_size=128), CONFIG),
    "int4 with zero points": (quantized(Dtype.INT4_W4A16, group_size=32, zero_point=True), CONFIG),
}
MS = (1, 8, 40, 600)
_NO_BIAS_BEFORE = (0, 5, 1)


def known(name: str, package: str, version: str) -> bool:
    """Whether the release has that format in this kernel."""
    release = tuple(map(int, version.split(".")))
    return not (name == "bias" and package == "sglang" and release < _NO_BIAS_BEFORE)


def made(problem: Problem, task: CompileTask, m: int) -> dict[str, Any]:
    """The tensors and flags with which a server calls what launches its kernel."""
    kind = kernel_format(problem)
    assert isinstance(kind, KernelFormat)
    kernel, slots = task.launch.kernel, m * problem.topk
    gemm = problem.gemm(kernel)
    maker = OperandMaker(kind, torch.device("cpu"), torch.Generator().manual_seed(1))
    x, w = maker.activations(m if kernel == "up" else slots, gemm.k), maker.weights(problem.E, gemm.n, gemm.k)
    dtype = problem.quantization.dtype
    x_scales, w_scales = x.scales, w.scales
    if kind.scales is Scales.TENSOR:  # one number, and one for each expert
        assert x_scales is not None
        assert w_scales is not None
        x_scales, w_scales = x_scales.reshape(1), w_scales.reshape(-1)
    x.values.scales = x_scales
    ids = torch.randint(0, problem.E, (m, problem.topk))
    size = task.launch.config.block_size_m
    server = open_server(problem.server, problem.server_version)
    assert isinstance(server, KernelServer)
    alone = (
        each_alone(ids, size)
        if task.slots_alone
        else align(ids, problem.E, size, length=sorted_length(problem, m, size))
    )
    block = kind.block_shape if kind.block_shape[1] else (0, kind.group_size) if kind.group_size else None
    bias = maker.normal(problem.E, gemm.n, maker.output) if problem.bias else None
    only_weights = not kind.quantizes_activations
    return {
        "A": x.values, "B": w.values, "bias": bias, "B_bias": bias,
        "C": torch.empty(m, problem.topk, gemm.n, dtype=TYPES[kind.output_type]),
        "A_scale": x_scales, "B_scale": w_scales, "B_zp": w.zeros,
        "topk_weights": torch.rand(m, problem.topk), "topk_ids": ids,
        "sorted_token_ids": None if task.slots_alone else alone.slot_ids,
        "expert_ids": alone.tile_experts, "num_tokens_post_padded": alone.used_length,
        "mul_routed_weight": kernel == "down", "top_k": task.top_k, "config": config_of(task.launch.config),
        "compute_type": {"bf16": tl.bfloat16, "fp16": tl.float16}[kind.output_type],
        "use_fp8_w8a8": dtype is Dtype.FP8_W8A8, "use_int8_w8a8": dtype is Dtype.INT8_W8A8,
        "use_int8_w8a16": dtype is Dtype.INT8_W8A16, "use_int4_w4a16": dtype is Dtype.INT4_W4A16,
        "per_channel_quant": problem.quantization.per_channel and not only_weights,
        "block_shape": None if block is None else list(block), "filter_expert": False,
    }  # fmt: skip


def sorted_length(problem: Problem, m: int, size: int) -> int:
    """Of the sorted ids as the server makes them (`moe_align_block_size`)."""
    server = open_server(problem.server, problem.server_version)
    assert isinstance(server, KernelServer)
    if problem.server == "sglang":
        return server.covered_length(problem, "up", m, size)
    rows = m * problem.topk
    longest = rows + problem.E * (size - 1)
    capped = tuple(map(int, problem.server_version.split("."))) >= (0, 13) and rows < problem.E
    return min(longest, rows * size) if capped else longest


def task_for(
    server: Server, problem: Problem, kernel: Kernel, config: KernelConfig, m: int
) -> CompileTask | None:
    launch = server.launch(problem, kernel, config)
    kinds = server.launch_classes(problem, kernel, (m,), launch.config.block_size_m)
    task = compile_task(launch, problem, kinds[0]) if kinds else None
    assert not isinstance(task, str)
    return task


def matches(value: object, given: object) -> bool:
    """Whether what moetune names is what the server gave."""
    if isinstance(value, Pointer):
        return (
            isinstance(given, torch.Tensor)
            and given.dtype is {**TYPES, "fp32": torch.float32, "i32": torch.int32}[value.type]
        )
    if isinstance(value, TypeConstant):
        return str(given) == value.type or getattr(given, "name", "") == value.type
    return value == given and isinstance(value, bool) == isinstance(given, bool)


@pytest.mark.parametrize(("package", "version"), RELEASES)
def test_each_parameter_gets_what_the_servers_own_code_gives_it(package: str, version: str) -> None:
    wheel = Wheel(package, version)
    server = open_server(package, version)
    assert isinstance(server, KernelServer)
    compared = 0
    for name, (shape, config) in CASES.items():
        if not known(name, package, version):
            continue
        problem = replace(shape, server=package, server_version=version)
        if (
            package == "vllm"
            and problem.quantization.group_size
            and tuple(map(int, version.split("."))) >= (0, 11, 1)
        ):
            config = replace(config, extra=(("SPLIT_K", 1),))
        for kernel in KERNELS:
            for m in MS:
                task = task_for(server, problem, kernel, config, m)
                if task is None:
                    continue  # vLLM before 0.27: another kernel
                arguments = made(problem, task, m)
                call = wheel.launch(arguments, grouped=task.grouped)
                lengths = Lengths(
                    server.covered_length(problem, kernel, m, task.launch.config.block_size_m),
                    m * problem.topk,
                )
                values = server.kernel_values(wheel.parameters[call.kernel], task, lengths)
                assert call.kernel == ("fused_moe_kernel_gptq_awq" if task.grouped else "fused_moe_kernel")
                wrong = {
                    key: (value, call.values.get(key))
                    for key, value in values.items()
                    if key in call.values and not matches(value, call.values[key])
                }
                assert not wrong, (name, kernel, m)
                # What the server leaves out has the kernel's own default, and so has it here.
                left_out = {key: values[key] for key in values if key not in call.values}
                assert all(not value or value == 1 for value in left_out.values()), left_out
                tiles = -(-lengths.covered // task.launch.config.block_size_m)
                assert call.grid == tiles * -(-task.n // task.launch.config.block_size_n)
                wanted = {
                    "num_warps": 4,
                    "num_stages": 3,
                    **({"launch_pdl": True} if task.launch.pdl else {}),
                }
                assert call.options == wanted
                compared += 1
    assert compared >= 60


def test_a_parameter_that_nobody_has_read_is_refused_by_name() -> None:
    server = open_server("sglang", "0.5.23")
    assert isinstance(server, KernelServer)
    task = task_for(server, SEED, "up", CONFIG, 8)
    assert task is not None
    with pytest.raises(ServerError, match="the parameter TURN_ROUND, which moetune does not know") as caught:
        server.kernel_values(["a_ptr", "TURN_ROUND"], task, Lengths(16, 16))
    assert "--kernel own" in str(caught.value.hint)
