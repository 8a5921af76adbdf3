"""`moetune status`: what is installed where, whether it stands, and whether the server finds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from moetune.cli.install import QUIET, STATE
from moetune.cli.options import sink_from, with_options
from moetune.cli.output import Prose

if TYPE_CHECKING:
    from moetune.applications.experiments.standing import ExperimentStatus
    from moetune.applications.installs import InstallStatus, Status
    from moetune.cli.output import Sink

_SHOWN = 24  # files that are as they should be; others are all shown

_EPILOG = """\b
Exit codes: 0 all stands as it was installed, and the server's lookup finds it; 1 something
does not; 2 it could not be looked at."""


@click.command(epilog=_EPILOG)
@with_options(STATE, *QUIET)
@click.option("--exit-zero", is_flag=True, help="Exit with 0 where the answer is no (1).")
def status(exit_zero: bool, **values: Any) -> int:  # noqa: ANN401 - click's values
    """List what is installed where, by which install, whether it is still what moetune wrote, and
    whether the lookup of the server that is here now still finds it.
    """  # noqa: D205 - one sentence is the help text
    sink = sink_from(values)
    from moetune.applications.installs import status as run

    answer = run(values["state"])
    _show(sink, answer)
    sink.document(answer.to_json())
    return 0 if answer.fine or exit_zero else 1


def _show(sink: Sink, answer: Status) -> None:
    if answer.recovered is not None:
        done = "completed" if answer.recovered.completed else "not begun, and dropped"
        sink.note(f"an interrupted {answer.recovered.action} in {answer.recovered.root} was {done}")
    if answer.pending:
        sink.warning(f"an interrupted command could not be completed: {answer.pending}")
    for experiment in answer.experiments:
        _show_experiment(sink, experiment)
    if not answer.installs:
        sink.line("nothing is installed, as far as is recorded")
        sink.fields([("records", str(answer.state))])
    for one in answer.installs:
        _show_install(sink, one)
        sink.line()


def _show_experiment(sink: Sink, one: ExperimentStatus) -> None:
    sink.heading(f"experiment {one.id}: {one.standing}")
    go_on = "go on" if one.standing == "half-way" else "take it back"
    starts = f"{one.starts} starts are finished" if one.starts else ""
    sink.fields([("plan", one.name), ("starts", starts), ("stopped", Prose(one.note)), (go_on, one.next)])
    sink.line()


def _show_install(sink: Sink, one: InstallStatus) -> None:
    from moetune.applications.provenance import SUFFIX

    install = one.install
    sink.heading(f"{install.id} in {install.root}")
    sink.fields(
        [
            ("for", f"{install.server} {install.server_version}, Triton {install.triton_version}"),
            ("from", ", ".join(install.sources)),
            ("asked", one.server),
            ("not asked", Prose(one.note)),
        ]
    )
    good = [entry for entry in one.entries if entry.standing.value == "intact" and one.finds(entry)]
    hushed = {entry.path for entry in good[_SHOWN:]}
    for entry in one.entries:
        is_provenance = entry.path.endswith(SUFFIX)
        if entry.path in hushed or (is_provenance and entry.standing.value == "intact"):
            continue
        says = "" if entry.lookup is None else f"; lookup: {entry.lookup.outcome.value}"
        said = "; found" if one.finds(entry) else says
        sink.fields([(entry.standing.value, entry.path + ("" if is_provenance else said))])
    if hushed:
        sink.fields([("intact", f"and found: {len(hushed)} more files")])
