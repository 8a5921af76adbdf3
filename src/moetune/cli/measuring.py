"""What `moetune tune` shows and asks where it measures: options, the live line, the table."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moetune.applications.server_kernels import AUTO, CHOICES
from moetune.cli.options import exit_code, request_from
from moetune.cli.output import Prose, clean
from moetune.cli.tables import Column, Table
from moetune.domain.choose import Reason
from moetune.domain.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from moetune.applications.live import Live
    from moetune.applications.measured_answer import MeasuredTuning
    from moetune.applications.tuning_finals import LayerResult
    from moetune.cli.output import Sink
    from moetune.domain.choose import Choice

PREDICT = "predict"
EFFORTS = (PREDICT, "quick", "full", "exhaustive")

EFFORT = click.option(
    "--effort",
    type=click.Choice(EFFORTS),
    help="predict: no GPU is needed. quick, full: measure on the GPU here, well under a minute or "
    "three. exhaustive: every config of the grid. [default: quick where a GPU and Triton are here "
    "and no --gpu is named, else predict]",
)
KERNEL = (
    click.option(
        "--kernel",
        type=click.Choice(CHOICES),
        help="Whose kernel is timed: the server's that is installed where is measured, or moetune's own. "
        "[default: auto: the server's where it is there in the version that is tuned for]",
    ),
    click.option(
        "--server-files",
        metavar="DIR",
        type=click.Path(path_type=Path),
        help="Time the kernel in a folder that a server's wheel was unpacked into. Its kernel functions are "
        "compiled and run; name only a folder that you trust.",
    ),
)
MEASURE = (
    click.option("--budget", type=float, metavar="SECONDS", help="Wall clock of measuring."),
    click.option("--devices", metavar="N,...", help="Numbers of the GPUs that share the work. [default: 0]"),
    click.option("--only", type=click.Choice(["up", "down"]), help="Search this kernel alone."),
    click.option(
        "--python",
        metavar="PATH",
        help="Measure with this interpreter: that of the server's environment. [default: this one]",
    ),
    click.option(
        "--routing",
        metavar="ROUTING",
        help="uniform, zipf:S, or the files of a recording: a directory of topk_ids_layer*.pt, or a dump of "
        "SGLang's recorder. [default: uniform]",
    ),
    *KERNEL,
    click.option("--share-gpu", is_flag=True, help="Measure although something else computes on the GPU."),
)
_SHOWN_FAILURES = 8
_NAMES = ("budget", "devices", "kernel", "only", "python", "routing", "server_files", "share_gpu")


def take_measure(values: dict[str, Any]) -> dict[str, Any]:
    """Take the options of measuring out of the values."""
    taken = {name: values.pop(name) for name in _NAMES}
    taken["devices"] = parse_devices(taken["devices"])
    return taken


def parse_devices(text: str | None) -> tuple[int, ...]:
    """Numbers of GPUs from `0,1`; none from nothing.

    Raises:
        InputError: for what names no GPUs.
    """
    if not text:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 5 for part in parts):
        raise InputError(f"--devices {clean(text)[:40]} names no GPUs", "give their numbers, as in 0,1")
    return tuple(map(int, parts))


def chosen_effort(effort: str | None, gpu_names: tuple[str, ...], measure: Mapping[str, Any]) -> str:
    """The effort that is meant where none is given.

    Raises:
        InputError: when options of measuring stand beside `predict`.
    """
    asks = any(measure[name] for name in _NAMES)
    if effort is None:
        effort = "quick" if asks or (not gpu_names and _can_measure()) else PREDICT
    if effort == PREDICT and asks:
        given = ", ".join(f"--{name.replace('_', '-')}" for name in _NAMES if measure[name])
        raise InputError(f"{given} say how to measure, and predicting measures nothing", "add --effort quick")
    return effort


def _can_measure() -> bool:
    if any(importlib.util.find_spec(name) is None for name in ("torch", "triton")):
        return False
    from moetune.applications.nvml import detect_gpus

    return bool(detect_gpus().devices)


def measure_and_show(
    sink: Sink, effort: str, measure: dict[str, Any], values: dict[str, Any]
) -> MeasuredTuning:
    """Measure, and show the plan, the table and the files."""
    from moetune.applications.measure_request import MeasureRequest
    from moetune.applications.routing_store import UNIFORM
    from moetune.applications.tuning_measured import tune_measured
    from moetune.cli.report import show_plan

    measure["routing"] = measure["routing"] or UNIFORM
    measure["kernel"] = measure["kernel"] or AUTO
    request = request_from({**values, **measure, "effort": effort}, MeasureRequest)
    line = LiveLine(sink)
    try:
        tuned = tune_measured(request, live=line.show)
    finally:
        line.clear()
    show_plan(sink, tuned.plan)
    _show(sink, tuned)
    return tuned


def measured_exit_code(tuned: MeasuredTuning, exit_zero: bool) -> int:
    """0: something is gained; 1: nothing beats the default by more than the noise."""
    return exit_code(tuned.gains, exit_zero)


class LiveLine:
    """One line on stderr that is written over; without a terminal a note for each phase.

    Args:
        sink: where notes go.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._phase = ""
        self._width = 0
        self._on_terminal = sys.stderr.isatty()

    def show(self, live: Live) -> None:
        """Show where the run is."""
        progress, health = live.progress, live.health
        if not self._on_terminal:
            if progress.phase != self._phase:
                self._phase = progress.phase
                self._sink.note(f"{live.seconds:6.1f} s  {progress.phase}")
            return
        parts = [f"{progress.phase}  {progress.answered}/{progress.wanted}"]
        if progress.target is not None:
            parts.append(f"{progress.target.kernel} m={progress.target.m}")
        if progress.best_us is not None:
            parts.append(f"best {progress.best_us:.1f} us")
        if health.clock_mhz is not None:
            parts.append(f"{health.clock_mhz} MHz")
        if health.temperature_c is not None:
            parts.append(f"{health.temperature_c} C")
        parts += [f"slowed by {reason}" for reason in health.throttled]
        text = clean("  ".join([*parts, f"{live.seconds:.0f} s"]))[:110]
        sys.stderr.write("\r" + text.ljust(self._width))
        sys.stderr.flush()
        self._width = len(text)

    def clear(self) -> None:
        """Make room for what comes next."""
        if self._on_terminal and self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()


