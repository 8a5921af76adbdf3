"""`moetune install`: puts config files where the server looks, and shows first what that changes."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moetune.cli.options import sink_from, with_options
from moetune.cli.output import Prose
from moetune.cli.tables import Column, Table
from moetune.domain.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moetune.applications.install_plan import InstallRequest, Prepared
    from moetune.applications.installing import Installed
    from moetune.cli.output import Sink

_SHOWN_ROWS, _SHOWN_HIDDEN = 24, 12

_EPILOG = """\b
Examples:
  moetune install moetune-configs
  moetune install moetune-configs --dry-run
  moetune install moetune-configs --root image/moe-configs --server sglang --server-version 0.5.23

\b
Exit codes: 0 the files are there, or were already; 2 they cannot be, and nothing was changed.
`moetune uninstall` takes them back; `moetune status` lists what is installed."""

STATE = click.option(
    "--state",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where backups are kept. [default: MOETUNE_STATE, else the XDG state directory]",
)
QUIET = (
    click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout."),
    click.option("--no-color", is_flag=True, help="No colours; NO_COLOR says the same."),
)
PLACE = (
    click.option(
        "--root",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Install below this directory: needs no server, GPU or answer. "
        "[default: what the server here reads]",
    ),
    click.option("--yes", is_flag=True, help="Do not ask."),
    click.option(
        "--copy-shipped", is_flag=True, help="Also copy in shipped files that the directory would hide."
    ),
)


@click.command(epilog=_EPILOG)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(path_type=Path))
@click.option("--server", metavar="NAME", help="sglang or vllm. [default: as the files or this machine say]")
@click.option("--server-version", metavar="X.Y.Z", help="Its release. [default: the installed, or likewise]")
@click.option("--triton-version", metavar="X.Y.Z", help="Its Triton. [default: the installed, else pinned]")
@with_options(*PLACE, STATE)
@click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
@with_options(*QUIET)
def install(paths: tuple[Path, ...], yes: bool, dry_run: bool, **values: Any) -> int:  # noqa: ANN401 - click's values
    """Put config files where the server will look: into the directory that the server of this
    environment reads, or below --root DIR.

    PATH is a config file or a directory of them, such as `moetune tune --out` writes. What lint calls
    fatal is refused; what is replaced is kept, and `moetune uninstall` brings it back.
    """  # noqa: D205 - one sentence is the help text
    sink = sink_from(values)
    from moetune.applications.install_plan import InstallRequest

    installed = run_install(sink, InstallRequest(paths=paths, **values), yes=yes, dry_run=dry_run)
    sink.document(installed.to_json())
    return 0


def run_install(sink: Sink, request: InstallRequest, *, yes: bool, dry_run: bool = False) -> Installed:
    """Prepare, show, ask and install; also for `moetune tune --install`."""
    from moetune.applications.install_plan import prepare_install
    from moetune.applications.installing import install as run

    prepared = prepare_install(request)
    _show(sink, prepared)
    asked = False
    if prepared.changes_something and not (yes or dry_run or request.root is not None):
        prepared = _ask(sink, prepared)
        asked = True
    installed = run(prepared, dry_run=dry_run, asked=asked)
    _show_done(sink, installed)
    return installed


def check_can_ask(verb: str, *, yes: bool, root: Path | None) -> None:
    """Refuse to go on where a person would have to be asked and none is there."""
    if not (yes or root is not None or (sys.stdin.isatty() and sys.stderr.isatty())):
        raise InputError(
            "there is no terminal to ask, and --yes was not given", f"go ahead with: moetune {verb} --yes"
        )


def _ask(sink: Sink, prepared: Prepared) -> Prepared:
    """Ask for what is shown; the answer may be to copy shipped files in too."""
    from moetune.applications.install_plan import prepare_install

    words = shlex.join(["install", *map(str, prepared.request.files)])
    check_can_ask(words, yes=False, root=None)
    if prepared.checked.hidden and click.confirm(
        f"Copy the {len(prepared.checked.hidden)} shipped files in too?", default=False, err=True
    ):
        prepared = prepare_install(replace(prepared.request, copy_shipped=True))
        sink.line(f"  {len(prepared.copied)} shipped files are copied in too")
    if not click.confirm(f"Install into {prepared.target.root}?", default=False, err=True):
        raise InputError("not installed: the answer was no", "nothing was changed")
    return prepared


def _show(sink: Sink, prepared: Prepared) -> None:
    from moetune.applications.provenance import SUFFIX

    target = prepared.target
    server = target.server
    sink.heading(f"install for {server.name} {server.version}, Triton {server.triton_version}")
    sink.fields([("into", str(target.root)), ("which is", Prose(_PLACES[target.place]))])
    sink.fields(("assumed", Prose(text)) for text in target.assumed)
    copied = set(prepared.copied)
    configs = [one for one in prepared.changes if not one.path.endswith(SUFFIX) and one.path not in copied]
    sink.fields((one.change.value, one.path) for one in configs)
    if copied:
        sink.fields([("copied in", f"{len(copied)} shipped files")])
    beside = [one for one in prepared.changes if one.path.endswith(SUFFIX)]
    if beside:
        sink.fields([("provenance", f"beside {len(beside)} of them, in *{SUFFIX}")])
    for one in configs:
        if one.diff:
            sink.line()
            _show_diff(sink, one.path, one.diff)
    for note in prepared.notes:
        sink.note(note)
    for found in prepared.checked.remarks:
        sink.warning(f"{found.code.code} {found.code.severity.value}: {found.message} ({found.where})")
    hidden = prepared.checked.hidden
    if hidden:
        sink.warning(
            f"{len(hidden)} shipped files of other shapes are not read while "
            f"{server.directory_variable} names {target.root}: those shapes run with the default"
        )
        for name in sorted(hidden, key=_relevance(prepared))[:_SHOWN_HIDDEN]:
            sink.note(f"  {name}")
        if len(hidden) > _SHOWN_HIDDEN:
            sink.note(f"  and {len(hidden) - _SHOWN_HIDDEN} more: --json lists all")
        sink.note("  --copy-shipped copies them in")


def _relevance(prepared: Prepared) -> Any:  # noqa: ANN401 - a sort key
    """Files of the GPUs that are installed for come first."""
    from moetune.domain.file_names import parse_file_name

    def device(path: str) -> str:
        name = parse_file_name(path.rpartition("/")[2])
        return name.device if name is not None else ""

    mine = {device(path) for path in prepared.checked.lookups}
    return lambda path: (device(path) not in mine, path)


_PLACES: Mapping[str, str] = {
    "package": "the server's own folder",
    "variable": "what its variable names here",
    "root": "as asked",
}


def _show_diff(sink: Sink, path: str, diff: tuple[tuple[int, str, str], ...]) -> None:
    sink.line(f"  {path.rpartition('/')[2]}")
    rows = tuple((str(m), before or "-", after or "-") for m, before, after in diff[:_SHOWN_ROWS])
    sink.table(Table((Column("m", right=True), Column("before"), Column("after")), rows), indent=4)
    if len(diff) > _SHOWN_ROWS:
        sink.line(f"    and {len(diff) - _SHOWN_ROWS} more entries: --json lists all")


def _show_done(sink: Sink, installed: Installed) -> None:
    sink.line()
    if installed.recovered is not None:
        done = "completed" if installed.recovered.completed else "not begun, and dropped"
        sink.note(f"an interrupted {installed.recovered.action} in {installed.recovered.root} was {done}")
    for path in installed.interrupted:
        sink.warning(
            f"an install with other records was interrupted here, and only a command with those completes "
            f"it: {path}"
        )
    for path in installed.left:
        sink.warning(f"{path} was changed by somebody else meanwhile, and left as it is")
    if installed.dry_run:
        sink.heading("nothing was changed: --dry-run")
    elif not installed.id:
        sink.heading("nothing to do: the files are there")
    else:
        sink.heading(f"installed as {installed.id}")
        sink.fields([("take it back", _uninstall_command(installed))])
    if installed.found:
        name = installed.prepared.target.server.name
        sink.fields([("lookup", f"{name}'s own {'would find' if installed.dry_run else 'finds'} them there")])
    else:
        sink.warning("the server's own lookup does not find all of them: moetune status says which")
    sink.fields([("use them", installed.use_command)])
    if installed.id:
        sink.fields([("restart", Prose("servers read each file once: restart those that run"))])


def _uninstall_command(installed: Installed) -> str:
    words = ["moetune", "uninstall", installed.id]
    if installed.prepared.target.place == "root":
        words += ["--root", str(installed.prepared.target.root)]
    if installed.prepared.request.state is not None:
        words += ["--state", str(installed.prepared.request.state)]
    return shlex.join(words)
