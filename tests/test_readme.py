"""The README's first screen is what the command prints, line by line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
LEFT_OUT = "..."
MACHINE_S_OWN = ("  compiled", "  use them")
"""Lines that name Triton, or the folder where the demo ran."""


def session() -> tuple[list[str], list[str]]:
    """The command of the README's first console block, and the lines below it."""
    block = re.search(r"```console\n\$ (.*?)\n```", README.read_text("utf-8"), re.S)
    assert block is not None
    text = block[1].replace("\\\n", " ")
    command, _, output = text.partition("\n")
    return re.findall(r'"[^"]*"|\S+', command), output.splitlines()


def test_the_first_screen_is_real(tmp_path: Path) -> None:
    words, shown = session()
    arguments = [word.strip('"') for word in words[1:]]
    done = subprocess.run(
        [sys.executable, "-m", "moetune", *arguments, "--no-compile"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    printed = done.stdout.splitlines()
    place = 0
    assert len([line for line in shown if line.strip() != LEFT_OUT]) > 40
    for line in shown:
        if line.strip() == LEFT_OUT or line.startswith(MACHINE_S_OWN):
            continue
        assert line in printed[place:], f"not printed, or not in this order: {line}"
        place = printed.index(line, place) + 1
