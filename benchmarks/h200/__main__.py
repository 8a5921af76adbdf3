"""What is measured on an H200, in pieces of under ten minutes. Needs a GPU, torch and Triton.

    python -m benchmarks.h200 numerics              # real shapes against the reference
    python -m benchmarks.h200 sanity LANDSCAPE      # times against a recorded landscape
    python -m benchmarks.h200 faults                # candidates that really hang and write out of bounds
    python -m benchmarks.h200 stock                 # the stock way on a sample of the grid, scaled
    python -m benchmarks.h200 grid PROBLEM          # the whole grid; 3: run it again and it goes on
    python -m benchmarks.h200 ahead PROBLEM         # compile for it beside something else
    python -m benchmarks.h200 side PROBLEM NAME=JSON ...  # winners and the default, interleaved
    python -m benchmarks.h200 pdl                   # one kernel with and without PDL
    python -m benchmarks.h200 sorted_rows PROBLEM   # what USE_TMA in the down config gains
    python -m benchmarks.h200 transfer LANDSCAPE LANDSCAPE  # what a choice on one loses on the other; no GPU
    python -m benchmarks.h200 gaps                  # how often a busy host hands a graph over late
    python -m benchmarks.h200 profile PROBLEM JOURNAL     # where the time of a measurement goes

`moetune tune` itself is timed from outside: `time moetune tune ... --effort quick`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.h200.checks import numerics, sanity
from benchmarks.h200.common import PROBLEMS, USUAL_MS
from benchmarks.h200.faults import faults
from benchmarks.h200.gaps import gaps
from benchmarks.h200.grid import ahead, grid
from benchmarks.h200.pdl import pdl
from benchmarks.h200.profile import profile
from benchmarks.h200.side import side
from benchmarks.h200.sorted_rows import sorted_rows
from benchmarks.h200.stock import stock
from benchmarks.h200.transfer import transfer


def _named(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    return name, Path(path)


def main() -> int:
    """Run one piece."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    pieces = parser.add_subparsers(required=True)
    first = (numerics, sanity, faults, stock, grid, ahead, side, pdl)
    functions = (*first, profile, sorted_rows, transfer, gaps)
    for function in functions:
        piece = pieces.add_parser(function.__name__, help=function.__doc__)
        piece.set_defaults(function=function)
        if function is transfer:
            piece.add_argument("first", type=Path)
            piece.add_argument("second", type=Path)
        if function is sanity:
            piece.add_argument("landscape", type=Path)
        if function in (grid, ahead, side, profile, sorted_rows):
            piece.add_argument("problem", choices=PROBLEMS)
        if function in (grid, ahead, side, sorted_rows):
            piece.add_argument("--m", type=int, nargs="+", default=USUAL_MS)
        if function in (grid, ahead, side, pdl):
            piece.add_argument("--cache", type=Path, required=function is not grid)
        if function in (grid, side, stock, pdl, sorted_rows):
            piece.add_argument("--out", type=Path, required=True)
        if function in (grid, pdl, sorted_rows):
            piece.add_argument("--budget", type=float, default=500.0)
        if function in (grid, sorted_rows):
            piece.add_argument("--state", type=Path, required=True)
        if function is side:
            piece.add_argument("runs", type=_named, nargs="+", metavar="NAME=JSON")
            piece.add_argument("--rounds", type=int, default=11)
        if function is pdl:
            piece.add_argument("--landscapes", type=Path, default=Path("training/landscapes"))
            piece.add_argument("--count", type=int, default=16)
            piece.add_argument("--compile-only", action="store_true")
        if function is profile:
            piece.add_argument("journal", type=Path)
            piece.add_argument("--count", type=int, default=400)
        if function is stock:
            piece.add_argument("--m", type=int, nargs="+", default=[64, 1024])
            piece.add_argument("--count", type=int, default=60)
    arguments = parser.parse_args()
    return int(arguments.function(arguments))


if __name__ == "__main__":
    sys.exit(main())
