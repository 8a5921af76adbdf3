"""Index the names of the tuned files in published wheels, for `moetune.domain.catalogue`.

    python training/published_configs.py WHEEL...

Give the wheels of every release that the index shall know: it is written anew. Only names are kept,
no content of any file.
"""

from __future__ import annotations

import argparse
import json
import re
import zipfile
from pathlib import Path

TARGET = Path(__file__).parents[1] / "src/moetune/domain/data/published_configs.json"
WHEEL = re.compile(r"(sglang|vllm)-(\d+(?:\.\d+)+)-.*\.whl")
# Where each server keeps them; SGLang has a directory for each Triton version between.
PLACES = {
    "sglang": re.compile(
        r"(sglang/srt/layers/moe/(?:fused_moe_triton|moe_runner/triton_utils))/configs/(?:([^/]+)/)?(E=[^/]+\.json)"
    ),
    "vllm": re.compile(r"(vllm/model_executor/layers/fused_moe/configs)/()(E=[^/]+\.json)"),
}


def release(version: str) -> tuple[int, ...]:
    """Order of a version."""
    return tuple(map(int, version.split(".")))


def index(server: str, wheels: dict[str, Path]) -> dict[str, object]:
    """Index of one server: its home in each release, and since when each file is there."""
    versions = sorted(wheels, key=release)
    homes: dict[str, str] = {}
    present: dict[tuple[str, str], list[str]] = {}
    for version in versions:
        with zipfile.ZipFile(wheels[version]) as wheel:
            matches = [match for name in wheel.namelist() if (match := PLACES[server].fullmatch(name))]
        homes[version] = matches[0][1]
        for match in matches:
            if match[1] != homes[version]:
                raise SystemExit(f"{server} {version} keeps tuned files in two places")
            present.setdefault((match[2] or "", match[3]), []).append(version)
    files: dict[str, dict[str, str]] = {}
    for (directory, name), found in sorted(present.items()):
        first, last = versions.index(found[0]), versions.index(found[-1])
        if found != versions[first : last + 1]:
            raise SystemExit(f"{name} left {server} and came back")
        span = found[0] if found[-1] == versions[-1] else f"{found[0]}..{found[-1]}"
        files.setdefault(directory, {})[name] = span
    return {"homes": homes, "files": files}


def main() -> None:
    """Write the index."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheels", nargs="+", type=Path)
    wheels: dict[str, dict[str, Path]] = {}
    for path in parser.parse_args().wheels:
        match = WHEEL.fullmatch(path.name)
        if match is None:
            raise SystemExit(f"{path} is no wheel of sglang or vllm")
        wheels.setdefault(match[1], {})[match[2]] = path
    document = {server: index(server, wheels[server]) for server in sorted(wheels)}
    TARGET.write_text(json.dumps(document, indent=0) + "\n", "utf-8")


if __name__ == "__main__":
    main()
