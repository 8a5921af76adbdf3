"""`moetune lint`: what cannot run, what computes wrong numbers, what a server will never read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moetune.applications.request import DEFAULT_MAX_M
from moetune.cli.options import OUTPUT, sink_from, with_options
from moetune.cli.output import Prose, Sink
from moetune.cli.tables import Column, Table
from moetune.domain.errors import InputError
from moetune.domain.findings import Severity

if TYPE_CHECKING:
    from collections.abc import Callable

    from moetune.applications.lint_report import Linted
    from moetune.domain.findings import Finding

_SEVERITIES = {severity.value.replace(" ", "-"): severity for severity in Severity} | {
    "crash": Severity.CRASH
}
_FAIL_ON = ("crash", "cannot-run", "wrong-numbers", "never-read", "costs-speed", "info", "nothing")
_SHOWN = 12  # findings of one code in the report for people; `--all` shows the rest

_EPILOG = """\b
Examples:
  moetune lint moetune-configs
  moetune lint --installed --gpu "NVIDIA RTX PRO 6000 Blackwell Server Edition"
  moetune lint configs --server vllm --fail-on wrong-numbers --format github

\b
Exit codes: 0 nothing at or above --fail-on; 1 findings at or above it; 2 it could not be looked at.
`moetune explain MOE111` tells what a code means."""


def shared_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that lint and borrow have in common."""
    options = (
        click.option("--installed", is_flag=True, help="Also the tree of the server that is installed here."),
        click.option("--server", metavar="NAME", help="sglang or vllm."),
        click.option(
            "--server-version", metavar="X.Y.Z", help="Its release. [default: installed, else newest]"
        ),
        click.option(
            "--triton-version", metavar="X.Y.Z", help="Its Triton. [default: installed, else pinned]"
        ),
        click.option("--compute-capability", metavar="X.Y", help="Of a GPU that moetune does not know."),
        click.option(
            "--max-m",
            type=click.IntRange(1, 1 << 20),
            default=DEFAULT_MAX_M,
            show_default=True,
            help="Largest m that the server meets: its prefill chunk.",
        ),
        click.option("--model", metavar="MODEL", help="A checkpoint: K and topk, for predictions."),
        click.option("--hidden", type=click.IntRange(1, 1 << 24), help="K by hand."),
        click.option("--topk", type=click.IntRange(1, 65536), help="Experts a token goes to, by hand."),
        click.option("--offline", is_flag=True, help="Never ask the network."),
    )
    return with_options(*options)(function)


@click.command(epilog=_EPILOG)
@click.argument("paths", nargs=-1, metavar="[PATH]...", type=click.Path(path_type=Path))
@shared_options
@click.option(
    "--gpu", metavar="NAME", help="Judge all files for this GPU. [default: each for the GPU in its name]"
)
@click.option(
    "--fail-on",
    type=click.Choice(_FAIL_ON),
    default="never-read",
    show_default=True,
    help="Exit with 1 for findings as bad as this, or worse.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "sarif", "github"]),
    default="text",
    show_default=True,
    help="For people, SARIF 2.1.0, or GitHub's annotations.",
)
@click.option("--all", "show_all", is_flag=True, help=f"Show more than {_SHOWN} findings of a code.")
@with_options(*OUTPUT)
def lint(
    paths: tuple[Path, ...],
    gpu: str | None,
    fail_on: str,
    form: str,
    show_all: bool,
    **values: Any,  # noqa: ANN401 - click's values
) -> int:
    """Judge config files by the rules of the server that would read them: what ends it, what cannot run
    on the GPU, what computes wrong numbers, what is never read, what costs speed.

    PATH is a config file or a directory of them. Without --server it is guessed from names and places.
    """  # noqa: D205 - one sentence is the help text
    if values["as_json"] and form != "text":
        raise InputError("--json and --format name two formats", "leave one of them out")
    sink = sink_from(values)
    exit_zero = values.pop("exit_zero")
    from moetune.applications.lint import lint as run
    from moetune.applications.lint_report import LintRequest

    linted = run(LintRequest(paths=paths, gpu=gpu, **values))
    if form == "text":
        _show(sink, linted, show_all)
        sink.document(linted.to_json())
    else:
        _print_format(sink, linted, form)
    failed = linted.fails(_SEVERITIES.get(fail_on))
    return 1 if failed and not exit_zero else 0


def _print_format(sink: Sink, linted: Linted, form: str) -> None:
    from moetune.applications.lint_formats import to_github, to_sarif

    if form == "sarif":
        Sink(as_json=True).document(to_sarif(linted))
        return
    for line in to_github(linted):
        sink.line(line)


def _show(sink: Sink, linted: Linted, show_all: bool) -> None:
    by_code: dict[str, list[Finding]] = {}
    for found in linted.findings:
        by_code.setdefault(found.code.code, []).append(found)
    for code, members in by_code.items():
        kind = members[0].code
        times = f" ({len(members)})" if len(members) > 1 else ""
        sink.heading(f"{code}  {kind.severity.value}: {kind.title}{times}")
        shown = members if show_all else members[:_SHOWN]
        for found in shown:
            sink.fields([("", found.where), ("", Prose(found.message))])
        if len(shown) < len(members):
            sink.fields([("", f"and {len(members) - len(shown)} more: --all shows them")])
        if members[0].mend:
            sink.fields([("mend", members[0].mend)])
        sink.line()
    _summary(sink, linted)


def _summary(sink: Sink, linted: Linted) -> None:
    if len(linted.tallies) > 1 or any(tally.entries_cannot_run for tally in linted.tallies):
        columns = (
            *(Column("server"), Column("vendor"), Column("dtype")),
            *(Column(name, right=True) for name in ("files", "entries", "cannot run", "in files", "wrong")),
        )
        rows = tuple(
            (
                *(tally.server, tally.vendor, tally.dtype, str(tally.files), str(tally.entries)),
                *(
                    str(tally.entries_cannot_run),
                    str(tally.files_cannot_run),
                    str(tally.entries_wrong_numbers),
                ),
            )
            for tally in linted.tallies
        )
        sink.table(Table(columns, rows))
        sink.line()
    counts: dict[str, int] = {}
    for found in linted.findings:
        counts[found.code.severity.value] = counts.get(found.code.severity.value, 0) + 1
    said = ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing to say"
    sink.line(f"{linted.files} files, {linted.entries} entries: {said}")
    sink.fields([("judged for", linted.gpu or "the GPU in each file's name")])
    sink.fields(("as", f"{name} {version}, Triton {triton}") for name, version, triton in linted.servers)
    sink.fields(("assumed", text) for text in linted.assumed)
