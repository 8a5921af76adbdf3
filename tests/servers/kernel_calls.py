"""What a published wheel's own code hands to its kernels: its launching functions run, the kernels record.

Of a module only the launching functions and what they call are taken, with stand-ins for what they import.
"""

from __future__ import annotations

import ast
import types
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from tests.measure.server_files import home_of
from tests.wheels import read_member

if TYPE_CHECKING:
    from collections.abc import Callable

    from moetune.domain.config import KernelConfig

_LAUNCHERS = (
    "invoke_fused_moe_kernel",
    "invoke_fused_moe_triton_kernel",
    "invoke_fused_moe_wna16_triton_kernel",
)
_CALLED = (
    "should_enable_swap_ab",
    "get_moe_wna16_block_config",
    "_ensure_block_size_k_divisible",
    "_get_b_tma_desc_cached",
)
KERNELS = ("fused_moe_kernel", "fused_moe_kernel_gptq_awq")


@dataclass
class Call:
    """One launch.

    Attributes:
        kernel: its name.
        values: what each parameter was given.
        options: what is no parameter of the kernel: warps, stages, PDL.
        grid: programs.
    """

    kernel: str
    values: dict[str, Any]
    options: dict[str, Any]
    grid: int


class Recorder:
    """Stands for a kernel."""

    def __init__(self, name: str, parameters: list[str], calls: list[Call]) -> None:
        self._name, self._parameters, self._calls = name, parameters, calls

    def __getitem__(self, grid: Callable[[dict[str, Any]], tuple[int, ...]]) -> Callable[..., None]:
        def launch(*args: object, **kwargs: Any) -> None:
            assert len(args) <= len(self._parameters)
            given = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
            values = {name: value for name, value in given.items() if name in self._parameters}
            options = {name: value for name, value in given.items() if name not in self._parameters}
            self._calls.append(Call(self._name, values, options, grid(given)[0]))

        return launch


def _quantized(x: torch.Tensor, *rest: Any, **_: Any) -> tuple[torch.Tensor, Any]:
    """Stands for what quantizes activations: these are quantized already, with their scales kept aside."""
    del rest
    return x, x.scales


@dataclass
class Described:
    """Stands for a tensor descriptor."""

    base: torch.Tensor
    tile: tuple[int, ...]


def _described(base: torch.Tensor, shape: Any, strides: Any, tile: list[int]) -> Described:
    assert tuple(shape) == tuple(base.shape)
    assert tuple(strides) == base.stride()
    return Described(base, tuple(tile))


class Wheel:
    """The launching code of a release.

    Args:
        package: `sglang` or `vllm`.
        version: of it.
        pdl: what the release is told of the GPU.
    """

    def __init__(self, package: str, version: str, *, pdl: bool = True) -> None:
        module = ast.parse(read_member(package, version, home_of(package, version)))
        self.calls: list[Call] = []
        self.parameters: dict[str, list[str]] = {}
        taken: list[ast.stmt] = []
        for node in module.body:
            if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                taken.append(node)
            if not isinstance(node, ast.FunctionDef):
                continue
            if node.name in KERNELS:
                self.parameters[node.name] = [item.arg for item in node.args.args]
            elif node.name in (*_LAUNCHERS, *_CALLED):
                node.decorator_list = []
                taken.append(node)
        self.namespace: dict[str, Any] = self._stand_ins(pdl)
        for name, parameters in self.parameters.items():
            self.namespace[name] = Recorder(name, parameters, self.calls)
        exec(compile(ast.Module(taken, type_ignores=[]), f"{package} {version}", "exec"), self.namespace)
        self.package = package

    @staticmethod
    def _stand_ins(pdl: bool) -> dict[str, Any]:
        def no(*_: object, **__: object) -> bool:
            return False

        def yes(*_: object) -> bool:
            return True

        cuda = types.SimpleNamespace(is_cuda=yes, is_device_capability=yes, is_rocm=no)
        return {
            **{"torch": torch, "triton": triton, "tl": tl, "Any": Any, "padding_size": 0, "_is_cuda": True},
            **dict.fromkeys(("Dict", "List", "Tuple", "Optional", "Union"), _Subscripted()),
            **dict.fromkeys(
                (
                    "scaled_fp8_quant",
                    "per_token_group_quant_fp8",
                    "sglang_per_token_group_quant_fp8",
                    "per_token_group_quant_int8",
                    "sglang_per_token_group_quant_int8",
                    "per_token_quant_int8",
                ),
                _quantized,
            ),
            "is_batch_invariant_mode_enabled": no,
            "is_sm90_supported": yes,
            "is_arch_support_pdl": lambda: pdl,
            "current_platform": cuda,
            "enable_swap_ab": lambda m, n: m < 64 <= n,
            "resolve_moe_use_td": no,
            "warn_if_moe_use_td_ineffective": no,
            "should_moe_wna16_use_cuda": no,
            "set_triton_allocator": no,
            "TensorDescriptor": _described,
            "_set_triton_tma_allocator": no,
            "_B_DESC_CACHE": OrderedDict(),
            "_B_DESC_CACHE_MAX": 1,
            "logger": types.SimpleNamespace(warning_once=no),
            "ops": None,
        }

    def launch(self, arguments: dict[str, Any], *, grouped: bool) -> Call:
        """Call the function that launches this kernel, with those of the arguments that it has."""
        names = [name for name in _LAUNCHERS if name in self.namespace]
        plain = [name for name in names if "wna16" not in name]
        of_groups = [name for name in names if "wna16" in name]
        function = self.namespace[(of_groups or plain)[0] if grouped else plain[0]]
        wanted = function.__code__.co_varnames[: function.__code__.co_argcount]
        function(**{name: value for name, value in arguments.items() if name in wanted})
        return self.calls.pop()


class _Subscripted:
    def __getitem__(self, _: object) -> object:
        return object


def config_of(config: KernelConfig) -> dict[str, int]:
    """A config as the server reads it from a file."""
    return {name: value for name, value in config.to_json().items() if isinstance(value, int)}
