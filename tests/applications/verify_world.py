"""Files to verify, good and bad, and how they are laid down, looked at and measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetune.applications.verify_answer import Entry, Verification, Verified, VerifyRequest
from moetune.applications.verifying import verify
from moetune.domain.config import ConfigTable, KernelConfig
from tests.applications.fake_machine import PROBLEM, SERVER, FakeMachine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moetune.applications.nvml import Device

MS = (1, 64, 2048)
FOLDER = Path("configs", "triton_3_6_0")
UP, DOWN = (SERVER.file_name(PROBLEM, kernel) for kernel in ("up", "down"))
# By the made-up times of tests/measure/fake_gpu.py: good at m, and bad at every m.
GOOD_UP = {
    1: KernelConfig(16, 128, 64, 1, 4, 3),
    64: KernelConfig(16, 128, 64, 2, 4, 3),
    2048: KernelConfig(128, 128, 64, 1, 4, 3),
}
GOOD_DOWN = {m: replace(config, group_size_m=3 + config.group_size_m) for m, config in GOOD_UP.items()}
SLOW = KernelConfig(128, 32, 128, 1, 8, 2)


def lay(
    root: Path,
    tables: Mapping[str, Mapping[int, KernelConfig]],
    folder: Path = FOLDER,
) -> list[Path]:
    paths = []
    for name, entries in tables.items():
        path = root / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(ConfigTable.of(entries).render())
        paths.append(path)
    return paths


def request(*paths: Path, **changes: Any) -> VerifyRequest:
    values: dict[str, Any] = {
        "server": "sglang",
        "server_version": "0.5.23",
        "triton_version": "3.6.0",
        "hidden": 3072,
        "topk": 8,
        "max_m": 2048,
        "offline": True,
    }
    return VerifyRequest(paths=paths, **{**values, **changes})


def look(*paths: Path, environ: Mapping[str, str] | None = None, **changes: Any) -> Verified:
    """Verify one problem on a machine without a GPU."""
    (one,) = verify(request(*paths, **changes), environ or {}, gpus=()).problems
    return one


def measure(
    machine: FakeMachine, *paths: Path, gpus: list[Device] | None = None, **changes: Any
) -> Verification:
    return verify(
        request(*paths, state=machine.folder / "state", **changes),
        {},
        gpus=machine.devices() if gpus is None else gpus,
        command=machine.command,
        pool=machine.pool,
    )


def measured(machine: FakeMachine, *paths: Path, **changes: Any) -> dict[int, Entry]:
    (one,) = measure(machine, *paths, **changes).problems
    assert not one.gpu.reason
    return {entry.pick.m: entry for entry in one.entries}
