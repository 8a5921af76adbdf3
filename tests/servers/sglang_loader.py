"""Runs SGLang's own functions, out of the published wheels, with everything around them stubbed.

The wheel's source is executed as it is: nothing of it is copied here, and no `sglang` is imported.
Its imports of torch, triton and sglang are answered by stubs that never reach `sys.modules`.
"""

from __future__ import annotations

import ast
import builtins
import functools
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

from moetune.servers.sglang.releases import rules_of
from tests.wheels import read_member

_FUNCTIONS = ("get_config_file_name", "get_moe_configs", "get_default_config", "try_get_optimal_moe_config")
_STUBBED = frozenset({"torch", "triton", "sglang", "sgl_kernel", "vllm"})


class Stub:
    """Answers any attribute and any call with another stub."""

    def __init__(self, **known: object) -> None:
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub()

    def __call__(self, *arguments: object, **options: object) -> Any:
        # As a decorator it gives the function back.
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) and not options else Stub()

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Any:
        return iter(())

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *_: object) -> None:
        return None


@dataclass
class Logger:
    """Stands in for the module's logger; keeps what a user would read."""

    lines: list[tuple[str, str]] = field(default_factory=list)

    def info(self, message: str, *arguments: object) -> None:
        self.lines.append(("INFO", message % arguments if arguments else message))

    def warning(self, message: str, *arguments: object) -> None:
        self.lines.append(("WARNING", message % arguments if arguments else message))

    warning_once = warning
    info_once = info
    debug = info


@dataclass(frozen=True)
class World:
    """What the stubs tell a wheel's code about the machine.

    Attributes:
        device: `torch.cuda.get_device_name()`.
        triton: `triton.__version__`.
        hip: ROCm.
        smem_optin_bytes: what CUDA answers; None: it has no such property.
        deterministic: `--enable-deterministic-inference`.
        fused_sum: `--enable-fused-moe-sum-all-reduce`.
        folder: where the module lies; its `configs/` is the package's.
    """

    device: str
    triton: str
    hip: bool = False
    smem_optin_bytes: int | None = 232_448
    deterministic: bool = False
    fused_sum: bool = False
    folder: str = "/nowhere"


@dataclass(frozen=True)
class Real:
    """A wheel's lookup functions in one world.

    Attributes:
        version: of the wheel.
        functions: its module's namespace.
        logger: what it printed.
    """

    version: str
    functions: dict[str, Any]
    logger: Logger

    def __getattr__(self, name: str) -> Any:
        return self.functions[name]


def load_lookup(version: str, world: World, torch: object | None = None) -> Real:
    """Execute the module that looks config files up, fresh: nothing is cached from an earlier call.

    Args:
        version: of the wheel.
        world: what the stubs say.
        torch: the real torch, where types of real tensors are compared; None for a stub.
    """
    module = rules_of(version).module
    logger = Logger()
    answers = _answers(world)
    answers["torch"] = torch or answers["torch"]
    namespace: dict[str, Any] = {
        "__name__": module.removesuffix(".py").replace("/", "."),
        "__file__": str(Path(world.folder) / Path(module).name),
        "__builtins__": {
            **vars(builtins),
            "__import__": importer(_answers(world) | ({"torch": torch} if torch else {})),
        },
    }
    code = _code(version, module)
    if not module.endswith("_config.py"):
        # 0.5.1 and before keep the functions in a module that also holds the kernels.
        namespace.update(
            functools=functools, json=json, os=os, _is_hip=world.hip, torch=torch or _torch(world)
        )
        namespace.update(triton=Stub(__version__=world.triton), get_device_name=lambda: world.device)
    exec(code, namespace)
    namespace["logger"] = logger
    return Real(version, namespace, logger)


def importer(answers: dict[str, Any], stubbed: frozenset[str] = _STUBBED) -> Any:
    """An `__import__` that answers for the stubbed packages, and imports the rest."""

    def stub_import(
        name: str,
        globals: object = None,
        locals: object = None,
        fromlist: tuple[str, ...] | None = (),
        level: int = 0,
    ) -> Any:
        if level == 0 and name.split(".")[0] not in stubbed:
            return __import__(name, globals, locals, fromlist, level)  # type: ignore[arg-type]
        wanted = fromlist or ()
        root = name if wanted else name.split(".")[0]
        if level == 0 and root in answers:
            return answers[root]
        return Stub(**{key: answers[key] for key in wanted if key in answers})

    return stub_import


def _answers(world: World) -> dict[str, Any]:
    arguments = SimpleNamespace(enable_deterministic_inference=world.deterministic)
    flags = SimpleNamespace(deterministic=arguments)
    return {
        "torch": _torch(world),
        "triton": Stub(__version__=world.triton),
        "get_device_name": lambda: world.device,
        "is_hip": lambda: world.hip,
        "get_global_server_args": lambda: arguments,
        "get_server_args": lambda: arguments,
        "get_exec": lambda: flags,
        "get_config": lambda: None,
    }


def _torch(world: World) -> Stub:
    properties = SimpleNamespace()
    if world.smem_optin_bytes is not None:
        properties.shared_memory_per_block_optin = world.smem_optin_bytes
    cuda = SimpleNamespace(
        is_available=lambda: True, current_device=lambda: 0, get_device_properties=lambda _: properties
    )
    return Stub(cuda=cuda, float="float32", dtype=object)


@functools.cache
def _code(version: str, module: str) -> CodeType:
    tree = ast.parse(read_member("sglang", version, module))
    if not module.endswith("_config.py"):
        wanted = (*_FUNCTIONS, "get_config_dtype_str")
        tree.body = [
            node
            for node in tree.body
            if (isinstance(node, ast.FunctionDef) and node.name in wanted)
            or (isinstance(node, ast.ImportFrom) and node.module in ("__future__", "typing"))
        ]
    return compile(tree, f"sglang-{version}/{module}", "exec")
