"""`moetune experiment`: arms of a real server under real load, verdicts, and the known-good state back."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moetune.cli.experiment_view import View
from moetune.cli.install import QUIET, STATE
from moetune.cli.options import sink_from, with_options
from moetune.cli.output import Prose
from moetune.cli.tables import Column, Table
from moetune.domain.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moetune.applications.experiments.outlook import Outlook
    from moetune.applications.experiments.report import Report
    from moetune.cli.output import Sink

_SHOWN_STARTS = 40

_EPILOG = """\b
Examples:
  moetune experiment evening.toml --suggest Qwen/Qwen3.5-122B-A10B --tp 4 --gpu "NVIDIA H200"
  moetune experiment evening.toml --dry-run
  moetune experiment evening.toml
  moetune experiment evening.toml --markdown evening.md

\b
Exit codes: 0 something helped, and stands; 1 nothing helped; 2 it could not run; 130 interrupted.
The same command goes on where it stopped; `moetune uninstall RUN` takes all of it back."""


@click.command(epilog=_EPILOG)
@click.argument("plan", metavar="PLAN", type=click.Path(path_type=Path))
@click.option("--dry-run", is_flag=True, help="Show arms, commands, schedule and time; start nothing.")
@click.option(
    "--markdown", metavar="FILE", type=click.Path(path_type=Path), help="Also write a page to share."
)
@click.option("--suggest", metavar="MODEL", help="Write PLAN, with the arms worth trying for a model.")
@click.option("--server", metavar="NAME", help="To suggest for: sglang or vllm. [default: the installed]")
@click.option("--server-version", default="", metavar="X.Y.Z", help="Its release. [default: the installed]")
@click.option("--gpu", metavar="NAME", help="To suggest for. [default: this machine's]")
@click.option("--tp", type=int, default=1, show_default=True, help="Tensor-parallel size to suggest for.")
@click.option("--offline", is_flag=True, help="Never ask the network for the model to suggest for.")
@with_options(STATE, *QUIET)
@click.option("--exit-zero", is_flag=True, help="Exit with 0 where the answer is no (1).")
def experiment(
    plan: Path,
    dry_run: bool,
    markdown: Path | None,
    suggest: str | None,
    exit_zero: bool,
    **values: Any,  # noqa: ANN401 - click's values
) -> int:
    """Try config files, flags and variables on a real server under real load: the known-good server
    against itself, each intervention alone against it, then all that helped together.

    PLAN is a TOML file: docs/experiment-plan.md. It is run as code: its commands are started. Only what
    helped is left in place; flags are printed, never written into a script.
    """  # noqa: D205 - one sentence is the help text
    sink = sink_from(values)
    asked = {name: values.pop(name) for name in ("server", "server_version", "gpu", "tp", "offline")}
    if suggest is not None:
        return _suggest(sink, plan, suggest, asked)
    from moetune.applications.experiments.experiment import look_ahead, run_experiment

    if dry_run:
        outlook = look_ahead(plan, values["state"], os.environ)
        _show_outlook(sink, outlook)
        sink.document(outlook.to_json())
        return 0
    view = View(sink)
    try:
        report = run_experiment(plan, values["state"], os.environ, view)
    except KeyboardInterrupt:
        # click would first write to a terminal that may be gone, and die of that.
        raise click.Abort from None
    finally:
        view.clear()
    show_report(sink, report)
    if markdown is not None:
        from moetune.applications.experiments.report import to_markdown

        _write(markdown, to_markdown(report))
    sink.document(report.to_json())
    return 0 if report.helps or exit_zero else 1


def _write(path: Path, text: str) -> None:
    from moetune.applications.atomic import open_places

    with open_places(path.absolute().parent, [path.name]) as places:
        places.put(path.name, text.encode())


def _suggest(sink: Sink, plan: Path, model: str, asked: Mapping[str, Any]) -> int:
    """Write a plan to start from."""
    from moetune.applications.experiments.suggesting import suggest_plan

    if os.path.lexists(plan):
        raise InputError(f"{plan} is there already", "name another file, or move it away")
    suggestion = suggest_plan(model, **asked)
    _write(plan, suggestion.plan_text)
    sink.heading(f"wrote {plan}: {len(suggestion.arms)} arms, simplest first")
    sink.fields(("arm", name) for name in suggestion.arms)
    sink.fields(("left out", Prose(f"{name}: {why}")) for name, why in suggestion.left_out)
    sink.fields([("then", shlex.join(["moetune", "experiment", str(plan), "--dry-run"]))])
    sink.document(suggestion.to_json())
    return 0


def _show_outlook(sink: Sink, outlook: Outlook) -> None:
    from moetune.applications.experiments.progress import spoken

    sink.heading(f"{outlook.plan.name}: {outlook.id}, nothing is started")
    for one in outlook.arms:
        sink.line()
        sink.heading(f"  {one.name}")
        sink.fields([("command", one.command), *(("configs", path) for path in one.configs)])
    for name, reason in outlook.refused:
        sink.line()
        sink.heading(f"  {name}")
        sink.fields([("refused", Prose(reason))])
    sink.line()
    for problem in outlook.problems:
        sink.warning(problem)
    blocks: dict[int, list[str]] = {}
    for start in outlook.schedule[:_SHOWN_STARTS]:
        blocks.setdefault(start.block, []).append(start.arm)
    sink.fields((f"block {block + 1}", ", ".join(arms)) for block, arms in blocks.items())
    if len(outlook.schedule) > _SHOWN_STARTS:
        sink.fields([("and", f"{len(outlook.schedule) - _SHOWN_STARTS} more starts: --json lists all")])
    size, duration = outlook.size, outlook.duration
    kind = "as measured by an earlier call" if duration.measured else "at most: the limits of the plan"
    wanted = f", of {size.proposed} that the smallest effect needs" if size.planned < size.proposed else ""
    sink.fields(
        [
            ("blocks", Prose(f"{size.planned}{wanted}; arms that are decided earlier stop earlier")),
            ("starts", Prose(f"{outlook.most_starts} at most, {outlook.finished} of them are finished")),
            ("one start", Prose(f"{spoken(duration.start_s)}, {kind}")),
            ("in all", Prose(f"{spoken(outlook.most_seconds)} at most")),
        ]
    )


def show_report(sink: Sink, report: Report) -> None:
    """The table, what stands behind it, and what stays."""
    from moetune.applications.experiments.report import HEADINGS, arm_details, arm_rows

    sink.heading(f"{report.plan.name}: {report.id}")
    if report.noise is not None:
        sink.fields([("noise", Prose(f"{report.noise:.1%} between two starts of the baseline"))])
    sink.line()
    columns = tuple(Column(heading, right=heading == "pairs") for heading in HEADINGS)
    sink.table(Table(columns, arm_rows(report)))
    sink.line()
    sink.line("  ratios to the baseline by paired starts, with intervals; of times, less is better")
    for one in report.judgements:
        details = arm_details(report, one)
        if details:
            sink.line()
            sink.heading(f"  {one.arm}: {one.verdict.value}")
            sink.fields((name, Prose(text)) for name, text in details)
    sink.line()
    for text in report.left_out:
        sink.note(text)
    _show_left(sink, report)


def _show_left(sink: Sink, report: Report) -> None:
    if report.taken_back:
        sink.heading("taken back since: the state is that from before the experiment")
    elif not report.kept:
        sink.heading("nothing helped, and nothing is left in place")
    else:
        sink.heading(f"left in place: {', '.join(report.kept)}")
        if report.installs:
            sink.fields([("files", f"in {report.root}"), ("take it back", f"moetune uninstall {report.id}")])
        sink.fields(report.flags)
        if report.changes_command:
            sink.fields([("start with", report.command)])
        sink.fields(("install far", path) for path in report.far_configs)
    sink.fields([("record", str(report.folder))])
