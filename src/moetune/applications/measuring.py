"""The laboratory: targets go in, they are compiled and measured as they get ready, and journalled.

One thread, the caller's, writes the journal and decides what comes next. A result is on the disk before
the GPU that gave it gets something new. What the journal knows already is not measured again, and as
long as nothing has to be measured no GPU is touched.
"""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moetune.applications.backlog import Backlog
from moetune.applications.binaries import Binaries
from moetune.applications.compile_service import CompileBroken, Compiled
from moetune.applications.compiling import CompilePool
from moetune.applications.equipment import Equipment
from moetune.applications.gpu_requests import Requests, RequestTag
from moetune.applications.known import Known
from moetune.applications.targets import NotMeasurableError, Progress, Target
from moetune.applications.worker_pool import Answered, DeviceGone, DeviceReady, WorkerCommand
from moetune.domain.codec import to_json
from moetune.domain.compilation import CompileTask, Depth
from moetune.domain.errors import MoetuneError
from moetune.measure.protocol import Failure, FailureKind, Timed, TimeTask, Workload

if TYPE_CHECKING:
    from moetune.applications.bench import Bench
    from moetune.applications.journal import Journal
    from moetune.domain.config import KernelConfig
    from moetune.domain.problem import Kernel, Problem
    from moetune.domain.server_kernel import KernelFile
    from moetune.measure.protocol import DeviceFacts
    from moetune.servers.protocol import Server

HOPELESS = 1.3
"""Times the best at that m, above which two samples are enough."""
CLEAR = 1.06
"""Times the best at that m, above which a few samples are enough."""


