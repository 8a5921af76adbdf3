"""The laboratory: targets go in, they are compiled and measured as they get ready, and journalled.

One thread, the caller's, writes the journal and decides what comes next. A result is on the disk before
the GPU that gave it gets something new. What the journal knows already is not measured again, and as
long as nothing has to be measured no GPU is touched.
"""

from __future__ import annotations

import queue
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from moetune.applications.compile_service import CompileBroken, Compiled, CompileService
from moetune.applications.compiling import CompilePool
from moetune.applications.provenance import rounded
from moetune.applications.worker_pool import (
    Answered,
    Device,
    DeviceGone,
    DeviceReady,
    WorkerCommand,
    import_path,
)
from moetune.domain.codec import to_json
from moetune.domain.compilation import CompileResult, CompileStatus, CompileTask, Depth, compile_task
from moetune.domain.config import KernelConfig
from moetune.domain.errors import ConfigFileError, MoetuneError
from moetune.domain.text import printable
from moetune.measure.protocol import (
    Checked,
    CheckTask,
    Failure,
    FailureKind,
    LayerPair,
    LayerTask,
    LayerTimed,
    Peaks,
    PeakTask,
    Timed,
    TimeTask,
    Workload,
)

if TYPE_CHECKING:
    from moetune.applications.journal import Journal
    from moetune.domain.choose import Pair
    from moetune.domain.problem import Kernel, Problem
    from moetune.measure.protocol import DeviceFacts
    from moetune.servers.protocol import Server

ANCHOR_EVERY = 50
"""Measurements between two of the anchor config."""
_CLOSING = 10
"""Measurements since the last anchor after which it is measured once more at the end."""
DRIFT = 0.02
"""Change of the anchor above which the measurements since the last one are repeated."""
HOPELESS = 1.3
"""Times the best at that m, above which two samples are enough."""
CLEAR = 1.06
"""Times the best at that m, above which a few samples are enough."""


_Command = TypeVar("_Command", WorkerCommand, CompilePool)


class NotMeasurableError(MoetuneError):
    """A problem that moetune cannot measure."""


@dataclass(frozen=True, slots=True, order=True)
class Target:
    """What is measured: a config of a kernel at an m."""

    kernel: Kernel
    m: int
    config: KernelConfig


@dataclass(frozen=True, slots=True)
class Progress:
    """What the live line shows.

    Attributes:
        phase: in a word or two.
        answered: measurements that have come.
        wanted: measurements asked for so far.
        target: what was measured last, with its time.
        time_us: None where it failed.
        best_us: the best of that kernel and m so far.
    """

    phase: str
    answered: int
    wanted: int
    target: Target | None = None
    time_us: float | None = None
    best_us: float | None = None


@dataclass(slots=True)
class _Bench:
    """One GPU as the laboratory sees it.

    Attributes:
        busy: it works on something.
        since: measurements since the last anchor.
        anchor_us: what the anchor took last.
        block: targets measured since, for when they have to be repeated.
        repeated: they were repeated already.
        doubted: the anchor has changed; it is measured once more before that is believed.
    """

    device: Device
    facts: DeviceFacts | None = None
    busy: bool = True
    gone: bool = False
    since: int = 0
    anchor_us: float | None = None
    block: list[Target] = field(default_factory=list)
    repeated: bool = False
    doubted: bool = False


@dataclass(frozen=True, slots=True)
class _AnchorTag:
    bench: int


@dataclass(frozen=True, slots=True)
class _AskTag:
    number: int


