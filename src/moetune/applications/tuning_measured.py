"""From a request to measured files: on the GPUs of this machine, resumed where a run before it stopped."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetune import __version__
from moetune.applications.environment import find_installed
from moetune.applications.exhaustive import write_landscape
from moetune.applications.gpu_health import Health, HealthMonitor
from moetune.applications.journal import Journal, state_root
from moetune.applications.measuring import Laboratory
from moetune.applications.output import TableFile, Written, write_tables
from moetune.applications.planning import Plan, make_plan, open_asked
from moetune.applications.predicting import forecast, keys_for
from moetune.applications.provenance import Check, Conditions, Kind, Provenance, rounded
from moetune.applications.rates import rate
from moetune.applications.request import TuneRequest
from moetune.applications.routing_store import UNIFORM, AskedRouting, ask_routing
from moetune.applications.server_kernels import AUTO, KernelChoice, choose_kernel, measured_server
from moetune.applications.start_from import configs_of
from moetune.applications.targets import NotMeasurableError, Progress, Target
from moetune.applications.tuning import command_to_use, look_again
from moetune.applications.tuning_efforts import EFFORTS, Effort
from moetune.applications.tuning_loop import Measured, Tuner
from moetune.domain.codec import to_json
from moetune.domain.errors import InputError, MoetuneError, UnknownGpuError
from moetune.domain.predict import PerformanceModel
from moetune.domain.problem import KERNELS
from moetune.domain.server_kernel import OWN
from moetune.domain.space import sglang_grid
from moetune.domain.text import printable
from moetune.domain.version import parse_release, release_text
from moetune.servers.other_kernel import with_own_entries
from moetune.servers.registry import open_server

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moetune.applications.compiling import CompilePool
    from moetune.applications.nvml import Device as GpuDevice
    from moetune.applications.planning import GpuPlan
    from moetune.applications.predicting import Forecast, Predicted
    from moetune.applications.request import Request
    from moetune.applications.worker_pool import WorkerCommand
    from moetune.domain.choose import Choice
    from moetune.domain.config import ConfigTable
    from moetune.domain.keys import Keys
    from moetune.domain.launch import Launch
    from moetune.domain.problem import Kernel, Problem
    from moetune.measure.protocol import DeviceFacts
    from moetune.servers.protocol import Server

SCHEMA = "moetune.measured/1"
_STARTED_FROM = 24  # configs of --start-from that are measured at every m, whatever the model says
ONLY = ("up", "down")


class GpuBusyError(MoetuneError):
    """Something else computes on the GPU: times would be of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureRequest(TuneRequest):
    """A question whose answer is measured and written.

    Attributes:
        effort: `quick`, `full` or `exhaustive`.
        budget: seconds of wall clock; None takes the effort's own.
        devices: places of the GPUs that share the work, in the driver's order; empty takes the first.
        only: search this kernel alone; the pair is still checked.
        python: the interpreter that measures, of an environment with torch and Triton.
        state: where runs are kept; None takes MOETUNE_STATE, else the XDG state directory.
        share_gpu: go on although something else computes on the GPU.
        routing: `uniform`, `zipf:S`, or the files of a recording.
        kernel: which kernel is timed: `server`: the server's, of the environment that measures; `own`:
            moetune's; `auto`: the server's where it is there in the version that is tuned for.
        server_files: a folder with the Python files of a server, whose kernel is timed.
        kernel_source: what came of that choice; found out by measuring.
        seed: of data, routings and the order of measurements.
    """

    effort: str = "quick"
    budget: float | None = None
    devices: tuple[int, ...] = ()
    only: str | None = None
    python: str | None = None
    state: str | Path | None = None
    share_gpu: bool = False
    routing: str = UNIFORM
    kernel: str = AUTO
    server_files: str | Path | None = None
    kernel_source: str = OWN
    seed: int = 0

    def __post_init__(self) -> None:
        # Not super(): dataclasses with slots are made anew, and the name here is of the first one.
        TuneRequest.__post_init__(self)
        if self.effort not in EFFORTS:
            raise InputError(f"no effort is called {self.effort[:40]!r}", f"known are {', '.join(EFFORTS)}")
        if self.only is not None and self.only not in ONLY:
            raise InputError(f"no kernel is called {self.only[:40]!r}", f"give {' or '.join(ONLY)}")
        if self.budget is not None and not 0 < self.budget < 1e6:
            raise InputError("the budget is no number of seconds", "give it as in --budget 60")
        if len(set(self.devices)) < len(self.devices) or any(not 0 <= n < 1024 for n in self.devices):
            raise InputError("--devices names no GPUs", "give their numbers once each, as in 0,1")

    @property
    def measured_routing(self) -> str:
        """The routing of the problem."""
        return self.routing

    @property
    def measured_kernel(self) -> str:
        """The kernel source of the problem."""
        return self.kernel_source


