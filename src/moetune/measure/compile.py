"""Compiling one launch of moetune's own kernel for a named GPU, with no GPU here.

Run as a program it is a worker: one task a line on stdin, one result a line on stdout, both JSON.
Whatever the compiler prints goes into the result and not to stdout.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import tempfile
import time
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any, TextIO

import triton
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.cache import get_cache_manager

from moetune.domain.compilation import CompileResult, CompileStatus, CompileTask, Depth
from moetune.domain.kernel_format import Scales
from moetune.domain.resources import WARP
from moetune.domain.text import printable
from moetune.measure.child import open_answers, say
from moetune.measure.cubin import cubin_resources
from moetune.measure.dequantizing_kernel import dequantizing_constants, moe_dequantizing_gemm
from moetune.measure.kernels import kernel_constants, moe_grouped_gemm
from moetune.measure.server_kernel import compile_arguments, server_kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

_NICE = 5
"""All cores compile: the process that measures must not wait for one of them."""
_MESSAGE_CHARACTERS = 300
_NOISE_CHARACTERS = 600
_NOISE_BYTES = 1 << 16
"""How much of the beginning, and of the end, of the compiler's output is looked at."""

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})
_LEAST_FREE_BYTES = 1 << 20
"""With less, what the compiler leaves may be cut short, and ptxas does not say so."""

_DESCRIPTOR = "tensordesc<"
"""How Triton names the type of a tensor descriptor."""

_STATUS_OF_ERROR = {
    # What Triton's front end says of the config.
    "CompilationError": CompileStatus.REFUSED,
    "CompileTimeAssertionFailure": CompileStatus.REFUSED,
    "UnsupportedLanguageConstruct": CompileStatus.REFUSED,
    "AssertionError": CompileStatus.REFUSED,
    "ValueError": CompileStatus.REFUSED,
    # What its passes, LLVM and ptxas do: MLIR's "PassManager::run failed" is a RuntimeError.
    "RuntimeError": CompileStatus.COMPILER_FAILURE,
    "PTXASError": CompileStatus.COMPILER_FAILURE,
    "OutOfResources": CompileStatus.COMPILER_FAILURE,
    "MemoryError": CompileStatus.COMPILER_FAILURE,
    "IndexError": CompileStatus.COMPILER_FAILURE,
    "CalledProcessError": CompileStatus.COMPILER_FAILURE,
}
"""The one place that knows what an exception of the compiler means."""


def compile_launch(task: CompileTask, depth: Depth) -> CompileResult:
    """Compile one launch and say what it needs, or why it cannot be compiled."""
    started = time.perf_counter()
    with _captured_output() as noise:
        try:
            found = _COMPILERS[depth](task)
        except Exception as error:  # noqa: BLE001 - whatever it is, it costs this candidate only
            found = _failure(error)
    return CompileResult(
        **found,
        seconds=round(time.perf_counter() - started, 4),
        noise=_gist(noise[0]),
    )


def _failure(error: Exception) -> dict[str, Any]:
    if (reason := _no_room(error)) is not None:
        return {"status": CompileStatus.NO_ROOM, "message": printable(reason, _MESSAGE_CHARACTERS)}
    names = (kind.__name__ for kind in type(error).__mro__)
    status = next(
        (_STATUS_OF_ERROR[name] for name in names if name in _STATUS_OF_ERROR),
        CompileStatus.COMPILER_FAILURE,
    )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    # ptxas marks its reason; a CompilationError ends with it, after lines that quote the kernel.
    reason = next((line for line in lines if " fatal " in line), lines[-1])
    text = f"{type(error).__name__}: {reason}"
    return {"status": status, "message": printable(text, _MESSAGE_CHARACTERS)}


def _no_room(error: Exception) -> str | None:
    """What keeps the compiler from writing, where that is why it failed."""
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return os.strerror(error.errno)
    folder = os.environ.get("TRITON_CACHE_DIR", tempfile.gettempdir())
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return os.strerror(errno.ENOSPC) if found.f_bavail * found.f_frsize < _LEAST_FREE_BYTES else None


def _gist(noise: str) -> str:
    """The lines that speak of an error, else the last one: a failing pass prints the whole module too."""
    lines = [line.strip() for line in noise.splitlines() if line.strip()]
    telling = [line for line in lines if " error: " in line or "Pipeline failed" in line]
    return printable(" | ".join(telling or lines[-1:]), _NOISE_CHARACTERS)


