"""What a GPU says of config files: right numbers, and the time against the server's default, interleaved.

Nothing is taken from the journal of a tuning run: verifying has a journal of its own for each problem,
GPU and seed, with data and routings that the tuning has not seen.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moetune.applications.journal import Journal, state_root
from moetune.applications.live import Live, LiveWatch
from moetune.applications.measuring import Laboratory
from moetune.applications.questions import check_target, time_layer
from moetune.applications.routing_store import kept_for
from moetune.applications.server_kernels import choose_kernel
from moetune.applications.targets import Progress, targets_of
from moetune.applications.tuning_finals import NOISE_FLOOR, other_routing
from moetune.applications.verify_answer import Entry, GpuPart, Looked, Numerics, Pick, Verdict, VerifyRequest
from moetune.applications.worker_pool import WorkerCommand
from moetune.domain.choose import Pair
from moetune.domain.codec import from_json
from moetune.domain.compilation import compile_task
from moetune.domain.errors import ConfigFileError, MoetuneError
from moetune.domain.problem import KERNELS
from moetune.domain.recording import PREFIX
from moetune.measure.protocol import DeviceFacts
from moetune.measure.timing import median_spread

if TYPE_CHECKING:
    from moetune.applications.compiling import CompilePool
    from moetune.applications.nvml import Device
    from moetune.domain.problem import Kernel, Problem
    from moetune.domain.server_kernel import KernelFile
    from moetune.measure.protocol import LayerTimed

_ROUNDS, _SKEWED_ROUNDS = 15, 9
"""Samples of each contestant under the uniform and under the skewed routing."""
_SEED_STEP = 104_729
"""Keeps the seeds of verifying apart from those of tuning, which are small."""


def measure(
    request: VerifyRequest,
    looked: Looked,
    devices: Sequence[Device],
    environ: Mapping[str, str],
    *,
    command: WorkerCommand | None = None,
    pool: CompilePool | None = None,
    live: Callable[[Live], None] | None = None,
) -> tuple[GpuPart, tuple[Entry, ...]]:
    """Measure the entries of a pair of files on GPUs of their kind.

    Raises:
        MoetuneError: when the GPU is lost, or even the server's default computes wrong numbers; what was
            measured is in the journal.
    """
    assert looked.problem is not None
    problem = replace(looked.problem, gpu=devices[0].gpu)
    recording = kept_for(state_root(request.state, environ), problem)
    lacks_recording = problem.routing.startswith(PREFIX) and recording is None
    if lacks_recording:
        problem = replace(problem, routing="uniform")
    kernel = choose_kernel(
        request.kernel, looked.server, request.python or sys.executable, request.server_files
    )
    problem = replace(problem, kernel_source=kernel.source)
    why = _why_no_kernel(looked, problem, kernel.file)
    if why:
        return GpuPart(reason=why), tuple(Entry(pick, why=why) for pick in looked.picks)
    uuids = [device.uuid for device in devices]
    root = state_root(request.state, environ) / "verify" / f"seed-{request.seed}"
    watch = LiveWatch(uuids[0], live)
    with (
        Journal.open(root, problem, uuids[0]) as journal,
        Laboratory(
            looked.server,
            problem,
            journal,
            [pick.m for pick in looked.picks],
            uuids,
            command=command or (WorkerCommand(python=request.python) if request.python else WorkerCommand()),
            pool=pool,
            seed=_SEED_STEP * (request.seed + 1),
            recording="" if recording is None else str(recording),
            kernel_file=kernel.file,
            progress=watch.see,
        ) as laboratory,
    ):
        measuring = _Measuring(looked, problem, laboratory, watch.see)
        entries = measuring.run()
        facts = laboratory.facts or _known_facts(journal)
        part = GpuPart(
            devices=tuple(device.name for device in devices),
            facts=facts,
            noise=measuring.noise,
            measured=measuring.fresh,
            compilations=laboratory.compilations,
            throttled=tuple(watch.throttled),
            journal=str(journal.path),
            remarks=tuple(_remarks(looked, facts, lacks_recording)),
            kernel=kernel,
        )
    return part, entries


def _why_no_kernel(looked: Looked, problem: Problem, kernel_file: KernelFile | None) -> str:
    """Why the kernel cannot be launched for this problem; empty when it can."""
    m = looked.picks[0].m
    default = looked.server.default_config(problem, "up", m)
    task = compile_task(looked.server.launch(problem, "up", default), problem, kernel_file=kernel_file)
    return f"cannot measure this problem: {task}" if isinstance(task, str) else ""


def _known_facts(journal: Journal) -> DeviceFacts | None:
    """The GPU and software of the run that filled the journal."""
    line = next((line for line in reversed(journal.lines) if line.get("kind") == "device"), None)
    return None if line is None else from_json(DeviceFacts, line, str(journal.path))


def _remarks(looked: Looked, facts: DeviceFacts | None, lacks_recording: bool) -> Iterator[str]:
    wanted = looked.server.triton_version
    if facts is not None and not facts.triton.startswith(wanted):
        yield f"measured with Triton {facts.triton}, the server's is {wanted}"
    if lacks_recording:
        yield (
            "the recorded routing that it was tuned for is not kept here, or of another model: "
            "measured under a uniform one"
        )


@dataclass(frozen=True, slots=True)
class _Contest:
    """A pick with the pairs that meet: as the server launches them."""

    pick: Pick
    pair: Pair | None
    default: Pair | None
    why: str = ""


class _Measuring:
    """One pair of files in a laboratory."""

    def __init__(
        self,
        looked: Looked,
        problem: Problem,
        laboratory: Laboratory,
        tell: Callable[[Progress], None],
    ) -> None:
        self._server, self._problem, self._lab, self._tell = looked.server, problem, laboratory, tell
        self._contests = [self._contest(pick) for pick in looked.picks]
        self._known = len(laboratory.known.checks) + len(laboratory.known.layers)
        self.noise = NOISE_FLOOR

    @property
    def fresh(self) -> int:
        """What was measured in this run: launches, numbers and layers."""
        lab = self._lab
        return lab.measured + len(lab.known.checks) + len(lab.known.layers) - self._known

    def run(self) -> tuple[Entry, ...]:
        """Find what cannot run, then what is wrong, then what is slow."""
        lab = self._lab
        lab.enter("each kernel alone")
        lab.want(
            target
            for contest in self._contests
            for pair in (contest.default, contest.pair)
            if pair is not None
            for target in targets_of(contest.pick.m, pair)
        )
        lab.run()
        lab.enter("numerics")
        entries = [self._checked(contest) for contest in self._watched()]
        lab.enter("the layer, beside the default")
        races = [self._race(contest, entry) for contest, entry in zip(self._watched(), entries, strict=True)]
        noises = [race.noise for race in races if race is not None and race.noise is not None]
        self.noise = max(NOISE_FLOOR, statistics.median(noises)) if noises else NOISE_FLOOR
        return tuple(
            entry if race is None else _judged(entry, race, self.noise)
            for entry, race in zip(entries, races, strict=True)
        )

    def _watched(self) -> Iterator[_Contest]:
        """The contests one after another, told to whoever watches."""
        for number, contest in enumerate(self._contests):
            self._tell(Progress(self._lab.phase, number, len(self._contests)))
            yield contest

    def _contest(self, pick: Pick) -> _Contest:
        default = self._as_launched(
            Pair(*(self._server.default_config(self._problem, kernel, pick.m) for kernel in KERNELS))
        )
        pair = self._as_launched(Pair(pick.up, pick.down))
        if isinstance(pair, str):
            return _Contest(pick, None, None if isinstance(default, str) else default, pair)
        return _Contest(pick, pair, None if isinstance(default, str) else default)

    def _as_launched(self, pair: Pair) -> Pair | str:
        """A pair with the server's overrides applied, or what the server dies of."""
        try:
            up = self._server.launch(self._problem, "up", pair.up).config
            return Pair(up, self._server.launch(self._problem, "down", pair.down, pair.up).config)
        except ConfigFileError as error:
            return error.message

    def _checked(self, contest: _Contest) -> Entry:
        """The entry as far as it can run and computes the right numbers; NOT_MEASURED: both hold."""
        entry, m = Entry(contest.pick), contest.pick.m
        if contest.pair is None:
            return replace(entry, verdict=Verdict.CANNOT_RUN, why=f"the launch fails: {contest.why}")
        for target in targets_of(m, contest.pair):
            if why := self._lab.binaries.why_wrong(target):
                return replace(entry, verdict=Verdict.WRONG, why=f"{target.kernel}: {why}")
            task = self._lab.task_of(target)
            if isinstance(task, str):
                return replace(entry, why=f"{target.kernel}: {task}")
        numerics = []
        for target in targets_of(m, contest.pair):
            checked = None
            if (target.kernel, target.config) not in self._lab.known.failed:
                checked = check_target(self._lab, target)
            if checked is None:
                why = self._lab.known.failed.get(
                    (target.kernel, target.config), "its numbers could not be compared"
                )
                return replace(entry, verdict=Verdict.CANNOT_RUN, why=f"{target.kernel}: {why}")
            numerics.append(Numerics(target.kernel, checked.relative_error, checked.tolerance))
        entry = replace(entry, numerics=tuple(numerics))
        wrong = [one for one in numerics if not one.passed]
        if not wrong:
            return entry
        self._trust_default(contest, wrong[0].kernel)
        parts = [f"{one.kernel} is off by {one.relative_error:.2g}, not {one.tolerance:.2g}" for one in wrong]
        return replace(entry, verdict=Verdict.WRONG, why="; ".join(parts))

    def _trust_default(self, contest: _Contest, kernel: Kernel) -> None:
        """Wrong numbers are the entry's fault only where the server's default computes right ones.

        Raises:
            MoetuneError: when it does not.
        """
        if contest.default is None:
            return
        up, down = targets_of(contest.pick.m, contest.default)
        checked = check_target(self._lab, up if kernel == "up" else down)
        if checked is not None and not checked.passed:
            raise MoetuneError(
                f"at m={contest.pick.m} even the default computes wrong numbers here: nothing can be trusted",
                "look at the journal, and report it",
            )

    def _race(self, contest: _Contest, entry: Entry) -> _Race | None:
        """The pair against the default, twice there for the noise; None: there is nothing to time."""
        pair, default, m = contest.pair, contest.default, contest.pick.m
        if pair is None or entry.verdict is not Verdict.NOT_MEASURED or entry.why:
            return None
        if default is None or self._failed(default):
            return self._alone(m, pair)
        if default.up.block_size_m != default.down.block_size_m:
            return _Race(why="the server's default is no pair of one BLOCK_SIZE_M")
        if pair == default:
            timed = time_layer(self._lab, m, (default, default), self._problem.routing, _ROUNDS)
            return _Race(why="the layer failed: see the journal") if timed is None else _same(timed)
        contestants = (default, pair, default)
        main = self._problem.routing
        uniform = time_layer(self._lab, m, contestants, main, _ROUNDS)
        skewed = time_layer(self._lab, m, contestants, other_routing(main), _SKEWED_ROUNDS)
        if uniform is None or skewed is None:
            return _Race(why="the layer failed: see the journal")
        return replace(
            _raced(uniform, skewed),
            other="uniform" if main != "uniform" else f"skewed ({other_routing(main)})",
        )

    def _alone(self, m: int, pair: Pair) -> _Race:
        timed = time_layer(self._lab, m, (pair,), self._problem.routing, _ROUNDS)
        if timed is None:
            return _Race(why="the layer failed: see the journal")
        return _Race(file_us=statistics.median(timed.samples_us[0]), why="the default cannot run")

    def _failed(self, pair: Pair) -> bool:
        """Whether a pair cannot run as far as is known."""
        return ("up", pair.up) in self._lab.known.failed or ("down", pair.down) in self._lab.known.failed


