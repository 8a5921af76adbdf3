"""What is asked of the compiler and what it answers, as data that crosses a process boundary."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from moetune.domain.config import KernelConfig
from moetune.domain.launch import Launch, LaunchClass
from moetune.domain.quantization import Dtype

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moetune.domain.problem import Problem


class Depth(str, Enum):
    """How far to compile."""

    ALLOCATION = "allocation"
    """To the shared memory that the kernel needs: tens of milliseconds."""
    BINARY = "binary"
    """To machine code, with registers and spills: tenths of a second up to many seconds."""


class CompileStatus(str, Enum):
    """How a compilation ended."""

    OK = "ok"
    REFUSED = "refused"
    """Triton's front end does not accept the config (a tile that is no power of two, ...)."""
    COMPILER_FAILURE = "compiler failure"
    """One of Triton's passes or ptxas gives up: a defect of that Triton version."""
    CRASHED = "crashed"
    """The compiling process died."""
    TIMED_OUT = "timed out"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class CompileTask:
    """One launch of moetune's own kernel for one architecture.

    Attributes:
        launch: what to compile.
        arch: compute capability as Triton writes it: 90 for 9.0.
        operand_type: Triton's name of the type of both dot operands: `bf16`, `fp16`, `fp8e4nv`.
        output_type: Triton's name of the type of the output.
        n: output columns.
        k: columns of the activations.
        top_k: slots that share a row of activations.
        block_n: columns that share a weight scale, 0 without block scales.
        bias: a bias is added.
        padded_length_divisible: the padded length is a multiple of 16.
        num_slots_divisible: the number of slots is a multiple of 16.
        num_slots_is_one: there is one slot, a value that Triton specialises on.
        pdl_early: with PDL, the next kernel may start at once.
    """

    launch: Launch
    arch: int
    operand_type: str
    output_type: str
    n: int
    k: int
    top_k: int
    block_n: int = 0
    bias: bool = False
    padded_length_divisible: bool = False
    num_slots_divisible: bool = True
    num_slots_is_one: bool = False
    pdl_early: bool = False

    def to_json(self) -> dict[str, Any]:
        """The task as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CompileTask:
        """Read what `to_json` wrote."""
        return cls(**{**value, "launch": _launch_from_json(value["launch"])})


@dataclass(frozen=True, slots=True)
class CompileResult:
    """What came of compiling one launch. None means unknown.

    Attributes:
        status: how it ended.
        shared_bytes: dynamic shared memory that the launch asks for.
        registers: registers of a thread.
        stack_bytes: local memory of a thread; more than 0 means that registers spill.
        seconds: what it took.
        message: why it did not end well, in one line.
        noise: what the compiler printed of errors, else the last line that it printed.
    """

    status: CompileStatus
    shared_bytes: int | None = None
    registers: int | None = None
    stack_bytes: int | None = None
    seconds: float = 0.0
    message: str = ""
    noise: str = ""

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {**asdict(self), "status": self.status.value}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CompileResult:
        """Read what `to_json` wrote."""
        return cls(**{**value, "status": CompileStatus(value["status"])})


_OPERAND_TYPES = {
    (Dtype.BF16, 16): "bf16",
    (Dtype.BF16, 8): "fp8e4nv",
    (Dtype.FP16, 16): "fp16",
    (Dtype.FP16, 8): "fp8e4nv",
}
_OUTPUT_TYPES = {Dtype.BF16: "bf16", Dtype.FP16: "fp16"}


def compile_task(
    launch: Launch, problem: Problem, launch_class: LaunchClass | None = None
) -> CompileTask | str:
    """The task that compiles a launch of a problem, or why moetune's own kernel cannot stand for it."""
    if problem.gpu.compute_capability is None:
        return f"{problem.gpu.torch_name} is no NVIDIA GPU"
    activation, dtype = problem.activation_dtype, problem.quantization.dtype
    block_shape = problem.quantization.block_shape
    if dtype is Dtype.FP8_W8A8 and block_shape is None:
        return "moetune's own kernel has fp8 with block scales only"
    if dtype not in (*_OUTPUT_TYPES, Dtype.FP8_W8A8) or activation not in _OUTPUT_TYPES:
        return f"moetune's own kernel has no {dtype.value}"
    if launch.config.use_tma:
        return "moetune's own kernel has no USE_TMA"
    major, minor = problem.gpu.compute_capability
    gemm = problem.gemm(launch.kernel)
    task = CompileTask(
        launch=launch,
        arch=10 * major + minor,
        operand_type=_OPERAND_TYPES[activation, launch.a_bits],
        output_type=_OUTPUT_TYPES[activation],
        n=gemm.n,
        k=gemm.k,
        top_k=problem.topk if launch.kernel == "up" else 1,
        block_n=block_shape[0] if block_shape is not None and launch.block_k else 0,
        bias=problem.bias,
    )
    if launch_class is None:
        return task
    return replace(
        task,
        padded_length_divisible=launch_class.padded_length_divisible_by % 16 == 0,
        num_slots_divisible=launch_class.num_valid_tokens_divisible_by_16,
        num_slots_is_one=launch_class.num_valid_tokens_is_one,
        pdl_early=bool(dict(launch_class.constexprs).get("GDC_EARLY", False)),
    )


def _launch_from_json(value: Mapping[str, Any]) -> Launch:
    config = {**value["config"], "extra": tuple((name, item) for name, item in value["config"]["extra"])}
    return Launch(**{**value, "config": KernelConfig(**config)})
