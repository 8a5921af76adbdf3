"""What the routing changes: choices made under one, served another, kernel by kernel and m by m."""

from __future__ import annotations

import json

from benchmarks.findings_data import RESULTS, percent, table

STORED = RESULTS / "routing_seed_h200.json"
_PAIRS = (
    ("uniform", "zipf:0.8"),
    ("uniform", "zipf:1.2"),
    ("uniform", "synthetic recording"),
    ("zipf:0.8", "uniform"),
    ("zipf:0.8", "zipf:1.2"),
    ("zipf:1.2", "uniform"),
    ("zipf:1.2", "zipf:0.8"),
)
_SHOWN = {"synthetic recording": "mixed layers"}


def routing() -> list[str]:
    """What a choice loses under another routing, by kernel and m; served its own, by noise, first."""
    losses: dict[tuple[str, int], dict[tuple[str, str], float]] = {}
    for row in json.loads(STORED.read_text("utf-8"))["rows"]:
        of_key = losses.setdefault((row["kernel"], row["m"]), {})
        for served, found in row["serves"].items():
            of_key[row["tuned"], served] = found["regret"] - 1
    rows = []
    for (kernel, m), of_key in losses.items():
        noise = max(loss for (tuned, served), loss in of_key.items() if tuned == served)
        rows.append([kernel, str(m), percent(noise), *(percent(of_key[pair]) for pair in _PAIRS)])
    head = [f"{tuned}, under {_SHOWN.get(served, served)}" for tuned, served in _PAIRS]
    return table(["kernel", "m", "its own, largest", *head], rows)
