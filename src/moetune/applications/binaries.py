"""The binaries of a problem's targets: which one a target launches, and which ones are there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moetune.domain.compilation import CompileResult, CompileStatus, CompileTask, compile_task
from moetune.domain.errors import ConfigFileError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moetune.applications.targets import Target
    from moetune.domain.launch import Launch
    from moetune.domain.problem import Problem
    from moetune.domain.server_kernel import KernelFile
    from moetune.servers.protocol import Server


class Binaries:
    """What the server would launch for the targets of one problem.

    Args:
        server: the release whose launches count.
        problem: the problem.
        kernel_file: the server's file whose kernel is timed; None: moetune's own kernel.

    Attributes:
        compiled: binaries that are in the cache.
    """

    def __init__(self, server: Server, problem: Problem, kernel_file: KernelFile | None = None) -> None:
        self._server, self._problem, self._kernel_file = server, problem, kernel_file
        self._tasks: dict[Target, CompileTask] = {}
        self.compiled: dict[CompileTask, CompileResult] = {}

    def task_of(self, target: Target) -> CompileTask | str:
        """The binary that a target launches, or why there is none."""
        if target not in self._tasks:
            try:
                launch = self._launch(target)
            except ConfigFileError as error:
                return error.message
            if launch.wrong_numbers:
                return launch.wrong_numbers
            kinds = self._server.launch_classes(
                self._problem, target.kernel, (target.m,), launch.config.block_size_m
            )
            if not kinds:
                return f"at m {target.m} the server runs a CUDA kernel, which moetune does not have"
            task = compile_task(launch, self._problem, kinds[0], self._kernel_file)
            if isinstance(task, str):
                return task
            self._tasks[target] = task
        return self._tasks[target]

    def why_wrong(self, target: Target) -> str:
        """Why the server computes wrong numbers with a target; empty: it does not, or dies instead."""
        try:
            return self._launch(target).wrong_numbers
        except ConfigFileError:
            return ""

    def _launch(self, target: Target) -> Launch:
        if not target.sorted_output:
            return self._server.launch(self._problem, target.kernel, target.config)
        down = replace(target.config, use_tma=True)
        return self._server.launch(self._problem, target.kernel, target.config, down=down)

    def forget(self, targets: Iterable[Target]) -> None:
        """Keep nothing of targets that were given up."""
        for target in targets:
            self._tasks.pop(target, None)

    def why_unusable(self, result: CompileResult) -> str:
        """What keeps a compiled binary from being launched; empty where nothing does."""
        if result.status is not CompileStatus.OK:
            return f"{result.status.value}: {result.message}"
        limit = self._problem.gpu.smem_optin_bytes
        if limit is not None and (result.shared_bytes or 0) > limit:
            return f"needs {result.shared_bytes} bytes of shared memory, a block can have {limit}"
        return ""
