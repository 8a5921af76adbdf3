"""`moetune verify`: does the server read these files, are their numbers right, are they faster?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moetune.applications.request import DEFAULT_MAX_M
from moetune.applications.server_kernels import AUTO
from moetune.cli.install import STATE
from moetune.cli.measuring import KERNEL, LiveLine, parse_devices
from moetune.cli.options import OUTPUT, sink_from, with_options
from moetune.cli.output import Prose
from moetune.cli.tables import Column, Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moetune.applications.verify_answer import Entry, Looked, Verification, Verified, VerifyRequest
    from moetune.cli.output import Sink
    from moetune.domain.config import KernelConfig

_COULD_NOT_RUN = 2
_SHOWN_FINDINGS = 12
_ANSWERS = {
    "yes": "yes: read, right, and nowhere slower than the default",
    "no": "no",
    "not measured": "nothing is wrong as far as could be looked; not all of it was measured",
}

_EPILOG = """\b
Examples:
  moetune verify moetune-configs
  moetune verify moetune-configs --lookup-only --server sglang --server-version 0.5.23
  moetune verify moetune-configs --model Qwen/Qwen3.5-122B-A10B --tp 4 --require-gpu --json

\b
Exit codes: 0 the server reads the files and nothing is wrong with them; where a GPU measured, all
numbers are right and no entry is slower than the default; 1 the answer is no; 2 it could not be
found out. --exit-zero turns 1 into 0."""


@click.command(epilog=_EPILOG)
@click.argument("paths", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option("--model", metavar="MODEL", help="A checkpoint: K and topk, where no provenance tells them.")
@click.option("--tp", type=click.IntRange(1, 4096), help="How it is split. [default: as the file's N says]")
@click.option("--ep", type=click.IntRange(1, 4096), help="Likewise. [default: as the file's E says]")
@click.option("--hidden", type=click.IntRange(1, 1 << 24), help="K by hand.")
@click.option("--topk", type=click.IntRange(1, 65536), help="Experts a token goes to, by hand.")
@click.option("--server", metavar="NAME", help="sglang or vllm. [default: as the files or this machine say]")
@click.option("--server-version", metavar="X.Y.Z", help="Its release. [default: the installed, or likewise]")
@click.option("--triton-version", metavar="X.Y.Z", help="Its Triton. [default: the installed, or likewise]")
@click.option("--compute-capability", metavar="X.Y", help="Of a GPU that moetune does not know.")
@click.option(
    "--max-m",
    type=click.IntRange(1, 1 << 20),
    default=DEFAULT_MAX_M,
    show_default=True,
    help="Largest m that the server meets: its prefill chunk.",
)
@click.option("--deterministic", is_flag=True, help="Deterministic or batch-invariant inference is on.")
@click.option("--lookup-only", is_flag=True, help="Touch no GPU.")
@click.option("--require-gpu", is_flag=True, help="Exit with 2 where an entry cannot be measured.")
@click.option("--between", is_flag=True, help="Measure between the keys too, and where the default changes.")
@click.option("--devices", metavar="N,...", help="Numbers of the GPUs. [default: the first of that kind]")
@click.option("--python", metavar="PATH", help="Measure with this interpreter. [default: this one]")
@with_options(*KERNEL)
@click.option("--share-gpu", is_flag=True, help="Measure although something else computes on the GPU.")
@click.option(
    "--seed",
    type=click.IntRange(0, (1 << 31) - 1),
    default=0,
    show_default=True,
    help="Of data and routings: another one measures anew.",
)
@with_options(STATE)
@click.option("--offline", is_flag=True, help="Never ask the network.")
@with_options(*OUTPUT)
def verify(**values: Any) -> int:  # noqa: ANN401 - click's values
    """Verify that the server's own lookup finds config files, that its loader reads them, which entry
    each m uses; and on a GPU of their kind that each entry computes the right numbers and is no slower
    than the server's default, both timed side by side.

    FILE is a config file or a directory of them. A `_down` file and its up file are one answer.
    """  # noqa: D205 - one sentence is the help text
    sink = sink_from(values)
    exit_zero = values.pop("exit_zero")
    from moetune.applications import verifying
    from moetune.applications.verify_answer import VerifyRequest

    values["devices"] = parse_devices(values["devices"])
    values["kernel"] = values["kernel"] or AUTO
    request = VerifyRequest(**values)
    line = LiveLine(sink)
    try:
        found = verifying.verify(request, live=line.show)
    finally:
        line.clear()
    for number, one in enumerate(found.problems):
        if number:
            sink.line()
        _show(sink, one)
    sink.document(found.to_json())
    return _exit_code(sink, request, found, exit_zero)


def _exit_code(sink: Sink, request: VerifyRequest, found: Verification, exit_zero: bool) -> int:
    if found.is_no:
        return 0 if exit_zero else 1
    if request.asks_for_gpu and not found.is_measured:
        reasons = dict.fromkeys(
            one.gpu.reason or "some entries could not be measured"
            for one in found.problems
            if not one.is_measured
        )
        sink.warning(f"not everything was measured: {'; '.join(reasons)}")
        return _COULD_NOT_RUN
    return 0


def _show(sink: Sink, one: Verified) -> None:
    looked = one.looked
    server = looked.server
    sink.heading(f"{server.name} {server.version}, Triton {server.triton_version}")
    for file in looked.files:
        sink.fields(
            [
                (file.kernel, file.path),
                ("lookup", Prose(file.says)),
                ("loader", Prose(file.unreadable or "reads it")),
                ("to read it", file.use),
                ("mend", file.mend),
                ("note", Prose(file.note)),
            ]
        )
    sink.fields(_known(looked))
    sink.fields(("assumed", text) for text in looked.assumed)
    _show_findings(sink, looked)
    if one.entries:
        sink.line()
        if one.gpu.reason:
            sink.line("  which entry each m uses; the server takes the nearest key")
        else:
            sink.line("  microseconds through the whole layer, weights cold, interleaved with the default")
        sink.table(_table(one))
    _show_reasons(sink, one)
    sink.fields(_summary(one))


def _known(looked: Looked) -> Iterator[tuple[str, str]]:
    from moetune.cli.report import quantization_text

    problem = looked.problem
    if problem is None:
        return
    sizes = f"E={problem.E}, N={problem.N}, {quantization_text(problem.quantization)}"
    if looked.complete:
        sizes += f", K={problem.K}, topk {problem.topk}, from {looked.known_from}"
    yield "problem", Prose(f"{problem.gpu.torch_name}: {sizes}")
    yield "note", Prose(looked.note)
    yield "not measured", Prose(looked.other_kernel)


def _show_findings(sink: Sink, looked: Looked) -> None:
    if not looked.findings:
        sink.fields([("lint", "nothing to say")])
    for found in looked.findings[:_SHOWN_FINDINGS]:
        kind = found.code
        sink.fields([("lint", Prose(f"{kind.code} {kind.severity.value}: {found.message}"))])
        sink.fields([("mend", found.mend)])
    if len(looked.findings) > _SHOWN_FINDINGS:
        sink.fields([("lint", f"{len(looked.findings) - _SHOWN_FINDINGS} more: see moetune lint")])


def _table(one: Verified) -> Table:
    has_two = one.looked.server.separate_down_file
    configs = ("up", "down") if has_two else ("up and down",)
    columns = [Column("m", right=True), Column("serves m", right=True), *map(Column, configs)]
    if not one.gpu.reason:
        numbers = ("default us", "file us", "file/default", "skewed", "numerics")
        columns += [*(Column(name, right=True) for name in numbers), Column("verdict")]
    return Table(tuple(columns), tuple(_row(one, entry, has_two) for entry in one.entries))


def _row(one: Verified, entry: Entry, has_two: bool) -> tuple[str, ...]:
    pick = entry.pick
    serves = f"{pick.first}" if pick.first == pick.last else f"{pick.first}-{pick.last}"
    up, down = _config(pick.up, pick.up_key, pick.m), _config(pick.down, pick.down_key, pick.m)
    row = (str(pick.m), serves, up, down) if has_two else (str(pick.m), serves, up)
    if one.gpu.reason:
        return row
    worst = max((item.relative_error / item.tolerance for item in entry.numerics), default=None)
    return (
        *row,
        "-" if entry.default_us is None else f"{entry.default_us:.1f}",
        "-" if entry.file_us is None else f"{entry.file_us:.1f}",
        _ratio(entry),
        "-" if entry.skewed_ratio is None else f"{entry.skewed_ratio:.3f}",
        "-" if worst is None else "right" if worst <= 1 else "wrong",
        entry.verdict.value,
    )


def _config(config: KernelConfig, key: int | None, m: int) -> str:
    """A config, and whose entry it is where that is not its own m's."""
    if key is None:
        return f"{config} (default)"
    return str(config) if key == m else f"{config} (key {key})"


