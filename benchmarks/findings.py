"""Makes every table of docs/findings.md from the recordings in this repository.

    python -m benchmarks.findings            # prints all tables
    python -m benchmarks.findings NAME ...   # some of them
    python -m benchmarks.findings --write    # puts them into the page

No GPU, no network; the same recordings give the same text. In the page each table follows a comment with its
name.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

from benchmarks import findings_choice as choice
from benchmarks import findings_formats as formats
from benchmarks import findings_grid as grid
from benchmarks import findings_keys as keys
from benchmarks import findings_layer as layer
from benchmarks import findings_machine as machine
from benchmarks import findings_published as published
from benchmarks import findings_search as search
from benchmarks import findings_triton as triton
from benchmarks.findings_data import ROOT
from benchmarks.findings_host import held_up
from benchmarks.findings_pdl import pdl
from benchmarks.findings_routing import routing

PAGE = ROOT / "docs" / "findings.md"
TABLES: dict[str, Callable[[], list[str]]] = {
    "noise": grid.noise,
    "held-up": held_up,
    "rarity": grid.rarity,
    "recorded-twice": grid.recorded_twice,
    "drawing": grid.drawing,
    "walking-downhill": search.walking_downhill,
    "near-floor": machine.near_floor,
    "defaults": grid.defaults,
    "default-shares": grid.default_shares,
    "default-formats": formats.defaults_by_format,
    "format-times": formats.format_times,
    "other-m": choice.other_m,
    "other-shape": choice.other_shape,
    "other-gpu": published.other_gpu,
    "other-gpu-by-m": published.other_gpu_by_m,
    "few-configs": choice.few_configs,
    "first-configs": choice.first_configs,
    "unseen-shapes": choice.unseen_shapes,
    "one-for-both": choice.one_for_both,
    "frozen-keys": keys.frozen_keys,
    "one-step": search.one_step,
    "smaller-grids": keys.smaller_grids,
    "outside": machine.outside,
    "cold": machine.cold,
    "pdl": pdl,
    "sum-over-topk": layer.sum_over_topk,
    "use-tma": layer.use_tma,
    "routing": routing,
    "triton-compiled": triton.compiled,
    "triton-timed": triton.timed,
    "triton-chosen": triton.chosen,
}
"""Name of a table to what makes it, in the order of the page."""

_PLACE = re.compile(r"^<!-- table: ([a-z0-9-]+) -->\n((?:\|.*\n)*)", re.M)


def tables_in(page: str) -> dict[str, list[str]]:
    """The tables that stand in a page, by name.

    Raises:
        ValueError: when one stands there twice.
    """
    found: dict[str, list[str]] = {}
    for name, lines in _PLACE.findall(page):
        if name in found:
            raise ValueError(f"the table {name} stands there twice")
        found[name] = lines.splitlines()
    return found


def rewritten(page: str) -> str:
    """The page with every table made anew."""

    def made(match: re.Match[str]) -> str:
        lines = TABLES[match[1]]()
        return f"<!-- table: {match[1]} -->\n" + "".join(f"{line}\n" for line in lines)

    return _PLACE.sub(made, page)


def main() -> None:
    """Print tables, or write them into the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TABLES))
    parser.add_argument("--write", action="store_true", help=f"put them into docs/{PAGE.name}")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(TABLES)):
        parser.error(f"no table is called {', '.join(unknown)}; there are {', '.join(TABLES)}")
    if arguments.write:
        PAGE.write_text(rewritten(PAGE.read_text("utf-8")), "utf-8")
        return
    for name in arguments.names or TABLES:
        print(f"\n{name}: {title(name)}\n")
        print("\n".join(TABLES[name]()))


def title(name: str) -> str:
    """What a table shows, in a line."""
    return (TABLES[name].__doc__ or "").splitlines()[0]


if __name__ == "__main__":
    main()
