"""Deployments to ask the runner rules about, shared by their tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetune.domain.gpu import Gpu
from moetune.domain.model import ExpertLayer
from moetune.domain.quantization import Dtype, Quantization
from moetune.servers.runner_facts import scheme

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moetune.servers.runner_rules import Fact, Rule

FP8_BLOCK = Quantization(Dtype.FP8_W8A8, "fp8", block_shape=(128, 128), dynamic_activation=True)
FP8_STATIC = Quantization(Dtype.FP8_W8A8, "fp8", dynamic_activation=False)
FP8_DYNAMIC = Quantization(Dtype.FP8_W8A8, "fp8", dynamic_activation=True)
CT_CHANNEL = Quantization(Dtype.FP8_W8A8, "compressed-tensors", per_channel=True, dynamic_activation=True)
CT_STATIC = Quantization(Dtype.FP8_W8A8, "compressed-tensors", dynamic_activation=False)
CT_DYNAMIC = Quantization(Dtype.FP8_W8A8, "compressed-tensors", dynamic_activation=True)
CT_BLOCK = Quantization(Dtype.FP8_W8A8, "compressed-tensors", block_shape=(128, 128), dynamic_activation=True)
MODELOPT_FP8 = Quantization(Dtype.FP8_W8A8, "modelopt", dynamic_activation=False)
QUARK_FP8 = Quantization(Dtype.FP8_W8A8, "quark", per_channel=True, dynamic_activation=True)
W8A8_FP8 = Quantization(Dtype.FP8_W8A8, "w8a8_fp8", per_channel=True, dynamic_activation=True)
W8A8_INT8 = Quantization(Dtype.INT8_W8A8, "w8a8_int8", per_channel=True, dynamic_activation=True)
BLOCK_INT8 = Quantization(Dtype.INT8_W8A8, "blockwise_int8", block_shape=(128, 128))
CT_INT8 = Quantization(Dtype.INT8_W8A8, "compressed-tensors", per_channel=True, dynamic_activation=True)
EXPERTS_INT8 = Quantization(Dtype.INT8_W8A16, "experts_int8", per_channel=True)
AWQ = Quantization(Dtype.INT4_W4A16, "awq", group_size=128, zero_point=True)
GPTQ = Quantization(Dtype.INT4_W4A16, "gptq", group_size=128)
GPTQ_ASYMMETRIC = Quantization(Dtype.INT4_W4A16, "gptq", group_size=128, zero_point=True)
CT_INT4 = Quantization(Dtype.INT4_W4A16, "compressed-tensors", group_size=128)
CT_INT4_32 = Quantization(Dtype.INT4_W4A16, "compressed-tensors", group_size=32)
CT_INT4_64 = Quantization(Dtype.INT4_W4A16, "compressed-tensors", group_size=64)
CT_INT4_ASYMMETRIC = Quantization(Dtype.INT4_W4A16, "compressed-tensors", group_size=128, zero_point=True)
MXFP4 = Quantization(Dtype.MXFP4, "mxfp4")
FP4_EXPERTS = Quantization(Dtype.MXFP4, "fp8")
CT_MXFP4 = Quantization(Dtype.MXFP4, "compressed-tensors")
NVFP4 = Quantization(Dtype.NVFP4, "modelopt")
CT_NVFP4 = Quantization(Dtype.NVFP4, "compressed-tensors")
MXFP8 = Quantization(Dtype.MXFP8, "modelopt")
W4AFP8 = Quantization(Dtype.INT4_W4AFP8, "w4afp8", group_size=128)
GGUF = Quantization(Dtype.GGUF, "gguf")
BITSANDBYTES = Quantization(Dtype.BITSANDBYTES, "bitsandbytes")
BF16 = Quantization()

ALL_QUANTIZATIONS = tuple(
    value for name, value in sorted(globals().items()) if isinstance(value, Quantization) and name.isupper()
)


def layer(
    quantization: Quantization = BF16,
    architecture: str = "SomeForCausalLM",
    *,
    intermediate: int = 1024,
    hidden: int = 2048,
    gated: bool = True,
    bias: bool = False,
    model_type: str = "",
) -> ExpertLayer:
    """An expert layer of a size that fits every kernel."""
    return ExpertLayer(
        model="test/model",
        architecture=architecture,
        num_experts=128,
        topk=8,
        hidden_size=hidden,
        intermediate_size=intermediate,
        model_type=model_type,
        gated=gated,
        bias=bias,
        quantization=quantization,
    )


def nvidia(capability: int | None) -> Gpu:
    """An NVIDIA GPU: 120 for compute capability 12.0."""
    return Gpu("GPU", compute_capability=None if capability is None else divmod(capability, 10))


AMD = Gpu("AMD Instinct MI300X", vendor="AMD", gfx="gfx942")


def candidates(rule: Rule, fact: str, default: Sequence[Fact], others: Sequence[Fact] = ()) -> list[Fact]:
    """Values of a fact under which a rule could hold: from its conditions, else the default."""
    for condition in rule.conditions:
        if condition.fact != fact:
            continue
        named = list(condition.values or ()) + [e for e in (condition.low, condition.high) if e is not None]
        tried = [*sorted(named, key=repr), *default, *others]
        return [value for value in tried if condition.holds({fact: value})]
    return list(default)


def checkpoints(rule: Rule, requested: Sequence[str | None]) -> list[tuple[Quantization, str | None]]:
    """Quantizations, with what `--quantization` says, whose scheme a rule could hold for."""
    wanted = [condition for condition in rule.conditions if condition.fact == "scheme"]
    return [
        (quantization, word)
        for quantization in ALL_QUANTIZATIONS
        for word in dict.fromkeys(requested)
        if all(condition.holds({"scheme": scheme(quantization, word)}) for condition in wanted)
    ]
