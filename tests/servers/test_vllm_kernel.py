"""What a launch of vLLM's own Triton kernels takes: bound and compiled for named GPUs, with no GPU.

The kernels' source comes from the wheels; the launchers are the real ones on shapes (vllm_loader.py).
"""

from __future__ import annotations

import importlib.util
import json
import random
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from moetune.domain.errors import ConfigFileError
from moetune.domain.gpu import Gpu
from moetune.domain.problem import Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.servers.vllm import open_vllm
from moetune.servers.vllm.rules import Change, has
from tests.servers.test_vllm_wheels_launch import launch_really
from tests.servers.vllm_cases import Case, every_version, outcome_of
from tests.servers.vllm_loader import FUSED_MOE, FakeTensor, function_node, real
from tests.wheels import read_member

if TYPE_CHECKING:
    from pathlib import Path

triton = pytest.importorskip("triton")

GOOD: dict[str, Any] = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
TARGETS = {"NVIDIA": ("cuda", 90, 32), "AMD": ("hip", "gfx942", 64)}


@cache
def kernels(version: str, folder: Path) -> Any:
    """The two kernels of a release as Triton functions, from their source alone."""
    import ast

    source = read_member("vllm", version, FUSED_MOE + "fused_moe.py")
    names = ("write_zeros_to_output", "fused_moe_kernel", "fused_moe_kernel_gptq_awq")
    nodes = [function_node(version, FUSED_MOE + "fused_moe.py", name) for name in names]
    text = "import triton\nimport triton.language as tl\n\n\n" + "\n\n\n".join(map(ast.unparse, nodes))
    path = folder / f"kernels_{version.replace('.', '_')}.py"
    path.write_text(text)
    assert "tl.constexpr" in source
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def problem_of(version: str, dtype: Dtype, vendor: str) -> Problem:
    grouped = dtype in (Dtype.INT4_W4A16, Dtype.INT8_W8A16)
    return Problem(
        E=8,
        global_experts=8,
        topk=2,
        K=512,
        N=256,
        file_n=256,
        gpu=Gpu("GPU", vendor=vendor, compute_capability=(9, 0) if vendor == "NVIDIA" else None),
        server="vllm",
        server_version=version,
        triton_version=triton.__version__,
        quantization=Quantization(dtype, group_size=256 if grouped else None),
    )


def bind_really(version: str, problem: Problem, entry: dict[str, Any], folder: Path) -> None:
    """Launch up to where Triton would compile; raises what the server would die of."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import MockTensor, create_function_from_signature

    functions = real(version)
    with functions.world("GPU", vendor=problem.gpu.vendor, capability=problem.gpu.compute_capability):
        captured = launch_really(functions, Case(problem, 5), 5, "up", entry)
    assert captured is not None
    args, kwargs = functions.captured.args, dict(functions.captured.kwargs)
    del kwargs["__grid__"]
    kernel = getattr(kernels(version, folder), functions.captured.kernel)
    backend = make_backend(GPUTarget(*TARGETS[problem.gpu.vendor]))
    tensors = [MockTensor("bf16") if isinstance(item, FakeTensor) else item for item in args]
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    kwargs["debug"] = kwargs.get("debug", False)
    bound, specialization, found = binder(*tensors, **kwargs)
    kernel._pack_args(backend, kwargs, bound, specialization, found)


ODD_KEYS = ("USE_TMA", "waves_per_eu", "kpack", "grf_mode", "SPLIT_K", "num_ctas", "maxnreg", "tile_m", "")
ARGUMENTS = ("top_k", "K", "EM", "stride_am", "compute_type", "SWAP_AB", "USE_TD", "naive_block_assignment")


def entries(version: str) -> list[dict[str, Any]]:
    """Entries with keys missing, foreign keys added, and numbers that Triton's options refuse."""
    rng = random.Random(version)
    found: list[dict[str, Any]] = [dict(GOOD), {}, {**GOOD, "num_warps": 3}, {**GOOD, "num_warps": 8}]
    found += [{key: value for key, value in GOOD.items() if key != missing} for missing in GOOD]
    found += [{**GOOD, key: 1} for key in (*ODD_KEYS, *ARGUMENTS)]
    for _ in range(60):
        entry = {key: value for key, value in GOOD.items() if rng.random() < 0.95}
        entry |= {key: rng.choice((1, 2)) for key in (*ODD_KEYS, *ARGUMENTS) if rng.random() < 0.06}
        found.append(entry | ({"SPLIT_K": 1} if rng.random() < 0.5 else {}))
    return found


