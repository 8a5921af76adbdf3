"""Roots, sources and installed servers for the tests of installing, and servers that start from them."""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.servers.sglang_loader import World, load_lookup
from tests.wheels import wheel

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest

DEVICE = "NVIDIA H200"
TRITON = "3.6.0"
FOLDER = "configs/triton_3_6_0"
UP = "E=64,N=256,device_name=NVIDIA_H200.json"
DOWN = "E=64,N=256,device_name=NVIDIA_H200_down.json"
MS = (1, 2, 8, 48, 64, 100, 512, 4096, 8192)


def entry(block_m: int, **more: Any) -> dict[str, Any]:
    base = {"BLOCK_SIZE_M": block_m, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
    return base | {"num_warps": 4, "num_stages": 3} | more


def table(block_m: int, keys: tuple[int, ...] = (1, 8, 64, 512, 4096, 8192), **more: Any) -> str:
    return json.dumps({str(m): entry(block_m, **more) for m in keys}, indent=4) + "\n"


def write(root: Path, texts: Mapping[str, str]) -> Path:
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def pair(block_m: int, folder: str = "") -> dict[str, str]:
    prefix = f"{folder}/" if folder else ""
    return {prefix + UP: table(block_m), prefix + DOWN: table(block_m, GROUP_SIZE_M=8)}


@dataclass(frozen=True)
class Kept:
    content: bytes
    mode: int
    mtime_ns: int


def snapshot(root: Path) -> dict[str, Kept | None]:
    """Every file below a root with its mode and time, and every directory."""
    found: dict[str, Kept | None] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        kept = Kept(path.read_bytes(), status.st_mode, status.st_mtime_ns) if path.is_file() else None
        found[str(path.relative_to(root))] = kept
    return found


def texts(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


def start(version: str, root: Path, *, device: str = DEVICE, triton: str = TRITON) -> dict[int, Any]:
    """Let a release's own code look configs up below a root for every m: it raises where the server dies.

    Returns:
        m to `(up config, down config or None)`.
    """
    real = load_lookup(version, World(device=device, triton=triton, folder=str(root)))
    found = {}
    for m in MS:
        config, (down, _) = real.try_get_optimal_moe_config(
            (64, 512, 2048), (64, 2048, 256), 8, None, m, return_down_config=True
        )
        found[m] = (config, down)
    return found


def install_package(
    site: Path, monkeypatch: pytest.MonkeyPatch, package: str, version: str, files: Mapping[str, str]
) -> None:
    """Lay out a package as pip would, with some config files in it, and make it importable."""
    write(
        site,
        {
            f"{package}/__init__.py": "raise ImportError('nothing here may be imported')\n",
            f"{package}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {package}\n"
            f"Version: {version}\n",
            **files,
        },
    )
    monkeypatch.syspath_prepend(str(site))


def shipped_files(package: str, version: str) -> dict[str, str]:
    """The config files of a published wheel."""
    with zipfile.ZipFile(wheel(package, version)) as archive:
        return {
            name: archive.read(name).decode()
            for name in archive.namelist()
            if "/configs/" in name and name.endswith(".json") and "E=" in name
        }


def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SGLANG_", "VLLM_", "MOETUNE_")):
            monkeypatch.delenv(name)
