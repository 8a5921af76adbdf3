"""What SGLang itself decides: its own functions out of the published wheels, on a faked platform.

Nothing of SGLang is installed. The resolving code of the server's arguments and the runner code of
each quantization method are taken out of the wheel's source by name and executed with stand-ins for
everything around them: a platform with a compute capability, a checkpoint's config, a MoeRunner that
only remembers which backend it was built for. All conditions that are evaluated are SGLang's own.
"""

from __future__ import annotations

import ast
import builtins
import copy
import importlib
import sys
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.wheels import members, read_member

INSPECTED = (
    "0.5.2",
    "0.5.3",
    "0.5.4",
    "0.5.5",
    "0.5.6",
    "0.5.9",
    "0.5.10",
    "0.5.11",
    "0.5.12",
    "0.5.13",
    "0.5.14",
    "0.5.15",
    "0.5.16",
    "0.5.18",
    "0.5.20",
    "0.5.23",
)


class Loose:
    """Stands for whatever the decision does not depend on: false, empty, callable, equal to nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return LOOSE

    def __call__(self, *args: Any, **_: Any) -> Any:
        # As a decorator it leaves what it decorates alone.
        return args[0] if len(args) == 1 and callable(args[0]) and not isinstance(args[0], Loose) else LOOSE

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Any:
        return iter(())

    def __contains__(self, _: object) -> bool:
        return False

    def __getitem__(self, _: object) -> Any:
        return LOOSE

    def __setitem__(self, *_: object) -> None: ...

    def __lt__(self, _: object) -> bool:
        return False

    __le__ = __gt__ = __ge__ = __lt__

    def __or__(self, _: object) -> Any:
        return LOOSE

    __ror__ = __add__ = __radd__ = __sub__ = __mul__ = __floordiv__ = __truediv__ = __or__

    def __index__(self) -> int:
        return 0

    __int__ = __index__

    def __enter__(self) -> Any:
        return LOOSE

    def __exit__(self, *_: object) -> None: ...

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return ()


LOOSE: Any = Loose()


@dataclass(frozen=True)
class Setup:
    """One deployment, in the server's own words."""

    arch: str = "Qwen3MoeForCausalLM"
    quantization_config: dict[str, Any] | None = None
    cc: int = 90
    rocm: bool = False
    runner: str = "auto"
    a2a: str = "none"
    quantization: str | None = None
    tp: int = 1
    ep: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    fp4_experts: bool = False
    redundant_experts: int = 0
    piecewise: bool = False
    driver: tuple[int, ...] = (590,)
    fp8_in_checkpoint: bool = False
    lora: bool = False


def platform_of(setup: Setup, version: tuple[int, ...]) -> SimpleNamespace:
    major = setup.cc // 10
    cuda = not setup.rocm
    wide = version >= (0, 5, 9)
    return SimpleNamespace(
        is_cuda=cuda,
        is_hip=setup.rocm,
        is_sm90=cuda and major == 9,
        is_sm100=cuda and major == 10,
        is_sm110=cuda and major == 11,
        is_sm120=cuda and major == 12,
        is_sm100_or_sm110=cuda and major in (10, 11),
        is_blackwell=cuda and major in ((10, 11, 12) if wide else (10, 12)),
        is_npu=False,
        is_xpu=False,
        is_cpu=False,
        is_musa=False,
        has_amx=False,
        has_flashinfer=True,
        device_sm=setup.cc,
        device_capability=(major, setup.cc % 10),
    )


class _Env:
    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment

    def __getattr__(self, name: str) -> Any:
        value = self._environment.get(name)
        on = {"1": True, "true": True, "0": False, "false": False}.get(value or "", bool(value))
        if value is None and name == "SGLANG_ENABLE_JIT_DEEPGEMM":
            on = True
        return SimpleNamespace(get=lambda: on, is_set=lambda: value is not None, set=lambda _: None, value=on)


class Namespaces(dict[str, Any]):
    """Globals in which an unknown name is a Loose object."""

    def __missing__(self, key: str) -> Any:
        if hasattr(builtins, key):
            raise KeyError(key)
        return LOOSE


def _quant_method(hf_config: Any) -> Any:
    config = getattr(hf_config, "quantization_config", None)
    return config.get("quant_method") if config is not None else None