@every_version
@pytest.mark.parametrize("vendor", sorted(TARGETS))
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP8_W8A8, Dtype.INT8_W8A16])
def test_case_29_the_wheels_kernels_bind_what_our_reader_takes(
    version: str, vendor: str, dtype: Dtype, folder: Path
) -> None:
    server = open_vllm(version, triton.__version__)
    problem = problem_of(version, dtype, vendor)
    taken = refused = 0
    for entry in entries(version):
        if dtype is Dtype.INT8_W8A16 and not {"BLOCK_SIZE_N", "BLOCK_SIZE_K"} <= set(entry):
            continue  # the launch fills them in; we ask for them
        text = json.dumps({"1": entry})
        _, error = outcome_of(bind_really, version, problem, dict(entry), folder)
        _, ours = outcome_of(server.read_table, text, "file", problem)
        assert (error is None) == (ours is None), (entry, error, ours)
        if error is None:
            taken += 1
            continue
        assert isinstance(ours, ConfigFileError)
        exceptions = {type(error).__name__}
        if len(set(GOOD) ^ set(entry)) > 1:
            exceptions |= {"KeyError", "TypeError"}  # several faults: the first is the launch's choice
        if "BLOCK_SIZE_N" not in entry:
            exceptions |= {"TypeError"}  # fp8 looks at it earlier since 0.25, with a KeyError
        assert any(f": {name})" in ours.message for name in exceptions), (entry, error, ours)
        refused += 1
    assert taken > 10
    assert refused > 10


def test_split_k_is_unknown_then_required_by_the_grouped_kernel() -> None:
    problem = problem_of("0.33.0", Dtype.INT8_W8A16, "NVIDIA")
    without, with_it = json.dumps({"1": GOOD}), json.dumps({"1": GOOD | {"SPLIT_K": 1}})
    for version in ("0.10.2", "0.11.0"):
        open_vllm(version).read_table(without, "f", problem)
        with pytest.raises(ConfigFileError, match="KeyError"):
            open_vllm(version).read_table(with_it, "f", problem)
    assert not has((0, 11, 0), Change.SPLIT_K)
    for version in ("0.11.1", "0.33.0"):
        open_vllm(version).read_table(with_it, "f", problem)
        with pytest.raises(ConfigFileError, match=r"lacks SPLIT_K.*TypeError"):
            open_vllm(version).read_table(without, "f", problem)


TILES = [
    ({}, True),
    ({"BLOCK_SIZE_M": 8}, True),
    ({"BLOCK_SIZE_N": 8}, True),
    ({"BLOCK_SIZE_K": 16}, True),
    ({"BLOCK_SIZE_K": 8}, False),
    ({"BLOCK_SIZE_M": 48}, False),
    ({"BLOCK_SIZE_N": 96}, False),
    ({"BLOCK_SIZE_K": 48}, False),
]


@pytest.mark.parametrize(("change", "runs"), TILES)
def test_the_newest_wheels_kernel_compiles_the_tiles_that_our_reader_takes(
    change: dict[str, int], runs: bool, folder: Path
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource

    version = "0.33.0"
    problem = problem_of(version, Dtype.BF16, "NVIDIA")
    entry = GOOD | change
    functions = real(version)
    with functions.world("GPU", capability=(9, 0)):
        launch_really(functions, Case(problem, 50), 50, "up", dict(entry))
    kernel = kernels(version, folder).fused_moe_kernel
    parameters = dict(zip(kernel.arg_names, functions.captured.args, strict=False))
    parameters |= functions.captured.kwargs
    pointers = {
        "sorted_token_ids_ptr": "*i32",
        "expert_ids_ptr": "*i32",
        "num_tokens_post_padded_ptr": "*i32",
    }
    pointers |= {"topk_weights_ptr": "*fp32"}
    signature, constants = {}, {}
    for parameter in kernel.params:
        value = parameters.get(parameter.name, False)
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = triton.language.bfloat16 if value == "bf16" else value
        else:
            tensor = isinstance(value, FakeTensor)
            signature[parameter.name] = pointers.get(parameter.name, "*bf16") if tensor else "i32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    text = json.dumps({"1": entry})
    if runs:
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
        open_vllm(version, triton.__version__).read_table(text, "file", problem)
    else:
        with pytest.raises(triton.compiler.errors.CompilationError):
            triton.compile(source, target=GPUTarget("cuda", 90, 32))
        with pytest.raises(ConfigFileError, match="CompilationError"):
            open_vllm(version, triton.__version__).read_table(text, "file", problem)
