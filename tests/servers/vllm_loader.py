"""The real functions of a published vLLM wheel, taken out with `ast` and run on stubs.

Nothing of vLLM is installed or copied: the source is read from the wheel, the functions that are asked
for are compiled with their annotations dropped, and every name that they use and that is not given is a
mock. Tensors are shapes with strides: no torch, no GPU.
"""

from __future__ import annotations

import ast
import builtins
import functools
import json
import math
import os
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

from tests.wheels import members, read_member

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

FUSED_MOE = "vllm/model_executor/layers/fused_moe/"


def has_member(version: str, path: str) -> bool:
    return path in members("vllm", version)


@functools.cache
def _tree(version: str, path: str) -> ast.Module:
    return ast.parse(read_member("vllm", version, path))


def defines(version: str, path: str, name: str) -> bool:
    return has_member(version, path) and any(
        getattr(node, "name", None) == name for node in _tree(version, path).body
    )


def method_of(version: str, path: str, owner: str, name: str) -> ast.FunctionDef:
    """A method's node, to be loaded like a function."""
    for node in _tree(version, path).body:
        if isinstance(node, ast.ClassDef) and node.name == owner:
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == name:
                    return item
    raise LookupError(f"vllm {version} has no {path}:{owner}.{name}")


def function_node(version: str, path: str, name: str) -> ast.FunctionDef:
    """A function's node."""
    # The last one of that name: those before it are overloads.
    found = [node for node in _tree(version, path).body if getattr(node, "name", None) == name]
    if not found:
        raise LookupError(f"vllm {version} has no {path}:{name}")
    assert isinstance(found[-1], ast.FunctionDef)
    return found[-1]


class _DropAnnotations(ast.NodeTransformer):
    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        self.generic_visit(node)
        return node


def load(nodes: Iterable[tuple[str, str, ast.stmt | str]], names: dict[str, Any]) -> dict[str, Any]:
    """Compile functions into one namespace.

    Args:
        nodes: (version, path in the wheel, name or node) of each.
        names: what the functions find; everything else that they use is a mock.
    """
    modules = names.pop("__modules__", {})

    def fake_import(name: str, _g: Any = None, _l: Any = None, _from: Any = (), _level: int = 0) -> Any:
        return modules.get(name) or MagicMock(name=name)

    namespace: dict[str, Any] = {
        "__builtins__": {**vars(builtins), "__import__": fake_import},
        "functools": functools,
        "cache": functools.cache,
        "json": json,
        "math": math,
        "os": os,
        "re": re,
        **names,
    }
    body: list[ast.stmt] = []
    for version, path, item in nodes:
        node = function_node(version, path, item) if isinstance(item, str) else item
        copy: Any = ast.parse(ast.unparse(node)).body[0]
        if isinstance(copy, ast.FunctionDef):
            copy.decorator_list = [d for d in copy.decorator_list if "method" not in ast.unparse(d)]
        _DropAnnotations().visit(copy)
        body.append(copy)
    module = ast.fix_missing_locations(ast.Module(body=body, type_ignores=[]))
    defined = {getattr(node, "name", "") for node in body}
    for part in ast.walk(module):
        if isinstance(part, ast.Name) and part.id not in defined and not hasattr(builtins, part.id):
            namespace.setdefault(part.id, MagicMock(name=part.id))
    exec(compile(module, "vllm wheel", "exec"), namespace)
    return namespace


@dataclass
class FakeTensor:
    """A shape, row-major."""

    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    device: str = "cuda"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def stride(self, dim: int) -> int:
        return math.prod(self.shape[dim % self.ndim + 1 :])

    def numel(self) -> int:
        return math.prod(self.shape)

    def view(self, *_: int) -> FakeTensor:
        return FakeTensor((self.numel(),), self.dtype)


class _FakeTorch(MagicMock):
    """torch as far as shapes go."""


def fake_torch() -> Any:
    torch = _FakeTorch()
    torch.float = "float32"
    torch.empty = lambda shape, **_: FakeTensor(shape if isinstance(shape, tuple) else (shape,))
    torch.full = lambda shape, *_, **__: FakeTensor(shape)
    return torch


@dataclass
class Log:
    """Stands for a logger: lines as (level, text)."""

    lines: list[tuple[str, str]] = field(default_factory=list)

    def _add(self, level: str) -> Callable[..., None]:
        def add(text: str, *values: Any, **_: Any) -> None:
            self.lines.append((level, text % values if values else text))

        return add

    def __getattr__(self, name: str) -> Callable[..., None]:
        return self._add(name.removesuffix("_once").upper())