def _show(sink: Sink, tuned: MeasuredTuning) -> None:
    from moetune.applications.routing_store import UNIFORM
    from moetune.cli.report import show_use, show_written

    measured = tuned.measured
    sink.line()
    if tuned.nothing_left:
        sink.heading("nothing is left to measure: all of this is in the journal")
    problem = tuned.plan.gpus[0].problem
    routing = problem.routing if problem is not None else UNIFORM
    kind = "new routings" if routing == UNIFORM else f"new routings ({routing})"
    sink.line(f"  measured: microseconds of one launch, weights cold, {kind}; the layer interleaved")
    sink.table(_table(tuned, routing))
    sink.fields(_summary(tuned))
    for name, why in list(measured.failed.items())[:_SHOWN_FAILURES]:
        sink.note(f"failed: {name}: {why}")
    if len(measured.failed) > _SHOWN_FAILURES:
        sink.note(f"{len(measured.failed) - _SHOWN_FAILURES} more failed: see the journal")
    sink.line()
    if not tuned.files:
        sink.heading("nothing was written")
        return
    show_written(sink, tuned.files, "measured")
    show_use(sink, tuned)


def _table(tuned: MeasuredTuning, routing: str) -> Table:
    measured = tuned.measured
    configs = ("up and down",) if measured.choices.one_file else ("up", "down")
    columns = (
        Column("m", right=True),
        *(Column(heading) for heading in configs),
        Column("default us", right=True),
        Column("tuned us", right=True),
        Column("gain", right=True),
        Column("layer", right=True),
        Column("skewed" if routing == "uniform" else "uniform", right=True),
        Column("rate", right=True),
        Column("of peak", right=True),
    )
    rows = (_row(tuned, choice) for choice in measured.choices.entries)
    return Table(columns, tuple(rows))


