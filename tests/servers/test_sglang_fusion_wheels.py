"""Shared-expert fusion: our table against the gates in the model files of SGLang's wheels.

Each gate is one method; it is taken out of its file with `ast` and run as it is, with stubs for the
machine and the flags.
"""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
from dataclasses import dataclass
from types import CodeType, SimpleNamespace
from typing import Any

import pytest

from moetune.domain.gpu import Gpu
from moetune.domain.model import ExpertLayer
from moetune.domain.problem import Parallelism
from moetune.domain.quantization import Dtype, Quantization
from moetune.domain.version import parse_release
from moetune.servers.protocol import ServerOptions
from moetune.servers.sglang.fusion import fused_shared_experts
from tests.servers.sglang_loader import Stub
from tests.wheels import members, read_member

VERSIONS = [
    *("0.4.9", "0.5.1", "0.5.2", "0.5.4", "0.5.5", "0.5.6", "0.5.9", "0.5.10", "0.5.11", "0.5.12"),
    *("0.5.13", "0.5.14", "0.5.15", "0.5.16", "0.5.18", "0.5.20", "0.5.23"),
]


@dataclass(frozen=True)
class Gate:
    """Where the gate of an architecture stands.

    Attributes:
        file: below sglang/srt/models.
        cls: class whose method decides.
        shared: numbers of shared experts to try (some gates assert that there is one).
        asks_with: the architecture that a subclass hands to the gate it inherits.
    """

    file: str
    cls: str
    shared: tuple[int, ...] = (0, 1)
    asks_with: str | None = None


GATES: dict[str, Gate] = {
    "DeepseekV3ForCausalLM": Gate("deepseek_v2.py", "DeepseekV2ForCausalLM", (0, 1, 2)),
    "DeepseekV32ForCausalLM": Gate("deepseek_v2.py", "DeepseekV2ForCausalLM"),
    "MistralLarge3ForCausalLM": Gate("deepseek_v2.py", "DeepseekV2ForCausalLM"),
    "GlmMoeDsaForCausalLM": Gate("deepseek_v2.py", "DeepseekV2ForCausalLM", asks_with="GlmMoeDsaForCausalLM"),
    "Glm4MoeForCausalLM": Gate("glm4_moe.py", "Glm4MoeForCausalLM"),
    "Glm4MoeLiteForCausalLM": Gate("glm4_moe_lite.py", "Glm4MoeLiteForCausalLM"),
    "Glm4vMoeForConditionalGeneration": Gate("glm4v_moe.py", "Glm4vMoeForConditionalGeneration"),
    "MiniMaxM3SparseForCausalLM": Gate("minimax_m3.py", "MiniMaxM3SparseForCausalLM"),
    "BailingMoeV3ForCausalLM": Gate("bailing_moe_v3.py", "BailingMoeV3ForCausalLM"),
    "Glm5NextForConditionalGeneration": Gate("glm5_next.py", "Glm5NextForConditionalGeneration"),
    "Dots3NoteForCausalLM": Gate("dots3_common/modeling.py", "Dots3LanguageModelForCausalLM"),
    "DeepseekV4ForCausalLM": Gate("deepseek_v4.py", "DeepseekV4ForCausalLM"),
}
QUANTIZATIONS = {
    "none": Quantization(),
    "fp8": Quantization(Dtype.FP8_W8A8, "fp8", block_shape=(128, 128)),
    "w4afp8": Quantization(Dtype.INT4_W4AFP8, "w4afp8"),
    "quark": Quantization(Dtype.MXFP4, "quark"),
    "compressed_tensors": Quantization(Dtype.INT4_W4A16, "compressed-tensors", group_size=32),
}
CAPABILITIES = [(7, 5), (8, 0), (12, 0)]
# What a gate imports while it decides: no layer is left out of the quantization.
IMPORTED = Stub(should_ignore_layer=lambda *_, **__: False)


@dataclass(frozen=True)
class Setup:
    """One machine and checkpoint."""

    architecture: str
    routed: int
    shared: int
    capability: tuple[int, int]
    ep: int
    a2a: str
    method: str
    disabled: bool


def setups(architecture: str) -> list[Setup]:
    grid = itertools.product(
        (256, 384),
        GATES[architecture].shared,
        CAPABILITIES,
        (("none", 1), ("none", 2), ("deepep", 2), ("mori", 2)),
        QUANTIZATIONS,
        (False, True),
    )
    return [
        Setup(architecture, routed, shared, capability, ep, a2a, method, disabled)
        for routed, shared, capability, (a2a, ep), method, disabled in grid
        # Quark is AMD's; the gates that single it out are reached with 256 and 384 alike.
        if not (disabled and (method != "fp8" or capability != (8, 0)))
    ]


