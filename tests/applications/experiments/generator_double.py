"""Stands for a load generator in tests: `BEHAVIOUR FLAGS...`, the flags those of the real ones.

Sends nothing. It says in the file `pids` of its folder which processes it is and starts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

IGNORE_AND_SLEEP = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"


def main() -> None:
    behaviour, *words = sys.argv[1:]
    if behaviour == "own":
        own(*words)
        return
    flags = {flag: value for flag, value in zip(words, [*words[1:], ""], strict=True) if flag.startswith("-")}
    requests = int(flags["--num-prompts"])
    say(f"sending {requests} requests")
    result = Path(flags.get("--output-file") or Path(flags["--result-dir"], flags["--result-filename"]))
    children = {
        "hang": [sys.executable, "-c", IGNORE_AND_SLEEP],
        "hang-bare": [sys.executable, "-c", IGNORE_AND_SLEEP],
        "sleep-bare": [sys.executable, "-c", IGNORE_AND_SLEEP],
        "leave": ["sleep", "60"],
    }
    started = [os.getpid()]
    if behaviour in children:
        variables = {} if behaviour.endswith("bare") else dict(os.environ)
        child = subprocess.Popen(children[behaviour], start_new_session=True, env=variables)
        started.append(child.pid)
        say("still sending")
    if behaviour.startswith("hang"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note = Path(f"pids.{os.getpid()}")
    note.write_text(" ".join(map(str, started)))
    note.replace("pids")
    if behaviour in ACTIONS:
        ACTIONS[behaviour](result)
    if behaviour not in WRITES_NONE:
        result.write_text(json.dumps(document(behaviour, flags, requests)) + "\n")


def document(behaviour: str, flags: dict[str, str], requests: int) -> dict[str, Any]:
    done = {"fail-all": 0, "fail-one": requests - 1, "fewer": requests // 2}.get(behaviour, requests)
    tokens = done * int(flags["--random-output-len"])
    return {
        "num_prompts": done,
        "request_rate": float("inf"),
        "completed": done,
        "duration": 2.0,
        "total_input_tokens": int(flags["--seed"]),
        "total_output_tokens": {"short": tokens - 1, "empty": 0}.get(behaviour, tokens),
        "median_ttft_ms": float("inf") if behaviour == "infinity" else 5.0,
        "median_itl_ms": 1.0,
    }


def own(result: str, requests: str, url: str) -> None:
    Path(result).write_text(
        json.dumps({"done": {"count": int(requests)}, "ms": 1500, "tokens": 99, "url": url})
    )


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - as generators do


def sleep(_: Path) -> None:
    time.sleep(60)


def crash(_: Path) -> None:
    say("ValueError: Warmup failed\x1b[31m - Please make sure")
    sys.exit(3)


def killed(_: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def chatter(_: Path) -> None:
    for number in range(5000):
        say(f"progress {number}: {'=' * 80}")
    say("the last line")


def link(result: Path) -> None:
    target = result.with_name("elsewhere")
    target.write_text("{}")
    result.symlink_to(target)


def huge(result: Path) -> None:
    with result.open("wb") as file:
        file.truncate(80 << 20)


ACTIONS: dict[str, Callable[[Path], Any]] = {
    "hang": sleep,
    "hang-bare": sleep,
    "sleep-bare": sleep,
    "sleep": sleep,
    "crash": crash,
    "killed": killed,
    "chatter": chatter,
    "print": lambda _: say(f"{sys.argv} {dict(os.environ)}"),
    "fail-all": lambda _: say("connection refused"),
    "link": link,
    "pipe": lambda result: os.mkfifo(result),
    "folder": lambda result: result.mkdir(),
    "huge": huge,
    "bytes": lambda result: result.write_bytes(b'{"completed": "\xff\xfe"}'),
    "deep": lambda result: result.write_text('{"a":' * 5000 + "1" + "}" * 5000),
    "half": lambda result: result.write_text('{"completed": 10, "dura'),
}
WRITES_NONE = {"nothing", "link", "pipe", "folder", "huge", "bytes", "deep", "half"}

if __name__ == "__main__":
    main()
