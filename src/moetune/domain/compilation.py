"""What is asked of the compiler and what it answers, as data that crosses a process boundary."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from moetune.domain.config import KernelConfig
from moetune.domain.kernel_format import Scales, kernel_format
from moetune.domain.launch import Launch, LaunchClass
from moetune.domain.server_kernel import KernelFile

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
    NO_ROOM = "no room"
    """The compiler's folder is full or cannot be written: no fault of the config."""


@dataclass(frozen=True, slots=True)
class CompileTask:
    """One launch of moetune's own kernel, or of the server's, for one architecture.

    Attributes:
        launch: what to compile.
        arch: compute capability as Triton writes it: 90 for 9.0.
        operand_type: Triton's name of the type of the activations: `bf16`, `fp16`, `fp8e4nv`, `i8`.
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
        weight_type: Triton's name of the type of the weights in memory, empty where it is operand_type.
        scales: which numbers share a scale; block scales are those of the launch.
        group_size: weights along K that share a scale, with scales by group.
        zero_point: groups have a zero point of their own.
        slots_alone: each slot is a block of its own, with no other slot in it: nothing is sorted.
        elsewhere: some of the experts that tokens go to may be on other ranks.
        kernel_file: the server's file whose kernel it is; None: moetune's own.
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
    weight_type: str = ""
    scales: Scales = Scales.NONE
    group_size: int = 0
    zero_point: bool = False
    slots_alone: bool = False
    elsewhere: bool = False
    kernel_file: KernelFile | None = None

    @property
    def grouped(self) -> bool:
        """Whether it is the kernel for weights with scales by group."""
        return self.scales is Scales.GROUP

    @property
    def quantizes_activations(self) -> bool:
        """Whether activations have scales: with the same type as the weights and any scales."""
        return self.weight_type in ("", self.operand_type) and (
            self.launch.block_k > 0 or self.scales is not Scales.NONE
        )

    def to_json(self) -> dict[str, Any]:
        """The task as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CompileTask:
        """Read what `to_json` wrote."""
        scales, file = Scales(value.get("scales", Scales.NONE)), value.get("kernel_file")
        launch = _launch_from_json(value["launch"])
        return cls(
            **{
                **value,
                "launch": launch,
                "scales": scales,
                "kernel_file": None if file is None else KernelFile(**file),
            }
        )


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


def compile_task(
    launch: Launch,
    problem: Problem,
    launch_class: LaunchClass | None = None,
    kernel_file: KernelFile | None = None,
) -> CompileTask | str:
    """The task that compiles a launch of a problem, or why there is none.

    Args:
        launch: what to compile.
        problem: the problem.
        launch_class: the binary of that launch; None: any.
        kernel_file: the server's file whose kernel is meant; None: moetune's own.
    """
    if problem.gpu.compute_capability is None:
        return f"{problem.gpu.torch_name} is no NVIDIA GPU"
    found = kernel_format(problem)
    if isinstance(found, str):
        return found
    if launch.config.use_tma and launch.grouped:
        return "the kernel for weights in groups has no USE_TMA"
    if launch.config.use_tma and kernel_file is not None:
        return f"USE_TMA is not launched on the kernel of {kernel_file.server} here, only on moetune's own"
    major, minor = problem.gpu.compute_capability
    gemm = problem.gemm(launch.kernel)
    task = CompileTask(
        launch=launch,
        arch=10 * major + minor,
        operand_type=found.operand_type,
        output_type=found.output_type,
        n=gemm.n,
        k=gemm.k,
        top_k=problem.topk if launch.kernel == "up" else 1,
        block_n=found.block_shape[0] if launch.block_k else 0,
        bias=problem.bias,
        weight_type=found.weight_type if found.weight_type != found.operand_type else "",
        scales=found.scales,
        group_size=found.group_size,
        zero_point=found.zero_point,
        elsewhere=problem.ep > 1,
        kernel_file=kernel_file,
    )
    if launch_class is None:
        return task
    constants = dict(launch_class.constexprs)
    return replace(
        task,
        slots_alone=bool(constants.get("naive_block_assignment", False)),
        padded_length_divisible=launch_class.padded_length_divisible_by % 16 == 0,
        num_slots_divisible=launch_class.num_valid_tokens_divisible_by_16,
        num_slots_is_one=launch_class.num_valid_tokens_is_one,
        pdl_early=bool(constants.get("GDC_EARLY", False)),
    )


def _launch_from_json(value: Mapping[str, Any]) -> Launch:
    config = {**value["config"], "extra": tuple((name, item) for name, item in value["config"]["extra"])}
    return Launch(**{**value, "config": KernelConfig(**config)})
