"""A measurement is not changed by what this shell tells Triton; its tools are found all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetune.applications.child_environment import without_tritons_own

if TYPE_CHECKING:
    import pytest


def test_tritons_switches_stay_behind_and_the_paths_of_its_tools_go_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = ("TRITON_INTERPRET", "TRITON_CACHE_DIR", "MLIR_ENABLE_DUMP", "LLVM_IR_ENABLE_DUMP")
    kept = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "LD_LIBRARY_PATH")
    for name in (*gone, *kept):
        monkeypatch.setenv(name, "x")
    found = without_tritons_own()
    assert not found.keys() & set(gone)
    assert all(found[name] == "x" for name in kept)