def ours(version: str, setup: Setup) -> int:
    layer = ExpertLayer(
        model="test",
        architecture=setup.architecture,
        num_experts=setup.routed,
        topk=8,
        hidden_size=4096,
        intermediate_size=2048,
        num_shared_experts=setup.shared,
        quantization=QUANTIZATIONS[setup.method],
    )
    return fused_shared_experts(
        parse_release(version),
        layer,
        Parallelism(tp=8, ep=setup.ep),
        Gpu("NVIDIA Test", compute_capability=setup.capability),
        ServerOptions(moe_a2a_backend=setup.a2a, disable_shared_experts_fusion=setup.disabled),
    )


def theirs(version: str, setup: Setup) -> int:
    """What the wheel's gate decides; a model file without a gate fuses nothing."""
    gate = GATES[setup.architecture]
    path = f"sglang/srt/models/{gate.file}"
    if path not in members("sglang", version) or not has_architecture(version, setup.architecture):
        return 0
    method = method_of(version, path, gate.cls)
    if method is None or setup.disabled:
        return 0
    name, code, free = method
    namespace = dict.fromkeys(free, Stub()) | world(setup)
    exec(code, namespace)
    config = SimpleNamespace(
        architectures=[setup.architecture],
        n_routed_experts=setup.routed,
        n_shared_experts=setup.shared,
        num_shared_experts=setup.shared,
        moe_intermediate_size=2048,
        num_hidden_layers=4,
    )
    quant = quant_config(setup, version)
    own = gate.asks_with or setup.architecture
    if name == "shared_experts_fusion_disable_reason":
        # Subclasses of the DeepSeek gate name their own architecture; these two do not.
        inherits = setup.architecture in ("DeepseekV32ForCausalLM", "MistralLarge3ForCausalLM")
        cls = SimpleNamespace(fused_shared_experts_architecture="DeepseekV3ForCausalLM" if inherits else own)
        reason = namespace[name](cls, config, quant)
        return 0 if reason else setup.shared
    model = SimpleNamespace(config=config, quant_config=quant, num_fused_shared_experts=0)
    namespace[name](model, *((gate.asks_with,) if gate.asks_with else ()))
    return int(model.num_fused_shared_experts)


def quant_config(setup: Setup, version: str) -> Any:
    if setup.method == "none" and parse_release(version) >= (0, 5, 6):
        return None
    # Before, a missing quantization config ends the gate itself (AttributeError).
    block = QUANTIZATIONS[setup.method].block_shape
    return SimpleNamespace(
        get_name=lambda: setup.method, weight_block_size=list(block) if block else None, ignore=()
    )


