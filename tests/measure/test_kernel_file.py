"""Kernels are taken out of a server's file: nothing else of it runs, and Triton's key is the server's."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moetune.domain.server_kernel import KernelFile
from moetune.measure.kernel_file import KernelFileError, load_kernel
from tests.measure.interpreted import ROOT

HEAD = "import triton\nimport triton.language as tl\nimport os\n"
KERNEL = "@triton.jit\ndef fused_moe_kernel(a_ptr, N: tl.constexpr):\n    tl.store(a_ptr, N)\n"
RAN = "open(os.environ['MOETUNE_TEST_RAN'], 'w')"


def file_of(path: Path, text: str | bytes) -> KernelFile:
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(data)
    return KernelFile("sglang", "0.5.23", str(path), "sglang.kernels", hashlib.sha256(data).hexdigest())


def test_only_the_kernel_of_a_file_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOETUNE_TEST_RAN", str(tmp_path / "ran"))
    text = f"{HEAD}{RAN}\nimport nothing_of_that_name\nLIMIT: {RAN} = 3\nclass A:\n    {RAN}\n"
    text += KERNEL.replace(", N)", ", LIMIT)")
    kernel = load_kernel(file_of(tmp_path / "kernels.py", text), "fused_moe_kernel")
    assert kernel.arg_names == ["a_ptr", "N"]
    assert not (tmp_path / "ran").exists()


HOSTILE: dict[str, tuple[str | bytes, str]] = {
    "decorator": (f"{HEAD}@{RAN.replace('open', 'print')}\n{KERNEL}", "decorator print"),
    "decorator's argument": (
        HEAD + KERNEL.replace("triton.jit", f"triton.jit(repr={RAN})"),
        "decorator triton.jit",
    ),
    "other decorator": (HEAD + KERNEL.replace("triton.jit", "triton.autotune"), "decorator triton.autotune"),
    "default": (HEAD + KERNEL.replace("constexpr)", f"constexpr = {RAN})"), "no plain kernel"),
    "annotation": (HEAD + KERNEL.replace("tl.constexpr", RAN), "annotations"),
    "return annotation": (HEAD + KERNEL.replace("):", f") -> {RAN}:"), "annotations"),
    "no decorator": (HEAD + KERNEL.replace("@triton.jit\n", ""), "no plain kernel"),
    "helper": (
        HEAD + KERNEL.replace("tl.store(a_ptr, N)", "helper(N)") + f"def helper(x, y={RAN}):\n    pass\n",
        "no plain kernel",
    ),
    "computed constant": (HEAD + f"LIMIT = {RAN}\n" + KERNEL.replace(", N)", ", LIMIT)"), "needs LIMIT"),
    "import": (HEAD + KERNEL.replace("tl.store(a_ptr, N)", "os.abort()"), "needs os"),
    "no kernel": (HEAD, "lacks fused_moe_kernel"),
    "no Python": ("def (", "no Python file"),
    "a zero byte": (b"x = 1\x00", "no Python file"),
    "too deep": ("(" * 5000 + ")" * 5000, "no Python file"),
    "too large": (b"#" * ((4 << 20) + 1), "at most 4 MiB"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_would_run_anything_else_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOETUNE_TEST_RAN", str(tmp_path / "ran"))
    text, why = HOSTILE[name]
    with pytest.raises(KernelFileError, match=why) as caught:
        load_kernel(file_of(tmp_path / "kernels.py", text), "fused_moe_kernel")
    assert "--kernel own" in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_a_file_that_is_another_by_now_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kernels.py"
    file = file_of(path, HEAD + KERNEL)
    path.write_text(HEAD + KERNEL + "\n")
    with pytest.raises(KernelFileError, match="has changed since this run began"):
        load_kernel(file, "fused_moe_kernel")
    path.unlink()
    with pytest.raises(KernelFileError, match="cannot be read: No such file"):
        load_kernel(file, "fused_moe_kernel")
    os.mkfifo(path)
    with pytest.raises(KernelFileError, match="is no file"):
        load_kernel(file, "fused_moe_kernel")


@pytest.mark.parametrize(("package", "version"), [("sglang", "0.5.23"), ("vllm", "0.33.0")])
def test_triton_has_the_cache_key_that_the_imported_module_gives(
    package: str, version: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.measure.whole_module", package, version, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert len(set(found["whole"].values())) == 2
    assert found["taken"] == found["whole"]
