"""Configs of files from elsewhere, as candidates: each once, without what belongs to another GPU."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from moetune.applications.start_from import configs_of
from moetune.domain.config import KernelConfig
from moetune.domain.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path


H100 = "E=128,N=192,device_name=NVIDIA_H100_80GB_HBM3"
ENTRY = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
}
GOOD = dict.fromkeys(("1", "64", "4096"), ENTRY)


def write(path: Path, table: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    return path


def test_start_from_takes_every_config_once_and_bare(tmp_path: Path) -> None:
    table = GOOD | {"64": ENTRY | {"USE_TMA": True}, "128": ENTRY | {"BLOCK_SIZE_N": 128, "maxnreg": 64}}
    path = write(tmp_path / "configs/triton_3_5_1" / f"{H100}_down.json", table)
    assert set(configs_of([path])) == {KernelConfig(16, 64, 64, 1), KernelConfig(16, 128, 64, 1)}
    with pytest.raises(InputError, match="no entries"):
        configs_of([write(tmp_path / f"{H100}.json", "{")])
