"""What moetune asks of a server: one small protocol, implemented once for each server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from moetune.domain.config import ConfigTable, KernelConfig
from moetune.domain.gpu import Gpu
from moetune.domain.launch import Launch, LaunchClass
from moetune.domain.model import ExpertLayer
from moetune.domain.problem import Kernel, Parallelism, Problem

if TYPE_CHECKING:
    from moetune.domain.compilation import CompileTask
    from moetune.servers.kernel_values import Lengths
    from moetune.servers.kernel_values import Value as KernelValue


@dataclass(frozen=True, slots=True)
class ConfigTree:
    """The config files that a server would see below one root: directory name to file names.

    For SGLang the directories are the entries of `{root}/configs` (`triton_3_6_0`, ...); for vLLM
    the only directory is the empty name.

    Attributes:
        root: what stands before the directory names in messages.
        directories: directory name to the names in it. None: `{root}/configs` does not exist.
    """

    root: str
    directories: Mapping[str, frozenset[str]] | None

    def has(self, directory: str, name: str) -> bool:
        """Whether the tree holds that file."""
        return bool(self.directories) and name in self.directories.get(directory, frozenset())  # type: ignore[union-attr]


class Outcome(str, Enum):
    """What a lookup ends with."""

    EXACT = "exact"
    STALE = "stale"  # from the directory of another Triton version
    REUSED_UP = "reused up"
    DEFAULT = "default"
    IGNORED = "ignored"  # deterministic or batch-invariant mode: no file is opened
    CRASH = "crash"


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a server's own lookup does for one kernel.

    Attributes:
        kernel: `up` or `down`.
        file_name: the name that is looked for.
        candidates: paths in the order in which the server tries them (`{root}/configs/...`).
        outcome: how it ends.
        found: the path that is used, None when the server's default is.
        error: exception type that the server dies with, for `Outcome.CRASH`.
        log_lines: `(level, text)` that the server prints.
    """

    kernel: Kernel
    file_name: str
    candidates: tuple[str, ...]
    outcome: Outcome
    found: str | None = None
    error: str | None = None
    log_lines: tuple[tuple[str, str], ...] = ()