class Laboratory:
    """Measures targets of one problem. Use it as a context manager.

    Args:
        server: the release whose launches count.
        problem: the problem.
        journal: what is known, and where what is measured goes.
        ms: every m that is a key.
        largest_m: the largest m that will be asked for.
        uuids: the GPUs, all of one kind.
        command: how measuring processes are started.
        pool: how is compiled; its interpreter is the command's.
        seed: of data, routings and the order of measurements.
        recording: path of what the problem's routing `recorded:ID` means.
        progress: called after each measurement.
    """

    def __init__(
        self,
        server: Server,
        problem: Problem,
        journal: Journal,
        ms: Sequence[int],
        uuids: Sequence[str],
        *,
        command: WorkerCommand | None = None,
        pool: CompilePool | None = None,
        seed: int = 0,
        recording: str = "",
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self._server, self._problem, self._journal = server, problem, journal
        self._uuids, self._seed = tuple(uuids), seed
        self._command = command or WorkerCommand()
        self._pool = pool or CompilePool(Depth.BINARY, seconds_each=60.0, python=self._command.python)
        self._workload = Workload(problem, tuple(sorted(ms)), seed, recording)
        self._progress = progress or (lambda _: None)
        self._rng = random.Random(seed)
        self._started = time.monotonic()
        self.phase = ""
        self.sealed = False
        """Nothing new may be measured: what the journal lacks is passed over."""
        self.times: dict[Target, float | None] = {}
        self.spreads: dict[Target, float] = {}
        self.failed: dict[tuple[Kernel, KernelConfig], str] = {}
        self.compiled: dict[CompileTask, CompileResult] = {}
        self.measured = 0
        self.compilations = 0
        self.drifts: list[float] = []
        self.layers: dict[str, LayerTimed] = {}
        self.checks: dict[str, Checked] = {}
        self.peaks: Peaks | None = None
        self._best: dict[tuple[Kernel, int], float] = {}
        self._tasks: dict[Target, CompileTask] = {}
        self._pending: set[Target] = set()
        self._compiling: dict[CompileTask, set[Target]] = {}
        self._ready: dict[tuple[Kernel, int], list[Target]] = {}
        self._homes: dict[tuple[Kernel, int], int] = {}
        self._asked: dict[int, object] = {}
        self._asks: deque[int] = deque()
        self._answers: dict[int, object] = {}
        self._events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._benches: list[_Bench] = []
        self._service: CompileService | None = None
        self._anchor: Target | None = None
        self._wanted = 0
        self._restore()

    def __enter__(self) -> Laboratory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        for bench in self._benches:
            bench.device.close()
        if self._service is not None:
            self._service.close()

    def enter(self, phase: str) -> None:
        """Begin a phase; the journal says when, for whoever asks where the time went."""
        self.phase = phase
        self.note("phase", name=phase)

    def note(self, kind: str, **values: Any) -> None:  # noqa: ANN401 - JSON values
        """A line of the journal that nothing depends on; a sealed laboratory writes none."""
        if not self.sealed:
            seconds = round(time.monotonic() - self._started, 3)
            self._journal.append(kind, durable=False, seconds=seconds, **values)

    @property
    def facts(self) -> DeviceFacts | None:
        """What the first worker said of its GPU; None while none was needed."""
        return next((bench.facts for bench in self._benches if bench.facts is not None), None)

    def want(self, targets: Iterable[Target], priority: int = 0) -> None:
        """Ask for measurements; what is known already is not asked for again."""
        tasks: dict[CompileTask, None] = {}
        for target in targets:
            if target in self.times or target in self._pending or self.sealed:
                continue
            why = self.failed.get((target.kernel, target.config))
            task = why or self.task_of(target)
            if isinstance(task, str):
                self.times[target] = None
                continue
            self._pending.add(target)
            self._wanted += 1
            result = self.compiled.get(task)
            if result is not None:
                self._ready.setdefault((target.kernel, target.m), []).append(target)
                continue
            self._compiling.setdefault(task, set()).add(target)
            tasks[task] = None
        if tasks:
            self._equipment().submit(tasks, priority)

    def times_at(self, kernel: Kernel, m: int) -> dict[KernelConfig, float]:
        """Configs that ran, with their times."""
        return {
            target.config: time_us
            for target, time_us in self.times.items()
            if target.kernel == kernel and target.m == m and time_us is not None
        }

    def use_anchor(self, target: Target) -> None:
        """Name the config that is measured again and again, to see whether the GPU's clock drifts."""
        self._anchor = None if isinstance(self.task_of(target), str) else target
        self.want([target], priority=-2)

    def run(self, deadline: float | None = None) -> None:
        """Measure until everything wanted is answered, or until a time of the monotonic clock.

        What the deadline leaves is given up: it is asked for no more. A sealed laboratory has none.

        Raises:
            MoetuneError: when the journal cannot be written or the last GPU is gone.
        """
        while self._is_waiting() or self._is_unsure():
            if not self._step(None if self.sealed else deadline):
                break
        for target in self._pending:
            self._tasks.pop(target, None)
        self._pending.clear()
        self._compiling.clear()
        self._ready.clear()

    def _is_waiting(self) -> bool:
        return bool(self._pending or self._compiling or self._asked.keys() - self._answers.keys())

    def _is_unsure(self) -> bool:
        """Whether a GPU has measured a while since its last anchor: its clock may have drifted since."""
        return self._ready_anchor() is not None and any(
            not bench.gone and (bench.since >= _CLOSING or bench.doubted) for bench in self._benches
        )

    def ask(self, bodies: Sequence[object]) -> list[object]:
        """Have requests of other kinds answered, on whatever GPU is free, in the order given."""
        first = len(self._asked)
        for number, body in enumerate(bodies, first):
            self._asked[number] = body
            self._asks.append(number)
        if bodies:
            self._equipment()
            self.run()
        return [self._answers[number] for number in range(first, first + len(bodies))]

    def _compile(self, tasks: Iterable[CompileTask]) -> bool:
        """Have binaries in the cache; whether all of them are."""
        wanted = list(dict.fromkeys(tasks))
        missing = [task for task in wanted if task not in self.compiled]
        for task in missing:
            self._compiling.setdefault(task, set())
        if missing:
            self._equipment().submit(missing)
            self.run()
        return all(task in self.compiled for task in wanted)

    def layer(self, m: int, pairs: Sequence[Pair], routing: str, rounds: int) -> LayerTimed | None:
        """Time pairs through the whole layer, interleaved; None where they cannot be."""
        key = f"{m} {routing} " + " | ".join(f"{pair.up} {pair.down}" for pair in pairs)
        if key not in self.layers and not self.sealed:
            binaries = []
            for pair in pairs:
                up = self.task_of(Target("up", m, pair.up))
                down = self.task_of(Target("down", m, pair.down))
                if isinstance(up, str) or isinstance(down, str):
                    return None
                binaries.append(LayerPair(up, down))
            if not self._compile(task for pair in binaries for task in (pair.up, pair.down)):
                return None
            task = LayerTask(m, tuple(binaries), routing, rounds, seed=self._seed + 1)
            (answer,) = self.ask([task])
            if not isinstance(answer, LayerTimed):
                self._journal.append("layer failed", key=key, why=_message(answer))
                return None
            values = rounded(to_json(answer))
            self._journal.append("layer", key=key, **values)
            self.layers[key] = _layer(values)
        return self.layers.get(key)

    def check(self, kernel: Kernel, m: int, config: KernelConfig) -> Checked | None:
        """Compare a config with the fp32 reference; None where it cannot be."""
        key = f"{kernel} {m} {config}"
        if key not in self.checks and not self.sealed:
            task = self.task_of(Target(kernel, m, config))
            if isinstance(task, str) or not self._compile([task]):
                return None
            (answer,) = self.ask([CheckTask(task, m, seed=self._seed + 2)])
            if not isinstance(answer, Checked):
                self._fail(kernel, config, f"while its numbers were checked it {_message(answer)}")
                return None
            self._journal.append("check", key=key, **to_json(answer))
            self.checks[key] = answer
        return self.checks.get(key)

    def measured_peaks(self) -> Peaks | None:
        """What the GPU can do; None where it cannot be measured."""
        if self.peaks is None and not self.sealed:
            (answer,) = self.ask([PeakTask()])
            if isinstance(answer, Peaks):
                self.peaks = answer
                self._journal.append("peaks", **to_json(answer))
        return self.peaks

    def task_of(self, target: Target) -> CompileTask | str:
        """The binary that a target launches, or why there is none."""
        if target not in self._tasks:
            try:
                launch = self._server.launch(self._problem, target.kernel, target.config)
            except ConfigFileError as error:
                return error.message
            kinds = self._server.launch_classes(
                self._problem, target.kernel, (target.m,), launch.config.block_size_m
            )
            if not kinds:
                return f"at m {target.m} the server runs a CUDA kernel, which moetune does not have"
            task = compile_task(launch, self._problem, kinds[0])
            if isinstance(task, str):
                return task
            self._tasks[target] = task
        return self._tasks[target]

    # events

    def _step(self, deadline: float | None) -> bool:
        self._dispatch()
        patience = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        try:
            event = self._events.get(timeout=patience)
        except queue.Empty:
            return False
        self._handle(event)
        return True

    def _handle(self, event: object) -> None:
        if isinstance(event, Compiled):
            self._on_compiled(event)
        elif isinstance(event, Answered):
            self._on_answer(event)
        elif isinstance(event, DeviceReady):
            bench = self._benches[event.device]
            bench.facts, bench.busy = event.facts, False
            self.note("device", device=event.device, **to_json(event.facts), opened=to_json(event.opened))
        elif isinstance(event, DeviceGone):
            self._on_gone(event)
        elif isinstance(event, CompileBroken):
            raise event.error

    def _on_compiled(self, event: Compiled) -> None:
        task, result = event.task, event.result
        why = self._why_unusable(result)
        launch = task.launch
        self._journal.append(
            "compiled",
            durable=False,
            kernel=launch.kernel,
            config=_config_json(launch.config),
            status=result.status.value,
            seconds=result.seconds,
            registers=result.registers,
            shared_bytes=result.shared_bytes,
            stack_bytes=result.stack_bytes,
            noise=result.noise,
        )
        targets = self._compiling.pop(task, set())
        if why:
            if (launch.kernel, launch.config) not in self.failed:
                self._fail(launch.kernel, launch.config, why)
            return
        self.compiled[task] = result
        for target in targets:
            self._ready.setdefault((target.kernel, target.m), []).append(target)

    def _why_unusable(self, result: CompileResult) -> str:
        if result.status is not CompileStatus.OK:
            return f"{result.status.value}: {result.message}"
        limit = self._problem.gpu.smem_optin_bytes
        if limit is not None and (result.shared_bytes or 0) > limit:
            return f"needs {result.shared_bytes} bytes of shared memory, a block can have {limit}"
        return ""

    def _on_answer(self, event: Answered) -> None:
        bench = self._benches[event.device]
        bench.busy = False
        if event.restarted:
            self._journal.append("restarted", device=event.device)
        if isinstance(event.tag, _AskTag):
            self._answers[event.tag.number] = event.answer
            return
        target = event.tag if isinstance(event.tag, Target) else self._anchor
        assert target is not None
        if isinstance(event.answer, Failure):
            if event.answer.kind is FailureKind.SETUP:
                raise NotMeasurableError(f"{target.kernel} at m={target.m}: {event.answer.message}")
            self._fail(target.kernel, target.config, event.answer.message, m=target.m)
            if event.tag is not target:
                self._anchor = None
            return
        assert isinstance(event.answer, Timed)
        if isinstance(event.tag, _AnchorTag):
            self._on_anchor(bench, event.answer)
        else:
            self._on_time(bench, target, event.answer)

    def _on_time(self, bench: _Bench, target: Target, timed: Timed) -> None:
        values = rounded(to_json(timed))
        self._journal.append(
            "time",
            kernel=target.kernel,
            m=target.m,
            config=_config_json(target.config),
            device=bench.device.number,
            **values,
        )
        # As a resumed run will read it: the same times lead to the same questions.
        self._note(target, values["time_us"], values["spread"])
        self.measured += 1
        self.compilations = max(self.compilations, timed.compilations)
        self._pending.discard(target)
        bench.since += 1
        bench.block.append(target)
        if target == self._anchor and bench.anchor_us is None:
            bench.anchor_us, bench.since = timed.time_us, 0
        self._tell(target, timed.time_us)

    def _on_anchor(self, bench: _Bench, timed: Timed) -> None:
        drift = timed.time_us / bench.anchor_us - 1 if bench.anchor_us else 0.0
        self._journal.append(
            "anchor", device=bench.device.number, time_us=timed.time_us, drift=round(drift, 5)
        )
        if abs(drift) > DRIFT and not bench.doubted:
            bench.doubted = True
            return
        bench.doubted = False
        bench.anchor_us, bench.since = timed.time_us, 0
        block, bench.block = bench.block, []
        if abs(drift) <= DRIFT or bench.repeated:
            bench.repeated = False
            return
        self.drifts.append(drift)
        bench.repeated = True
        for target in dict.fromkeys(block):
            self._pending.add(target)
            self._wanted += 1
            self._ready.setdefault((target.kernel, target.m), []).append(target)

    def _on_gone(self, event: DeviceGone) -> None:
        bench = self._benches[event.device]
        bench.gone = bench.busy = True
        self._journal.append("gone", device=event.device, why=event.error.message)
        if isinstance(event.tag, Target):
            self._ready.setdefault((event.tag.kernel, event.tag.m), []).append(event.tag)
        elif isinstance(event.tag, _AskTag):
            self._asks.appendleft(event.tag.number)
        self._homes = {key: home for key, home in self._homes.items() if home != event.device}
        if all(bench.gone for bench in self._benches):
            hint = event.error.hint
            resume = "what was measured is kept: run the same command again and it goes on"
            raise MoetuneError(event.error.message, f"{hint}; {resume}" if hint else resume)

    def _fail(self, kernel: Kernel, config: KernelConfig, why: str, m: int | None = None) -> None:
        """Write down a culprit; it is never tried again, at any m."""
        why = printable(why, 300)
        self._journal.append("failed", kernel=kernel, config=_config_json(config), m=m, why=why)
        self._note_failure(kernel, config, why)

    def _note_failure(self, kernel: Kernel, config: KernelConfig, why: str) -> None:
        self.failed[kernel, config] = why
        if self._service is not None:
            self._service.drop(kernel, config)
        lost = [t for t in self._pending if t.kernel == kernel and t.config == config]
        for target in lost:
            self._pending.discard(target)
            self._tell(target, None)
        for task in [
            task for task in self._compiling if (task.launch.kernel, task.launch.config) == (kernel, config)
        ]:
            del self._compiling[task]
        for targets in self._ready.values():
            targets[:] = [t for t in targets if (t.kernel, t.config) != (kernel, config)]
        for target in [t for t in self.times if t.kernel == kernel and t.config == config] + lost:
            self.times[target] = None

    def _tell(self, target: Target, time_us: float | None) -> None:
        best = self._best.get((target.kernel, target.m))
        done = self._wanted - len(self._pending)
        self._progress(Progress(self.phase, done, self._wanted, target, time_us, best))

    # work for the GPUs

    def _dispatch(self) -> None:
        for number, bench in enumerate(self._benches):
            if bench.busy:
                continue
            item = self._next(number, bench)
            if item is not None:
                bench.busy = True
                bench.device.submit(*item)

    def _next(self, number: int, bench: _Bench) -> tuple[object, object] | None:
        if self._asks:
            ask = self._asks.popleft()
            return _AskTag(ask), self._asked[ask]
        target, anchor = self._draw(number), self._ready_anchor()
        if target is None:
            if anchor is None or self._is_waiting() or (bench.since < _CLOSING and not bench.doubted):
                return None
            return _AnchorTag(number), TimeTask(self._tasks[anchor], anchor.m)
        due = bench.doubted or bench.since >= ANCHOR_EVERY or (bench.anchor_us is None and target != anchor)
        if anchor is not None and due:
            self._ready[target.kernel, target.m].append(target)
            return _AnchorTag(number), TimeTask(self._tasks[anchor], anchor.m)
        return target, self._time_task(target)

    def _draw(self, number: int) -> Target | None:
        """A random target; all candidates of one kernel and m run on one GPU."""
        mine = [key for key, ready in self._ready.items() if ready and self._homes.get(key, number) == number]
        if not mine:
            return None
        key = self._rng.choices(mine, [len(self._ready[key]) for key in mine])[0]
        self._homes[key] = number
        ready = self._ready[key]
        place = self._rng.randrange(len(ready))
        ready[place], ready[-1] = ready[-1], ready[place]
        return ready.pop()

    def _ready_anchor(self) -> Target | None:
        if self._anchor is None or (self._anchor.kernel, self._anchor.config) in self.failed:
            return None
        if not self._benches:
            return None
        task = self.task_of(self._anchor)
        assert isinstance(task, CompileTask)
        if task in self.compiled:
            return self._anchor
        self._equipment().submit([task], priority=-1)
        return None

    def _time_task(self, target: Target) -> TimeTask:
        best = self._best.get((target.kernel, target.m))
        task = self._tasks[target]
        if best is None:
            return TimeTask(task, target.m)
        return TimeTask(task, target.m, give_up_us=HOPELESS * best, clear_us=CLEAR * best)

    def _equipment(self) -> CompileService:
        """Start what measures and what compiles, when it is needed for the first time."""
        if self._service is None:
            variables = {}
            if self._command.variables.get("PYTHONPATH") is None:
                variables["PYTHONPATH"] = import_path(self._journal.folder)
            command = _with_variables(self._command, variables)
            pool = _with_variables(self._pool, variables)
            self._service = CompileService(pool, self._journal.cache, self._events.put)
            self._benches = [
                _Bench(Device(number, uuid, command, self._journal.cache, self._workload, self._events.put))
                for number, uuid in enumerate(self._uuids)
            ]
        return self._service

    # what is known

    def _restore(self) -> None:
        """Take what the journal holds."""
        for line in self._journal.lines:
            kind = line.get("kind")
            if kind == "time":
                target = Target(line["kernel"], line["m"], _config(line["config"]))
                if (target.kernel, target.config) not in self.failed:
                    self._note(target, line["time_us"], line["spread"])
            elif kind == "failed":
                self._note_failure(line["kernel"], _config(line["config"]), line["why"])
            elif kind == "layer":
                self.layers[line["key"]] = _layer(line)
            elif kind == "peaks":
                self.peaks = Peaks(line["tflops"], line["gbps"])
            elif kind == "check":
                self.checks[line["key"]] = Checked(line["relative_error"], line["tolerance"])

    def _note(self, target: Target, time_us: float, spread: float) -> None:
        self.times[target], self.spreads[target] = time_us, spread
        key = (target.kernel, target.m)
        self._best[key] = min(time_us, self._best.get(key, time_us))


def _layer(values: Mapping[str, Any]) -> LayerTimed:
    samples = tuple(tuple(row) for row in values["samples_us"])
    return LayerTimed(samples, values["reuse_bytes"], values["compilations"])


def _message(answer: object) -> str:
    return answer.message if isinstance(answer, Failure) else str(answer)


def _config_json(config: KernelConfig) -> dict[str, Any]:
    return config.to_json()


def _config(value: object) -> KernelConfig:
    return KernelConfig.from_json(value, "the journal")


def _with_variables(what: _Command, variables: dict[str, str]) -> _Command:
    return replace(what, variables={**what.variables, **variables})