def _row(tuned: MeasuredTuning, choice: Choice) -> tuple[str, ...]:
    measured = tuned.measured
    pair = (choice.pair.up,) if measured.choices.one_file else (choice.pair.up, choice.pair.down)
    default = "cannot run" if choice.default_us is None else f"{choice.default_us:.1f}"
    layer = measured.layers.get(choice.m)
    return (
        str(choice.m),
        *map(str, pair),
        default,
        f"{choice.time_us:.1f}",
        _gain(choice),
        _ratio(layer, "uniform_ratio"),
        _ratio(layer, "zipf_ratio"),
        *_rate(tuned, choice),
    )


def _rate(tuned: MeasuredTuning, choice: Choice) -> tuple[str, str]:
    from moetune.applications.rates import rate

    problem = tuned.plan.gpus[0].problem
    assert problem is not None
    found = rate(problem, choice.m, choice.time_us, tuned.measured.peaks)
    text = f"{found.gbps:.0f} GB/s" if found.limit == "memory" else f"{found.tflops:.0f} TFLOP/s"
    return text, "-" if found.share is None else f"{found.share:.0%}"


def _gain(choice: Choice) -> str:
    if choice.speedup is None:
        return "-"
    return "default" if choice.reason is Reason.DEFAULT_KEPT else f"{choice.speedup:.2f}x"


def _ratio(layer: LayerResult | None, name: str) -> str:
    value = None if layer is None else getattr(layer, name)
    return f"{1 / value:.2f}x" if value else "-"


def _summary(tuned: MeasuredTuning) -> Iterator[tuple[str, str]]:
    measured = tuned.measured
    if not measured.choices.improves:
        yield "gain", Prose(f"none: nothing beats the server's default by more than {measured.noise:.1%}")
    elif measured.gain is not None:
        layer = f", {measured.layer_gain:.3f}x through the layer" if measured.layer_gain else ""
        yield "gain", Prose(f"geometric mean {measured.gain:.3f}x over the server's default{layer}")
    yield (
        "noise",
        Prose(f"{measured.noise:.1%} between two runs of the default, {measured.spread:.1%} in one"),
    )
    configs = ", ".join(f"{count} {kernel}" for kernel, count in measured.configs.items())
    times = f"{measured.measured} times in {tuned.seconds:.1f} s, {measured.known} known before"
    yield "measured", Prose(f"{times}; {configs} configs")
    yield "kernel", Prose(tuned.kernel.text)
    worst = max((item.relative_error / item.tolerance for item in measured.numerics), default=None)
    if worst is not None:
        compared = f"{len(measured.numerics)} configs against an fp32 reference"
        yield "numerics", Prose(f"{compared}, at most {worst:.0%} of the tolerance")
    if measured.compilations:
        yield "beware", Prose(f"{measured.compilations} kernels were compiled while measuring")
    for remark in tuned.routing_remarks:
        yield "routing", Prose(remark)
    if measured.drifts:
        yield "beware", Prose(f"the GPU's speed changed by over 2% {len(measured.drifts)} times; repeated")
    if tuned.throttled:
        yield "beware", Prose(f"the GPU was slowed by {' and '.join(tuned.throttled)} at times")
    if not measured.complete:
        yield "budget", Prose("ended the search; run the same command again and it goes on")
    if measured.shortfalls:
        ms = ", ".join(map(str, measured.shortfalls))
        yield "shortfall", Prose(f"the default was faster at m = {ms}")
    yield "journal", str(tuned.journal)
    if tuned.landscape is not None:
        yield "landscape", str(tuned.landscape)