def _ratio(entry: Entry) -> str:
    if entry.ratio is None or entry.spread is None:
        return "-"
    return f"{entry.ratio:.3f} +-{entry.spread:.1%}"


def _show_reasons(sink: Sink, one: Verified) -> None:
    """Why an entry is what it is, where a word does not say it."""
    if one.gpu.reason:
        return
    reasons: dict[str, list[int]] = {}
    for entry in one.entries:
        if entry.why:
            reasons.setdefault(f"{entry.verdict.value}: {entry.why}", []).append(entry.pick.m)
    sink.fields(
        (f"m={','.join(map(str, ms[:4]))}{',..' if len(ms) > 4 else ''}", Prose(why))
        for why, ms in reasons.items()
    )


def _summary(one: Verified) -> Iterator[tuple[str, str]]:
    gpu = one.gpu
    if gpu.reason:
        yield "not measured", Prose(gpu.reason)
    else:
        words = [entry.verdict.value for entry in one.entries]
        counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
        yield "entries", Prose(f"{counts} (of {len(words)})")
        worst = max(
            (item.relative_error / item.tolerance for e in one.entries for item in e.numerics), default=None
        )
        if worst is not None:
            yield "numerics", Prose(f"against an fp32 reference, at most {worst:.0%} of the tolerance")
        yield "noise", Prose(f"{gpu.noise:.1%} between two runs of the default" if gpu.noise else "")
        where = ", ".join(dict.fromkeys(gpu.devices))
        known = f"{gpu.measured} measurements" if gpu.measured else "nothing new, all was in the journal"
        yield "measured", Prose(f"on {where}: {known}")
        if gpu.kernel is not None:
            yield "kernel", Prose(gpu.kernel.text)
        yield "journal", gpu.journal
        if gpu.throttled:
            yield "beware", Prose(f"the GPU was slowed by {' and '.join(gpu.throttled)} at times")
        if gpu.compilations:
            yield "beware", Prose(f"{gpu.compilations} kernels were compiled while measuring")
        for remark in gpu.remarks:
            yield "beware", Prose(remark)
    yield "answer", Prose(_ANSWERS[one.answer])
