"""A compiling or measuring process: answers alone go to stdout, and it does not outlive its parent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def test_what_else_prints_does_not_get_between_the_answers() -> None:
    code = (
        "import os; from moetune.measure.child import open_answers, say; answers = open_answers(); "
        "print('chatter of a library'); os.write(1, b'of C too\\n'); say(answers, {'hello': [1]}); "
        "say(answers, {'text': 'a\\nb'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{"hello": [1]}, {"text": "a\nb"}]
    assert "chatter of a library" in done.stderr
    assert "of C too" in done.stderr


def test_it_ends_with_the_process_that_started_it() -> None:
    child = (
        "import os, time; from moetune.measure.child import open_answers, say; "
        "say(open_answers(), {'pid': os.getpid()}); time.sleep(60)"
    )
    parent = (
        "import subprocess, sys; "
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], text=True, "
        "stdout=subprocess.PIPE, stderr=subprocess.DEVNULL); "
        "print(child.stdout.readline())"
    )
    done = subprocess.run(
        [sys.executable, "-c", parent], capture_output=True, text=True, check=True, env=ENVIRONMENT
    )
    pid = int(json.loads(done.stdout)["pid"])
    deadline = time.monotonic() + 20
    while _lives(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _lives(pid)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