@dataclass
class Captured:
    """What a launch hands to a kernel."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    kernel: str = ""


class FakeKernel:
    """Stands for a Triton kernel: remembers what it is launched with, and evaluates the grid."""

    def __init__(self, name: str, captured: Captured) -> None:
        self.name = name
        self.captured = captured

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            self.captured.args, self.captured.kwargs, self.captured.kernel = args, kwargs, self.name
            self.captured.kwargs["__grid__"] = grid

        return run


@dataclass
class Real:
    """The functions of one release, and the knobs of the world that they see."""

    version: str
    functions: dict[str, Any]
    log: Log
    platform: SimpleNamespace
    envs: SimpleNamespace
    invariant: dict[str, bool]
    captured: Captured

    def __getattr__(self, name: str) -> Any:
        return self.functions[name]

    @contextmanager
    def world(
        self,
        device: str,
        *,
        vendor: str = "NVIDIA",
        capability: tuple[int, int] | None = (9, 0),
        folder: str | None = None,
        invariant: bool = False,
        module: Path | None = None,
    ) -> Iterator[Real]:
        """Set the GPU, the environment and the module's own folder; caches are empty."""
        self.platform.get_device_name = lambda *_: device
        self.platform.is_cuda = lambda: vendor == "NVIDIA"
        self.platform.is_rocm = lambda: vendor == "AMD"
        self.platform.is_xpu = lambda: vendor == "Intel"
        major, minor = capability or (0, 0)
        self.platform.is_device_capability = lambda wanted: major * 10 + minor == wanted
        self.envs.VLLM_TUNED_CONFIG_FOLDER = folder
        self.envs.VLLM_BATCH_INVARIANT = invariant
        self.invariant["on"] = invariant
        self.functions["__file__"] = str((module or Path("/nowhere")) / "fused_moe.py")
        self.log.lines.clear()
        for function in self.functions.values():
            if isinstance(function, functools._lru_cache_wrapper):
                function.cache_clear()
        yield self

    def dtype_tag(self, flags: set[str], dtype: str) -> str | None:
        """`_get_config_dtype_str` with those of its flags on; unknown flags are a KeyError."""
        function = self.functions.get("_get_config_dtype_str") or self.functions["get_config_dtype_str"]
        known = set(function.__code__.co_varnames[: function.__code__.co_argcount])
        given: dict[str, Any] = {}
        for flag in flags:
            if flag == "ocp_mx":
                name = "ocp_mx_scheme" if "ocp_mx_scheme" in known else "use_mxfp4_w4a4"
                given[name] = "w_mxfp4_a_mxfp4" if name == "ocp_mx_scheme" else True
            elif flag in known:
                given[flag] = True
            else:
                raise KeyError(flag)
        result: str | None = function(dtype=dtype, **given)
        return result


_LOOKUP = (
    "get_config_file_name",
    "get_moe_configs",
    "get_moe_wna16_block_config",
    "should_moe_wna16_use_cuda",
    "get_default_config",
    "try_get_optimal_moe_config",
)
_LAUNCH = (
    "invoke_fused_moe_kernel",
    "invoke_fused_moe_triton_kernel",
    "invoke_fused_moe_wna16_triton_kernel",
    "dispatch_fused_moe_kernel",
    "invoke_fused_moe_wna16_cuda_kernel",
    "_prepare_expert_assignment",
    "_ensure_block_size_k_divisible",
    "get_config_dtype_str",
)


@functools.cache
def real(version: str) -> Real:
    """The functions of a release."""
    source, captured, log = FUSED_MOE + "fused_moe.py", Captured(), Log()
    nodes: list[tuple[str, str, ast.stmt | str]] = [(version, source, name) for name in _LOOKUP]
    nodes += [(version, source, name) for name in _LAUNCH if defines(version, source, name)]
    others = {
        FUSED_MOE + "config.py": ["_get_config_dtype_str"],
        FUSED_MOE + "moe_align_block_size.py": ["moe_align_block_size"],
        FUSED_MOE + "utils.py": ["enable_swap_ab"],
        "vllm/utils/platform_utils.py": ["get_device_name_as_file_name"],
        "vllm/utils/math_utils.py": ["next_power_of_2", "round_up", "cdiv"],
    }
    for path, names in others.items():
        nodes += [(version, path, name) for name in names if defines(version, path, name)]
    platform, envs, invariant = SimpleNamespace(), SimpleNamespace(), {"on": False}
    found = {
        "torch": fake_torch(),
        "triton": SimpleNamespace(cdiv=lambda a, b: -(-a // b)),
        "current_platform": platform,
        "envs": envs,
        "logger": log,
        "vllm_is_batch_invariant": lambda: invariant["on"],
        "resolve_moe_use_td": lambda: False,
        "fused_moe_kernel": FakeKernel("fused_moe_kernel", captured),
        "fused_moe_kernel_gptq_awq": FakeKernel("fused_moe_kernel_gptq_awq", captured),
        "__modules__": {
            "vllm.platforms": SimpleNamespace(current_platform=platform),
            "vllm.model_executor.layers.fused_moe": SimpleNamespace(get_config=lambda: None),
        },
    }
    return Real(version, load(nodes, found), log, platform, envs, invariant, captured)
