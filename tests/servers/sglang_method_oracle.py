"""Which runner a quantization method of SGLang builds for its layer: its own code out of the wheel."""

from __future__ import annotations

import ast
import copy
from enum import Enum
from functools import cache
from types import SimpleNamespace
from typing import Any

from tests.servers.sglang_runner_oracle import (
    LOOSE,
    Setup,
    globals_of,
    known_names,
    platform_of,
    release_of,
    tree_of,
)
from tests.wheels import members, read_member


class BuiltRunner:
    """Stands for MoeRunner: remembers the backend that it was built for."""

    def __init__(self, runner_backend: Any, config: Any = None, *_: Any, **__: Any) -> None:
        self.runner_backend = runner_backend
        self.config = config


METHODS = {
    "bf16": "UnquantizedFusedMoEMethod",
    "fp8": "Fp8MoEMethod",
    "w8a8_fp8": "W8A8FP8MoEMethod",
    "w8a8_int8": "W8A8Int8MoEMethod",
    "blockwise_int8": "BlockInt8MoEMethod",
    "moe_wna16": "MoeWNA16Method",
    "ct-fp8": "CompressedTensorsW8A8Fp8MoE",
    "modelopt_fp8": "ModelOptFp8MoEMethod",
    "mxfp4": "Mxfp4MoEMethod",
    "awq": "AWQMoEScheme",
    "gptq": "GPTQMarlinMoEKernel",
    "nvfp4": "ModelOptNvFp4FusedMoEMethod",
    "quark-fp8": "QuarkW8A8FP8MoE",
}
# Names that a method's class had in other versions.
_ALIASES = {
    "AWQMoEScheme": ("AWQMoEMethod",),
    "CompressedTensorsW8A8Fp8MoE": ("CompressedTensorsW8A8Fp8MoEMethod",),
    "GPTQMarlinMoEKernel": ("GPTQMarlinMoEMethod",),
    "QuarkW8A8FP8MoE": ("QuarkW8A8FP8MoEMethod",),
}


@cache
def _class_member(version: str, name: str) -> tuple[str, str] | None:
    """Module and class that hold `create_moe_runner` of a quantization method."""
    for wanted in (name, *_ALIASES.get(name, ())):
        for member in members("sglang", version):
            if "/quantization/" not in member or not member.endswith(".py"):
                continue
            if f"class {wanted}(" in read_member("sglang", version, member):
                for node in tree_of(version, member).body:
                    if isinstance(node, ast.ClassDef) and node.name == wanted:
                        names = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
                        if "create_moe_runner" in names:
                            return member, wanted
    return None


@cache
def _enums(version: str) -> dict[str, Any]:
    """SGLang's own enumerations of runners and a2a backends."""
    wanted = ("MoeA2ABackend", "_MoeRunnerBackendPredicates", "MoeRunnerBackend")
    member = "sglang/srt/layers/moe/utils.py"
    body = [n for n in tree_of(version, member).body if isinstance(n, ast.ClassDef) and n.name in wanted]
    space = globals_of({"Enum": Enum})
    exec(compile(ast.Module(body=[*body], type_ignores=[]), member, "exec"), space)
    return {name: space[name] for name in wanted if name in space}


def built_runner(version: str, setup: Setup, method: str, resolved: str) -> str | None:
    """The runner that a quantization method builds for its layer, given the resolved argument.

    None where this version's method builds none there (its `apply` decides); `error: ...` when it
    refuses.
    """
    found = _class_member(version, METHODS[method])
    if found is None:
        return None
    member, name = found
    enums = _enums(version)
    try:
        backend = enums["MoeRunnerBackend"](resolved)
        a2a = enums["MoeA2ABackend"](setup.a2a)
    except ValueError:
        return "error: no such choice"
    known = known_names(setup, release_of(version))
    on = setup.environment.get("SGLANG_USE_AITER") == "1" and setup.rocm
    platform = platform_of(setup, release_of(version))
    known.update(
        {
            **enums,
            "get_moe_runner_backend": lambda: backend,
            "get_moe_a2a_backend": lambda: a2a,
            "MoeRunner": BuiltRunner,
            "MoeRunnerConfig": object,
            "_use_aiter": on,
            "_is_hip": setup.rocm,
            "_is_cuda": not setup.rocm,
            "_is_npu": False,
            "_use_hip_int4": False,
            "QuantizationStrategy": SimpleNamespace(CHANNEL="channel"),
            "replace": lambda config, **_: config,
            "print_info_once": lambda *_: None,
            "get_device_capability": lambda *_: platform.device_capability,
            "Optional": LOOSE,
        }
    )
    node = next(n for n in tree_of(version, member).body if isinstance(n, ast.ClassDef) and n.name == name)
    kept = ("__init__", "create_moe_runner", "is_deepgemm_moe_runner_backend_enabled")
    body: list[ast.stmt] = []
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name in kept:
            item = copy.deepcopy(item)
            item.returns = None
            for part in ast.walk(item):
                if isinstance(part, ast.arg):
                    part.annotation = None
            body.append(item)
    stripped = ast.parse(f"class {name}: pass")
    assert isinstance(stripped.body[0], ast.ClassDef)
    stripped.body[0].body = body
    space = globals_of(known)
    exec(compile(stripped, member, "exec"), space)
    made = space[name].__new__(space[name])
    kernels = (
        backend.is_triton_kernels() if hasattr(backend, "is_triton_kernels") else resolved == "triton_kernel"
    )
    made.__dict__.update(
        use_triton_kernels=kernels,
        use_flashinfer_trtllm_moe=resolved in ("flashinfer_trtllm", "flashinfer_trtllm_routed"),
        use_flashinfer_cutlass=resolved == "flashinfer_cutlass",
        use_deep_gemm=resolved == "deep_gemm",
        use_mega_moe=False,
        is_fp4_expert=False,
        _fi_kernel="trtllm_sm100",
        _is_cutedsl_v1_deepep=False,
        is_weight_per_channel=True,
        weight_quant=SimpleNamespace(strategy="channel"),
        kernel=SimpleNamespace(),
        _aiter_ck_moe_unsupported_reason=lambda *_: None,
        _aiter_ck_moe_supported=lambda *_: True,
    )
    config = SimpleNamespace(activation="silu", routing_method_type=1, layer=None, swiglu_limit=None)
    try:
        made.create_moe_runner(LOOSE, config)
    except (AssertionError, ValueError, NotImplementedError) as error:
        return f"error: {type(error).__name__}"
    aiter = getattr(made, "_aiter_runner", None)
    runner = aiter or getattr(made, "runner", None) or getattr(made.kernel, "runner", None)
    if runner is None:
        chosen = getattr(made, "_moe_runner_backend", None)
        return str(chosen.value) if chosen is not None else None
    return str(runner.runner_backend.value)
