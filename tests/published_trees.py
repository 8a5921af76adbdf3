"""The tuned files of a published wheel, laid out as an installed server has them."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from tests.wheels import members, read_member

if TYPE_CHECKING:
    from pathlib import Path

VERSIONS = {"sglang": "0.5.23", "vllm": "0.33.0"}
_HOMES = {"sglang": "/moe_runner/triton_utils/configs/", "vllm": "/fused_moe/configs/"}


@lru_cache(maxsize=4)
def config_names(package: str) -> tuple[str, ...]:
    """Paths inside the wheel of its tuned fused-MoE files."""
    home = _HOMES[package]
    names = members(package, VERSIONS[package])
    return tuple(name for name in names if home in name and "/E=" in name and name.endswith(".json"))


def find_member(package: str, *parts: str) -> str:
    """Path of the one tuned file whose path holds all the parts."""
    (name,) = (name for name in config_names(package) if all(part in name for part in parts))
    return name


def config_text(package: str, *parts: str) -> str:
    """Text of the one tuned file whose path holds all the parts."""
    return read_member(package, VERSIONS[package], find_member(package, *parts))


def unpack(package: str, site: Path, *, metadata: bool = True) -> Path:
    """Lay the tuned files of a wheel into a site folder, which then looks as if it were installed."""
    for name in config_names(package):
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(read_member(package, VERSIONS[package], name))
    (site / package / "__init__.py").write_text("raise SystemExit('imported')\n")
    if metadata:
        version = VERSIONS[package]
        folder = site / f"{package}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return site
