"""What published tuned files lose on the H200: those of other GPUs, of other Tritons, and its own.

    python -m benchmarks.findings_published SGLANG_0.5.23_WHEEL VLLM_0.33.0_WHEEL

writes `results/published_on_h200.json.gz`: for each file whose E, N and type were recorded, and each
recorded kernel and m, what the entry that the server would pick loses there to the best. No content of a
file is kept. A file names neither K nor topk: it is used here, as by a server, for every model with that E
and N.
"""

from __future__ import annotations

import gzip
import json
import sys
import zipfile
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median

from benchmarks.findings_choice import distinct
from benchmarks.findings_data import (
    RESULTS,
    Cell,
    mean_loss,
    own,
    percent,
    plain,
    quantile,
    sampled,
    table,
    theirs,
)
from benchmarks.findings_grid import DTYPES, RELEASES, default_of
from moetune.domain.config import ConfigTable

STORED = RESULTS / "published_on_h200.json.gz"
FAMILIES = (
    ("the H200 itself", ("NVIDIA H200",)),
    ("H100, H800", ("NVIDIA H100", "NVIDIA H100 80GB HBM3", "NVIDIA H800")),
    ("H20, H20-3e", ("NVIDIA H20", "NVIDIA H20-3e")),
    ("A100, A800", ("NVIDIA A100-SXM4-80GB", "NVIDIA A800-SXM4-80GB", "NVIDIA A100 80GB PCIe")),
    ("B200, GB200", ("NVIDIA B200", "NVIDIA GB200")),
    ("RTX PRO 6000, GB10", ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "NVIDIA GB10")),
    ("L20", ("NVIDIA L20",)),
)
_NOISE = 0.01
_SIZES = (("up to 32", 32), ("33 to 512", 512), ("over 512", 1 << 30))


@dataclass(frozen=True, slots=True)
class Copied:
    """A file's entry on one recorded cell.

    Attributes:
        gpu: that the file was tuned on.
        server: whose wheel holds it.
        file: its name, with the directory of the Triton release where there is one.
        dtype: `bf16` or `block fp8`.
        kernel: `up` or `down`.
        m: of the cell.
        loss: over the best; None where the config was not measured.
        default: what the same server's default loses there; None where not measured.
        whole: the cell holds the whole grid.
        pair: the file is one of a pair, tuned for this kernel alone.
    """

    gpu: str
    server: str
    file: str
    dtype: str
    kernel: str
    m: int
    loss: float | None
    default: float | None
    whole: bool
    pair: bool


def collect(wheels: list[Path]) -> list[Copied]:
    """Score every published file on every recorded cell that it fits."""
    from training.published import RELEASES as PUBLISHED
    from training.published import Published, read_published

    files: dict[tuple[str, str], list[Published]] = defaultdict(list)
    for entry in read_published(wheels):
        files[entry.server, entry.file].append(entry)
    cells: dict[tuple[int, int, str], list[Cell]] = defaultdict(list)
    for cell in distinct((*own(), *theirs(), *sampled())):
        cells[cell.problem.E, cell.problem.N, cell.dtype].append(cell)
    whole_grid = {cell.recording for cell in (*own(), *theirs())}
    shown = {name: server for server, (name, _) in RELEASES.items()}
    archives = {name: zipfile.ZipFile(path) for (name, _), path in zip(PUBLISHED, wheels, strict=True)}
    found = []
    for (server, path), entries in sorted(files.items()):
        problem, kernels = entries[0].problem, entries[0].kernels
        quantization = problem.quantization
        if quantization.block_shape not in (None, (128, 128)) or (
            quantization.dtype.value != "bf16" and quantization.block_shape is None
        ):
            continue
        dtype = DTYPES[quantization.dtype.value != "bf16"]
        # The whole table: entries with USE_TMA, which were not recorded, are picked too.
        published = ConfigTable.parse(archives[server].read(path), path, frozenset({"triton_version"}))
        for cell in cells[problem.E, problem.N, dtype]:
            if cell.kernel in kernels:
                picked = published.get(published.nearest_key(cell.m))
                assert picked is not None
                config = plain(picked)
                found.append(
                    Copied(
                        problem.gpu.torch_name,
                        server,
                        "/".join(path.split("/configs/")[-1:]),
                        dtype,
                        cell.kernel,
                        cell.m,
                        None if picked.use_tma else _rounded(cell.loss(config)),
                        _rounded(cell.loss(default_of(shown[server], cell))),
                        cell.recording in whole_grid,
                        len(kernels) == 1,
                    )
                )
    return found


def _rounded(loss: float | None) -> float | None:
    return None if loss is None else round(loss, 5)


@lru_cache(maxsize=1)
def stored() -> tuple[Copied, ...]:
    """What `main` wrote."""
    with gzip.open(STORED, "rb") as stream:
        document = json.load(stream)
    return tuple(Copied(*row) for row in document["rows"])


def other_gpu() -> list[str]:
    """What a file of another GPU loses here, beside this GPU's own files and the default."""
    rows = []
    for dtype in DTYPES:
        for family, gpus in FAMILIES:
            of_family = [one for one in stored() if one.gpu in gpus and one.dtype == dtype]
            known = [one for one in of_family if one.loss is not None]
            if len(known) < 8:
                continue
            losses = [one.loss for one in known if one.loss is not None]
            both = [(one.loss, one.default) for one in known if one.default is not None]
            worse = sum(loss is not None and loss > default + _NOISE for loss, default in both) / len(both)
            rows.append(
                [
                    dtype,
                    family,
                    str(len({(one.server, one.file) for one in known})),
                    f"{len(known)} of {len(of_family)}",
                    percent(mean_loss(losses)),
                    percent(median(losses)),
                    percent(quantile(losses, 0.9), 0),
                    percent(max(losses), 0),
                    percent(mean_loss(default for _, default in both)),
                    percent(worse, 0),
                ]
            )
    head = ["type", "tuned on", "files", "entries", "mean", "median", "90%", "worst", "default, mean"]
    return table([*head, "slower than the default"], rows)


def other_gpu_by_m() -> list[str]:
    """The same by kernel and m, mean and worst."""
    rows = []
    for family, gpus in FAMILIES:
        for kernel in ("up", "down"):
            shown = []
            for place, (_, last) in enumerate(_SIZES):
                first = _SIZES[place - 1][1] if place else 0
                rows_here = [one for one in stored() if one.gpu in gpus and one.kernel == kernel]
                losses = [one.loss for one in rows_here if first < one.m <= last and one.loss is not None]
                shown.append(_brief(losses) if losses else "")
            if sum(map(bool, shown)) == len(_SIZES):
                rows.append([family, kernel, *shown])
    return table(["tuned on", "kernel", *(f"m {name}" for name, _ in _SIZES)], rows)


def _brief(losses: list[float]) -> str:
    return f"{percent(mean_loss(losses))}, {percent(max(losses), 0)} ({len(losses)})"


def main() -> None:
    """Write the results file."""
    found = collect([Path(path) for path in sys.argv[1:3]])
    rows = [[getattr(one, name) for name in Copied.__slots__] for one in found]
    document = {"schema": "moetune.published_on_h200/1", "columns": list(Copied.__slots__), "rows": rows}
    with gzip.GzipFile(STORED, "wb", mtime=0) as stream:
        stream.write((json.dumps(document, sort_keys=True) + "\n").encode())
    print(f"{len(rows)} rows, {STORED.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
