"""Every format of the kernel is reached from a checkpoint's config and from `--quant`, with one problem.

The configs are those that public checkpoints of the method carry, shortened to what is read.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

import pytest

from moetune.domain.gpu import find_gpu
from moetune.domain.kernel_format import KernelFormat, Scales, kernel_format
from moetune.domain.model import ExpertLayer, read_expert_layer
from moetune.domain.problem import Parallelism, Problem
from moetune.domain.quantization import Quantization
from moetune.domain.quantization_names import parse_quantization
from moetune.servers.protocol import ServerOptions
from moetune.servers.registry import open_server
from tests.wheels import members, read_member

BLOCK = "block_shape="


def compressed(weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    """As llm-compressor writes it."""
    group: dict[str, Any] = {"targets": ["Linear"], "weights": {"num_bits": 8, "symmetric": True, **weights}}
    group["input_activations"] = activations and {"num_bits": 8, "symmetric": True, **activations}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


def integer(method: str, bits: int, group: int, **more: Any) -> dict[str, Any]:
    """As AutoAWQ, GPTQModel and others write it."""
    return {"quant_method": method, "bits": bits, "group_size": group, **more}


FLOAT = {"type": "float", "strategy": "channel"}
INT = {"type": "int", "strategy": "channel"}
FP8_TOKEN = {"type": "float", "strategy": "token", "dynamic": True}
INT8_TOKEN = {"type": "int", "strategy": "token", "dynamic": True}


@dataclass(frozen=True)
class Format:
    """A format with its ways in.

    Attributes:
        names: values of `--quant`.
        configs: the quantization_config of checkpoints.
        sglang: what stands in SGLang's file name after the GPU.
        vllm: the same in vLLM's.
        kernel: what moetune's own kernel computes with.
    """

    names: tuple[str, ...]
    configs: tuple[dict[str, Any], ...]
    sglang: str
    vllm: str
    kernel: KernelFormat = field(default_factory=lambda: KernelFormat("bf16", "bf16", "bf16"))


def eight(kind: str, scales: Scales, **more: Any) -> KernelFormat:
    return KernelFormat(kind, kind, "bf16", scales, weight_bits=8, **more)


def groups(size: int, bits: int, zero_point: bool = False) -> KernelFormat:
    return KernelFormat(
        "bf16", "u8", "bf16", Scales.GROUP, group_size=size, weight_bits=bits, zero_point=zero_point
    )


FORMATS = {
    "bf16": Format(("bf16",), ({},), "", ""),
    "fp8 by tensor": Format(
        ("fp8", "fp8-tensor", "fp8_w8a8"),
        (
            {"quant_method": "fp8", "activation_scheme": "dynamic"},
            compressed({"type": "float", "strategy": "tensor"}, FP8_TOKEN | {"strategy": "tensor"}),
        ),
        ",dtype=fp8_w8a8",
        ",dtype=fp8_w8a8",
        eight("fp8e4nv", Scales.TENSOR),
    ),
    "fp8 by tensor, static": Format(
        ("fp8-static", "modelopt_fp8"),
        (
            {"quant_method": "fp8", "activation_scheme": "static"},
            {"quant_method": "modelopt", "quant_algo": "FP8"},
        ),
        ",dtype=fp8_w8a8",
        ",dtype=fp8_w8a8",
        eight("fp8e4nv", Scales.TENSOR, static_activation=True),
    ),
    "fp8 by channel": Format(
        ("fp8-channel", "w8a8_fp8"),
        (compressed(FLOAT, FP8_TOKEN), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
        ",dtype=fp8_w8a8,per_channel_quant=True",
        ",dtype=fp8_w8a8",
        eight("fp8e4nv", Scales.CHANNEL),
    ),
    "fp8 in blocks": Format(
        ("fp8-block", "fp8-block[128,128]", "fp8[128,128]"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},),
        ",dtype=fp8_w8a8,block_shape=[128, 128]",
        ",dtype=fp8_w8a8,block_shape=[128,128]",
        eight("fp8e4nv", Scales.BLOCK, block_shape=(128, 128)),
    ),
    "int8 by channel": Format(
        ("int8", "int8_w8a8", "int8-channel"),
        (compressed(INT, INT8_TOKEN), {"quant_method": "w8a8_int8"}),
        ",dtype=int8_w8a8,per_channel_quant=True",
        "",  # vLLM has no tag for it
        eight("i8", Scales.CHANNEL),
    ),
    "int8 in blocks": Format(
        ("int8-block", "int8_w8a8[128,128]"),
        ({"quant_method": "blockwise_int8", "weight_block_size": [128, 128]},),
        ",dtype=int8_w8a8,block_shape=[128, 128]",
        ",block_shape=[128,128]",
        eight("i8", Scales.BLOCK, block_shape=(128, 128)),
    ),
    "int8 weights by channel": Format(
        ("int8_w8a16-channel", "experts_int8"),
        ({"quant_method": "experts_int8"}, integer("gptq", 8, -1, sym=True), compressed(INT)),
        ",dtype=int8_w8a16",
        ",dtype=int8_w8a16",
        KernelFormat("bf16", "i8", "bf16", Scales.CHANNEL, weight_bits=8),
    ),
    "int8 weights in groups": Format(
        ("int8_w8a16", "int8_w8a16[128]", "gptq-int8"),
        (
            integer("gptq", 8, 128, sym=True, desc_act=False),
            integer("moe_wna16", 8, 128, sym=True),
            compressed(INT | {"strategy": "group", "group_size": 128}),
        ),
        ",dtype=int8_w8a16",
        ",dtype=int8_w8a16",
        groups(128, 8),
    ),
    "int8 weights in groups with zero points": Format(
        ("int8_w8a16-asym[64]",),
        (
            integer("gptq", 8, 64, sym=False),
            compressed(INT | {"strategy": "group", "group_size": 64, "symmetric": False}),
        ),
        ",dtype=int8_w8a16",
        ",dtype=int8_w8a16",
        groups(64, 8, zero_point=True),
    ),
    "int4 in groups": Format(
        ("int4[32]", "int4_w4a16[32]", "gptq[32]", "moe_wna16[32]"),
        (
            integer("gptq", 4, 32, sym=True, desc_act=False),
            integer("auto-round", 4, 32, sym=True, data_type="int"),
            compressed(INT | {"num_bits": 4, "strategy": "group", "group_size": 32}),
        ),
        ",dtype=int4_w4a16",
        ",dtype=int4_w4a16",
        groups(32, 4),
    ),
    "int4 in groups with zero points": Format(
        ("int4-asym", "awq", "awq_marlin"),
        (
            integer("awq", 4, 128, zero_point=True, version="gemm"),
            integer("gptq", 4, 128, sym=False),
            compressed(INT | {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": False}),
        ),
        ",dtype=int4_w4a16",
        ",dtype=int4_w4a16",
        groups(128, 4, zero_point=True),
    ),
}
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "hidden_size": 2048,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 4,
    "torch_dtype": "bfloat16",
}


def problem_of(server: str, quantization: Quantization) -> Problem:
    layer = ExpertLayer("model", "Qwen3MoeForCausalLM", 64, 8, 2048, 1024, quantization=quantization)
    return open_server(server).problem(layer, Parallelism(), find_gpu("NVIDIA H200"), ServerOptions())


def assert_reached(quantization: Quantization, expected: Format) -> None:
    for server in ("sglang", "vllm"):
        problem = problem_of(server, quantization)
        name = open_server(server).file_name(problem, "up")
        assert name.removesuffix(".json").split("NVIDIA_H200")[1] == getattr(expected, server)
        assert kernel_format(problem) == expected.kernel


@pytest.mark.parametrize(
    ("name", "expected"),
    [(name, one) for one in FORMATS.values() for name in one.names],
    ids=[name for one in FORMATS.values() for name in one.names],
)
def test_a_name_reaches_its_format(name: str, expected: Format) -> None:
    assert_reached(parse_quantization(name), expected)


@pytest.mark.parametrize(
    ("config", "expected"),
    [(config, one) for one in FORMATS.values() for config in one.configs],
    ids=[
        f"{name} of {config.get('quant_method', 'none')}"
        for name, one in FORMATS.items()
        for config in one.configs
    ],
)
def test_a_checkpoint_reaches_its_format(config: dict[str, Any], expected: Format) -> None:
    document = {**CONFIG, **({"quantization_config": config} if config else {})}
    assert_reached(read_expert_layer(document, name="model", source="config.json").quantization, expected)


@pytest.mark.parametrize("version", ["0.5.6", "0.5.12", "0.5.23"])
def test_no_layer_of_sglang_has_channels_with_16_bit_activations(version: str) -> None:
    """So no file name has `per_channel_quant=True` with int8_w8a16."""
    asked = 0
    for path in members("sglang", version):
        if not path.startswith("sglang/srt/layers/quantization/") or not path.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(read_member("sglang", version, path))):
            if isinstance(node, ast.Call):
                words = {keyword.arg for keyword in node.keywords}
                asked += "use_int8_w8a16" in words
                assert not words >= {"use_int8_w8a16", "per_channel_quant"}, path
    assert asked
