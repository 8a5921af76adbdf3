"""`moetune routing`: which experts the tokens of a real server went to."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

import click

from moetune.cli.options import OUTPUT, sink_from, with_options
from moetune.cli.output import Prose, clean
from moetune.cli.tables import Column, Table
from moetune.domain.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from moetune.applications.routing_inspection import RoutingAnswer
    from moetune.cli.output import Sink
    from moetune.domain.routing_statistics import LayerStatistics

_EPILOG = """\b
Examples:
  moetune routing --synthetic zipf:1.2 --layers 3-60 --tokens 64 --experts 64 --topk 8 --out ids
  moetune routing --synthetic uniform --layers 4 --tokens 1024 --experts 64 --topk 6 --json

\b
A recording is a directory of topk_ids_layer{L}_idx{I}.pt, as SGLang's separate tuner reads them,
or dumps of SGLang's recorder, expert_distribution_recorder_*.pt."""

_ALL = "all"
_RANGE = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")

_OPTIONS = (
    click.argument("paths", nargs=-1, metavar="[FILE_OR_DIR]..."),
    click.option("--synthetic", metavar="LAW", help="Make one up: uniform, or zipf:S."),
    click.option(
        "--layers",
        metavar="LAYERS",
        help="Which: all, 7, 3-60 or 3,5,7. With --synthetic a number says how many. "
        "[default: worst, median and best]",
    ),
    click.option("--tokens", type=int, help="Tokens of each call of a synthetic one."),
    click.option(
        "--calls",
        type=int,
        default=2,
        show_default=True,
        help="Calls a layer of a synthetic one: idx0, idx1.",
    ),
    click.option("--experts", type=int, help="Global experts. [default: as recorded]"),
    click.option("--topk", type=int, help="Experts of a token. [default: as recorded]"),
    click.option("--seed", type=int, default=0, show_default=True, help="Of a synthetic one."),
    click.option(
        "--ep", type=int, default=1, show_default=True, help="Expert-parallel size: balance of ranks."
    ),
    click.option("--rank", type=int, help="What this rank sees: its own experts, from 0 on."),
    click.option("--m", "ms", metavar="M,...", help="Tokens of calls. [default: 16,64,256,1024,4096]"),
    click.option("--block-m", "block_ms", metavar="B,...", help="BLOCK_SIZE_M. [default: 16,64,128]"),
    click.option(
        "--out", metavar="DIR", help="Write what SGLang's separate tuner reads into a new directory."
    ),
    click.option(
        "--python",
        metavar="PATH",
        help="The interpreter that reads .pt files, with torch. [default: this one]",
    ),
)


@click.command(epilog=_EPILOG)
@with_options(*_OPTIONS, *OUTPUT)
def routing(paths: tuple[str, ...], layers: str | None, **values: Any) -> int:  # noqa: ANN401 - click's values
    """Inspect recorded expert choices: layers, tokens, balance, experts never hit, and blocks against
    uniform routing.

    With --synthetic a recording is made up; with --out it is written for SGLang's separate tuner.
    """  # noqa: D205 - one sentence is the help text
    values.pop("exit_zero")  # nothing here has the answer no
    sink = sink_from(values)
    for name in ("ms", "block_ms"):
        numbers = _numbers(values.pop(name), name)
        if numbers:
            values[name] = numbers
    from moetune.applications.routing_inspection import RoutingRequest, inspect

    wanted = _layers(layers, synthetic=values["synthetic"] is not None)
    answer = inspect(RoutingRequest(paths=paths, layers=wanted, **values))
    _show(sink, answer, every=layers == _ALL or (bool(paths) and layers is not None))
    sink.document(answer.to_json())
    return 0


def _layers(text: str | None, *, synthetic: bool) -> tuple[int, ...]:
    if text is None or text == _ALL:
        return ()
    if synthetic and text.isascii() and text.isdigit() and len(text) <= 4:
        return tuple(range(int(text)))
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise InputError(f"--layers {clean(text)[:40]} names no layers", "as in all, 7, 3-60 or 3,5,7")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(found))


def _numbers(text: str | None, name: str) -> tuple[int, ...]:
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    if not all(part.isascii() and part.isdigit() and len(part) < 8 for part in parts):
        option = {"ms": "--m", "block_ms": "--block-m"}[name]
        raise InputError(f"{option} {clean(text)[:40]} is not made of whole numbers", f"as in {option} 16,64")
    return tuple(sorted(set(map(int, parts))))