def _always(value: Any) -> Any:
    return lambda *_, **__: value


def known_names(setup: Setup, version: tuple[int, ...]) -> dict[str, Any]:
    """Stand-ins for what the server's code imports, by name."""
    platform = platform_of(setup, version)
    on: dict[str, Any] = {
        name: _always(value)
        for name, value in {
            "is_cuda": platform.is_cuda,
            "is_cuda_alike": True,
            "is_hip": platform.is_hip,
            "is_npu": False,
            "is_cpu": False,
            "is_xpu": False,
            "is_mps": False,
            "is_musa": False,
            "use_mlx": False,
            "is_sm90_supported": platform.is_sm90,
            "is_sm100_supported": platform.is_sm100,
            "is_sm110_supported": platform.is_sm110,
            "is_sm120_supported": platform.is_sm120,
            "is_blackwell_supported": platform.is_blackwell,
            "is_blackwell": platform.is_blackwell,
            "is_flashinfer_available": True,
            "is_gfx95_supported": False,
            "is_triton_kernels_available": True,
            "check_pkg_version_at_least": True,
            "is_deepseek_nsa": False,
            "is_deepseek_dsa": False,
            "get_device_sm": setup.cc,
            "get_device_capability": platform.device_capability,
            "get_nvidia_driver_version": setup.driver,
            "has_fp8_weights_in_checkpoint": setup.fp8_in_checkpoint,
            "get_bool_env_var": False,
            "get_platform": platform,
            "parse_connector_type": None,
        }.items()
    }
    environment = setup.environment
    on["get_bool_env_var"] = lambda name, default="false": (
        str(environment.get(name, default)).lower() in ("1", "true")
    )
    on["get_quantization_config"] = _quant_method
    on["unwrap_modelopt_quantization_config"] = lambda config: config
    on["envs"] = _Env(environment)
    on["resolving_view"] = on["resolved_view"] = lambda args: args
    on["model_config_of"] = lambda args: args.model_config
    on["_register_for"] = lambda *names: lambda function: _register(function, names)
    on["register_post_process"] = lambda function: function
    on["declare_resolution"] = lambda args, _, **values: args.__dict__.update(values)
    on["is_attention_backend_not_set"] = lambda _: False
    on["logger"] = LOOSE
    on["log_info_on_rank0"] = LOOSE
    on["deep_gemm_wrapper"] = SimpleNamespace(ENABLE_JIT_DEEPGEMM=on["envs"].SGLANG_ENABLE_JIT_DEEPGEMM.value)
    return on


def _register(function: Any, names: tuple[str, ...]) -> Any:
    function.architectures = names
    return function


_REAL_MODULES = frozenset(
    {"logging", "dataclasses", "typing", "enum", "functools", "__future__", "os", "sys", "math", "re", "json"}
    | {
        "copy",
        "itertools",
        "collections",
        "collections.abc",
        "types",
        "warnings",
        "abc",
        "contextlib",
        "time",
    }
)


def _importer(known: dict[str, Any]) -> Any:
    def fake_import(
        name: str,
        _globals: Any = None,
        _locals: Any = None,
        fromlist: tuple[str, ...] | None = (),
        level: int = 0,
    ) -> Any:
        if level == 0 and name in _REAL_MODULES:
            module = importlib.import_module(name)
            return module if fromlist else sys.modules[name.split(".")[0]]
        module = ModuleType(name)
        for wanted in fromlist or ():
            setattr(module, wanted, known.get(wanted, LOOSE))
        if not fromlist:
            return known.get(name.split(".")[0], LOOSE)
        return module

    return fake_import


def globals_of(known: dict[str, Any]) -> Namespaces:
    space = Namespaces(known)
    space["__builtins__"] = {**vars(builtins), "__import__": _importer(known)}
    space["__name__"] = "oracle"
    return space


@cache
def tree_of(version: str, member: str) -> ast.Module:
    return ast.parse(read_member("sglang", version, member))


@cache
def _code(version: str, member: str, owner: str | None, name: str) -> Any:
    """A function of a module, or a method of one of its classes, as code that defines it."""
    body: list[ast.stmt] = tree_of(version, member).body
    if owner is not None:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
    found = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not found:
        return None
    function = copy.deepcopy(found[0])
    function.decorator_list = []
    for part in ast.walk(function):
        if isinstance(part, ast.arg):
            part.annotation = None
    function.returns = None
    return compile(ast.Module(body=[function], type_ignores=[]), f"{version}/{member}", "exec")