class Applies(str, Enum):
    """Whether the tuned file matters for what the server runs."""

    YES = "yes"
    NO = "no"
    PARTLY = "partly"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class RunnerVerdict:
    """Which MoE runner a server version chooses, and whether it reads the tuned Triton file.

    Attributes:
        runner: the runner's name in the server's words; empty when no rule is known.
        applies: whether it is the Triton fused-MoE kernel.
        reason: the rule, in a sentence.
        source: where the rule was read (path inside the wheel and function).
        certainty: `run`, `read`, `inferred`, or `none`.
        force_triton: flags or variables that select the Triton kernel; empty when there are none.
        evidence: log lines that would prove it.
    """

    runner: str
    applies: Applies
    reason: str
    source: str = ""
    certainty: str = "none"
    force_triton: str = ""
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What of a server's command line and environment changes the problem or the runner.

    Attributes:
        moe_runner_backend: `--moe-runner-backend` (SGLang) or `--moe-backend` (vLLM).
        moe_a2a_backend: `--moe-a2a-backend` (SGLang) or `--all2all-backend` (vLLM).
        quantization: `--quantization` as given to the server, which may change the method.
        deterministic: SGLang's `--enable-deterministic-inference`, vLLM's batch invariance.
        disable_shared_experts_fusion: SGLang's flag.
        enable_lora: LoRA on.
        fused_moe_sum: SGLang's `--enable-fused-moe-sum-all-reduce`.
        environment: the server's variables that rules read (`SGLANG_MOE_PADDING`, ...).
        flashinfer: whether flashinfer can be imported there (None: assumed as the server pins it).
    """

    moe_runner_backend: str = "auto"
    moe_a2a_backend: str = "none"
    quantization: str | None = None
    deterministic: bool = False
    disable_shared_experts_fusion: bool = False
    enable_lora: bool = False
    fused_moe_sum: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    flashinfer: bool | None = None


@runtime_checkable
class Server(Protocol):
    """All that differs by server. An instance stands for one release of one server.

    A third server is a plug-in: an entry point in the group `moetune.servers` that names a
    callable `(version: str | None, triton_version: str | None) -> Server`.
    """

    name: str
    version: str
    triton_version: str
    directory_variable: str | None
    """Environment variable that names the directory of tuned files; None where there is none."""
    separate_down_file: bool
    """Whether this release reads a `_down` file."""

    def problem(
        self, layer: ExpertLayer, parallelism: Parallelism, gpu: Gpu, options: ServerOptions
    ) -> Problem:
        """Shard an expert layer by this server's rules.

        Raises:
            ShardingError: when a size does not divide; names the sizes that do.
            ServerError: for a dtype that this server has no string for.
        """
        ...

    def runner(
        self, layer: ExpertLayer, parallelism: Parallelism, gpu: Gpu, options: ServerOptions
    ) -> RunnerVerdict:
        """Which MoE runner this release chooses."""
        ...

    def device_name(self, gpu: Gpu) -> str:
        """The GPU's name as this server spells it in file names."""
        ...

    def file_name(self, problem: Problem, kernel: Kernel) -> str:
        """Name of the file this release looks for; for `down` without a file of its own, the up name."""
        ...

    def file_path(self, problem: Problem, kernel: Kernel) -> str:
        """Path of the file below the directory that `directory_variable` can point to."""
        ...

    def lookup(
        self, problem: Problem, kernel: Kernel, trees: Sequence[ConfigTree], options: ServerOptions
    ) -> Lookup:
        """What this release's own lookup does, given the trees it reads, first one first."""
        ...

    def read_table(self, text: str, source: str, problem: Problem | None = None) -> ConfigTable:
        """Read a config file as this server's loader would.

        Args:
            text: the file.
            source: its name, for the message.
            problem: when given, also what depends on it: the GPU's own keys and those of its kernel.

        Raises:
            ConfigFileError: where the loader or the launch would fail, with the server's exception.
        """
        ...

    def render_table(self, problem: Problem, table: ConfigTable, kernel: Kernel = "up") -> str:
        """The JSON text of a kernel's table in this server's own shape: sorted, canonical."""
        ...

    def config_for(self, table: ConfigTable, m: int) -> KernelConfig:
        """The entry that this release chooses for m."""
        ...

    def default_config(self, problem: Problem, kernel: Kernel, m: int) -> KernelConfig:
        """What this release uses for m when it finds no file."""
        ...

    def default_switches(self, problem: Problem) -> tuple[int, ...]:
        """The m at which the default changes: each m is the last one of its regime."""
        ...

    def launch(
        self,
        problem: Problem,
        kernel: Kernel,
        config: KernelConfig,
        up: KernelConfig | None = None,
        down: KernelConfig | None = None,
    ) -> Launch:
        """The launch of a config with this release's clamps and overrides.

        Args:
            problem: the problem.
            kernel: `up` or `down`.
            config: the entry chosen for that kernel.
            up: the up kernel's entry at the same m, where it overrides the down kernel's.
            down: the down kernel's entry at the same m, where it changes how the up kernel writes.
        """
        ...

    def allowed_keys(self, problem: Problem) -> frozenset[str]:
        """JSON keys of an entry that this release accepts on this GPU."""
        ...

    def launch_classes(
        self, problem: Problem, kernel: Kernel, ms: Sequence[int], block_size_m: int
    ) -> tuple[LaunchClass, ...]:
        """The binaries of one config that those m really use."""
        ...


@runtime_checkable
class KernelServer(Protocol):
    """What a server adds whose own kernels can be timed. A plug-in may leave it out."""

    def kernel_files(self) -> tuple[str, ...]:
        """Files below site-packages that may hold this release's kernels, the likeliest first."""
        ...

    def kernel_values(
        self, names: Sequence[str], task: CompileTask, lengths: Lengths
    ) -> Mapping[str, KernelValue]:
        """The value of each parameter of a kernel, in the order of the names.

        Raises:
            ServerError: naming a parameter that is not known.
        """
        ...

    def covered_length(self, problem: Problem, kernel: Kernel, m: int, block_size_m: int) -> int:
        """Rows that the grid of a launch covers (`EM`)."""
        ...
