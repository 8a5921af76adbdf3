"""What a compiling and a measuring process do first, and how they answer: a line of JSON each."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any, TextIO

_PR_SET_PDEATHSIG = 1


def open_answers() -> TextIO:
    """Begin as a child: answers go to what was stdout, whatever else prints goes to stderr.

    The process ends with the one that started it, even in the middle of LLVM or of a kernel that hangs,
    and leaves no core behind when it aborts.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def say(answers: TextIO, message: dict[str, Any]) -> None:
    """Answer."""
    answers.write(json.dumps(message) + "\n")
    answers.flush()
