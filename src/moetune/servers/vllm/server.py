"""vLLM behind the protocol of a server: one instance stands for one release."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetune.domain.errors import ConfigFileError
from moetune.domain.version import Release, parse_release
from moetune.servers.kernel_values import Lengths, Value, values_of
from moetune.servers.vllm import (
    cuda_kernel,
    defaults,
    kernels,
    launch,
    lookup,
    names,
    rules,
    sharding,
    table_json,
)
from moetune.servers.vllm.runner import choose_runner

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moetune.domain.compilation import CompileTask
    from moetune.domain.config import ConfigTable, KernelConfig
    from moetune.domain.gpu import Gpu
    from moetune.domain.launch import Launch, LaunchClass
    from moetune.domain.model import ExpertLayer
    from moetune.domain.problem import Kernel, Parallelism, Problem
    from moetune.servers.protocol import ConfigTree, Lookup, RunnerVerdict, ServerOptions


class VLLM:
    """One release of vLLM, 0.10.2 to 0.33.0; a newer one is treated as the newest of these.

    Attributes:
        release: the release whose rules hold.
        assumed: the version is newer than all whose rules were read: they are taken to be unchanged.
    """

    name: str = "vllm"
    directory_variable: str | None = rules.DIRECTORY_VARIABLE
    separate_down_file: bool = False

    def __init__(self, version: str | None = None, triton_version: str | None = None) -> None:
        """Choose the rules of a version.

        Args:
            version: of vLLM; the newest known one when not given.
            triton_version: of Triton; the one that comes with that vLLM when not given.

        Raises:
            ServerError: for a version that is too old or no version.
        """
        self.release: Release
        self.release, self.assumed = rules.resolve(version)
        self.version = rules.NEWEST if version is None else version.strip()
        self.triton_version = (
            rules.default_triton(self.release) if triton_version is None else triton_version.strip()
        )
        self._triton = parse_release(self.triton_version)

    def __repr__(self) -> str:
        return f"VLLM({self.version!r}, {self.triton_version!r})"

    def problem(
        self, layer: ExpertLayer, parallelism: Parallelism, gpu: Gpu, options: ServerOptions
    ) -> Problem:
        """Shard an expert layer; see `sharding.shard`."""
        return sharding.shard(
            self.release,
            layer,
            parallelism,
            gpu,
            options,
            version=self.version,
            triton_version=self.triton_version,
        )

    def runner(
        self, layer: ExpertLayer, parallelism: Parallelism, gpu: Gpu, options: ServerOptions
    ) -> RunnerVerdict:
        """Which MoE runner this release chooses."""
        return choose_runner(self.release, layer, parallelism, gpu, options)

    def device_name(self, gpu: Gpu) -> str:
        """The GPU's name as this release spells it in file names."""
        return names.device_name(self.release, gpu)

    def file_name(self, problem: Problem, kernel: Kernel) -> str:  # noqa: ARG002 one file for both kernels
        """Name of the one file that both kernels read."""
        return names.file_name(self.release, problem)

    def file_path(self, problem: Problem, kernel: Kernel) -> str:
        """The same: the folder that VLLM_TUNED_CONFIG_FOLDER names is flat."""
        return self.file_name(problem, kernel)

    def never_read(self, file_name: str) -> str | None:
        """Why this release can never look for a file of that name; None when it can."""
        return names.why_never_read(self.release, file_name)

    def lookup(
        self, problem: Problem, kernel: Kernel, trees: Sequence[ConfigTree], options: ServerOptions
    ) -> Lookup:
        """What the lookup does; the root of a tree is the folder that holds the files themselves."""
        return lookup.look_up(self.release, kernel, self.file_name(problem, kernel), trees, options)

    def read_table(self, text: str, source: str, problem: Problem | None = None) -> ConfigTable:
        """Read a config file as this release would; see `table_json.read_table`."""
        return table_json.read_table(self.release, self._triton, text, source, problem)

    def render_table(
        self,
        problem: Problem,
        table: ConfigTable,
        kernel: Kernel = "up",  # noqa: ARG002 one file serves both kernels
    ) -> str:
        """The JSON text of a table as vLLM's own tuning script writes it."""
        return table_json.render_table(self.release, self.triton_version, problem, table)

    def config_for(self, table: ConfigTable, m: int) -> KernelConfig:
        """The entry of the nearest key; of two equally near ones the first in the file.

        Raises:
            ConfigFileError: for an empty table, in whose place vLLM uses its default.
        """
        if not table.entries:
            raise ConfigFileError("the table has no entries: vLLM uses its default config in its place")
        return min(table.entries, key=lambda entry: abs(entry[0] - m))[1]

    def default_config(self, problem: Problem, kernel: Kernel, m: int) -> KernelConfig:
        """What this release uses for m when it finds no file."""
        return defaults.default_config(self.release, problem, kernel, m)

    def default_switches(self, problem: Problem) -> tuple[int, ...]:
        """The m at which the default of either kernel changes: each is the last one of its regime."""
        return defaults.default_switches(self.release, problem)

    def cuda_kernel_until(self, problem: Problem) -> int:
        """The last m at which vLLM's CUDA kernel for grouped int4 runs; 0 where it never does."""
        return defaults.cuda_kernel_until(self.release, problem)

    def cuda_kernel_entry(self, problem: Problem, m: int) -> KernelConfig:
        """The entry with which that kernel does at an m what it does without a file."""
        return defaults.cuda_kernel_entry(self.release, problem, m)

    def cuda_kernel_fault(self, problem: Problem, m: int, config: KernelConfig) -> str:
        """Why that kernel cannot run the entry of a key; empty where it can."""
        return cuda_kernel.cuda_kernel_fault(self.release, problem, m, config)

    def launch(
        self,
        problem: Problem,
        kernel: Kernel,
        config: KernelConfig,
        up: KernelConfig | None = None,  # noqa: ARG002 the down kernel follows no other config
        down: KernelConfig | None = None,  # noqa: ARG002 nor does the up kernel
    ) -> Launch:
        """The launch of a config with this release's clamps."""
        return launch.launch(self.release, problem, kernel, config)

    def allowed_keys(self, problem: Problem) -> frozenset[str]:
        """JSON keys of an entry that this release accepts on this GPU."""
        return table_json.allowed_keys(self.release, problem)

    def launch_classes(
        self, problem: Problem, kernel: Kernel, ms: Sequence[int], block_size_m: int
    ) -> tuple[LaunchClass, ...]:
        """The binaries of one config that those m use; see `launch.launch_classes`."""
        return launch.launch_classes(self.release, problem, kernel, ms, block_size_m)

    def kernel_files(self) -> tuple[str, ...]:
        """The file that holds the kernels of all releases."""
        return kernels.FILES

    def kernel_values(self, names: Sequence[str], task: CompileTask, lengths: Lengths) -> Mapping[str, Value]:
        """The value of each parameter of a kernel."""
        return values_of(names, kernels.own_values(self.release, task), task, lengths)

    def covered_length(self, problem: Problem, kernel: Kernel, m: int, block_size_m: int) -> int:
        """Rows that the grid of a launch covers."""
        return launch.padded_length(self.release, problem, kernel, m, block_size_m)


def open_vllm(version: str | None = None, triton_version: str | None = None) -> VLLM:
    """The rules of a version of vLLM; the newest known one, with the Triton that it installs, by default.

    Raises:
        ServerError: for a version that is too old or no version.
    """
    return VLLM(version, triton_version)