@dataclass(frozen=True, slots=True)
class _AnchorTag:
    bench: int


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
        kernel_file: the server's file whose kernel is timed; None: moetune's own kernel.
        progress: called after each measurement.

    Attributes:
        known: what was measured, now or before.
        binaries: what targets launch, and what of that is compiled.
        phase: what it is at, in a word or two.
        sealed: nothing new may be measured: what the journal lacks is passed over.
        measured: measurements of this run.
        compilations: the most that a measuring process says it had to compile by itself.
        drifts: changes of the anchor after which measurements were repeated.
        seed: as given.
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
        kernel_file: KernelFile | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        command = command or WorkerCommand()
        pool = pool or CompilePool(Depth.BINARY, seconds_each=60.0, python=command.python)
        workload = Workload(problem, tuple(sorted(ms)), seed, recording)
        self._journal, self.seed = journal, seed
        self._progress = progress or (lambda _: None)
        self._started = time.monotonic()
        self.phase = ""
        self.known = Known(journal)
        self.sealed = False
        self.measured = 0
        self.compilations = 0
        self.drifts: list[float] = []
        self._equipment = Equipment(journal, workload, uuids, command, pool)
        self.binaries = Binaries(server, problem, kernel_file)
        self._backlog = Backlog(random.Random(seed))
        self._anchor: Target | None = None
        self._requests = Requests()

    def __enter__(self) -> Laboratory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        self._equipment.close()

    @property
    def facts(self) -> DeviceFacts | None:
        """What the first worker said of its GPU; None while none was needed."""
        return self._equipment.facts

    def enter(self, phase: str) -> None:
        """Begin a phase; the journal says when, for whoever asks where the time went."""
        self.phase = phase
        self.note("phase", name=phase)

    def note(self, kind: str, **values: Any) -> None:  # noqa: ANN401 - JSON values
        """A line of the journal that nothing depends on; a sealed laboratory writes none."""
        if not self.sealed:
            seconds = round(time.monotonic() - self._started, 3)
            self._journal.append(kind, durable=False, seconds=seconds, **values)

    def task_of(self, target: Target) -> CompileTask | str:
        """The binary that a target launches, or why there is none."""
        return self.binaries.task_of(target)

    # what is asked

    def want(self, targets: Iterable[Target], priority: int = 0) -> None:
        """Ask for measurements; what is known already is not asked for again."""
        tasks: dict[CompileTask, None] = {}
        for target in targets:
            if target in self.known.times or target in self._backlog or self.sealed:
                continue
            why = self.known.failed.get((target.kernel, target.config))
            task = why or self.task_of(target)
            if isinstance(task, str):
                self.known.add_unable([target])
            elif task in self.binaries.compiled:
                self._backlog.add_ready([target])
            else:
                self._backlog.add_compiling(target, task)
                tasks[task] = None
        if tasks:
            self._equipment.start().submit(tasks, priority)

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
        self.binaries.forget(self._backlog.clear())

    def ask(self, bodies: Sequence[object]) -> list[object]:
        """Have requests of other kinds answered, on whatever GPU is free, in the order given."""
        numbers = self._requests.add(bodies)
        if numbers:
            self._equipment.start()
            self.run()
        return [self._requests.answers[number] for number in numbers]

    def prepare(self, tasks: Iterable[CompileTask]) -> bool:
        """Have binaries in the cache; whether all of them are."""
        wanted = list(dict.fromkeys(tasks))
        missing = [task for task in wanted if task not in self.binaries.compiled]
        for task in missing:
            self._backlog.await_binary(task)
        if missing:
            self._equipment.start().submit(missing)
            self.run()
        return all(task in self.binaries.compiled for task in wanted)

    # what comes

    def _is_waiting(self) -> bool:
        return bool(self._backlog or self._requests)

    def _is_unsure(self) -> bool:
        """Whether a GPU has to measure the anchor once more before what it measured is believed."""
        return self._ready_anchor() is not None and any(
            bench.is_unsure and not bench.gone for bench in self._equipment.benches
        )

    def _step(self, deadline: float | None) -> bool:
        self._dispatch()
        patience = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        try:
            event = self._equipment.events.get(timeout=patience)
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
            bench = self._equipment.benches[event.device]
            bench.facts, bench.busy = event.facts, False
            self.note("device", device=event.device, **to_json(event.facts), opened=to_json(event.opened))
        elif isinstance(event, DeviceGone):
            self._on_gone(event)
        elif isinstance(event, CompileBroken):
            raise event.error

    def _on_compiled(self, event: Compiled) -> None:
        result, launch = event.result, event.task.launch
        self._journal.append(
            "compiled",
            durable=False,
            kernel=launch.kernel,
            config=launch.config.to_json(),
            status=result.status.value,
            seconds=result.seconds,
            registers=result.registers,
            shared_bytes=result.shared_bytes,
            stack_bytes=result.stack_bytes,
            noise=result.noise,
        )
        targets = self._backlog.take_compiling(event.task)
        why = self.binaries.why_unusable(result)
        if not why:
            self.binaries.compiled[event.task] = result
            for target in targets:
                self._backlog.put_back(target)
        elif (launch.kernel, launch.config) not in self.known.failed:
            self.fail(launch.kernel, launch.config, why)

    def _on_answer(self, event: Answered) -> None:
        bench = self._equipment.benches[event.device]
        bench.busy = False
        if event.restarted:
            self._journal.append("restarted", device=event.device)
        if isinstance(event.tag, RequestTag):
            self._requests.answers[event.tag.number] = event.answer
            return
        target = event.tag if isinstance(event.tag, Target) else self._anchor
        assert target is not None
        if isinstance(event.answer, Failure):
            if event.answer.kind is FailureKind.SETUP:
                raise NotMeasurableError(f"{target.kernel} at m={target.m}: {event.answer.message}")
            self.fail(target.kernel, target.config, event.answer.message, m=target.m)
            if event.tag is not target:
                self._anchor = None
            return
        assert isinstance(event.answer, Timed)
        if isinstance(event.tag, _AnchorTag):
            self._on_anchor(bench, event.answer)
        else:
            self._on_time(bench, target, event.answer)

    def _on_time(self, bench: Bench, target: Target, timed: Timed) -> None:
        self.known.add_time(target, timed, bench.device.number)
        self.measured += 1
        self.compilations = max(self.compilations, timed.compilations)
        self._backlog.finish(target)
        bench.add_time(target, timed.time_us, self._anchor)
        self._tell(target, timed.time_us)

    def _on_anchor(self, bench: Bench, timed: Timed) -> None:
        seen = bench.add_anchor(timed.time_us)
        self._journal.append(
            "anchor", device=bench.device.number, time_us=timed.time_us, drift=round(seen.drift, 5)
        )
        if seen.repeat:
            self.drifts.append(seen.drift)
            self._backlog.add_ready(seen.repeat)

    def _on_gone(self, event: DeviceGone) -> None:
        benches = self._equipment.benches
        benches[event.device].gone = benches[event.device].busy = True
        self._journal.append("gone", device=event.device, why=event.error.message)
        if isinstance(event.tag, Target):
            self._backlog.put_back(event.tag)
        elif isinstance(event.tag, RequestTag):
            self._requests.put_back(event.tag)
        self._backlog.lose_device(event.device)
        if all(bench.gone for bench in benches):
            hint = event.error.hint
            resume = "what was measured is kept: run the same command again and it goes on"
            raise MoetuneError(event.error.message, f"{hint}; {resume}" if hint else resume)

    def fail(self, kernel: Kernel, config: KernelConfig, why: str, m: int | None = None) -> None:
        """Write down a culprit; it is never tried again, at any m."""
        self.known.add_failure(kernel, config, why, m)
        self._equipment.drop(kernel, config)
        lost = self._backlog.drop(kernel, config)
        self.known.add_unable(lost)
        for target in lost:
            self._tell(target, None)

    def _tell(self, target: Target, time_us: float | None) -> None:
        best = self.known.best_us(target)
        self._progress(
            Progress(self.phase, self._backlog.answered, self._backlog.wanted, target, time_us, best)
        )

    # work for the GPUs

    def _dispatch(self) -> None:
        for number, bench in enumerate(self._equipment.benches):
            if bench.busy:
                continue
            item = self._next(number, bench)
            if item is not None:
                bench.busy = True
                bench.device.submit(*item)

    def _next(self, number: int, bench: Bench) -> tuple[object, object] | None:
        request = self._requests.take()
        if request is not None:
            return request
        target, anchor = self._backlog.draw(number), self._ready_anchor()
        if target is None:
            if anchor is None or self._is_waiting() or not bench.is_unsure:
                return None
            return _AnchorTag(number), TimeTask(self._binary(anchor), anchor.m)
        if anchor is not None and bench.is_anchor_due(target, anchor):
            self._backlog.put_back(target)
            return _AnchorTag(number), TimeTask(self._binary(anchor), anchor.m)
        return target, self._time_task(target)

    def _ready_anchor(self) -> Target | None:
        if self._anchor is None or (self._anchor.kernel, self._anchor.config) in self.known.failed:
            return None
        if not self._equipment.benches:
            return None
        task = self._binary(self._anchor)
        if task in self.binaries.compiled:
            return self._anchor
        self._equipment.start().submit([task], priority=-1)
        return None

    def _time_task(self, target: Target) -> TimeTask:
        best, task = self.known.best_us(target), self._binary(target)
        if best is None:
            return TimeTask(task, target.m)
        return TimeTask(task, target.m, give_up_us=HOPELESS * best, clear_us=CLEAR * best)

    def _binary(self, target: Target) -> CompileTask:
        task = self.task_of(target)
        assert isinstance(task, CompileTask)
        return task
