"""SGLang behind the protocol of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetune.domain.version import parse_release
from moetune.servers.kernel_values import Lengths, Value, values_of
from moetune.servers.protocol import ConfigTree, Lookup, RunnerVerdict, ServerOptions
from moetune.servers.sglang import defaults, kernels, launch, names, sharding, table_json
from moetune.servers.sglang.lookup import look_up, triton_directory
from moetune.servers.sglang.releases import Feature, rules_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moetune.domain.compilation import CompileTask
    from moetune.domain.config import ConfigTable, KernelConfig
    from moetune.domain.gpu import Gpu
    from moetune.domain.launch import Launch, LaunchClass
    from moetune.domain.model import ExpertLayer
    from moetune.domain.problem import Kernel, Parallelism, Problem
    from moetune.domain.quantization import Quantization

DIRECTORY_VARIABLE = "SGLANG_MOE_CONFIG_DIR"


class SGLang:
    """One release of SGLang.

    Attributes:
        assumed: the release is newer than any whose rules were read; the newest known ones stand in.
        home: folder inside site-packages whose `configs/` holds the files that it ships.
        module: path inside site-packages of the module that looks files up; its dotted name is the
            logger's.
    """

    name: str = "sglang"

    def __init__(self, version: str | None = None, triton_version: str | None = None) -> None:
        self._rules = rules_of(version)
        if triton_version is not None:
            parse_release(triton_version)
        self.version: str = self._rules.version
        self.triton_version: str = (triton_version or self._rules.default_triton).strip()
        self.assumed: bool = self._rules.assumed
        self.home: str = self._rules.home
        self.module: str = self._rules.module
        self.directory_variable: str | None = (
            DIRECTORY_VARIABLE if self._rules.has(Feature.ENVIRONMENT_DIRECTORY) else None
        )
        self.separate_down_file: bool = self._rules.has(Feature.DOWN_FILE)

    def __repr__(self) -> str:
        return f"SGLang({self.version!r}, triton {self.triton_version})"

    def problem(
        self, layer: ExpertLayer, parallelism: Parallelism, gpu: Gpu, options: ServerOptions
    ) -> Problem:
        """Shard an expert layer; shared experts that this release fuses are among E and topk."""
        return sharding.make_problem(self._rules, self.triton_version, layer, parallelism, gpu, options)

    def runner(
        self, layer: ExpertLayer, parallelism: Parallelism, gpu: Gpu, options: ServerOptions
    ) -> RunnerVerdict:
        """Which MoE runner this release chooses."""
        # Here, so that what needs no verdict does not read the table of rules.
        from moetune.servers.sglang.runner import choose_runner

        return choose_runner(self._rules.release, layer, parallelism, gpu, options)

    def device_name(self, gpu: Gpu) -> str:
        """The GPU's name with underscores for spaces."""
        return names.device_name(gpu.torch_name)

    def file_name(self, problem: Problem, kernel: Kernel) -> str:
        """Name of the file that is looked for; before 0.5.5 the down kernel uses the up file."""
        quantization = problem.quantization
        return str(
            names.FileName(
                E=problem.E,
                N=problem.file_n,
                device=self.device_name(problem.gpu),
                dtype=names.dtype_tag(quantization.dtype, problem.activation_dtype),
                block_shape=quantization.block_shape,
                per_channel=self._has_channels(quantization),
                down=kernel == "down" and self.separate_down_file,
            )
        )

    def _has_channels(self, quantization: Quantization) -> bool:
        # No layer of SGLang asks for it with 16-bit activations (calls with `use_int8_w8a16`).
        channels = quantization.per_channel and quantization.dtype.activation_bits == 8
        return channels and self._rules.has(Feature.PER_CHANNEL_NAME)

    def file_path(self, problem: Problem, kernel: Kernel) -> str:
        """`configs/triton_X_Y_Z/{name}`."""
        return f"configs/{triton_directory(self.triton_version)}/{self.file_name(problem, kernel)}"

    def lookup(
        self, problem: Problem, kernel: Kernel, trees: Sequence[ConfigTree], options: ServerOptions
    ) -> Lookup:
        """What this release finds.

        Only the first tree counts: the variable's directory replaces the package's. A tree lists
        every entry of `{root}/configs`, files too: names that begin with `triton_` matter.
        """
        tree = trees[0] if trees else ConfigTree(root=self.home, directories={})
        both = (self.file_name(problem, "up"), self.file_name(problem, "down"))
        ignored = options.deterministic or defaults.DETERMINISTIC_FLAG in problem.flags
        return look_up(self._rules, self.triton_version, kernel, both, tree, ignored=ignored)

    def read_table(self, text: str, source: str, problem: Problem | None = None) -> ConfigTable:
        """Read a config file; one named `*_down.json` by the rules of down files.

        Raises:
            ConfigFileError: where the server would die; with a problem also of another vendor's keys.
        """
        table = self.read_with_notes(text, source).table
        if problem is not None:
            table_json.check_vendor(self._rules, table, problem.gpu.vendor, source)
        return table

    def read_with_notes(self, text: str, source: str) -> table_json.Reading:
        """Read a config file, and say what the server lets pass and a person should know."""
        return table_json.read(self._rules, text, source)

    def render_table(self, problem: Problem, table: ConfigTable, kernel: Kernel = "up") -> str:
        """The JSON text of a table.

        Raises:
            ConfigFileError: for a key that this release does not accept in that kernel's file.
        """
        return table_json.render(self._rules, table, problem.gpu.vendor, kernel)

    def config_for(self, table: ConfigTable, m: int) -> KernelConfig:
        """The entry whose key is nearest to m, of two the first in the file.

        Raises:
            ConfigFileError: when the table is empty: the server then uses its default.
        """
        return table.nearest(launch.chunk_tokens(self._rules, m))

    def default_config(self, problem: Problem, kernel: Kernel, m: int) -> KernelConfig:  # noqa: ARG002
        """What this release uses for m without a file: the same for both kernels."""
        return defaults.default_config(self._rules, problem, launch.chunk_tokens(self._rules, m))

    def default_switches(self, problem: Problem) -> tuple[int, ...]:
        """E, where the default depends on m at all."""
        return defaults.default_switches(self._rules, problem)

    def launch(
        self,
        problem: Problem,
        kernel: Kernel,
        config: KernelConfig,
        up: KernelConfig | None = None,
        down: KernelConfig | None = None,
    ) -> Launch:
        """The launch of a config.

        Raises:
            ConfigFileError: where this release would die of the config or of the pair.
        """
        return launch.make_launch(self._rules, problem, kernel, config, up, down)

    def allowed_keys(self, problem: Problem, kernel: Kernel | None = None) -> frozenset[str]:
        """Keys that an entry may have; without a kernel those that both files may have."""
        return table_json.accepted_keys(self._rules, problem.gpu.vendor, kernel)

    def launch_classes(
        self, problem: Problem, kernel: Kernel, ms: Sequence[int], block_size_m: int
    ) -> tuple[LaunchClass, ...]:
        """The binaries of one config that those m really use."""
        return launch.launch_classes(self._rules, problem, kernel, ms, block_size_m)

    def kernel_files(self) -> tuple[str, ...]:
        """Files that may hold this release's kernels."""
        return kernels.kernel_files(self._rules)

    def kernel_values(self, names: Sequence[str], task: CompileTask, lengths: Lengths) -> Mapping[str, Value]:
        """The value of each parameter of a kernel."""
        return values_of(names, kernels.own_values(task), task, lengths)

    def covered_length(self, problem: Problem, kernel: Kernel, m: int, block_size_m: int) -> int:  # noqa: ARG002
        """Rows that the grid of a launch covers: as long as the sorted ids, for both kernels."""
        return launch.padded_length(self._rules, problem.E, m * problem.topk, block_size_m)


def open_sglang(version: str | None = None, triton_version: str | None = None) -> SGLang:
    """A release of SGLang, by default the newest known with the Triton that it pins.

    Raises:
        ServerError: for a version that is none, or too old.
    """
    return SGLang(version, triton_version)