def function_of(version: str, member: str, owner: str | None, name: str, known: dict[str, Any]) -> Any:
    """The function itself, in globals of stand-ins; None where this version has none of that name."""
    code = _code(version, member, owner, name)
    if code is None:
        return None
    space = globals_of(known)
    exec(code, space)
    return space[name]


@cache
def _defaults(version: str) -> dict[str, Any]:
    """Defaults of the server's arguments, as far as they are literals."""
    tree = tree_of(version, "sglang/srt/server_args.py")
    body = next(n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "ServerArgs")
    values: dict[str, Any] = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            try:
                values[node.target.id] = ast.literal_eval(node.value)
            except ValueError:
                values[node.target.id] = None
    return values


def _attention(arch: str) -> str:
    """An attention backend that the architecture accepts; the runner does not depend on it."""
    for start, backend in (("NemotronH", "flashinfer"), ("Lfm2", "flashinfer"), ("MossVL", "flashinfer")):
        if arch.startswith(start):
            return backend
    return "fa3" if arch.startswith("IQuestQ1") else "triton"


class _Arguments:
    """Server arguments: what the setup says, else the default, else a Loose object."""

    def __init__(self, version: str, setup: Setup) -> None:
        hf_config = SimpleNamespace(
            architectures=[setup.arch],
            mlp_hidden_act="relu2",
            num_experts=128,
            block_configs=[],
            model_type="x",
            sliding_window_pattern=None,
        )
        if setup.quantization_config is not None:
            hf_config.quantization_config = setup.quantization_config
        method = setup.quantization or _quant_method(hf_config)
        self.__dict__.update(_defaults(version))
        self.__dict__.update(
            device="cuda",
            moe_runner_backend=setup.runner,
            moe_a2a_backend=setup.a2a,
            quantization=setup.quantization,
            tp_size=setup.tp,
            ep_size=setup.ep,
            dp_size=1,
            enable_piecewise_cuda_graph=setup.piecewise,
            attention_backend=_attention(setup.arch),
            prefill_attention_backend=_attention(setup.arch),
            decode_attention_backend=_attention(setup.arch),
            ep_num_redundant_experts=setup.redundant_experts,
            init_expert_location="trivial",
            enable_eplb=False,
            enable_prefill_cp=False,
            enable_waterfill=False,
            nnodes=1,
            enable_lora=setup.lora,
            _quantization_explicitly_unset=False,
            hf_config=hf_config,
            enable_dp_attention=False,
            cpu_offload_gb=0,
            cuda_graph_config=LOOSE,
            flashinfer_a2a_dispatch_type=None,
        )
        self.model_config = SimpleNamespace(
            hf_config=hf_config,
            hf_text_config=hf_config,
            quantization=method,
            is_fp4_experts=setup.fp4_experts,
            nvfp4_moe_meta=None,
            dtype="bfloat16",
            is_multimodal=True,
        )

    def get_hf_config(self) -> Any:
        return self.hf_config

    def get_model_config(self) -> Any:
        return self.model_config

    def get_attention_backends(self) -> tuple[str, str]:
        return self.attention_backend, self.attention_backend

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return LOOSE