@dataclass(frozen=True, slots=True)
class Live:
    """What the live line shows: the laboratory's progress, the GPU, and the time."""

    progress: Progress
    health: Health
    seconds: float


@dataclass(frozen=True, slots=True)
class MeasuredTuning:
    """The answer to `moetune tune` on a GPU.

    Attributes:
        plan: what `moetune plan` says of the GPU that was measured.
        measured: the tables, with their times.
        effort: how hard was tried.
        out: the directory below which files were written.
        files: the config files as they now stand; none where nothing is gained.
        nothing_left: the journal had everything.
        journal: where it is.
        landscape: what was measured as a landscape; only of an exhaustive run.
        throttled: why the GPU ran slower than it could at some time; empty when it did not.
        routing_remarks: what a person should know of the recording that was measured under.
        kernel: which kernel was timed, and why.
        facts: the GPU and the software that measured; None where nothing had to be measured.
        found: the server's own lookup, pointed to `out`, finds every file.
        replaces_shipped: pointed to `out`, the server no longer reads the files that it ships.
        use_command: what makes the server read the files.
        seconds: wall clock of this run.
    """

    plan: Plan
    measured: Measured
    effort: str
    out: Path
    files: tuple[Written, ...]
    nothing_left: bool
    journal: Path
    landscape: Path | None
    throttled: tuple[str, ...]
    routing_remarks: tuple[str, ...]
    kernel: KernelChoice
    facts: DeviceFacts | None
    found: bool
    replaces_shipped: bool
    use_command: str
    seconds: float

    @property
    def gains(self) -> bool:
        """Whether something beats the server's default by more than the noise."""
        return self.measured.choices.improves

    def to_json(self) -> dict[str, Any]:
        """The document of `moetune tune --json` where it measured."""
        part, measured = self.plan.gpus[0], self.measured
        assert part.problem is not None
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "moetune": __version__,
            "kind": "measured",
            "effort": self.effort,
            "gains": self.gains,
            "nothing_left": self.nothing_left,
            "model": to_json(self.plan.layer),
            "parallelism": to_json(self.plan.parallelism),
            "server": to_json(self.plan.server),
            "gpu": part.to_json()["gpu"],
            "fingerprint": part.to_json()["fingerprint"],
            "device": to_json(self.facts),
            "l2": "cold",
            "routing": part.problem.routing,
            "routing_remarks": list(self.routing_remarks),
            "kernel_source": part.problem.kernel_source,
            "kernel": to_json(self.kernel),
            "noise": measured.noise,
            "spread": measured.spread,
            "gain": measured.gain,
            "layer_gain": measured.layer_gain,
            "measured": measured.measured,
            "known": measured.known,
            "configs": dict(measured.configs),
            "compiled_while_measuring": measured.compilations,
            "failed": dict(measured.failed),
            "drifts": list(measured.drifts),
            "throttled": list(self.throttled),
            "peaks": to_json(measured.peaks),
            "complete": measured.complete,
            "added_keys": list(measured.added_keys),
            "shortfalls": list(measured.shortfalls),
            "entries": [self._entry(choice) for choice in measured.choices.entries],
            "numerics": [{**to_json(item), "config": item.config.to_json()} for item in measured.numerics],
            "journal": str(self.journal),
            "landscape": str(self.landscape) if self.landscape else None,
            "out": str(self.out),
            "written": [
                {
                    "path": str(file.path),
                    "provenance": str(file.provenance),
                    "state": file.state.value,
                    "shared_with": file.shared_with,
                }
                for file in self.files
            ],
            "found_by_lookup": self.found,
            "replaces_shipped": self.replaces_shipped,
            "use_command": self.use_command,
            "seconds": self.seconds,
        }
        rounded_document: dict[str, Any] = rounded(document)
        return rounded_document

    def _entry(self, choice: Choice) -> dict[str, Any]:
        layer = self.measured.layers.get(choice.m)
        problem = self.plan.gpus[0].problem
        assert problem is not None
        return {
            "rate": to_json(rate(problem, choice.m, choice.time_us, self.measured.peaks)),
            "m": choice.m,
            "up": choice.pair.up.to_json(),
            "down": choice.pair.down.to_json(),
            "up_us": choice.up_us,
            "down_us": choice.down_us,
            "default_us": choice.default_us,
            "speedup": choice.speedup,
            "reason": choice.reason.value,
            "layer": None if layer is None else to_json(layer),
        }


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
    devices = _devices(request, gpus)
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


