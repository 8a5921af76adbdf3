"""What two switches of SGLang gain in the layer: the sum over topk in the down kernel, and USE_TMA."""

from __future__ import annotations

import gzip
import json

from benchmarks.findings_data import RESULTS, percent, table

SUMMED = RESULTS / "sum_over_topk_seed_h200.json.gz"
BY_DESCRIPTOR = RESULTS / "use_tma_h200.json"
_NAMES = {"seed": "seed problem, bf16", "qwen3.5-35b-fp8": "Qwen3.5-35B-A3B, block fp8"}


def sum_over_topk() -> list[str]:
    """Layers tuned with and without the sum over topk in the down kernel, by m."""
    stored = json.loads(gzip.decompress(SUMMED.read_bytes()))
    plain, summed = (
        {entry["m"]: entry["layer"] for entry in stored[name]["document"]["entries"] if entry["layer"]}
        for name in ("plain", "summed")
    )
    rows = []
    for m in sorted(plain.keys() & summed.keys()):
        without_us, with_us = _tuned_us(plain[m]), _tuned_us(summed[m])
        untouched = summed[m]["default_us"] / plain[m]["default_us"] - 1
        rows.append(
            [
                str(m),
                f"{without_us:.1f}",
                f"{with_us:.1f}",
                percent(with_us / without_us - 1),
                percent(untouched),
            ]
        )
    return table(["m", "without, us", "with, us", "with it, tuned", "with it, default"], rows)


def _tuned_us(layer: dict[str, float]) -> float:
    """Of the pair that was written; where none was, the default's."""
    return min(layer["uniform_us"], layer["default_us"])


def use_tma() -> list[str]:
    """The best pair with USE_TMA beside the best plain one, kernels alone and in the layer."""
    rows = []
    for problem, measured in json.loads(BY_DESCRIPTOR.read_text("utf-8"))["problems"].items():
        for row in measured:
            plain, other = row["plain"], row["use_tma"]
            up, down = (
                percent(after / before - 1)
                for before, after in zip(plain["kernels_us"], other["kernels_us"], strict=True)
            )
            layer = percent(row["use_tma_over_plain"] - 1)
            numbers = [up, down, layer, percent(row["noise"], 2)]
            rows.append([_NAMES[problem], str(row["m"]), plain["down"], other["down"], *numbers])
    head = ["problem", "m", "plain, down", "with USE_TMA, down", "up", "down", "layer", "noise"]
    return table(head, rows)
