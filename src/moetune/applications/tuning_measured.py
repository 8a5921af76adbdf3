"""From a request to measured files: on the GPUs of this machine, resumed where a run before it stopped."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetune import __version__
from moetune.applications.exhaustive import write_landscape
from moetune.applications.journal import Journal, state_root
from moetune.applications.live import Live, LiveWatch
from moetune.applications.measured_answer import MeasuredTuning
from moetune.applications.measured_tables import measured_tables
from moetune.applications.measuring import Laboratory
from moetune.applications.measuring_devices import chosen_devices, triton_of
from moetune.applications.output import write_tables
from moetune.applications.planning import Plan, make_plan, open_asked
from moetune.applications.predicting import forecast, keys_for
from moetune.applications.routing_store import AskedRouting, ask_routing
from moetune.applications.server_kernels import KernelChoice, choose_kernel, measured_server
from moetune.applications.start_from import configs_of
from moetune.applications.targets import NotMeasurableError, Target
from moetune.applications.tuning import command_to_use, look_again
from moetune.applications.tuning_efforts import EFFORTS, Effort
from moetune.applications.tuning_loop import Measured, Tuner
from moetune.domain.codec import to_json
from moetune.domain.predict import PerformanceModel
from moetune.domain.problem import KERNELS
from moetune.domain.space import sglang_grid
from moetune.servers.registry import open_server

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moetune.applications.compiling import CompilePool
    from moetune.applications.measure_request import MeasureRequest
    from moetune.applications.nvml import Device as GpuDevice
    from moetune.applications.planning import GpuPlan
    from moetune.applications.predicting import Forecast, Predicted
    from moetune.applications.request import Request
    from moetune.applications.worker_pool import WorkerCommand
    from moetune.domain.keys import Keys
    from moetune.domain.launch import Launch
    from moetune.domain.problem import Kernel, Problem
    from moetune.servers.protocol import Server

_STARTED_FROM = 24  # configs of --start-from that are measured at every m, whatever the model says


def tune_measured(
    request: MeasureRequest,
    environ: Mapping[str, str] | None = None,
    *,
    gpus: Sequence[GpuDevice] | None = None,
    command: WorkerCommand | None = None,
    pool: CompilePool | None = None,
    live: Callable[[Live], None] | None = None,
) -> MeasuredTuning:
    """Measure, choose, and write the server's files.

    Args:
        request: what is asked.
        environ: the variables of the server; None takes those of this process.
        gpus: the GPUs of this machine; None asks the driver.
        command: how measuring processes are started.
        pool: how is compiled.
        live: called after each measurement.

    Raises:
        MoetuneError: for what cannot be done; what was measured is in the journal.
    """
    started = time.monotonic()
    environ = os.environ if environ is None else environ
    devices = chosen_devices(request, gpus)
    request = replace(request, gpu=devices[0].name, compute_capability=devices[0].compute_capability)
    if request.triton_version is None:
        # Times are those of the Triton that measures, whatever the newest server pins.
        request = replace(request, triton_version=triton_of(request.python or sys.executable))
    request, kernel = with_kernel(request)
    effort = _effort(request)
    routing = ask_routing(request.routing, state_root(request.state, environ), request.python)
    request = replace(request, routing=routing.name)
    with ExitStack() as stack:
        run = _Run(request, effort, environ, devices, command, pool, live, started, stack, routing, kernel)
        plan = make_plan(request, environ, run.prepare)
        part = plan.gpus[0]
        if run.tuner is None or part.problem is None or part.predicted is None:
            raise NotMeasurableError(part.reason, "`moetune plan` says more")
        measured, landscape = run.measure()
        return _written(request, effort, plan, part, measured, run, landscape, environ, started)


def with_kernel(request: MeasureRequest) -> tuple[MeasureRequest, KernelChoice]:
    """The request for the server that is there where is measured, and which kernel is timed."""
    python = request.python or sys.executable
    name, version = measured_server(request.server, request.server_version, python, request.server_files)
    request = replace(request, server=name, server_version=version)
    server, _, _ = open_asked(request)
    kernel = choose_kernel(request.kernel, server, python, request.server_files)
    return replace(request, kernel_source=kernel.source), kernel


def _effort(request: MeasureRequest) -> Effort:
    effort = EFFORTS[request.effort]
    return effort if request.budget is None else replace(effort, budget_seconds=request.budget)


class _Run:
    """One run: the journal, the laboratory and the tuner, made when the plan knows the problem."""

    def __init__(
        self,
        request: MeasureRequest,
        effort: Effort,
        environ: Mapping[str, str],
        devices: Sequence[GpuDevice],
        command: WorkerCommand | None,
        pool: CompilePool | None,
        live: Callable[[Live], None] | None,
        started: float,
        stack: ExitStack,
        routing: AskedRouting,
        kernel: KernelChoice,
    ) -> None:
        self._request, self._effort, self._environ, self._devices = request, effort, environ, devices
        self._command, self._pool = command, pool
        self._started, self._stack, self._routing = started, stack, routing
        self.kernel = kernel
        self.routing_remarks: tuple[str, ...] = ()
        self.watch = LiveWatch(devices[0].uuid, live, started)
        self.tuner: Tuner | None = None
        self.laboratory: Laboratory | None = None
        self.journal: Journal | None = None
        self.nothing_left = False
        self._start_from = configs_of(map(Path, request.start_from)) if request.start_from else ()
        self._problem: Problem | None = None
        self._forecast: Forecast | None = None
        self._keys: Keys | None = None

    def prepare(self, _: Request, server: Server, problem: Problem) -> Predicted:
        """Begin with the defaults, and predict while processes start."""
        request = self._request
        self._routing.check(problem)
        keys = keys_for(server, problem, request.max_m, request.traffic)
        self.routing_remarks = self._routing.remarks_for(keys.ms[-1])
        uuids = [device.uuid for device in self._devices]
        root = state_root(request.state, self._environ)
        journal = self._stack.enter_context(Journal.open(root, problem, uuids[0]))
        laboratory = self._stack.enter_context(
            Laboratory(
                server,
                problem,
                journal,
                keys.ms,
                uuids,
                command=self._command or _command(request),
                pool=self._pool,
                seed=request.seed,
                recording=self._routing.path,
                kernel_file=self.kernel.file,
                progress=self.watch.see,
            )
        )
        probe = laboratory.task_of(Target("up", keys.ms[0], server.default_config(problem, "up", keys.ms[0])))
        if isinstance(probe, str) and "kernel" in probe:
            raise NotMeasurableError(f"cannot measure this problem: {probe}", "add --effort predict")
        self._mark: dict[str, Any] = {
            "effort": self._effort.name,
            "ms": list(keys.ms),
            "only": request.only,
            "start_from": sorted(str(config) for config in self._start_from),
            "moetune": __version__,
        }
        self.nothing_left = laboratory.sealed = any(
            line.get("kind") == "done" and all(line.get(key) == value for key, value in self._mark.items())
            for line in journal.lines
        )
        only: Kernel | None = "up" if request.only == "up" else "down" if request.only == "down" else None
        tuner = Tuner(server, problem, laboratory, keys, self._effort, only, self._started)
        tuner.begin()
        self.tuner, self.laboratory, self.journal = tuner, laboratory, journal
        self._problem, self._keys = problem, keys
        self._forecast = forecast(server, problem, start_from=self._start_from)
        return self._forecast.tables(keys, keys.ms[-1])

    def measure(self) -> tuple[Measured, Path | None]:
        """Measure, and mark the journal when there is nothing left to do."""
        assert self.tuner is not None
        assert self.laboratory is not None
        assert self.journal is not None
        assert self._problem is not None
        assert self._forecast is not None
        grid = frozenset((*sglang_grid(), *self._start_from))
        launches: dict[Kernel, Sequence[Launch]] = {
            kernel: tuple(
                launch
                for launch in self._forecast.launches(kernel)
                if self._effort.wide or launch.config in grid
            )
            for kernel in KERNELS
        }
        measured = self.tuner.tune(launches, PerformanceModel.load(), self._start_from[:_STARTED_FROM])
        self.laboratory.note(
            "health", **to_json(self.watch.look()), throttled_during=list(self.watch.throttled)
        )
        landscape = None
        if self._effort.exhaustive and measured.complete:
            assert self._keys is not None
            ms = self._keys.ms
            landscape = write_landscape(self.journal.folder, self._problem, self.laboratory, ms)
        if measured.complete and not self.nothing_left:
            self.journal.append("done", **self._mark)
        return measured, landscape


def _command(request: MeasureRequest) -> WorkerCommand:
    from moetune.applications.worker_pool import WorkerCommand

    return WorkerCommand(python=request.python or sys.executable)


def _written(
    request: MeasureRequest,
    effort: Effort,
    plan: Plan,
    part: GpuPlan,
    measured: Measured,
    run: _Run,
    landscape: Path | None,
    environ: Mapping[str, str],
    started: float,
) -> MeasuredTuning:
    server = open_server(plan.server.name, plan.server.version, plan.server.triton_version)
    out = Path(request.out)
    gains = measured.choices.improves
    assert run.laboratory is not None
    facts = run.laboratory.facts
    tables = measured_tables(server, plan, part, measured, facts) if gains else []
    files = write_tables(tables, out, force=request.force) if tables else ()
    gaining = [part] if gains else []
    found, replaces = look_again(server, request, gaining, out, environ)
    assert run.journal is not None
    return MeasuredTuning(
        plan=plan,
        measured=measured,
        effort=effort.name,
        out=out,
        files=files,
        nothing_left=run.nothing_left,
        journal=run.journal.path,
        landscape=landscape,
        throttled=tuple(run.watch.throttled),
        routing_remarks=run.routing_remarks,
        kernel=run.kernel,
        facts=facts,
        found=found,
        replaces_shipped=replaces,
        use_command=command_to_use(server, gaining, files, out),
        seconds=time.monotonic() - started,
    )