def release_of(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _override_members(version: str) -> list[str]:
    folder = "sglang/srt/arg_groups/model_overrides/"
    found = [name for name in members("sglang", version) if name.startswith(folder) and name.endswith(".py")]
    return [name for name in found if not name.endswith("__init__.py")]


@cache
def _registered(version: str) -> dict[str, tuple[tuple[str, str], ...]]:
    """Architecture to (member, function) of the override functions that claim it (0.5.15 and newer)."""
    claims: dict[str, list[tuple[str, str]]] = {}
    for member in [*_override_members(version), "sglang/srt/arg_groups/overrides.py"]:
        for node in tree_of(version, member).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "_register_for":
                    for argument in decorator.args:
                        if isinstance(argument, ast.Constant):
                            claims.setdefault(str(argument.value), []).append((member, node.name))
    return {arch: tuple(found) for arch, found in claims.items()}


def known_architectures(version: str) -> frozenset[str]:
    """Architectures that this version's resolving code names anywhere."""
    if release_of(version) >= (0, 5, 15):
        return frozenset(_registered(version))
    text = [
        node.value
        for node in ast.walk(tree_of(version, "sglang/srt/server_args.py"))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return frozenset(word for word in text if "For" in word and word.isidentifier())


def resolved_runner(version: str, setup: Setup) -> str:
    """`--moe-runner-backend` after the server resolved its arguments; `error: ...` when it refuses."""
    release = release_of(version)
    known = known_names(setup, release)
    arguments = _Arguments(version, setup)
    try:
        if release >= (0, 5, 15):
            _resolve_registry(version, arguments, setup, known)
        else:
            _resolve_monolith(version, arguments, known)
    except (AssertionError, ValueError, NotImplementedError) as error:
        return f"error: {type(error).__name__}: {str(error)[:90]}"
    return str(arguments.moe_runner_backend)


def _resolve_monolith(version: str, arguments: Any, known: dict[str, Any]) -> None:
    member = "sglang/srt/server_args.py"
    known = {**_module_constants(version, member), **known}
    for name in (
        "model_specific_adjustments",
        "_handle_model_specific_adjustments",
        "_handle_moe_kernel_config",
        "_handle_a2a_moe",
        "_handle_deepep_moe",
    ):
        function = function_of(version, member, "ServerArgs", name, known)
        if function is not None:
            function(arguments)


def _resolve_registry(version: str, arguments: Any, setup: Setup, known: dict[str, Any]) -> None:
    overrides = "sglang/srt/arg_groups/overrides.py"
    constants = _module_constants(version, overrides)
    known = {**constants, **known}
    known["run_post_process_pass"] = lambda args, function: args.__dict__.update(function(args) or {})
    # The stand-ins win over functions of the same name that read the real platform or arguments.
    helpers = _module_functions(version, overrides, known)
    base = "sglang/srt/arg_groups/model_override_base.py"
    if base in members("sglang", version):
        helpers = {**helpers, **_module_functions(version, base, known)}
    for member, name in _registered(version).get(setup.arch, ()):
        own = {**_module_constants(version, member), **helpers, **known}
        function = function_of(
            version, member, None, name, {**own, **_module_functions(version, member, own)}
        )
        arguments.__dict__.update(function(arguments, arguments.hf_config) or {})
    for name in ("_deepseek_moe_quant_resolution", "_deepseek_family_moe_overrides"):
        if name in helpers:
            arguments.__dict__.update(helpers[name](arguments) or {})
    hook = "sglang/srt/arg_groups/moe_hook.py"
    if hook in members("sglang", version):
        hooks = _module_functions(version, hook, {**helpers, **known})
        hooks["handle_moe_kernel_config"](arguments)
        hooks["handle_a2a_moe"](arguments)
    else:
        for name in ("_handle_moe_kernel_config", "_handle_a2a_moe"):
            function = function_of(
                version, "sglang/srt/server_args.py", "ServerArgs", name, {**helpers, **known}
            )
            if function is not None:
                function(arguments)


@cache
def _module_constants(version: str, member: str) -> dict[str, Any]:
    """Module-level names of a module that are literals (sets and lists of architectures)."""
    values: dict[str, Any] = {}
    for node in tree_of(version, member).body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            value = node.value
            if isinstance(value, ast.Call) and ast.unparse(value.func) in ("frozenset", "set", "tuple"):
                value = value.args[0] if value.args else ast.Tuple(elts=[], ctx=ast.Load())
            try:
                values[node.targets[0].id] = ast.literal_eval(value)
            except ValueError:
                continue
    return values


def _module_functions(version: str, member: str, known: dict[str, Any]) -> dict[str, Any]:
    """All functions of a module in one set of globals, so that they can call each other."""
    space = globals_of(known)
    for node in tree_of(version, member).body:
        if isinstance(node, ast.FunctionDef) and node.name not in known:
            code = _code(version, member, None, node.name)
            exec(code, space)
    return {
        node.name: space[node.name]
        for node in tree_of(version, member).body
        if isinstance(node, ast.FunctionDef) and node.name in space
    }