def world(setup: Setup) -> dict[str, Any]:
    backend = Stub(
        is_deepep=lambda: setup.a2a == "deepep",
        is_mori=lambda: setup.a2a == "mori",
        is_none=lambda: setup.a2a == "none",
    )
    parallel = SimpleNamespace(moe_ep_size=setup.ep, tp_size=8, moe_tp_size=8 // setup.ep)
    arguments = Stub(disable_shared_experts_fusion=False, enforce_shared_experts_fusion=False, moe=Stub())
    return {
        "_is_cuda": True,
        "_is_hip": False,
        "_is_musa": False,
        "_device_sm": setup.capability[0] * 10 + setup.capability[1],
        "torch": SimpleNamespace(cuda=SimpleNamespace(get_device_capability=lambda *_: setup.capability)),
        "get_moe_a2a_backend": lambda: backend,
        "is_deepep_class_backend": lambda: setup.a2a in ("deepep", "mori"),
        "get_moe_expert_parallel_world_size": lambda: setup.ep,
        "get_parallel": lambda: parallel,
        "get_global_server_args": lambda: arguments,
        "get_flags": lambda: arguments,
        "global_server_args_dict": {
            "disable_shared_experts_fusion": False,
            "enable_deepep_moe": setup.a2a != "none",
            "enable_ep_moe": setup.ep > 1,
        },
        "is_wint4afp8_or_wint4a16_config": lambda _: setup.method in ("w4afp8", "compressed_tensors"),
        "_get_bailing_num_shared_experts": lambda config: config.num_shared_experts,
        "_use_aiter_gfx95": False,
        "__builtins__": {**vars(builtins), "__import__": lambda *_, **__: IMPORTED},
    }


@functools.cache
def has_architecture(version: str, architecture: str) -> bool:
    """Whether any model file of the wheel knows the architecture's class."""
    names = [name for name in members("sglang", version) if name.startswith("sglang/srt/models/")]
    return any(f"class {architecture}(" in read_member("sglang", version, name) for name in names)


@functools.cache
def method_of(version: str, path: str, cls: str) -> tuple[str, CodeType, frozenset[str]] | None:
    """A gate's name, its code, and the names that it expects around it."""
    tree = ast.parse(read_member("sglang", version, path))
    body = next((n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == cls), [])
    found = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    for name in ("shared_experts_fusion_disable_reason", "determine_num_fused_shared_experts"):
        if name in found:
            found[name].decorator_list = []
            module = ast.Module(body=[found[name]], type_ignores=[])
            names = {node.id for node in ast.walk(module) if isinstance(node, ast.Name)}
            free = frozenset(name for name in names if not hasattr(builtins, name))
            return name, compile(module, path, "exec"), free
    return None


@pytest.mark.parametrize("version", VERSIONS)
def test_case_10_which_models_fuse_is_what_the_wheels_gates_decide(version: str) -> None:
    fused = set()
    for architecture in GATES:
        if (version, architecture) == ("0.5.6", "Glm4vMoeForConditionalGeneration"):
            continue  # fuses without a gate, see below
        for setup in setups(architecture):
            expected = theirs(version, setup)
            assert ours(version, setup) == expected, setup
            if expected:
                fused.add(architecture)
    assert "DeepseekV3ForCausalLM" in fused
    assert not fused & {"DeepseekV32ForCausalLM", "MistralLarge3ForCausalLM", "DeepseekV4ForCausalLM"}


def test_glm_4v_of_0_5_6_fuses_without_a_gate() -> None:
    source = read_member("sglang", "0.5.6", "sglang/srt/models/glm4v_moe.py")
    assert "def determine_num_fused_shared_experts" not in source
    assert "disable_shared_experts_fusion" in source
    setup = Setup("Glm4vMoeForConditionalGeneration", 128, 1, (9, 0), 1, "none", "none", disabled=False)
    assert ours("0.5.6", setup) == 1


@pytest.mark.parametrize("version", ["0.5.12", "0.5.13", "0.5.14", "0.5.16", "0.5.20", "0.5.23"])
def test_qwen3_next_fuses_where_the_wheel_asks_for_it_on_cuda(version: str) -> None:
    source = read_member("sglang", version, "sglang/srt/models/qwen3_next.py")
    asks = "enable_cuda_shared_expert_fusion=True" in source
    for shared_size, ep, a2a in itertools.product((0, 512, 1024), (1, 2), ("none", "deepep")):
        can = asks and can_fuse(version, shared_size, a2a)
        layer = ExpertLayer(
            model="test",
            architecture="Qwen3NextForCausalLM",
            num_experts=512,
            topk=10,
            hidden_size=2048,
            intermediate_size=512,
            shared_intermediate_size=shared_size or None,
        )
        fused = fused_shared_experts(
            parse_release(version),
            layer,
            Parallelism(tp=2, ep=2 if a2a != "none" else ep),
            Gpu("NVIDIA Test", compute_capability=(9, 0)),
            ServerOptions(moe_a2a_backend=a2a),
        )
        assert fused == int(can)


class Subscriptable(Stub):
    """Stands in for what annotations name."""

    def __getitem__(self, _: object) -> object:
        return self


def can_fuse(version: str, shared_size: int, a2a: str) -> bool:
    tree = ast.parse(read_member("sglang", version, "sglang/srt/models/qwen2_moe.py"))
    body = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "can_fuse_shared_expert"]
    setup = Setup("Qwen3NextForCausalLM", 512, 1, (9, 0), 1, a2a, "none", disabled=False)
    names = ("get_exec", "get_server_args", "PretrainedConfig", "Optional", "QuantizationConfig")
    namespace = dict.fromkeys(names, Subscriptable()) | world(setup)
    exec(compile(ast.Module(body=list(body), type_ignores=[]), "qwen2_moe.py", "exec"), namespace)
    config = SimpleNamespace(shared_expert_intermediate_size=shared_size, moe_intermediate_size=512)
    return bool(namespace["can_fuse_shared_expert"](config, None))