@dataclass(frozen=True, slots=True)
class _Race:
    """What came of the layer at one m. Without a default's time the file ran alone.

    Attributes:
        noise: what two runs of the default differed by.
        skewed: ratio and spread under the other routing.
        other: that routing.
        is_default: the file has the default's own pair.
        why: what is missing.
    """

    file_us: float | None = None
    default_us: float | None = None
    ratio: float | None = None
    spread: float | None = None
    noise: float | None = None
    skewed: tuple[float, float] | None = None
    other: str = ""
    is_default: bool = False
    why: str = ""


def _raced(uniform: LayerTimed, skewed: LayerTimed) -> _Race:
    ratio, spread = _ratio(uniform, 1, (0, 2))
    noise, _ = _ratio(uniform, 2, (0,))
    default_us = statistics.median([*uniform.samples_us[0], *uniform.samples_us[2]])
    return _Race(ratio * default_us, default_us, ratio, spread, abs(noise - 1), _ratio(skewed, 1, (0, 2)))


def _same(timed: LayerTimed) -> _Race:
    noise, _ = _ratio(timed, 1, (0,))
    default_us = statistics.median([*timed.samples_us[0], *timed.samples_us[1]])
    return _Race(default_us, default_us, 1.0, 0.0, abs(noise - 1), is_default=True)