def triton_of(python: str) -> str | None:
    """The version of Triton that an interpreter has; None where it has none."""
    if python == sys.executable:
        found = find_installed("triton")
        return None if found is None else found.version
    code = "from importlib.metadata import version; print(version('triton'))"
    try:
        done = subprocess.run(
            [python, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        return release_text(parse_release(done.stdout))
    except (OSError, subprocess.SubprocessError, MoetuneError) as error:
        raise InputError(
            f"{printable(python, 200)} is no interpreter with Triton",
            "give that of the server's environment with --python",
        ) from error


def _devices(request: MeasureRequest, gpus: Sequence[GpuDevice] | None) -> list[GpuDevice]:
    """The GPUs that are meant, of one kind and free."""
    if gpus is None:
        from moetune.applications.nvml import detect_gpus

        detected = detect_gpus()
        gpus = detected.devices
        if not gpus:
            why = "; ".join(detected.reasons) or "none was found"
            raise UnknownGpuError(
                f"nothing can be measured: this machine has no GPU ({why})",
                'add --effort predict, and --gpu "NVIDIA H200" or another name',
            )
    wanted = request.devices or (0,)
    if max(wanted) >= len(gpus):
        raise InputError(f"this machine has {len(gpus)} GPUs, not one with the number {max(wanted)}")
    devices = [gpus[number] for number in wanted]
    names = dict.fromkeys(device.name for device in devices)
    if len(names) > 1:
        raise InputError(f"the GPUs are of different kinds: {', '.join(names)}", "tune each kind on its own")
    if request.gpu_names and devices[0].gpu.torch_name not in request.gpu_names:
        raise InputError(
            f"this GPU is {devices[0].name}, not {', '.join(request.gpu_names)}",
            "leave --gpu out, or add --effort predict",
        )
    if not request.share_gpu:
        refuse_busy(devices)
    return devices


def refuse_busy(devices: Sequence[GpuDevice], ways_out: str = "or add --share-gpu") -> None:
    """Refuse GPUs that other processes compute on.

    Args:
        devices: that are to measure.
        ways_out: options of the verb that help, as the end of a sentence.

    Raises:
        GpuBusyError: with the processes.
    """
    for device in devices:
        others = [process for process in device.processes if process.pid != os.getpid()]
        if others:
            pids = ", ".join(str(process.pid) for process in others[:8])
            raise GpuBusyError(
                f"GPU {device.index} is in use by other processes ({pids}): times would be of both",
                f"end them, choose another GPU with --devices, {ways_out}",
            )


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
        self._command, self._pool, self._live = command, pool, live
        self._started, self._stack, self._routing = started, stack, routing
        self.kernel = kernel
        self.routing_remarks: tuple[str, ...] = ()
        self._health = HealthMonitor(devices[0].uuid)
        self._looked, self._last = 0.0, Health()
        self.tuner: Tuner | None = None
        self.laboratory: Laboratory | None = None
        self.journal: Journal | None = None
        self.nothing_left = False
        self.throttled: dict[str, None] = {}
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
                progress=self._tell,
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
        self.laboratory.note("health", **to_json(self._health.look()), throttled_during=list(self.throttled))
        landscape = None
        if self._effort.exhaustive and measured.complete:
            assert self._keys is not None
            ms = self._keys.ms
            landscape = write_landscape(self.journal.folder, self._problem, self.laboratory, ms)
        if measured.complete and not self.nothing_left:
            self.journal.append("done", **self._mark)
        return measured, landscape

    def _tell(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._looked > 1.0:
            self._looked, self._last = now, self._health.look()
            self.throttled.update(dict.fromkeys(self._last.throttled))
        if self._live is not None:
            self._live(Live(progress, self._last, now - self._started))


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
    tables = _tables(server, plan, part, measured, facts) if gains else []
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
        throttled=tuple(run.throttled),
        routing_remarks=run.routing_remarks,
        kernel=run.kernel,
        facts=facts,
        found=found,
        replaces_shipped=replaces,
        use_command=command_to_use(server, gaining, files, out),
        seconds=time.monotonic() - started,
    )


def _tables(
    server: Server, plan: Plan, part: GpuPlan, measured: Measured, facts: DeviceFacts | None
) -> list[TableFile]:
    problem, choices = part.problem, measured.choices
    assert problem is not None
    tables: dict[Kernel, ConfigTable] = {"up": choices.up}
    if choices.down is not None:
        tables["down"] = choices.down
    return [
        TableFile(
            path=server.file_path(problem, kernel),
            text=server.render_table(problem, with_own_entries(server, problem, table)),
            provenance=Provenance(
                kind=Kind.MEASURED,
                kernels=KERNELS if choices.down is None else (kernel,),
                problem=problem,
                choices=choices,
                conditions=Conditions(measured.noise, repeats=_REPEATS, spread=measured.spread),
                model=plan.layer.model,
                checks=_checks(
                    measured,
                    kernel if choices.down is not None else None,
                    server.triton_version,
                    facts,
                    problem.routing,
                ),
                added_keys=measured.added_keys,
                shortfalls=measured.shortfalls,
            ),
        )
        for kernel, table in tables.items()
    ]


_REPEATS = 5  # least samples behind a time; see protocol.TimeTask


def _checks(
    measured: Measured, kernel: Kernel | None, triton: str, facts: DeviceFacts | None, routing: str
) -> tuple[Check, ...]:
    numerics = [item for item in measured.numerics if kernel is None or item.kernel == kernel]
    worst = max((item.relative_error for item in numerics), default=None)
    layers = [layer for layer in measured.layers.values() if layer.uniform_ratio is not None]
    routings = "uniform and skewed" if routing == UNIFORM else f"{routing} and uniform"
    return (
        Check(
            "matches the fp32 reference",
            bool(numerics),
            f"{len(numerics)} configs, relative error at most {worst:.2g}" if worst is not None else "",
        ),
        Check(
            f"not slower through the whole layer, {routings} routing",
            bool(layers) or None,
            f"{len(layers)} m, interleaved with the default",
        ),
        Check(
            "measured with the Triton of the server",
            None if facts is None else facts.triton.startswith(triton),
            "" if facts is None else f"Triton {facts.triton}, the server's is {triton}",
        ),
        Check("weights cold", True, "three times the L2 touched between two uses of the same weights"),
        Check(
            "nothing compiled while measuring",
            measured.compilations == 0,
            f"{measured.compilations} kernels compiled by the measuring processes",
        ),
    )