def kernel_source(task: CompileTask) -> ASTSource:
    """The kernel with the types, constants and divisibility with which the launch specialises it."""
    kernel, arguments = _kernel_and_arguments(task)
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if kernel.params[index].is_constexpr or value is None or value == 1:
            signature[name] = "constexpr"
            constants[(index,)] = value
            continue
        signature[name] = value if isinstance(value, str) else _integer_type(value)
        # Triton's own launch path names the arguments without a property too, and its cache looks at that.
        if isinstance(value, str) and value.startswith(_DESCRIPTOR):
            continue
        divisible = isinstance(value, str) or value % 16 == 0
        attributes[(index,)] = [["tt.divisibility", 16]] if divisible else []
    return ASTSource(kernel, signature, constants, attributes)


def _kernel_and_arguments(task: CompileTask) -> tuple[Any, dict[str, Any]]:
    """The kernel, and by parameter the type of a pointer, a number like that of the launch, or a constant."""
    if task.kernel_file is not None:
        kernel = server_kernel(task)
        return kernel, compile_arguments(task, kernel)
    if task.grouped:
        return moe_dequantizing_gemm, _grouped_arguments(task)
    return moe_grouped_gemm, _arguments(task)


def _integer_type(value: int) -> str:
    return "i32" if value < 2**31 else "i64"


def _shared_arguments(task: CompileTask) -> dict[str, Any]:
    """What both kernels have: type of each pointer, and a value like it of each number."""
    return {
        "x_ptr": f"*{task.operand_type}",
        "w_ptr": f"*{task.weight_type or task.operand_type}",
        "y_ptr": f"*{task.output_type}",
        "slot_weight_ptr": "*fp32",
        "slot_ids_ptr": "*i32",
        "tile_expert_ptr": "*i32",
        "used_length_ptr": "*i32",
        "padded_length": 16 if task.padded_length_divisible else 4,
        "num_slots": 1 if task.num_slots_is_one else 16 if task.num_slots_divisible else 8,
        "x_stride": task.k,
        "y_stride": task.n,
    }


