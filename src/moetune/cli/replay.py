"""`moetune replay`: the search strategy on a recorded landscape."""

from __future__ import annotations

from pathlib import Path

import click

from moetune.cli.options import OUTPUT, sink_from, with_options

_EPILOG = """\b
Example:
  moetune replay NAME.csv.gz --measurements 16 --seed 0 --json"""


@click.command(epilog=_EPILOG)
@click.argument("landscape", metavar="LANDSCAPE")
@click.option(
    "--measurements", type=int, default=16, show_default=True, help="For each (kernel, m); 0: the first pick."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of everything that is random.")
@with_options(*OUTPUT)
def replay(landscape: str, measurements: int, seed: int, **values: bool) -> int:
    """Replay the default search strategy on a recorded LANDSCAPE (NAME.csv.gz, NAME.json beside it)."""
    del values["exit_zero"]  # there is no 1
    sink = sink_from(values)
    from moetune.applications.replay import replay as run

    result = run(Path(landscape), measurements, seed)
    document = result.to_json()
    sink.document(document)
    return 0