def _ratio(timed: LayerTimed, place: int, base: Sequence[int]) -> tuple[float, float]:
    """A contestant over the base, the median of the ratios within each round, and its spread."""
    rows = timed.samples_us
    ratios = [
        rows[place][turn] / statistics.fmean(rows[other][turn] for other in base)
        for turn in range(len(rows[place]))
    ]
    return statistics.median(ratios), median_spread(ratios)


def _judged(entry: Entry, race: _Race, noise: float) -> Entry:
    """The entry with what the race says: a difference must exceed the noise and its own spread."""
    entry = replace(
        entry,
        default_us=race.default_us,
        file_us=race.file_us,
        ratio=race.ratio,
        spread=race.spread,
        skewed_ratio=race.skewed[0] if race.skewed else None,
        why=race.why,
    )
    if race.file_us is None:
        return entry
    if race.ratio is None or race.spread is None or race.noise is None:
        return replace(entry, verdict=Verdict.FASTER)
    bar = max(noise, race.noise, race.spread)
    entry = replace(entry, noise=bar)
    if race.is_default:
        return replace(entry, verdict=Verdict.SAME, why="it is the default's own config")
    if race.ratio > 1 + bar:
        return replace(entry, verdict=Verdict.SLOWER)
    if race.skewed is not None and race.skewed[0] > 1 + max(bar, 2 * NOISE_FLOOR, race.skewed[1]):
        return replace(entry, verdict=Verdict.SLOWER, why=f"under a {race.other} routing")
    return replace(entry, verdict=Verdict.FASTER if race.ratio < 1 - bar else Verdict.SAME)