def _show(sink: Sink, answer: RoutingAnswer, *, every: bool) -> None:
    sink.heading(_title(answer))
    sink.fields(_facts(answer))
    sink.line()
    ordered = answer.by_balance
    shown: Sequence[tuple[str, LayerStatistics]]
    if every or len(ordered) <= 3:
        shown = [("", layer) for layer in answer.layers]
    else:
        shown = [("worst", ordered[0]), ("median", answer.median), ("best", ordered[-1])]
    sink.table(_table(shown, answer))
    if len(shown) < len(ordered):
        sink.line(f"  {len(ordered)} layers, by balance; --layers all shows each")
    sink.line()
    blocks = list(answer.blocks())
    if blocks:
        sink.heading("blocks with rows, over those of uniform routing; mean of the layers")
        sink.table(_blocks(blocks))
    for remark in answer.remarks:
        sink.note(remark)
    if answer.out is not None:
        sink.line()
        sink.fields(
            [
                ("written", f"{len(answer.written)} files in {answer.out}"),
                ("use", f"tuning_fused_moe_triton_sep.py --topk-ids-dir {shlex.quote(str(answer.out))}"),
            ]
        )


def _title(answer: RoutingAnswer) -> str:
    kinds = {
        "topk_ids": "files of SGLang's tuner",
        "per_token": "SGLang's recorder, per_token",
        "per_pass": "SGLang's recorder, per_pass: counts",
        "stat": "SGLang's recorder, stat: counts",
        "synthetic": f"synthetic, {answer.law}",
    }
    return kinds[answer.recording.form]


def _facts(answer: RoutingAnswer) -> Iterator[tuple[str, str]]:
    numbers = [layer.number for layer in answer.layers]
    missing = numbers[-1] - numbers[0] + 1 - len(numbers)
    between = f", {missing} between them without experts" if missing else ""
    yield "layers", f"{len(numbers)}, from {numbers[0]} to {numbers[-1]}{between}"
    guessed = "" if answer.recording.experts_known else " or more"
    of_rank = "" if answer.rank is None else f", {answer.recording.experts} of them on rank {answer.rank}"
    yield "experts", f"{answer.global_experts}{guessed}{of_rank}"
    yield "topk", "?" if answer.topk is None else str(answer.topk)
    if answer.recording.has_ids and answer.rank is None and not answer.law:
        yield "routing", answer.recording.routing
    balance = answer.mean("balance")
    yield "balance", Prose(f"{balance:.3f}, the mean of the layers: mean over maximum of the experts' loads")
    ranks = answer.mean("rank_balance")
    if ranks is not None:
        yield "ranks", Prose(f"{ranks:.3f} over {answer.ep} ranks, call by call, as SGLang reports it")
    exponent = answer.mean("exponent")
    if exponent is not None:
        yield "skew", f"as zipf:{exponent:.2f}"
    never = sum(layer.never_hit for layer in answer.layers)
    yield "never hit", f"{never} experts in {sum(layer.never_hit > 0 for layer in answer.layers)} layers"


def _table(shown: Sequence[tuple[str, LayerStatistics]], answer: RoutingAnswer) -> Table:
    named = any(name for name, _ in shown)
    ranked = answer.layers[0].rank_balance is not None
    columns = (
        *([Column("")] if named else []),
        Column("layer", right=True),
        Column("tokens", right=True),
        Column("calls", right=True),
        Column("balance", right=True),
        *([Column("ranks", right=True)] if ranked else []),
        Column("variation", right=True),
        Column("by chance", right=True),
        Column("busiest", right=True),
        Column("never hit", right=True),
        Column("zipf", right=True),
    )
    rows = tuple(
        (
            *([name] if named else []),
            str(layer.number),
            "?" if layer.tokens is None else str(layer.tokens),
            str(layer.calls),
            f"{layer.balance:.3f}",
            *([_number(layer.rank_balance, 3)] if ranked else []),
            f"{layer.variation:.2f}",
            _number(layer.uniform_variation, 2),
            f"{layer.busiest:.2f}x",
            str(layer.never_hit),
            _number(layer.exponent, 2),
        )
        for name, layer in shown
    )
    return Table(columns, rows)


def _blocks(blocks: Sequence[tuple[int, int, float, float]]) -> Table:
    sizes = sorted({block_m for _, block_m, _, _ in blocks})
    cells = {(m, block_m): f"{found / even:.2f}" for m, block_m, found, even in blocks}
    columns = (Column("m", right=True), *(Column(f"BLOCK_SIZE_M {size}", right=True) for size in sizes))
    rows = tuple(
        (str(m), *(cells.get((m, size), "-") for size in sizes)) for m in sorted({m for m, *_ in blocks})
    )
    return Table(columns, rows)


def _number(value: float | None, digits: int) -> str:
    return "?" if value is None else f"{value:.{digits}f}"
