"""What `plan` tells of the bound on end-to-end gain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from moetune.cli.output import Prose
from moetune.cli.tables import Column, Table

if TYPE_CHECKING:
    from moetune.applications.at_most import AtMost, PhaseBound
    from moetune.cli.output import Sink

_KINDS = {
    "traced": "shares measured in the trace, distances from the best predicted",
    "estimated": "an ESTIMATE: step times of the log, kernel times predicted",
}


def show_bound(sink: Sink, bound: AtMost) -> None:
    """The steps of a trace or a log, and what tuning can give at most."""
    sink.line()
    sink.heading(f"at most: {bound.source}")
    sink.fields([("kind", Prose(_KINDS[bound.kind]))])
    if bound.phases:
        columns = (
            Column("steps"),
            Column("of them", right=True),
            Column("m", right=True),
            Column("step us", right=True),
            Column("up us", right=True),
            Column("down us", right=True),
            Column("share", right=True),
            Column("default/best", right=True),
            Column("saves at most", right=True),
        )
        sink.table(Table(columns, tuple(_row(phase) for phase in bound.phases)))
    sink.fields(_fields(bound))


def _row(phase: PhaseBound) -> tuple[str, ...]:
    return (
        phase.phase,
        str(phase.steps),
        "?" if phase.m is None else str(phase.m),
        f"{phase.wall_us:.0f}",
        _us(phase.up_us),
        _us(phase.down_us),
        _percent(phase.share),
        "?" if phase.speedup is None else f"{phase.speedup:.2f}",
        _percent(phase.saved_at_most),
    )


def _fields(bound: AtMost) -> Iterator[tuple[str, str]]:
    runners = ", ".join(f"{runner} {_percent(part)}" for runner, part in bound.runners)
    if runners and bound.kind == "traced":
        yield "runners", Prose(f"of the MoE kernels' time: {runners}")
    if bound.phases:
        yield (
            "were it free",
            Prose(
                f"{_percent(bound.saved_if_free)} of the time is in the MoE kernels: no tuning can save more"
            ),
        )
    if bound.saved is not None and bound.saved_at_most is not None and bound.phases:
        saved, at_most = _percent(bound.saved), _percent(bound.saved_at_most)
        yield "predicted", Prose(f"{saved} of the time saved, {at_most} with the model's error")
    yield "answer", Prose(bound.reason)
    for problem in bound.problems:
        yield "beware", Prose(problem)


def _us(time_us: float | None) -> str:
    return "?" if time_us is None else f"{time_us:.0f}"


def _percent(part: float | None) -> str:
    return "?" if part is None else f"{100 * part:.1f}%"