def _arguments(task: CompileTask) -> dict[str, Any]:
    """Those of the kernel whose operands go into the dot as they are, or converted only."""
    by_block = task.launch.block_k > 0
    scaled = by_block or task.scales is not Scales.NONE
    by_channel = task.scales is Scales.CHANNEL
    groups = -(-task.k // task.launch.block_k) if by_block else int(scaled)
    blocks = -(-task.n // task.block_n) if by_block else task.n if by_channel else int(scaled)
    x_scaled = task.quantizes_activations
    launch, config = task.launch, task.launch.config
    rows, columns, depth = config.block_size_m, config.block_size_n, config.block_size_k
    weight_type = task.weight_type or task.operand_type
    return {
        **_shared_arguments(task),
        "x_desc": f"{_DESCRIPTOR}{task.operand_type}[{rows}, {depth}]>" if launch.sorted_input else None,
        "w_desc": f"{_DESCRIPTOR}{weight_type}[1, {columns}, {depth}]>" if launch.weights_by_tma else None,
        "bias_ptr": f"*{task.output_type}" if task.bias else None,
        "x_scale_ptr": "*fp32" if x_scaled else None,
        "w_scale_ptr": "*fp32" if scaled else None,
        "N": task.n,
        "K": task.k,
        "w_stride_expert": task.n * task.k,
        "w_stride_column": task.k,
        "bias_stride": task.n if task.bias else 0,
        "x_scale_stride": groups if x_scaled else 0,
        "w_scale_stride_expert": groups * blocks,
        "w_scale_stride_column": groups,
        **kernel_constants(
            task.launch,
            top_k=task.top_k,
            k=task.k,
            block_n=task.block_n,
            channel_scales=by_channel,
            pdl_early=task.pdl_early,
        ),
    }


def _grouped_arguments(task: CompileTask) -> dict[str, Any]:
    """Those of the kernel whose weights have scales by group."""
    groups, per_byte = -(-task.k // task.group_size), 8 // task.launch.b_bits
    return {
        **_shared_arguments(task),
        "w_scale_ptr": f"*{task.output_type}",
        "w_zero_ptr": "*u8" if task.zero_point else None,
        "w_stride_expert": task.n * task.k // per_byte,
        "w_stride_column": task.k // per_byte,
        "w_scale_stride_expert": task.n * groups,
        "w_scale_stride_column": groups,
        "w_zero_stride_expert": -(-task.n // per_byte) * groups if task.zero_point else 0,
        "w_zero_stride_column": groups if task.zero_point else 0,
        **dequantizing_constants(
            task.launch, n=task.n, k=task.k, top_k=task.top_k, group_size=task.group_size
        ),
    }


def _options(task: CompileTask) -> dict[str, Any]:
    config = task.launch.config
    options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if task.launch.pdl:
        options["launch_pdl"] = True
    return options


def _to_binary(task: CompileTask) -> dict[str, Any]:
    kernel = triton.compile(
        kernel_source(task), target=GPUTarget("cuda", task.arch, WARP), options=_options(task)
    )
    try:
        used = cubin_resources(kernel.asm["cubin"])
    except ValueError:
        # Cut short on a full disk: it must not be found again.
        shutil.rmtree(get_cache_manager(kernel.hash).cache_dir, ignore_errors=True)
        raise
    return {
        "status": CompileStatus.OK,
        "shared_bytes": kernel.metadata.shared,
        "registers": used.registers,
        "stack_bytes": used.stack_bytes,
    }


def _to_allocation(task: CompileTask) -> dict[str, Any]:
    shared_bytes = allocated_shared_bytes(kernel_source(task), task.arch, _options(task))
    if shared_bytes is None:
        return _to_binary(task)
    return {"status": CompileStatus.OK, "shared_bytes": shared_bytes}


def allocated_shared_bytes(source: ASTSource, arch: int, options: dict[str, Any]) -> int | None:
    """Run Triton's passes up to the one that lays out shared memory, and say how much there is.

    That is a tenth of the whole: what follows is LLVM and ptxas. The two stages before are Triton's
    own; of the third these are the first passes (triton 3.6.0: backends/nvidia/compiler.py:make_llir).

    Returns:
        Bytes, or None with a release of Triton whose passes are others.
    """
    target = GPUTarget("cuda", arch, WARP)
    backend = make_backend(target)
    parsed = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    try:
        backend.add_stages(stages, parsed, source.language)
        allocate = _allocation_passes(ir.pass_manager(context), arch, parsed)
        module = source.make_ir(
            target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context
        )
    except (AttributeError, ImportError, TypeError):
        return None
    metadata: dict[str, Any] = {}
    module = stages["ttgir"](stages["ttir"](module, metadata), metadata)
    allocate.run(module, "allocate")
    return int(module.get_int_attr("ttg.shared"))


def _allocation_passes(manager: Any, arch: int, options: Any) -> Any:  # noqa: ANN401 - Triton's own types
    from triton.backends.nvidia.compiler import get_ptx_version_from_options

    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(
        manager, arch, get_ptx_version_from_options(options, arch)
    )
    nvidia.passes.ttnvgpuir.add_allocate_tensor_memory(manager)
    return manager


_COMPILERS = {Depth.ALLOCATION: _to_allocation, Depth.BINARY: _to_binary}


@contextmanager
def _captured_output() -> Iterator[list[str]]:
    """Catch what is printed, to the file descriptors 1 and 2 too: MLIR knows nothing of sys.stdout.

    The list that is given holds its beginning and its end afterwards.
    """
    kept: list[str] = [""]
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        try:
            # Python's own streams may write elsewhere than to 1 and 2.
            with (
                os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace") as text,
                redirect_stdout(text),
                redirect_stderr(text),
            ):
                yield kept
        finally:
            for descriptor, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, descriptor)
                os.close(copy)
            size = sink.seek(0, os.SEEK_END)
            sink.seek(0)
            beginning = sink.read(_NOISE_BYTES)
            sink.seek(max(size - _NOISE_BYTES, len(beginning)))
            kept[0] = (beginning + sink.read()).decode("utf-8", "replace")


def serve(tasks: TextIO, answers: TextIO) -> None:
    """Say hello with Triton's version, then answer one task a line until there are no more."""
    say(answers, {"triton": triton.__version__})
    for line in tasks:
        request = json.loads(line)
        result = compile_launch(CompileTask.from_json(request["task"]), Depth(request["depth"]))
        say(answers, {"number": request["number"], "result": result.to_json()})


def main() -> None:
    """Serve on stdin and stdout."""
    answers = open_answers()
    os.nice(_NICE)
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
