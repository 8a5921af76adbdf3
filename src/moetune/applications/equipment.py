"""The processes that compile and measure for a laboratory; they start when something needs them."""

from __future__ import annotations

import queue
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from moetune.applications.bench import Bench
from moetune.applications.compile_service import CompileService
from moetune.applications.compiling import CompilePool
from moetune.applications.worker_pool import Device, WorkerCommand, import_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moetune.applications.journal import Journal
    from moetune.domain.config import KernelConfig
    from moetune.domain.problem import Kernel
    from moetune.measure.protocol import DeviceFacts, Workload

_Command = TypeVar("_Command", WorkerCommand, CompilePool)


class Equipment:
    """Compiling processes and one measuring process a GPU.

    Args:
        journal: its folder holds the cache of compiled kernels.
        workload: what the measuring processes are opened with.
        uuids: the GPUs, all of one kind.
        command: how measuring processes are started.
        pool: how is compiled.

    Attributes:
        events: what the processes report.
        benches: the GPUs; none before the start.
    """

    def __init__(
        self,
        journal: Journal,
        workload: Workload,
        uuids: Sequence[str],
        command: WorkerCommand,
        pool: CompilePool,
    ) -> None:
        self._journal, self._workload, self._uuids = journal, workload, tuple(uuids)
        self._command, self._pool = command, pool
        self._service: CompileService | None = None
        self.events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.benches: list[Bench] = []

    @property
    def facts(self) -> DeviceFacts | None:
        """What the first worker said of its GPU; None while none was needed."""
        return next((bench.facts for bench in self.benches if bench.facts is not None), None)

    def start(self) -> CompileService:
        """Start all processes, the first time; what compiles."""
        if self._service is None:
            variables = {}
            if self._command.variables.get("PYTHONPATH") is None:
                variables["PYTHONPATH"] = import_path(self._journal.folder)
            command = _with_variables(self._command, variables)
            pool = _with_variables(self._pool, variables)
            self._service = CompileService(pool, self._journal.cache, self.events.put)
            self.benches = [
                Bench(Device(number, uuid, command, self._journal.cache, self._workload, self.events.put))
                for number, uuid in enumerate(self._uuids)
            ]
        return self._service

    def drop(self, kernel: Kernel, config: KernelConfig) -> None:
        """Compile a config no more."""
        if self._service is not None:
            self._service.drop(kernel, config)

    def close(self) -> None:
        """End all processes."""
        for bench in self.benches:
            bench.device.close()
        if self._service is not None:
            self._service.close()


def _with_variables(what: _Command, variables: dict[str, str]) -> _Command:
    return replace(what, variables={**what.variables, **variables})
