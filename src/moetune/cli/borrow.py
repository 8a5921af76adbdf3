"""`moetune borrow`: make files of another GPU, server or Triton version safe here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moetune.applications.borrow_tables import Action
from moetune.applications.request import DEFAULT_OUT
from moetune.cli.lint import shared_options
from moetune.cli.options import OUTPUT, sink_from, with_options
from moetune.cli.output import Prose
from moetune.cli.tables import Column, Table
from moetune.domain.errors import InputError

if TYPE_CHECKING:
    from moetune.applications.borrow_answer import Borrow, Lent
    from moetune.applications.borrow_list import Listing
    from moetune.applications.catalogue import TunedFile
    from moetune.cli.output import Sink
    from moetune.domain.file_names import FileName

_SHOWN_FILES = 6
_SHOWN_PASSED = 12

_EPILOG = """\b
Examples:
  moetune borrow FILE.json --gpu "NVIDIA RTX PRO 6000 Blackwell Server Edition" --model MODEL
  moetune borrow --installed --gpu "NVIDIA H200" --out moetune-configs
  moetune borrow --list Qwen/Qwen3-30B-A3B --tp 2 --gpu "NVIDIA L40S"

\b
Exit codes: 0 files are there; 1 nothing could be borrowed; 2 it could not be tried.
What is borrowed has not been timed here: `moetune verify FILE` does that on the GPU."""


@click.command(epilog=_EPILOG)
@click.argument("paths", nargs=-1, metavar="[FILE]...", type=click.Path(path_type=Path))
@shared_options
@click.option(
    "--gpu",
    metavar="NAME",
    multiple=True,
    help="The GPU to write for; repeatable. [default: the GPU in each file's name]",
)
@click.option("--from-server", metavar="NAME", help="Whose files they are. [default: by names and places]")
@click.option("--out", metavar="DIR", default=DEFAULT_OUT, show_default=True, help="Where they go.")
@click.option("--force", is_flag=True, help="Replace files of another problem or another origin.")
@click.option(
    "--list", "listed", metavar="MODEL", help="List what could be borrowed for a model; write nothing."
)
@click.option("--tp", type=click.IntRange(1, 4096), default=1, help="With --list: tensor-parallel size.")
@click.option("--ep", type=click.IntRange(1, 4096), default=1, help="With --list: expert-parallel size.")
@click.option("--quant", metavar="NAME", help="With --list: quantization of the experts.")
@click.option("--all", "show_all", is_flag=True, help="Show every file and every entry.")
@with_options(*OUTPUT)
def borrow(
    paths: tuple[Path, ...],
    listed: str | None,
    tp: int,
    ep: int,
    quant: str | None,
    show_all: bool,
    **values: Any,  # noqa: ANN401 - click's values
) -> int:
    """Write config files of another GPU, server or Triton version so that they are safe for a target:
    what cannot run or would compute wrong numbers is dropped or repaired, gaps are filled with the
    server's default, names and keys become the target's. Entries that run stay as they are.

    With --model, or --hidden and --topk, the performance model repairs what cannot run.
    """  # noqa: D205 - one sentence is the help text
    sink = sink_from(values)
    exit_zero = values.pop("exit_zero")
    if listed is not None:
        if paths or values["installed"]:
            raise InputError("--list takes a model and no files", "moetune borrow --list MODEL")
        listing = _list(listed, tp, ep, quant, values)
        _show_listing(sink, listing, show_all)
        sink.document(listing.to_json())
        return 0 if listing.found or exit_zero else 1
    from moetune.applications.borrow import borrow as run
    from moetune.applications.borrow_answer import BorrowRequest

    answer = run(BorrowRequest(paths=paths, **values))
    _show(sink, answer, show_all)
    sink.document(answer.to_json())
    return 0 if answer.lent or exit_zero else 1


def _list(model: str, tp: int, ep: int, quant: str | None, values: dict[str, Any]) -> Listing:
    from moetune.applications.borrow_list import list_tuned
    from moetune.applications.request import Request

    return list_tuned(
        Request(
            model=model,
            tp=tp,
            ep=ep,
            quant=quant,
            server=values["server"],
            server_version=values["server_version"],
            triton_version=values["triton_version"],
            gpu=values["gpu"],
            compute_capability=values["compute_capability"],
            offline=values["offline"],
        )
    )


def _show(sink: Sink, answer: Borrow, show_all: bool) -> None:
    name, version, triton = answer.server
    shown = answer.lent if show_all else answer.lent[:_SHOWN_FILES]
    for lent in shown:
        _show_lent(sink, lent, show_all)
    if len(shown) < len(answer.lent):
        sink.line(f"and {len(answer.lent) - len(shown)} more files: --all shows them")
        sink.line()
    if answer.passed_over:
        sink.heading(f"not borrowed ({len(answer.passed_over)})")
        passed = answer.passed_over if show_all else answer.passed_over[:_SHOWN_PASSED]
        for one in passed:
            sink.fields([("", str(one.source)), ("", Prose(one.reason))])
        if len(passed) < len(answer.passed_over):
            sink.fields([("", f"and {len(answer.passed_over) - len(passed)} more: --all shows them")])
        sink.line()
    counts: dict[str, int] = {}
    for lent in answer.lent:
        for action, count in lent.counts().items():
            counts[action] = counts.get(action, 0) + count
    said = ", ".join(f"{count} {action}" for action, count in counts.items())
    files = sum(len(lent.files) for lent in answer.lent)
    sink.heading(f"{files} files written" if files else "nothing was written")
    sink.fields([("for", f"{name} {version}, Triton {triton}"), ("entries", said)])
    sink.fields(("assumed", text) for text in answer.assumed)
    if files:
        sink.fields(
            [
                (
                    "unmeasured",
                    Prose("nobody has timed these entries here; the provenance beside each says so"),
                ),
                ("use them", answer.use_command),
                ("check them", f"moetune lint {answer.out}"),
            ]
        )


def _show_lent(sink: Sink, lent: Lent, show_all: bool) -> None:
    sink.heading(lent.files[0].path.name)
    sink.fields(
        [("from", str(lent.source)), ("tuned for", lent.from_gpu if lent.from_gpu != lent.gpu else "")]
    )
    sink.fields(
        [("kinship", Prose(lent.kinship)), *((file.state.value, str(file.path)) for file in lent.files)]
    )
    sink.fields(("note", Prose(note)) for note in lent.notes)
    changed = [change for change in lent.changes if show_all or change.action.value != "kept"]
    kept = len(lent.changes) - len(changed)
    if kept:
        sink.fields([("kept", f"{kept} entries as they were")])
    if changed:
        rows: dict[tuple[str, ...], list[str]] = {}
        for change in changed:
            said = (change.kernel, change.action.value, str(change.before or "-"), str(change.after or "-"))
            # What was added names its m in the reason: together it says more.
            why = "" if change.before is None and change.action is Action.FILLED else change.why
            rows.setdefault((*said, why), []).append(str(change.m))
        columns = tuple(Column(name) for name in ("m", "kernel", "what", "was", "is", "why"))
        sink.table(Table(columns, tuple((" ".join(ms), *said) for said, ms in rows.items())))
    sink.line()


def _show_listing(sink: Sink, listing: Listing, show_all: bool) -> None:
    for part in listing.parts:
        sink.heading(f"{part.gpu}: {part.file_name}")
        columns = tuple(Column(name) for name in ("confidence", "tuned for", "E", "N", "server", "", "why"))
        ups = [file for file in part.files if file.kernel == "up"]
        paired = {_key(file, replace(file.name, down=False)) for file in part.files if file.name.down}
        files = ups if show_all else ups[: 2 * _SHOWN_PASSED]
        rows = tuple(
            (
                *(file.confidence, file.gpu.torch_name, str(file.name.E), str(file.name.N)),
                f"{file.server} {file.directory}".strip(),
                "pair" if _key(file, file.name) in paired else "",
                file.reason,
            )
            for file in files
        )
        if rows:
            sink.table(Table(columns, rows))
        else:
            sink.line("  no published file for this GPU, its siblings, or neighbouring shapes")
        if len(files) < len(ups):
            sink.line(f"  and {len(ups) - len(files)} more: --all shows them")
        sink.line()
    sink.fields(("assumed", text) for text in listing.assumed)


def _key(file: TunedFile, name: FileName) -> tuple[str, str, str]:
    """What tells one published table from another: a pair shares it."""
    return (file.server, file.directory, str(name))
