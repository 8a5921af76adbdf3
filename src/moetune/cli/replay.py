"""`moetune replay`: a search strategy on a recorded landscape."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from moetune.cli.options import OUTPUT, sink_from, with_options
from moetune.cli.tables import Column, Table

if TYPE_CHECKING:
    from moetune.applications.replay import Replay
    from moetune.cli.output import Sink

_EPILOG = """\b
Examples:
  moetune replay landscape.csv.gz --measurements 16 --seed 0 --json
  moetune replay landscape.csv.gz --measurements 16 --strategy random"""


@click.command(epilog=_EPILOG)
@click.argument("landscape", metavar="LANDSCAPE")
@click.option(
    "--measurements",
    type=int,
    default=16,
    show_default=True,
    help="For each (kernel, m); 0 takes the model's first pick.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of what a strategy draws.")
@click.option(
    "--strategy", metavar="NAME", default="guided", show_default=True, help="guided, random, exhaustive."
)
@with_options(*OUTPUT)
def replay(landscape: str, measurements: int, seed: int, strategy: str, **values: bool) -> int:
    """Replay a search strategy on a recorded LANDSCAPE, which needs no GPU and has an exact answer.

    LANDSCAPE is NAME.csv.gz, with NAME.json beside it. The strategy sees the problem and the times
    of what it measures, nothing else of the file.
    """
    values.pop("exit_zero")  # nothing here has the answer no
    sink = sink_from(values)
    from moetune.applications.replay import replay as run

    result = run(Path(landscape), measurements, seed, strategy=strategy)
    _show(sink, result)
    sink.document(result.to_json())
    return 0


def _show(sink: Sink, result: Replay) -> None:
    sink.heading(f"{result.landscape}: {result.strategy}")
    columns = ("kernel", "m", "best us", "chosen us", "fraction", "measurements")
    sink.table(
        Table(
            tuple(Column(name, right=name != "kernel") for name in columns),
            tuple(
                (
                    problem.kernel,
                    str(problem.m),
                    f"{problem.best_us:.1f}",
                    "cannot run" if problem.chosen_us is None else f"{problem.chosen_us:.1f}",
                    f"{problem.fraction:.4f}",
                    str(problem.measurements),
                )
                for problem in result.problems
            ),
        )
    )
    compiled = ", ".join(f"{count} {kernel}" for kernel, count in result.compiled)
    sink.fields(
        [
            ("geomean", f"{result.geomean:.4f} of the best"),
            ("worst", f"{result.worst:.4f}"),
            ("compiled", f"{compiled} (distinct configs)"),
        ]
    )
