"""`moetune uninstall`: brings back what was there before, and leaves what was changed since."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moetune.cli.install import QUIET, STATE
from moetune.cli.options import sink_from, with_options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moetune.applications.uninstalling import Uninstalled
    from moetune.cli.output import Sink

_SHOWN = 24  # files of an install; what is left is always named

_EPILOG = """\b
Examples:
  moetune uninstall
  moetune uninstall i0123456789ab
  moetune uninstall image/moe-configs
  moetune uninstall e0123456789ab

\b
Exit codes: 0 taken back; 1 everything was changed since, and left; 2 it could not be done."""


@click.command(epilog=_EPILOG)
@click.argument("what", required=False, metavar="[ID|PATH|RUN]")
@click.option(
    "--root",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Change this directory, although no server reads it here.",
)
@click.option("--all", is_flag=True, help="Everything that is installed.")
@click.option("--forget", is_flag=True, help="Drop the record also of what is left because it was changed.")
@click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
@with_options(STATE, *QUIET)
def uninstall(dry_run: bool, **values: Any) -> int:  # noqa: ANN401 - click's values
    """Bring back the files, with their times and modes, that were there before `moetune install`. What
    was changed since, as by an upgrade of the server, is left as it is and named.

    ID is the name of an install; PATH a directory, a file in it, or what was installed; RUN the name of
    an experiment, whose state before is brought back. Without any the only install there is.
    """  # noqa: D205 - one sentence is the help text
    sink = sink_from(values)
    from moetune.applications.experiments.record import is_experiment_id

    if is_experiment_id(values["what"] or ""):
        how = {"dry_run": dry_run, "forget": values["forget"]}
        return _take_experiment_back(sink, values["what"], values["state"], how)
    from moetune.applications.uninstalling import UninstallRequest
    from moetune.applications.uninstalling import uninstall as run

    answer = run(UninstallRequest(**values), dry_run=dry_run)
    _show(sink, answer)
    sink.document(answer.to_json())
    return 0 if answer.did_something else 1


def _take_experiment_back(sink: Sink, name: str, state: Path | None, how: Mapping[str, bool]) -> int:
    from moetune.applications.experiments.taking_back import take_experiment_back
    from moetune.applications.state import state_path

    answer = take_experiment_back(state_path(state, os.environ), name, os.environ, **how)
    for text in answer.ended:
        sink.note(f"a server that an interrupted call had left was ended: {text}")
    for one in answer.uninstalled:
        _show(sink, one)
    if answer.arm:
        sink.note("the config files of an arm that was interrupted were taken back")
    for text in answer.changed:
        sink.warning(f"not as before the experiment: {text}")
    said = "nothing was changed: --dry-run" if answer.dry_run else f"the state before {name} is back"
    sink.heading(
        said if not answer.changed else f"the state before {name} is back but for what is named above"
    )
    sink.fields([("start with", answer.command)])
    sink.document(answer.to_json())
    return 0 if not answer.left else 1


def _show(sink: Sink, answer: Uninstalled) -> None:
    from moetune.applications.provenance import SUFFIX

    if answer.recovered is not None:
        done = "completed" if answer.recovered.completed else "not begun, and dropped"
        sink.note(f"an interrupted {answer.recovered.action} in {answer.recovered.root} was {done}")
    for one in answer.removals:
        sink.heading(f"{one.install.id} in {one.install.root}")
        shown = [(outcome.value, path) for path, outcome in one.outcomes.items() if not path.endswith(SUFFIX)]
        sink.fields(shown[:_SHOWN])
        if len(shown) > _SHOWN:
            sink.fields([("likewise", f"{len(shown) - _SHOWN} more files: --json lists all")])
        for path, outcome in one.outcomes.items():
            if outcome.value == "left":
                sink.warning(f"{path} is {one.standings[path].value}, and left as it is")
    if answer.left:
        sink.note("--forget drops the record of what was left")
    if answer.dry_run:
        sink.heading("nothing was changed: --dry-run")
