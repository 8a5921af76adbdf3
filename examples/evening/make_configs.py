#!/usr/bin/env python3
"""Makes the config files of the evening with moetune itself: predicted ones, on any machine, offline.

    python3 make_configs.py            # into configs/tuned and configs/borrowed-b200

On a machine with the four GPUs, measured files take their place:

    moetune tune Qwen/Qwen3.5-122B-A10B --tp 4 --out configs/tuned --force
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = ["Qwen/Qwen3.5-122B-A10B", "--tp", "4"]
SERVER = ["--server", "sglang", "--server-version", "0.5.23", "--triton-version", "3.8.0", "--offline"]
GPU = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
PREDICT = ["--effort", "predict", "--no-compile", "--force"]


def moetune(*arguments: str) -> None:
    """Run a verb of moetune, and stop when it does not do its work."""
    subprocess.run([sys.executable, "-m", "moetune", *arguments], check=True)


def main(into: Path) -> None:
    """Write both directories."""
    moetune("tune", *MODEL, *SERVER, "--gpu", GPU, *PREDICT, "--out", str(into / "tuned"))
    with tempfile.TemporaryDirectory() as folder:
        # The Triton kernel is not what a B200 runs by default; its files are what people borrow.
        other = ["--gpu", "NVIDIA B200", "--assume-triton"]
        moetune("tune", *MODEL, *SERVER, *other, *PREDICT, "--out", folder)
        tables = sorted(path for path in Path(folder).rglob("E=*.json") if "provenance" not in path.name)
        borrowed = ["--model", MODEL[0], "--force", "--out", str(into / "borrowed-b200")]
        moetune("borrow", *map(str, tables), "--gpu", GPU, *SERVER, *borrowed)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "configs")
